"""Other policy losses, and other gradients."""

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import numpy as np

import kljax
from kljax.systems import Call
from kljax.tools.parity.causes import Cause, make, rare
from kljax.tools.parity.losses import BY_ROW, has_clips
from kljax.tools.parity.replay import Replay

# Losses with two clips, by function.
FAMILY = {
    "ppo_clip_loss": "PPO's, with a ratio per token",
    "gspo_loss": "GSPO's, with a ratio per sequence",
    "cispo_loss": "CISPO's, whose clipped ratio is a constant",
}

# Losses of the same arrays that have other numbers.
OTHERS: tuple[tuple[str, str, dict[str, float]], ...] = (
    ("gmpo_loss", "GMPO's, with a geometric mean of clipped ratios", {}),
    ("vespo_loss", "VESPO's, with its own numbers", {}),
    *(("kl_cov_loss", "KL-Cov's", {"fraction": fraction}) for fraction in (2e-4, 2e-3, 2e-2, 0.2)),
)


def loss_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other policy losses."""
    if replay.plan.recipe.loss is None:
        return
    call = replay.plan.calls["loss"]
    signature = inspect.signature(getattr(kljax, call.function)).parameters
    value = {name: call.arguments.get(name, parameter.default) for name, parameter in signature.items()}
    changes: list[tuple[str, str, str, Any]] = []
    if value.get("dual_clip") is not None:
        changes.append(("no dual clip", "the policy loss has no dual clip", "dual_clip", None))
    if has_clips(call):
        changes.append(("no upper clip", "the policy loss is not clipped from above", "clip_high", 1e6))
        yield from _clip_causes(call.function, value["clip_low"], value["clip_high"])
    if "log_ratio_clip" in signature:
        bound = None if value["log_ratio_clip"] is not None else 20.0
        text = f"the log-ratio is {'not clipped' if bound is None else 'clipped at 20'}"
        changes.append(("log-ratio clip", text, "log_ratio_clip", bound))
    if "max_ratio" in signature and value["max_ratio"] is not None:
        changes.append(("no cap of the ratio", "the ratio is not capped", "max_ratio", None))
    for name, words in _words(call.function):
        changes += [(f"{name} {word}", f"the {name} of the policy loss is {word}", name, word) for word in words]
    for name, text, argument, setting in changes:
        if value[argument] != setting:
            yield make("loss", name, text, arguments=((argument, setting),))
    yield make("loss", "sign flipped", "the policy loss has the other sign", scale=-1.0)
    for moved, where in ((1, "right"), (-1, "left")):
        name = f"advantages off by one ({where})"
        yield rare("loss", name, f"the advantages are off by one in the loss: moved to the {where}", moved=moved)
    if "weights" in replay.arrays and replay.plan.recipe.correction is None:
        text = "recorded weights multiply the policy loss, and the header has no correction"
        yield rare("loss", "recorded weights", text, recorded=True)
    text = "token t has the advantage of row t"
    if replay.shape[0] == replay.shape[1] and replay.arrays.get("advantages", np.zeros((1, 1))).ndim == 1:
        yield make("loss", "advantages along the tokens", text, columns=True)
    yield from _form_causes(replay, call, value)


def _form_causes(replay: Replay, call: Call, value: dict[str, Any]) -> Iterator[Cause]:
    """Yields other forms of the loss of the header, by the values of its arguments."""
    if call.function in BY_ROW:
        yield make("loss", "ratio summed over the row", "the ratio is that of the whole row", row_ratio="sum")
        text = "the log-ratios of a row are divided by the padded length"
        yield make("loss", "ratio over the padded length", text, row_ratio="padded mean")
        text = "the ratio of a row is the arithmetic mean of its ratios"
        yield rare("loss", "mean of ratios", text, row_ratio="mean of ratios")
    if call.function == "ppo_clip_loss" and value["dual_clip"] is not None:
        yield rare("loss", "dual clip of both signs", "the dual clip bounds positive advantages, too", dual_both=True)
    if call.function == "dppo_loss":
        wide = (("clip_low", 2.0), ("clip_high", 2.0), ("divergence", "tv"))
        for trust in ("old_log_probs", "rollout_log_probs", "ref_log_probs"):
            if trust in replay.arrays and trust != replay.array_name("loss", "old_log_probs"):
                yield rare(
                    "loss", f"region around {trust}", f"the trust region is around {trust}", arguments=wide, trust=trust
                )
    if call.function == "cispo_loss":
        yield make("loss", "weight has a gradient", "the clipped ratio is differentiated, too", weight_gradient=True)


def _words(function: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the arguments of a function that are words or flags, each with its choices."""
    for name, parameter in inspect.signature(getattr(kljax, function)).parameters.items():
        if parameter.annotation is bool:
            yield name, (True, False)
        elif get_origin(parameter.annotation) is Literal:
            yield name, get_args(parameter.annotation)


