"""The table: all systems, and all their names by kind."""

from kljax.systems._data import art, openrlhf, prime_rl, skyrl, slime, trinity, trl, verl
from kljax.systems._entry import KINDS, Entry, System

_MODULES = (trinity, skyrl, slime, art, verl, openrlhf, trl, prime_rl)

SYSTEMS: dict[str, System] = {module.SYSTEM.key: module.SYSTEM for module in _MODULES}

ENTRIES: tuple[Entry, ...] = tuple(
    entry for kind in KINDS for module in _MODULES for entry in module.ENTRIES if entry.kind == kind
)
