"""Other advantages."""

from collections.abc import Iterator

import numpy as np

from kljax.parity.causes import Cause, make, rare
from kljax.parity.choices.policies import ROWS
from kljax.parity.comparisons import CENTERS, DIVISORS, GROUPINGS, MEMBERS, grouped
from kljax.parity.replay import Replay
from kljax.systems import Call
from kljax.systems._call import parameters, steps

GROUPS = {
    "interleaved": ("groups interleaved", "row i belongs to prompt i modulo the number of prompts"),
    "moved": ("groups moved by one", "the groups are those of the row above"),
    "batch": ("one group", "the whole batch is one group"),
}
CENTERED = {"none": "not centered", "by length": "centered on the mean weighted by length"}
WHITENINGS = {
    "center": "subtracts the mean alone",
    "scale": "divides by the deviation alone",
    "mean added back": "adds the mean again after the division",
    "padded": "has its mean over padding, too",
}
REWARD_AT = {"first": "the first token", "last column": "the last column", "every": "every token"}


def advantage_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other comparisons of rewards, and other treatments of advantages."""
    if replay.plan.recipe.advantage is None:
        return
    call = replay.plan.calls["advantage"]
    names = {parameter.name for step, _ in steps(call) for parameter in parameters(step)}
    if "ddof" in names:
        for ddof in (0, 1):
            text = f"advantages divide by the standard deviation with ddof {ddof}"
            yield make("advantage", f"ddof {ddof}", text, arguments=(("ddof", ddof),))
    if "scale" in names:
        for scale in ("std", "batch_std", "mean", "none"):
            text = f"advantages are scaled by {scale}"
            yield make("advantage", f"scale {scale}", text, arguments=(("scale", scale),))
    if call.arguments.get("eps") and call.arguments.get("scale", "std") in ("std", "batch_std"):
        text = "advantages add epsilon to the variance, under the root, not to the standard deviation"
        yield make("advantage", "epsilon inside the root", text, root=True)
    if call.function in ("grpo_advantages", "rloo_advantages"):
        other = "rloo_advantages" if call.function == "grpo_advantages" else "grpo_advantages"
        title = "leave-one-out" if other.startswith("rloo") else "of GRPO"
        yield make("advantage", f"{other}", f"advantages are {title}", arguments=(("function", other),))
    yield make("advantage", "sign flipped", "advantages have the other sign", scale=-1.0)
    yield from _group_causes(replay)
    for order, (name, text) in ROWS.items():
        yield make("advantage", name, f"advantages are those of {text}", rows=order)
    yield from _comparison_causes(call, names)
    yield make("advantage", "sign alone", "only the sign of the advantages is left", sign=True)
    text = "advantages are spread over the tokens: divided by the length of their row"
    yield make("advantage", "divided by the length", text, per_length=True)
    text = "rewards are whitened over the batch before they are compared"
    yield make("advantage", "rewards whitened first", text, rewards="whitened")
    yield from _whitening_causes(call)


def _group_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other groups of rows; of several names for the same groups, the first."""
    recorded = replay.arrays.get("group_ids", np.arange(replay.shape[0]))
    seen = set()
    for groups in ("recorded", *GROUPS, *(name for name in GROUPINGS if " in " in name)):
        ids = np.unique(grouped(recorded, groups)[0], return_inverse=True)[1].tobytes()
        if ids in seen:
            continue
        seen.add(ids)
        if groups in GROUPS:
            name, text = GROUPS[groups]
            yield make("advantage", name, text, groups=groups)
        elif groups != "recorded":
            kind, size = groups.split(" in ")
            yield rare("advantage", groups, f"{size} {kind} that follow each other are one group", groups=groups)


def _comparison_causes(call: Call, names: set[str]) -> Iterator[Cause]:
    """Yields other centers and divisors of the rewards of a group, and other rules along a row."""
    if call.function in ("grpo_advantages", "rloo_advantages", "reinforce_plus_plus_baseline_advantages"):
        for center in CENTERS:
            title = CENTERED.get(center, f"centered on the {center}")
            yield make("advantage", title, f"rewards are {title}", center=center)
        for members in MEMBERS:
            text = f"rows that are {members} alone make the statistics of a group"
            yield make("advantage", f"members {members}", text, members=members)
    if call.arguments.get("scale") == "std":
        for divisor in DIVISORS:
            text = f"centered rewards are divided by the group's {divisor}"
            yield make("advantage", f"scale {divisor}", text, divisor=divisor)
    if "masked_tokens" in names:
        for rule in ("skip", "zero", "none", "reset"):
            arguments = (("masked_tokens", rule),)
            text = f"masked tokens within a row have the rule {rule}"
            yield make("advantage", f"masked tokens {rule}", text, arguments=arguments)
    if call.function in ("gae", "reinforce_plus_plus_returns"):
        for position, title in REWARD_AT.items():
            yield make("advantage", f"reward at {title}", f"the reward of a row stands at {title}", reward_at=position)
    if call.function == "gae":
        for shift, where in ((1, "right"), (-1, "left")):
            text = f"the values of GAE are off by one: moved to the {where}"
            yield make("advantage", f"values off by one ({where})", text, values_shift=shift)
        yield make("advantage", "returns", "the returns stand in place of the advantages", returns=True)


def _whitening_causes(call: Call) -> Iterator[Cause]:
    """Yields a further normalisation of the advantages, and the absence of the system's own."""
    if any(step.function == "masked_whiten" for step in call.then):
        yield make("advantage", "not whitened", "advantages are not whitened", skip="masked_whiten")
        for parts, text in WHITENINGS.items():
            yield make("advantage", f"whitening: {parts}", f"the whitening {text}", whitening=parts)
    for whiten, title in (("tokens", "over the tokens"), ("rows", "over the rows")):
        for ddof in (1, 0):
            for eps in (1e-8, 1e-6, 1e-5, 1e-4):
                extra = "" if (ddof, eps) == (1, 1e-8) else f", ddof {ddof}, eps {eps:g}"
                text = f"advantages are whitened again, {title}{extra}"
                settings = {"whiten": whiten, "whiten_ddof": ddof, "whiten_eps": eps}
                yield Cause("advantage", f"whitened again {title}", text, tuple(settings.items()), alone=bool(extra))
    yield make("advantage", "centered again", "advantages are centered over the tokens again", whiten="centered")
