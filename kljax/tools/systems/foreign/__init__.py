"""The options of other trainers as fields of this one, a module each.

A value may be a name of the table of systems, such as `trl/dapo`: the trainer knows its meaning.
"""

from collections.abc import Mapping

from kljax.tools.systems.foreign import prime_rl, skyrl, trl, verl
from kljax.tools.systems.foreign.option import ForeignOption, ForeignSystem, NotExpressed

__all__ = ["FOREIGN", "ForeignOption", "ForeignSystem", "NotExpressed"]

FOREIGN: Mapping[str, ForeignSystem] = {
    "trl": trl.SYSTEM,
    "verl": verl.SYSTEM,
    "skyrl": skyrl.SYSTEM,
    "prime-rl": prime_rl.SYSTEM,
}
