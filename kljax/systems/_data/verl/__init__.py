"""The names of verl, by topic."""

from kljax.systems._data.verl import advantages, kl, losses, mismatch, presets
from kljax.systems._entry import System

SYSTEM = System("verl", "verl", "0.9.1", "none; low_var_kl in the loss or kl (k1) in the reward once switched on")

ENTRIES = (*kl.ENTRIES, *advantages.ENTRIES, *losses.ENTRIES, *mismatch.ENTRIES, *presets.PRESETS)
