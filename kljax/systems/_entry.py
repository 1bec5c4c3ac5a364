"""The types of the table: a system, an entry for one of its names, and the recorded cases that check it."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from kljax.systems._call import Call

KINDS = {
    "kl": "KL estimators: arguments of estimate_kl",
    "reduction": "reductions of a loss, as the weight of each token: arguments of token_weights",
    "advantage": "advantage estimators",
    "policy_loss": "policy losses",
    "value_loss": "losses of a value function",
    "correction": "importance weights and masks, mostly for the mismatch of trainer and sampler",
    "controller": "KL coefficients over time, and references that follow the policy",
    "placement": "where the KL enters: reward, loss, advantage",
    "distillation": "distillation from a teacher",
    "statistic": "metrics and masked statistics",
}


OF_LAYERS = "it is of the layers, not of log-probs: `routing` of a config of kljax's trainer"
"""Why a replay of routes has no call."""
TO_ROUTER = "to the router, through the gates of the replayed experts"


def call(function: str, /, **arguments: Any) -> Call:
    """Makes a `Call` from keyword arguments, for calls without a factor and without further steps."""
    return Call(function, types.MappingProxyType(arguments))


def recorded(function: str, /, **params: Any) -> tuple["Golden", ...]:
    """Selects the recorded cases of a function whose arguments include `params`."""
    return (Golden(function, types.MappingProxyType(params)),)


@dataclasses.dataclass(frozen=True)
class System:
    """A system of the table.

    Attributes:
      key: its name in lookups.
      title: its name in text.
      version: the release or commit whose code was read.
      default_kl: the KL that it uses unless told otherwise.
      aliases: flags of older releases, or of arguments -> the options of the table that they stand for.
    """

    key: str
    title: str
    version: str
    default_kl: str
    aliases: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))


@dataclasses.dataclass(frozen=True)
class Golden:
    """Recorded results that check an entry; `tests/goldens` holds them.

    Attributes:
      function: name of the function of the system.
      params: arguments that the cases were recorded with; None stands for one that is absent or off.
    """

    function: str
    params: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One name that one system accepts, and its meaning there.

    Attributes:
      system: key of the system, see `kljax.systems.entries`.
      kind: "kl", "reduction", "advantage", "policy_loss", "value_loss", "correction", "controller", "placement",
        "distillation" or "statistic".
      name: the name as the system spells it. A flag that changes the meaning follows a plus: "k3+use_unbiased_kl".
      call: the equivalent call of this library; None where there is none, and `reason` says why.
      meaning: the formula in words, with `x = log pi - log ref`, `d = log pi - log old`, `r = exp(d)`, `A` the
        advantage.
      option: the options of the system that take the name, or the function that it names.
      sources: argument of the call -> the option or the array of the system that it comes from.
      clamps: every clamp that is always on.
      divisors: the denominators, epsilons included.
      gradient: where the gradient goes, and its formula.
      defaults: whether the name is a default, and the defaults of the values beside it.
      note: where the code differs from the documentation, from the paper or from other systems.
      goldens: the recorded cases that check the entry.
      reason: why there is no call, or no recorded case.
      part: the part of the system's computation that the call covers; empty where it covers all of it.
      version: the version read, where it is not that of the system.
    """

    system: str
    kind: str
    name: str
    call: Call | None
    meaning: str
    _: dataclasses.KW_ONLY
    option: str = ""
    sources: Mapping[str, str] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))
    clamps: str = "none"
    divisors: str = ""
    gradient: str = ""
    defaults: str = ""
    note: str = ""
    goldens: tuple[Golden, ...] = ()
    reason: str = ""
    part: str = ""
    version: str = ""

    @property
    def key(self) -> str:
        """`system/name`."""
        return f"{self.system}/{self.name}"
