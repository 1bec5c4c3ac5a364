"""The choices of every stage that another system may have made: a fixed list. Numbers are solved in `numbers`."""

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np

import kljax
from kljax.parity.causes import Cause, make
from kljax.parity.positions import apply_rule
from kljax.parity.recipe import Kl, LogProbRecipe, MaskRule, Recipe, ReductionRecipe
from kljax.parity.replay import Replay
from kljax.systems import Call
from kljax.systems._call import parameters, steps

# Losses with two clips, by function.
FAMILY = {
    "ppo_clip_loss": "PPO's, with a ratio per token",
    "gspo_loss": "GSPO's, with a ratio per sequence",
    "cispo_loss": "CISPO's, whose clipped ratio is a constant",
}
KL_ESTIMATORS: dict[str, dict[str, Any]] = {
    "k1": {"estimator": "k1"},
    "abs": {"estimator": "abs"},
    "k2": {"estimator": "k2"},
    "squared log-ratio, no half": {"estimator": "k2", "scale": 2.0},
    "k3": {"estimator": "k3"},
    "k3 clipped as low_var_kl": {"estimator": "low_var_kl"},
    "k3 with its value clipped at 10": {"estimator": "k3", "value_clip": 10.0},
}


def causes_of(replay: Replay) -> list[Cause]:
    """Lists every hypothesis about a dump, in the order of the data; causes that change nothing are left out.

    Args:
      replay: the recorded arrays, and the plan whose recipe the causes change.

    Returns:
      The causes; of several that give the same recipe, the first.
    """
    recipe = replay.plan.recipe
    causes = [*_mask_causes(replay, "mask_rule", "recorded mask"), *_score_causes(replay)]
    causes += [*_ratio_causes(replay), *_correction_causes(replay), *_kl_causes(replay)]
    causes += [*_advantage_causes(replay), *_loss_causes(replay), *_reduction_causes(replay)]
    causes += [*_mask_causes(replay, "mask", "mask of the loss"), *_kl_mask_causes(replay), *_gradient_causes(replay)]
    unique: dict[Recipe, Cause] = {}
    for cause in causes:
        if getattr(recipe, cause.stage, None) is not None:
            changed = cause.apply(recipe)
            if changed != recipe:
                unique.setdefault(changed, cause)
    return list(unique.values())


def _mask_causes(replay: Replay, stage: str, title: str) -> Iterator[Cause]:
    """Yields the faults of a mask that change it; of several that give the same mask, the first.

    An empty mask is left out: nothing would be compared, and every number explained.
    """
    options: list[tuple[str, str, dict[str, Any]]] = [
        ("shifted right by one", "is shifted by one position to the right", {"shift": 1}),
        ("shifted left by one", "is shifted by one position to the left", {"shift": -1}),
        ("prompt tokens", "has the prompt's tokens in it", {"prompt": "all"}),
        ("prompt tokens but the first", "has the prompt's tokens in it, but the first", {"prompt": "predicted"}),
        ("pad tokens", "has padding in it", {"pad": True}),
        ("first token left out", "leaves out the first token of each row", {"first": False}),
        ("last row left out", "leaves out the last row", {"final": False}),
        ("padding on the left", "has padding on the left in it", {"left": True}),
    ]
    if replay.layout.ends_known:
        text = "leaves out the end-of-sequence token of each row"
        options.append(("end of sequence left out", text, {"last": "cut"}))
        options.append(("last token left out", "leaves out the last token of each row", {"last": "none"}))
    else:
        options.append(("end of sequence left out", "leaves out the last token of each row", {"last": "none"}))
    options += [
        ("rows cut at the limit left out", "leaves out the rows that are cut at the limit", {"cut": False}),
        ("prompt and pad tokens", "has the prompt's tokens and padding in it", {"prompt": "all", "pad": True}),
        ("prompt and padding on the left", "has all before the completion in it", {"prompt": "all", "left": True}),
        ("all tokens", "has every position in it", {"prompt": "all", "left": True, "pad": True}),
    ]
    base = replay.arrays["mask"]
    size = int(base.sum(1).max(initial=0))
    options.append((f"first {size} tokens", f"has at most {size} tokens of a row in it", {"size": size}))
    if stage == "mask_rule" and {"prompt_lengths", "lengths"} <= set(replay.arrays):
        position = np.arange(replay.shape[1])
        base = (position >= replay.arrays["prompt_lengths"][:, None]) & (position < replay.arrays["lengths"][:, None])
    masks = {base.tobytes(), np.zeros_like(base).tobytes()}
    for name, text, settings in options:
        mask = apply_rule(base, MaskRule(**settings), replay.layout).tobytes()
        if mask not in masks:
            masks.add(mask)
            yield make(stage, name, f"the {title} {text}", **settings)


