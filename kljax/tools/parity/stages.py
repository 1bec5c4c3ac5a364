"""The stages of an update in the order of the data, and which of them a dump has the inputs for."""

import re

from kljax.systems import Call
from kljax.systems._call import parameters, steps
from kljax.tools.parity import advantages, losses, policies
from kljax.tools.parity.dump import Dump
from kljax.tools.parity.fields import METRIC, ORDER
from kljax.tools.parity.header import RecipeCalls
from kljax.tools.parity.recipe import Kl
from kljax.tools.parity.replay import Replay, Stage

STAGES: dict[str, Stage] = {
    "mask": policies.mask,
    "log_probs": policies.log_probs,
    "ref_log_probs": policies.ref_log_probs,
    "ratio": policies.ratio,
    "weights": policies.weights,
    "kl": policies.kl_per_token,
    "advantages": advantages.advantages,
    "token_loss": losses.token_loss,
    "loss": losses.loss,
    "grad_log_probs": losses.gradient,
}
# Inputs that the stage of a section computes, or is given as a constant.
COMPUTED = {
    "correction": ("mask",),
    "advantage": ("mask", "kl", "coef", "num_groups", "token_rewards"),
    "loss": ("mask", "key", "advantages"),
}
SECTIONS = {"weights": "correction", "kl": "kl", "advantages": "advantage", "token_loss": "loss", "loss": "loss"}


def make_replay(dump: Dump, plan: RecipeCalls) -> Replay:
    """Makes a replay of all stages.

    Returns:
      The `Replay`, with every recorded array but logits, hidden states and heads in memory.
    """
    return Replay(dump, plan, STAGES, losses.METRICS)


def comparable(replay: Replay) -> list[str]:
    """Lists the recorded results that can be recomputed, in the order of the data.

    Returns:
      Names of results, and of metrics as `metric/NAME`.
    """
    return [name for name in recorded(replay) if reason_not_compared(replay, name) is None]


def recorded(replay: Replay) -> list[str]:
    """Lists the recorded results, in the order of the data.

    Returns:
      Names of results, then of metrics as `metric/NAME`.
    """
    names = [*ORDER, *(name for name in replay.arrays if name.startswith(METRIC))]
    return [name for name in names if name in replay.arrays]


def reason_not_compared(replay: Replay, name: str) -> str | None:
    """Returns why a result cannot be recomputed, or None if it can.

    Returns:
      A phrase such as `needs rewards, group_ids`, or None.
    """
    if name.startswith(METRIC) and name.removeprefix(METRIC) not in replay.metrics:
        return f"no such metric here; known are {', '.join(replay.metrics)}"
    section = "loss" if name == "grad_log_probs" else SECTIONS.get(name)
    per_token = name == "loss" and "token_loss" in replay.arrays
    if section is not None and getattr(replay.plan.recipe, section) is None and not per_token:
        return f"needs header.{section}"
    available = {*replay.arrays, *replay.dump}
    missing = [field for field in _needs(replay, name) if field not in available]
    return f"needs {', '.join(dict.fromkeys(missing))}" if missing else None


def _needs(replay: Replay, name: str) -> list[str]:
    """Lists the arrays that a stage reads; in place of a result that is not recorded, the arrays that it needs."""
    recipe = replay.plan.recipe
    side = name.removesuffix("log_probs")
    kl = recipe.kl or Kl()
    if name in ("weights", "kl", "advantages") and getattr(recipe, SECTIONS[name]) is None:
        return [f"header.{SECTIONS[name]}"]
    needs: dict[str, list[str]] = {
        "mask": ["prompt_lengths", "lengths"],
        "ratio": [recipe.ratio.old] if recipe.ratio.old != "old_log_probs" else [],
        "metric/ppo_kl": [recipe.ratio.old] if recipe.ratio.old != "old_log_probs" else [],
        "weights": _needs_of_call(replay, "correction"),
        "kl": [kl.policy if kl.policy in replay.arrays else "log_probs", kl.reference],
        "advantages": ["rewards", "group_ids", *_needs_of_call(replay, "advantage")],
    }
    if name in ("log_probs", "ref_log_probs"):
        has_logits = f"{side}logits" in replay.dump or f"{side}hidden" in replay.dump
        return ["tokens", "rows"] if has_logits else [f"{side}logits or {side}hidden"]
    if name in needs:
        before = ["kl"] if name == "advantages" and kl.place == "reward" else []
        return needs[name] + _needs_of_absent(replay, before)
    if name.startswith(METRIC):
        return _needs_of_absent(replay, [name.removeprefix(METRIC)])
    return _needs_of_loss(replay, name)


def _needs_of_loss(replay: Replay, name: str) -> list[str]:
    """Lists the arrays of the policy loss, of the scalar loss or of its gradient."""
    recipe = replay.plan.recipe
    needs: list[str] = []
    if name != "loss" or "token_loss" not in replay.arrays:
        needs += _needs_of_call(replay, "loss") + _needs_of_absent(replay, ["advantages"])
        needs += _needs_of_absent(replay, ["weights"]) if recipe.correction is not None else []
        needs += _needs_of_absent(replay, ["kl"]) if recipe.kl is not None and recipe.kl.place == "advantage" else []
    if name != "token_loss" and recipe.entropy.coef and recipe.entropy.source == "recorded":
        needs.append("entropy")
    if name != "token_loss" and recipe.kl is not None and recipe.kl.place == "loss":
        needs += _needs(replay, "kl") if name == "grad_log_probs" else _needs_of_absent(replay, ["kl"])
    return needs


def _needs_of_absent(replay: Replay, names: list[str]) -> list[str]:
    return [field for name in names if name not in replay.arrays for field in _needs(replay, name)]


def _needs_of_call(replay: Replay, section: str) -> list[str]:
    """Lists the arrays and arguments that the call of a section requires, but for results of its stage."""
    if section not in replay.plan.calls:
        return []
    call = replay.plan.calls[section]
    settings = _settings(call)
    needs = []
    for name in call.required:
        field = replay.array_name(section, name)
        if section == "advantage" and field == "advantages":
            needs.append(f"advantages before {call.function}")
        # Without one, the policy is its own old policy.
        elif name not in COMPUTED[section] and field != "old_log_probs":
            needs.append(f"header.{section}.{name}" if name in settings else field)
    if call.function == "gdpo_advantages":
        needs.append("rewards of each reward function")
    if section == "correction" and not {"log_probs", "sampling_log_probs"} <= set(call.required):
        needs.append("a function of log_probs and sampling_log_probs")
    return needs


def _settings(call: Call) -> set[str]:
    """Returns the arguments of a call that are numbers or words, which the header can hold."""
    return {
        parameter.name
        for step, _ in steps(call)
        for parameter in parameters(step)
        if parameter.kind is parameter.KEYWORD_ONLY
        and not re.search("ArrayLike|Mask|Sequence", str(parameter.annotation))
    }
