"""Other advantages."""

from collections.abc import Iterator

import numpy as np

from kljax.systems import Call
from kljax.systems._call import parameters, steps
from kljax.tools.parity.advantages import WHITENED_TOGETHER
from kljax.tools.parity.causes import Cause, make, rare
from kljax.tools.parity.choices.policies import ROWS
from kljax.tools.parity.comparisons import CENTERS, DIVISORS, GROUPINGS, MEMBERS, REWARDS, grouped
from kljax.tools.parity.replay import Replay

GROUPS = {
    "interleaved": ("groups interleaved", "row i belongs to prompt i modulo the number of prompts"),
    "moved": ("groups moved by one", "the groups are those of the row above"),
    "batch": ("one group", "the whole batch is one group"),
    "cut": ("groups cut by micro-batches", "the rows of a prompt in different micro-batches are groups of their own"),
}
CENTERED = {
    "none": "not centered",
    "by length": "centered on the mean weighted by length",
    "others": "centered on the mean of the other rows",
}
WHITENINGS = {
    "center": "subtracts the mean alone",
    "scale": "divides by the deviation alone",
    "mean added back": "adds the mean again after the division",
    "padded": "has its mean over padding, too",
}
REWARD_AT = {
    "before last": "the token before the last",
    "first": "the first token",
    "last column": "the last column",
    "every": "every token",
}


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
        kind = rare if order in ("interleaved", "gathered") else make
        yield kind("advantage", name, f"advantages are those of {text}", rows=order)
    yield from _reward_causes()
    yield from _comparison_causes(call, names)
    if replay.arrays.get("advantages", np.zeros(1)).ndim > 1:
        yield rare("advantage", "at the last token", "the last token of a row alone has its advantage", place="last")
    if call.function == "grpo_advantages":
        arguments = {name: call.arguments[name] for name in ("scale", "ddof", "eps") if name in call.arguments}
        text = "the best row of a group has its lead over the second, and the others have 0"
        changes = (("function", "pass_at_k_advantages"), *arguments.items())
        if arguments.get("scale", "std") in ("std", "none"):
            yield rare("advantage", "pass_at_k_advantages", text, arguments=changes)
    yield make("advantage", "sign alone", "only the sign of the advantages is left", sign=True)
    text = "advantages are spread over the tokens: divided by the length of their row"
    yield make("advantage", "divided by the length", text, per_length=True)
    text = "rewards are whitened over the batch before they are compared"
    yield make("advantage", "rewards whitened first", text, rewards="whitened")
    yield from _whitening_causes(call)


def _reward_causes() -> Iterator[Cause]:
    """Yields other rewards: of other rows, or other functions of the recorded ones."""
    yield rare("advantage", "rewards left out", "the rewards do not enter the advantages", reward_scale=0.0)
    for order, (name, text) in ROWS.items():
        yield rare("advantage", f"rewards: {name}", f"rewards are those of {text}", reward_rows=order)
    for transform in (name for name in REWARDS if name != "whitened"):
        text = f"rewards are {transform} before they are compared"
        yield rare("advantage", f"rewards {transform}", text, rewards=transform)


def _group_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other groups of rows; of several names for the same groups, the first."""
    recorded = replay.arrays.get("group_ids", np.arange(replay.shape[0]))
    parts = replay.arrays.get("micro_batch_ids", np.zeros(len(recorded), int))
    seen = set()
    for groups in ("recorded", *GROUPS, *(name for name in GROUPINGS if " in " in name)):
        ids = np.unique(grouped(recorded, groups, parts)[0], return_inverse=True)[1].tobytes()
        if ids in seen:
            continue
        seen.add(ids)
        if groups in GROUPS:
            name, text = GROUPS[groups]
            kind = rare if groups == "cut" else make
            yield kind("advantage", name, text, groups=groups)
        elif groups != "recorded":
            unit, size = groups.split(" in ")
            yield rare("advantage", groups, f"{size} {unit} that follow each other are one group", groups=groups)


def _comparison_causes(call: Call, names: set[str]) -> Iterator[Cause]:
    """Yields other centers and divisors of the rewards of a group, and other rules along a row."""
    if call.function in ("grpo_advantages", "rloo_advantages", "reinforce_plus_plus_baseline_advantages"):
        for center in CENTERS:
            title = CENTERED.get(center, f"centered on the {center}")
            kind = rare if center == "log mean exp" else make
            yield kind("advantage", title, f"rewards are {title}", center=center)
        for members in MEMBERS:
            text = f"rows that are {members} alone make the statistics of a group"
            yield make("advantage", f"members {members}", text, members=members)
    if call.arguments.get("scale") == "std":
        for divisor in DIVISORS:
            text = f"centered rewards are divided by the group's {divisor}"
            kind = rare if divisor == "std of its micro-batches" else make
            yield kind("advantage", f"scale {divisor}", text, divisor=divisor)
    if "masked_tokens" in names:
        for rule in ("skip", "zero", "none", "reset"):
            arguments = (("masked_tokens", rule),)
            text = f"masked tokens within a row have the rule {rule}"
            yield make("advantage", f"masked tokens {rule}", text, arguments=arguments)
    if call.function == "gae" or "reinforce_plus_plus_returns" in (step.function for step in (call, *call.then)):
        for position, title in REWARD_AT.items():
            kind = rare if position == "before last" else make
            yield kind("advantage", f"reward at {title}", f"the reward of a row stands at {title}", reward_at=position)
    if call.function == "gae":
        for shift, where in ((1, "right"), (-1, "left")):
            text = f"the values of GAE are off by one: moved to the {where}"
            yield make("advantage", f"values off by one ({where})", text, values_shift=shift)
        text = "the value of the last token follows a row that is cut at the limit"
        yield rare("advantage", "rows bootstrapped", text, bootstrap=True)
        yield make("advantage", "returns", "the returns stand in place of the advantages", returns=True)


def _whitening_causes(call: Call) -> Iterator[Cause]:
    """Yields a further normalisation of the advantages, and the absence of the system's own."""
    if any(step.function == "masked_whiten" for step in call.then):
        yield make("advantage", "not whitened", "advantages are not whitened", skip="masked_whiten")
        for parts, text in WHITENINGS.items():
            yield make("advantage", f"whitening: {parts}", f"the whitening {text}", whitening=parts)
        for over in WHITENED_TOGETHER:
            text = f"the whitening is that of each of the {over}"
            yield rare("advantage", f"whitened over {over}", text, whiten_over=over)
    if "reinforce_plus_plus_returns" in (call.function, *(step.function for step in call.then)):
        yield rare("advantage", "returns forward", "returns are summed from the first token on", forward=True)
    for whiten, title in (("tokens", "over the tokens"), ("rows", "over the rows")):
        for ddof in (1, 0):
            for eps in (1e-8, 1e-6, 1e-5, 1e-4):
                extra = "" if (ddof, eps) == (1, 1e-8) else f", ddof {ddof}, eps {eps:g}"
                text = f"advantages are whitened again, {title}{extra}"
                settings = {"whiten": whiten, "whiten_ddof": ddof, "whiten_eps": eps}
                yield Cause("advantage", f"whitened again {title}", text, tuple(settings.items()), alone=bool(extra))
    text = "advantages are divided by the mean of their sizes over the tokens"
    yield rare("advantage", "divided by the mean absolute", text, whiten="mean absolute")
    yield make("advantage", "centered again", "advantages are centered over the tokens again", whiten="centered")
