"""The names of Trinity-RFT, SkyRL, slime, ART, verl, OpenRLHF, TRL and prime-rl, and the call that each stands for.

The table has an entry for every KL estimator, reduction, advantage estimator, policy loss, correction and controller
that one of the systems accepts by name. An entry holds the call of this library that computes the same numbers, and
describes the formula, clamps, divisors and gradient of the system. The recorded results of the systems' own code check
an entry, or its `reason` says why they do not.

    python -m kljax systems                  # all systems
    python -m kljax systems verl/low_var_kl  # one name
    python -m kljax systems --compare k3     # one name across the systems
"""

from kljax.systems._entry import Call, Entry, Golden, System
from kljax.systems._lookup import advantage, controller, correction, entries, kl, policy_loss, reduction

__all__ = [
    "Call",
    "Entry",
    "Golden",
    "System",
    "advantage",
    "controller",
    "correction",
    "entries",
    "kl",
    "policy_loss",
    "reduction",
]