def _kl_mask_causes(replay: Replay) -> Iterator[Cause]:
    """Yields the masks of the KL term alone."""
    kl = replay.plan.recipe.kl or Kl(place="")
    if kl.place == "loss":
        yield from _mask_causes(replay, "kl_mask", "mask of the KL term")
    if kl.place == "reward":
        mask = replay.arrays["mask"]
        for cause in _mask_causes(replay, "kl_mask", "mask of the KL in the reward"):
            # The KL of a token outside the mask is not recorded.
            if (apply_rule(mask, MaskRule(**dict(cause.settings)), replay.layout) <= mask).all():
                yield cause


def _score_causes(replay: Replay) -> Iterator[Cause]:
    for stage, side in (("log_probs", ""), ("reference", "ref_")):
        if f"{side}logits" in replay.dump or f"{side}hidden" in replay.dump:
            yield from _logit_causes(stage, getattr(replay.plan.recipe, stage))
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
            text = f"{title} are renormalised over the top-p set of {top_p}"
            yield make(stage, f"top-p {top_p} renormalised", text, top_p=top_p)
    for dtype in ("bfloat16", "float16"):
        yield make(stage, f"logits in {dtype}", f"{title} come from logits rounded to {dtype}", logits_dtype=dtype)


def _row_causes(replay: Replay, stage: str, side: str) -> Iterator[Cause]:
    """Yields log-probs of other positions, rows and policies."""
    title = f"{side}log_probs"
    moves = (("moved by one (right)", 1), ("moved by one (left)", -1))
    for name, by in moves:
        yield make(stage, name, f"{title} are moved by one position: {name}", moved=by)
    yield make(stage, "rows moved by one", f"{title} are those of the row above", rows=1)
    for source in ("old_log_probs", "rollout_log_probs"):
        if side and source in replay.arrays:
            yield make(stage, f"of {source}", f"{title} are {source}", source=source)
    text = "of the base: the adapter is off" if not side else "of the policy: the adapter is on"
    yield make(stage, "adapter " + ("on" if side else "off"), f"{title} are {text}", adapter=False)


def _ratio_causes(replay: Replay) -> Iterator[Cause]:
    text = "the ratio is exp(old - log_probs)"
    yield make("ratio", "direction swapped", text, swapped=True)
    for shift, where in ((1, "right"), (-1, "left")):
        text = f"old_log_probs are off by one in the ratio: moved to the {where}"
        yield make("ratio", f"old log-probs off by one ({where})", text, shift=shift)
    for old in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "log_probs"):
        if old in replay.arrays and not (old == "log_probs" and "old_log_probs" not in replay.arrays):
            yield make("ratio", f"{old} as the old policy", f"{old} are the denominator of the ratio", old=old)


def _correction_causes(replay: Replay) -> Iterator[Cause]:
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
    text = "the correction's weights are divided by their mean"
    yield make("correction", "divided by their mean", text, normalized=True)
    yield make("correction", "weights squared", "the correction's weights are squared", weights=2)
    yield make("loss", "weights left out", "the policy loss leaves out the correction's weights", weights=0)
    yield make("loss", "weights twice", "the policy loss has the correction's weights twice", weights=2)


def _kl_causes(replay: Replay) -> Iterator[Cause]:
    kl = replay.plan.recipe.kl
    if kl is None:
        return
    plain = {"log_ratio_clip": None, "value_clip": None, "scale": 1.0}
    for name, settings in KL_ESTIMATORS.items():
        yield make("kl", f"estimator {name}", f"the KL is {name}", **{**plain, **settings})
    yield make("kl", "direction swapped", "the KL has its direction swapped: KL(ref || pi)", swapped=True)
    for shift, where in ((1, "right"), (-1, "left")):
        text = f"the reference's log-probs are off by one in the KL: moved to the {where}"
        yield make("kl", f"reference off by one ({where})", text, shift=shift)
    if kl.value_clip is not None:
        name = "squared log-ratio, no half"
        yield make(
            "kl", f"estimator {name}", f"the KL is {name}", estimator="k2", scale=2.0, value_clip=kl.value_clip / 2
        )
    if kl.corrected:
        yield make("kl", "importance ratio detached", "the KL's importance ratio is a constant", detached=True)
    flag = "importance ratio left out" if kl.corrected else "importance ratio multiplied"
    if replay.plan.recipe.ratio.old in replay.arrays:
        yield make("kl", flag, f"the KL has its {flag}", corrected=not kl.corrected)
    for policy in ("log_probs", "old_log_probs", "rollout_log_probs"):
        if policy in replay.arrays:
            yield make("kl", f"of {policy}", f"the KL is that of {policy}", policy=policy)
    for reference in ("ref_log_probs", "old_log_probs", "rollout_log_probs"):
        if reference in replay.arrays:
            yield make("kl", f"against {reference}", f"the KL is taken to {reference}", reference=reference)
    for gradient, text in (
        ("value", "the KL's gradient is that of its estimator"),
        ("k2", "the KL has the straight-through gradient of k2"),
        ("none", "the KL has no gradient"),
    ):
        yield make("kl", f"gradient {gradient}", text, gradient=gradient)
    yield from _coefficient_causes(replay, kl)