def _clip_causes(function: str, low: float, high: float) -> Iterator[Cause]:
    """Yields exchanged clips, and other losses with the same clips."""
    if low != high:
        text = f"the clips are exchanged: {high:g} below and {low:g} above"
        yield make("loss", "clips exchanged", text, arguments=(("clip_low", high), ("clip_high", low)))
    text = f"the clips {low:g} and {high:g} are those of the log-ratio"
    of_log = (("clip_low", -float(np.expm1(-low))), ("clip_high", float(np.expm1(high))))
    yield rare("loss", "clips of the log-ratio", text, arguments=of_log)
    text = "the policy loss is not clipped, from below or above"
    yield make("loss", "unclipped", text, arguments=(("clip_low", 0.999999), ("clip_high", 1e6)))
    yield make("loss", "outside masked", "tokens whose ratio is beyond a clip are left out", outside="masked")
    text = "tokens whose ratio is beyond PPO's clip are left out"
    yield rare("loss", "outside of PPO's clip masked", text, outside="masked side")
    if function == "ppo_clip_loss":
        text = "the clipped surrogate alone is taken, not the larger of both"
        yield rare("loss", "clipped alone", text, outside="clipped")
    if function in FAMILY:
        for other, title, arguments in OTHERS:
            clips = {"clip_low": low, "clip_high": high} if other == "gmpo_loss" else arguments
            changed = (("function", other), *clips.items())
            shown = "".join(f", {name} {number:g}" for name, number in arguments.items())
            yield rare("loss", f"{other}{shown}", f"the policy loss is {title}{shown}", arguments=changed)
    text = "the policy loss is -A log pi, without a ratio"
    yield make("loss", "reinforce_loss", text, arguments=(("function", "reinforce_loss"),))
    if function == "ppo_clip_loss":
        text = "the smaller of the clipped and the unclipped loss is taken, not the larger"
        yield make("loss", "optimistic", text, flipped=True)
        without = (("dual_clip", None),)
        yield make("loss", "optimistic, no dual clip", f"{text}, without a dual clip", flipped=True, arguments=without)
    for other, title in FAMILY.items() if function in FAMILY else ():
        if other != function:
            settings = (("function", other), ("clip_low", low), ("clip_high", high))
            yield make("loss", other, f"the policy loss is {title}", arguments=settings)


def gradient_causes(replay: Replay) -> Iterator[Cause]:
    """Yields terms without a gradient, and a gradient of the other sign."""
    base = replay.plan.recipe.gradient
    yield make("gradient", "KL detached", "the KL term has no gradient", through_kl=False)
    yield make("gradient", "policy detached", "the policy loss has no gradient", through_policy=False)
    yield make("gradient", "sign flipped", "the gradient has the other sign", scale=-base.scale)
    for which in ("first", "last"):
        text = f"only the {which} micro-batch has a gradient"
        yield make("gradient", f"{which} micro-batch alone", text, micro_batch=which)
