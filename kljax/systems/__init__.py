"""The names of Trinity-RFT, SkyRL, slime, ART, verl, OpenRLHF, TRL and prime-rl, and the call that each stands for.

The table has an entry for every KL estimator, reduction, advantage estimator, policy loss, correction and controller
that one of the systems accepts by name. An entry holds the call of this library that computes the same numbers, and
describes the formula, clamps, divisors and gradient of the system. The recorded results of the systems' own code check
an entry, or its `reason` says why they do not. `get` returns the call of a name, which runs on arrays by name; `find`
searches the names, the options and the functions of the systems.

    python -m kljax systems                  # all systems
    python -m kljax systems verl/low_var_kl  # one name
    python -m kljax systems kl_penalty       # the names of a function
    python -m kljax systems --kl-loss-type   # the names that an option takes, or the argument that it sets
    python -m kljax systems --compare k3     # one name across the systems
"""

from kljax.systems._call import Call
from kljax.systems._entry import Entry, Golden, System
from kljax.systems._lookup import arguments, entries, find, get
from kljax.systems._lookup import hint_for_attribute as hint_for_attribute
from kljax.systems._lookup import hint_for_choice as hint_for_choice

__all__ = ["Call", "Entry", "Golden", "System", "arguments", "entries", "find", "get"]