def _coefficient_causes(replay: Replay, kl: Kl) -> Iterator[Cause]:
    """Yields coefficients that are easily confused, and other ways to take a KL off the reward."""
    if kl.place == "advantage":
        text = "the KL in the advantage does not have its mean over the batch taken off"
        yield make("kl", "not centered", text, centered=False)
    if kl.place == "reward":
        yield make("kl", "summed over padding", "the KL in the reward is summed over padding, too", padded=True)
        if "advantage" in replay.plan.calls and "subtract_kl" in repr(replay.plan.calls["advantage"]):
            text = "the KL is taken off the reward before the rewards of a group are compared"
            yield make("kl", "taken off before the comparison", text, early=True)
    yield make("kl", "coefficient missing", "the KL term has no coefficient", coef=1.0)
    yield make("kl", "term missing", "the KL term is left out", coef=0.0)
    yield make("kl", "coefficient twice", "the KL term has its coefficient squared", coef=kl.coef**2)
    yield make("kl", "sign flipped", "the KL term has the other sign", coef=-kl.coef)


def _advantage_causes(replay: Replay) -> Iterator[Cause]:
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


def _loss_causes(replay: Replay) -> Iterator[Cause]:
    if replay.plan.recipe.loss is None:
        return
    call = replay.plan.calls["loss"]
    signature = inspect.signature(getattr(kljax, call.function)).parameters
    value = {name: call.arguments.get(name, parameter.default) for name, parameter in signature.items()}
    changes: list[tuple[str, str, str, Any]] = []
    if value.get("dual_clip") is not None:
        changes.append(("no dual clip", "the policy loss has no dual clip", "dual_clip", None))
    if {"clip_low", "clip_high"} <= set(signature):
        changes.append(("no upper clip", "the policy loss is not clipped from above", "clip_high", 1e6))
        yield from _clip_causes(call.function, value["clip_low"], value["clip_high"])
    if "log_ratio_clip" in signature:
        bound = None if value["log_ratio_clip"] is not None else 20.0
        text = f"the log-ratio is {'not clipped' if bound is None else 'clipped at 20'}"
        changes.append(("log-ratio clip", text, "log_ratio_clip", bound))
    if "max_ratio" in signature and value["max_ratio"] is not None:
        changes.append(("no cap of the ratio", "the ratio is not capped", "max_ratio", None))
    if "level" in signature:
        for level in ("token", "sequence", "geometric"):
            changes.append((f"level {level}", f"the ratio is that of level {level}", "level", level))
    if call.function == "gspo_loss":
        for gradient in ("token", "sequence"):
            text = f"the sequence ratio has the gradient of {gradient} level"
            changes.append((f"gradient {gradient}", text, "gradient", gradient))
    for name, text, argument, setting in changes:
        if value[argument] != setting:
            yield make("loss", name, text, arguments=((argument, setting),))
    yield make("loss", "sign flipped", "the policy loss has the other sign", scale=-1.0)


def _clip_causes(function: str, low: float, high: float) -> Iterator[Cause]:
    """Yields exchanged clips, and other losses with the same clips."""
    if low != high:
        text = f"the clips are exchanged: {high:g} below and {low:g} above"
        yield make("loss", "clips exchanged", text, arguments=(("clip_low", high), ("clip_high", low)))
    text = "the policy loss is not clipped, from below or above"
    yield make("loss", "unclipped", text, arguments=(("clip_low", 0.999999), ("clip_high", 1e6)))
    if function == "ppo_clip_loss":
        text = "the smaller of the clipped and the unclipped loss is taken, not the larger"
        yield make("loss", "optimistic", text, flipped=True)
    for other, title in FAMILY.items() if function in FAMILY else ():
        if other != function:
            settings = (("function", other), ("clip_low", low), ("clip_high", high))
            yield make("loss", other, f"the policy loss is {title}", arguments=settings)


