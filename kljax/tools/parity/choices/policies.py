"""Other log-probs, ratios and corrections."""

import inspect
from collections.abc import Iterator

import kljax
from kljax.tools.parity.causes import Cause, make, rare
from kljax.tools.parity.recipe import LogProbRecipe
from kljax.tools.parity.replay import Replay
from kljax.tools.parity.scoring import PROBED, decimals_between, partial_sums

# Orders of rows that are a fault, each with its name and whose numbers a row then has.
ROWS = {
    "above": ("rows moved by one", "the row above"),
    "below": ("rows moved by one (up)", "the row below"),
    "reversed": ("rows reversed", "the rows in reverse"),
    "by length": ("rows by length", "the rows sorted by length"),
    "longest first": ("rows by length, longest first", "the rows sorted by length, the longest first"),
    "interleaved": ("rows interleaved", "the first row of each prompt, then the second of each"),
    "gathered": ("rows of interleaved prompts", "the rows of prompts that are thought to be interleaved"),
}


def score_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other ways to score tokens, where logits or hidden states are recorded."""
    for stage, side in (("log_probs", ""), ("reference", "ref_")):
        if f"{side}logits" in replay.dump or f"{side}hidden" in replay.dump:
            base = getattr(replay.plan.recipe, stage)
            yield from _logit_causes(stage, base)
            yield from _sum_causes(replay, stage, side, base)
            yield from _row_causes(replay, stage, side)


def _logit_causes(stage: str, base: LogProbRecipe) -> Iterator[Cause]:
    """Yields other ways from logits to log-probs."""
    title = "log_probs" if stage == "log_probs" else "ref_log_probs"
    if base.temperature != 1:
        yield make(stage, "temperature missing", f"{title} are not divided by the temperature", temperature=1.0)
        square = base.temperature**2
        yield make(stage, "temperature twice", f"{title} are divided by the temperature twice", temperature=square)
    for shift, side_text in ((1, "the token's own position"), (-1, "two positions before the token")):
        text = f"{title} are off by one: they read the logits at {side_text}"
        yield make(stage, "alignment off by one" if shift == 1 else "alignment off by one (back)", text, shift=shift)
    if base.softcap is not None:
        yield make(stage, "softcap left out", f"{title} leave out the cap of the logits", softcap=None)
    if base.logit_scale != 1:
        yield make(stage, "logit scale left out", f"{title} leave out the scale of the logits", logit_scale=1.0)
        inverse = 1 / base.logit_scale
        yield make(stage, "logit scale inverted", f"{title} divide by the scale of the logits", logit_scale=inverse)
    if base.vocab_size is not None:
        yield make(stage, "vocabulary padding", f"{title} count the padding of the vocabulary", vocab_size=None)
    if base.top_p is not None:
        yield make(stage, "no top-p renormalisation", f"{title} are of the whole vocabulary, not of top-p", top_p=None)
    else:
        for top_p in (0.8, 0.9, 0.95, 0.99):
            yield make(stage, *_of_top_p(title, top_p), top_p=top_p)
    for dtype in ("bfloat16", "float16"):
        yield make(stage, f"logits in {dtype}", f"{title} come from logits rounded to {dtype}", logits_dtype=dtype)


def _sum_causes(replay: Replay, stage: str, side: str, base: LogProbRecipe) -> Iterator[Cause]:
    """Yields sums over fewer logits that a few tokens show."""
    recipe, title = replay.plan.recipe, f"{side}log_probs"
    mask, unit = replay.arrays["mask"], replay.unit(title, recipe)
    if title not in replay.arrays or not {"tokens", "rows"} <= set(replay.dump):
        return
    sizes, ids, masses = partial_sums(replay.dump, side, base, mask, unit)
    if base.top_p is None and masses != (0, 1):
        for top_p in decimals_between(*masses):
            yield rare(stage, *_of_top_p(title, top_p), top_p=top_p)
    for size in sorted(sizes)[:PROBED]:
        yield rare(stage, f"top {size}", f"{title} are normalised over the {size} largest logits", top_k=size)
    for number in sorted(ids)[:PROBED]:
        text = f"{title} are normalised without the logit of token {number}"
        yield rare(stage, f"without token {number}", text, without=number)


def _of_top_p(title: str, top_p: float) -> tuple[str, str]:
    return f"top-p {top_p} renormalised", f"{title} are renormalised over the top-p set of {top_p}"


def _row_causes(replay: Replay, stage: str, side: str) -> Iterator[Cause]:
    """Yields log-probs of other positions, rows and policies."""
    title = f"{side}log_probs"
    moves = (("moved by one (right)", 1), ("moved by one (left)", -1))
    for name, by in moves:
        yield make(stage, name, f"{title} are moved by one position: {name}", moved=by)
    for order, (name, text) in ROWS.items():
        kind = rare if order in ("interleaved", "gathered") else make
        yield kind(stage, name, f"{title} are those of {text}", rows=order)
    for source in ("old_log_probs", "rollout_log_probs"):
        if side and source in replay.arrays:
            yield make(stage, f"of {source}", f"{title} are {source}", source=source)
    text = "of the base: the adapter is off" if not side else "of the policy: the adapter is on"
    yield make(stage, "adapter " + ("on" if side else "off"), f"{title} are {text}", adapter=False)


def ratio_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other pairs of policies in the ratio."""
    text = "the ratio is exp(old - log_probs)"
    yield make("ratio", "direction swapped", text, swapped=True)
    for shift, where in ((1, "right"), (-1, "left")):
        text = f"old_log_probs are off by one in the ratio: moved to the {where}"
        yield make("ratio", f"old log-probs off by one ({where})", text, shift=shift)
    for old in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "log_probs"):
        if old in replay.arrays and not (old == "log_probs" and "old_log_probs" not in replay.arrays):
            yield make("ratio", f"{old} as the old policy", f"{old} are the denominator of the ratio", old=old)
    if replay.plan.recipe.ratio.old in replay.arrays:
        for order, (name, text) in ROWS.items():
            yield rare("ratio", f"old {name}", f"the denominator of the ratio is that of {text}", rows=order)
        for which in ("first", "last"):
            text = f"the {which} micro-batch has its own policy as the denominator of the ratio"
            yield rare("ratio", f"{which} micro-batch on its own policy", text, own=which)
    for dtype in ("bfloat16", "float16"):
        yield rare("ratio", f"log-ratio in {dtype}", f"the log-ratio is rounded to {dtype}", dtype=dtype)


