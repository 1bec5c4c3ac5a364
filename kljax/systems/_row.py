"""What a row of the table holds."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

KINDS = {
    "kl": "KL estimators: arguments of estimate_kl",
    "reduction": "reductions of a loss: arguments of token_weights",
    "advantage": "advantage estimators",
    "policy_loss": "policy losses",
    "value_loss": "losses of a value function",
    "correction": "importance weights and masks, mostly for the mismatch of trainer and sampler",
    "controller": "KL coefficients over time, and references that follow the policy",
    "placement": "where the KL enters: reward, loss, advantage",
    "distillation": "distillation from a teacher",
    "statistic": "metrics and masked statistics",
}


@dataclasses.dataclass(frozen=True)
class System:
    """A system of the table.

    Attributes:
      key: its name in lookups.
      title: its name in text.
      version: the release or commit whose code was read.
      default_kl: the KL that it uses unless told otherwise.
    """

    key: str
    title: str
    version: str
    default_kl: str


SYSTEMS = {
    system.key: system
    for system in (
        System("trinity", "Trinity-RFT", "0.6.0", "k2 in the loss, coefficient 0.001; none in the reward"),
        System("skyrl", "SkyRL", "0.3.0", "its k3 (clamped) in the loss, coefficient 0.001"),
        System("slime", "slime", "0.3.1, commit 624b824", "none; type k1 once a coefficient is set"),
        System("art", "ART (openpipe-art)", "0.5.18", "none; centred k1 in the advantages once a coefficient is set"),
        System("verl", "verl", "0.9.1", "none; low_var_kl in the loss or kl (k1) in the reward once switched on"),
        System("openrlhf", "OpenRLHF", "0.11.2", "k1 in the reward, coefficient 0.01"),
        System("trl", "TRL", "1.16.0", "none (beta 0); importance-corrected k3 in the loss once beta is set"),
        System("prime-rl", "prime-rl", "0.8.0, commit 559b447", "squared log-ratio to the sampler, coefficient 0.001"),
    )
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of this library as data: `scale * kljax.<function>(arrays, **arguments)`, and what follows it.

    Attributes:
      function: the name of the function in `kljax`.
      arguments: its keyword arguments. Those that only the user can know (a length, a schedule) are left out and
        named in the `given` of the row.
      scale: a constant factor of the result.
      times: calls whose results, as constants, multiply it: importance weights, or a mask.
      then: calls applied to the result, one after the other.
      plus: calls whose results are added to it.

    Example:
      >>> import kljax
      >>> kljax.systems.Call("ppo_clip_loss", {"clip_high": 0.28})
      kljax.ppo_clip_loss(clip_high=0.28)
    """

    function: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))
    scale: float = 1.0
    times: tuple["Call", ...] = ()
    then: tuple["Call", ...] = ()
    plus: tuple["Call", ...] = ()

    def __repr__(self) -> str:
        factor = "" if self.scale == 1 else f"{self.scale:g} * "
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        text = f"{factor}kljax.{self.function}({arguments})"
        more = [
            f"{sign} {call!r}"
            for sign, calls in (("*", self.times), ("+", self.plus), ("->", self.then))
            for call in calls
        ]
        return " ".join([text, *more])


@dataclasses.dataclass(frozen=True)
class Golden:
    """Recorded results that a row is checked against: `tests/goldens` holds them.

    Attributes:
      function: name of the function of the system.
      params: arguments that the cases were recorded with; None stands for one that is absent or off.
    """

    function: str
    params: Mapping[str, Any]


def on(function: str, **params: Any) -> Golden:
    """The recorded cases of a function whose arguments include `params`."""
    return Golden(function, types.MappingProxyType(params))


@dataclasses.dataclass(frozen=True)
class Row:
    """One name that one system accepts, and what it means there.

    Attributes:
      system: key of the system, see `kljax.systems.rows`.
      kind: "kl", "reduction", "advantage", "policy_loss", "value_loss", "correction", "controller", "placement",
        "distillation" or "statistic".
      name: the name as the system spells it. A flag that changes the meaning follows a plus: "k3+use_unbiased_kl".
      call: the same thing in this library; None where there is none, and `reason` says why.
      meaning: what the name computes, with `x = log pi - log ref`, `d = log pi - log old`, `r = exp(d)`, `A` the
        advantage.
      option: the options of the system that take the name, or the function that it names.
      given: argument of the call -> the option or the array of the system that it comes from.
      clamps: every clamp that is always on.
      divisors: what is divided by, epsilons included.
      gradient: where the gradient goes, and what it is.
      defaults: whether the name is a default, and the defaults of the values beside it.
      note: where the code differs from the documentation, from the paper or from other systems.
      goldens: the recorded cases that check the row.
      reason: why there is no call, or no recorded case.
      version: the version read, where it is not that of the system.
    """

    system: str
    kind: str
    name: str
    call: Call | None
    meaning: str
    _: dataclasses.KW_ONLY
    option: str = ""
    given: Mapping[str, str] = dataclasses.field(default_factory=lambda: types.MappingProxyType({}))
    clamps: str = "none"
    divisors: str = ""
    gradient: str = ""
    defaults: str = ""
    note: str = ""
    goldens: tuple[Golden, ...] = ()
    reason: str = ""
    version: str = ""

    @property
    def key(self) -> str:
        """`system/name`."""
        return f"{self.system}/{self.name}"
