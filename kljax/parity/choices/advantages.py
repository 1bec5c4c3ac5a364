"""Other advantages."""

from collections.abc import Iterator

from kljax.parity.causes import Cause, make
from kljax.parity.replay import Replay
from kljax.systems import Call
from kljax.systems._call import parameters, steps


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
    text = "groups are interleaved: row i belongs to prompt i modulo the number of prompts"
    yield make("advantage", "groups interleaved", text, groups="interleaved")
    yield make("advantage", "groups moved by one", "the groups are those of the row above", groups="moved")
    yield make("advantage", "rows moved by one", "advantages are those of the row above", rows=1)
    yield make("advantage", "rows moved by one (up)", "advantages are those of the row below", rows=-1)
    yield from _comparison_causes(call, names)
    yield make("advantage", "one group", "the whole batch is one group", groups="batch")
    text = "advantages are spread over the tokens: divided by the length of their row"
    yield make("advantage", "divided by the length", text, per_length=True)
    text = "rewards are whitened over the batch before they are compared"
    yield make("advantage", "rewards whitened first", text, rewards="whitened")
    yield from _whitening_causes(call)


def _comparison_causes(call: Call, names: set[str]) -> Iterator[Cause]:
    """Yields other centers and divisors of the rewards of a group, and other rules along a row."""
    if call.function in ("grpo_advantages", "rloo_advantages", "reinforce_plus_plus_baseline_advantages"):
        titles = {"median": "centered on the median", "batch": "centered on the batch", "none": "not centered"}
        for center, title in titles.items():
            yield make("advantage", title, f"rewards are {title}", center=center)
    if call.arguments.get("scale") == "std":
        for divisor in ("variance", "range", "mean absolute"):
            text = f"centered rewards are divided by the group's {divisor} distance"
            yield make("advantage", f"scale {divisor}", text.replace("variance distance", "variance"), divisor=divisor)
    if "masked_tokens" in names:
        for rule in ("skip", "zero", "none", "reset"):
            arguments = (("masked_tokens", rule),)
            text = f"masked tokens within a row have the rule {rule}"
            yield make("advantage", f"masked tokens {rule}", text, arguments=arguments)
    if call.function in ("gae", "reinforce_plus_plus_returns"):
        text = "the reward of a row stands at its first token"
        yield make("advantage", "reward at the first token", text, reward_at="first")


def _whitening_causes(call: Call) -> Iterator[Cause]:
    """Yields a further normalisation of the advantages, and the absence of the system's own."""
    if any(step.function == "masked_whiten" for step in call.then):
        yield make("advantage", "not whitened", "advantages are not whitened", skip="masked_whiten")
    for whiten, title in (("tokens", "over the tokens"), ("rows", "over the rows")):
        for ddof in (1, 0):
            for eps in (1e-8, 1e-6, 1e-5, 1e-4):
                extra = "" if (ddof, eps) == (1, 1e-8) else f", ddof {ddof}, eps {eps:g}"
                text = f"advantages are whitened again, {title}{extra}"
                settings = {"whiten": whiten, "whiten_ddof": ddof, "whiten_eps": eps}
                yield Cause("advantage", f"whitened again {title}", text, tuple(settings.items()), alone=bool(extra))
    yield make("advantage", "centered again", "advantages are centered over the tokens again", whiten="centered")
