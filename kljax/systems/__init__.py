"""The names of Trinity-RFT, SkyRL, slime, ART, verl, OpenRLHF, TRL and prime-rl, and what each one means.

A table of data: for every KL estimator, reduction, advantage estimator, policy loss, correction and controller that one
of the systems accepts by name, the explicit call of this library that computes the same numbers, and in words what the
name computes there, what it clamps and divides by, and where its gradient goes. Rows are checked against the recorded
results of the systems' own code, or say why they are not.

    python -m kljax systems                  # what there is
    python -m kljax systems verl/low_var_kl  # one name
    python -m kljax systems --compare k3     # what it means in each system
"""

from kljax.systems._lookup import advantage, controller, correction, kl, policy_loss, reduction, rows
from kljax.systems._row import Call, Golden, Row, System

__all__ = [
    "Call",
    "Golden",
    "Row",
    "System",
    "advantage",
    "controller",
    "correction",
    "kl",
    "policy_loss",
    "reduction",
    "rows",
]