def _reduction_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other reductions: of the whole loss, then of the policy loss or the KL term alone."""
    recipe = replay.plan.recipe
    base, mask = recipe.reduction, replay.arrays["mask"]
    options = [(name, f"is {text}", settings) for name, text, settings in _reductions(replay, base, mask)]
    for eps in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3):
        options.append((f"eps {eps:g}", f"adds {eps:g} to the number of tokens", _eps(base, eps)))
    options.append(("no eps", "adds no epsilon to the number of tokens", {"eps_batch": 0.0, "eps_row": 0.0}))
    shared = recipe.kl_reduction == base
    for name, text, settings in options:
        also = (("kl_reduction", tuple(settings.items())),) if shared else ()
        title = "the reduction" if shared or recipe.kl_reduction is None else "the reduction of the policy loss"
        yield Cause("reduction", name, f"{title} {text}", tuple(settings.items()), also)
    if recipe.kl_reduction is None:
        return
    for name, text, settings in options:
        if "eps" in name:
            continue
        if shared:
            title = "the reduction of the policy loss alone"
            yield Cause(
                "reduction", f"{name}, policy loss alone", f"{title} {text}", tuple(settings.items()), alone=True
            )
        title = "the reduction of the KL term alone"
        yield Cause("kl_reduction", name, f"{title} {text}", tuple(settings.items()), alone=True)


def _eps(reduction: ReductionRecipe, eps: float) -> dict[str, float]:
    return {"eps_row": eps} if reduction.mode == "seq_mean_token_mean" else {"eps_batch": eps}


def _reductions(replay: Replay, base: ReductionRecipe, mask: np.ndarray) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the other reductions: name, text and settings."""
    plain: dict[str, Any] = {"denominator": None, "micro_batches": 1, "eps_batch": 0.0, "eps_row": 0.0}
    length, longest = mask.shape[1], int(mask.sum(1).max())
    for name, mode, settings in (
        ("token mean", "token_mean", {}),
        ("token sum", "token_sum", {}),
        ("sequence mean of token means", "seq_mean_token_mean", {"empty_rows": "count"}),
        ("sequence mean of token means, empty rows dropped", "seq_mean_token_mean", {"empty_rows": "drop"}),
        ("sequence mean of token sums", "seq_mean_token_sum", {"empty_rows": "count"}),
        ("sequence mean of token sums, empty rows dropped", "seq_mean_token_sum", {"empty_rows": "drop"}),
    ):
        same = {"max_length": None, **plain, **settings}
        yield name, f"the {name}", {"mode": mode, **same}
    norm = {**plain, "mode": "seq_mean_token_sum_norm", "empty_rows": base.empty_rows}
    lengths = {"the padded length": length, "the longest row": longest}
    if replay.plan.recipe.reduction.max_length:
        lengths["the constant length"] = int(replay.plan.recipe.reduction.max_length)
    for title, size in lengths.items():
        yield f"Dr. GRPO over {title}", f"Dr. GRPO's, over {title} {size}", {**norm, "max_length": size}
        total = {**norm, "max_length": size, "denominator": 1.0}
        yield f"sum over {title}", f"a sum over {title} {size}, without a mean over rows", total
    if "group_ids" in replay.arrays:
        yield "mean per prompt", "a mean over prompts", {**plain, "mode": "prompt_mean", "groups": "group_ids"}
    if base.mode not in ("token_sum", "seq_mean_token_sum_norm"):
        text = "not counting rows of groups with equal rewards"
        yield "rows of equal groups dropped", text, {"rows": "spread"}
    yield "length divided twice", "divided by the length of each row once more", {"length_power": 1.0}
    root = {"mode": "seq_mean_token_sum", "max_length": None, **plain, "empty_rows": "count", "length_power": 0.5}
    yield "divided by the root of the length", "a sum divided by the root of each row's length", root
    if not mask.any(1).all():
        # Without an empty row, that is Dr. GRPO's over the padded length.
        padded = {"mode": "token_mean", "max_length": None, **plain, "denominator": float(mask.size)}
        yield "mean over the padded batch", f"a mean over the {mask.size} positions of the padded batch", padded
    rows = len(mask)
    for parts in (part for part in range(2, min(rows, 16) + 1) if rows % part == 0):
        yield (
            f"mean of {parts} micro-batches",
            f"the mean of the means of {parts} micro-batches",
            {"micro_batches": parts},
        )
    if "micro_batch_ids" in replay.arrays:
        yield "mean of micro-batches", "the mean of the means of the recorded micro-batches", {"micro_batches": 0}


def _gradient_causes(replay: Replay) -> Iterator[Cause]:
    base = replay.plan.recipe.gradient
    yield make("gradient", "KL detached", "the KL term has no gradient", through_kl=False)
    yield make("gradient", "policy detached", "the policy loss has no gradient", through_policy=False)
    yield make("gradient", "sign flipped", "the gradient has the other sign", scale=-base.scale)
