"""How entries of `kljax.systems` run on the recorded cases of their system; its modules fill `EXERCISES`."""

from tests.kljax.systems import advantages, corrections, distillation, estimators, losses, others, preferences
from tests.kljax.systems.exercises import EXERCISES, cases_of, matches

__all__ = [
    "EXERCISES",
    "advantages",
    "cases_of",
    "corrections",
    "distillation",
    "estimators",
    "losses",
    "matches",
    "others",
    "preferences",
]