def correction_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other weights of the rollout correction."""
    if replay.plan.recipe.correction is None:
        return
    call = replay.plan.calls["correction"]
    signature = inspect.signature(getattr(kljax, call.function)).parameters
    yield make("correction", "direction swapped", "the correction's ratio is rollout / old", swapped=True)
    for level in ("token", "sequence", "geometric"):
        if "level" in signature and call.arguments.get("level") != level:
            text = f"the correction's ratio is that of level {level}"
            yield make("correction", f"level {level}", text, arguments=(("level", level),))
    for mode in ("truncate", "mask", "clip"):
        if "mode" in signature and call.arguments.get("mode") != mode:
            text = f"the correction's weights have mode {mode}"
            yield make("correction", f"mode {mode}", text, arguments=(("mode", mode),))
    if call.arguments.get("upper") is not None:
        yield make("correction", "no cap", "the correction's weights are not capped", arguments=(("upper", None),))
    for shift, where in ((1, "right"), (-1, "left")):
        text = f"the sampler's log-probs are off by one in the correction: moved to the {where}"
        yield make("correction", f"sampler off by one ({where})", text, shift=shift)
    for over, name in (("batch", "divided by their mean"), ("row", "divided by the mean of their row")):
        yield make("correction", name, f"the correction's weights are {name}", normalized=over)
    for policy in ("log_probs", "old_log_probs", "ref_log_probs"):
        if policy in replay.arrays and policy != replay.array_name("correction", "log_probs"):
            yield make("correction", f"of {policy}", f"the correction's ratio is {policy} / sampler", policy=policy)
    yield make("correction", "weights squared", "the correction's weights are squared", weights=2)
    yield from _rare_correction_causes("mode" in signature)
    yield make("loss", "weights left out", "the policy loss leaves out the correction's weights", weights=0)
    yield make("loss", "weights twice", "the policy loss has the correction's weights twice", weights=2)


def _rare_correction_causes(masks: bool) -> Iterator[Cause]:
    """Yields weights of other rows and parts, and tokens that are rejected if the function has a mask."""
    for order, (name, text) in ROWS.items():
        yield rare("correction", f"sampler {name}", f"the sampler of the correction is that of {text}", rows=order)
    for dtype in ("bfloat16", "float16"):
        text = f"the correction's log-ratio is rounded to {dtype}"
        yield rare("correction", f"log-ratio in {dtype}", text, dtype=dtype)
    text = "the last token of each row has the weight 1"
    yield rare("correction", "last token of weight 1", text, end="one")
    text = "the sampler's log-prob of the last token is 0 in the weights"
    yield rare("correction", "last token not sampled", text, end="unsampled")
    text = "a weight of the correction is the product of those up to its token"
    yield rare("correction", "level prefix", text, prefix=True)
    text = "the correction's weights are divided by the mean of the means of rows"
    yield rare("correction", "divided by the mean of rows", text, normalized="rows")
    text = "the correction's weights are divided by their mean over all columns"
    yield rare("correction", "divided by their mean over all columns", text, normalized="columns")
    text = "the correction's weights are divided by their mean before their bounds"
    yield rare("correction", "divided by their mean before the bounds", text, normalized="free")
    if masks:
        text = "tokens whose weight is out of its bounds are in no sum and no divisor of the loss"
        mask = (("mode", "mask"),)
        yield rare("correction", "tokens rejected", text, arguments=mask, rejects=True)
