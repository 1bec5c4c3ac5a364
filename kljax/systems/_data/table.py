"""All rows, in the order of the kinds and, within a kind, of the files."""

from kljax.systems._data import (
    advantages_others,
    advantages_trinity,
    advantages_verl_family,
    controllers,
    corrections_others,
    corrections_verl_family,
    distillation,
    kl_others,
    kl_verl_family,
    placements,
    policy_losses_others,
    policy_losses_skyrl,
    policy_losses_trinity,
    policy_losses_verl,
    reductions,
    statistics,
)
from kljax.systems._row import Row

ROWS: tuple[Row, ...] = (
    *kl_verl_family.ROWS,
    *kl_others.ROWS,
    *reductions.ROWS,
    *advantages_verl_family.ROWS,
    *advantages_trinity.ROWS,
    *advantages_others.ROWS,
    *policy_losses_verl.ROWS,
    *policy_losses_skyrl.ROWS,
    *policy_losses_trinity.ROWS,
    *policy_losses_others.ROWS,
    *statistics.VALUE_LOSSES,
    *corrections_verl_family.ROWS,
    *corrections_others.ROWS,
    *controllers.ROWS,
    *placements.ROWS,
    *distillation.ROWS,
    *statistics.ROWS,
)
