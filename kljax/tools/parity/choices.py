"""The choices of every stage that another system may have made: a fixed list. Numbers are solved in `numbers`."""

import inspect
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import numpy as np

import kljax
from kljax.systems import Call
from kljax.systems._call import parameters, steps
from kljax.tools.parity.advantages import CENTERS, GROUPINGS, grouped
from kljax.tools.parity.causes import Cause, make
from kljax.tools.parity.losses import BY_ROW, has_clips
from kljax.tools.parity.positions import apply_rule
from kljax.tools.parity.recipe import LogProbRecipe, MaskRule, Recipe
from kljax.tools.parity.replay import Replay

# Name, the end of the text, and the change of a mask.
MASKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tools trained", "has the answers of tools in it", {"tools": True}),
    ("tools left out", "leaves out the answers of tools", {"tools": False}),
    ("rows cut at the limit trained", "has the rows that are cut at the limit in it", {"truncated": True}),
    ("rows cut at the limit left out", "leaves out the rows that are cut at the limit", {"truncated": False}),
    ("shifted right by one", "is shifted by one position to the right", {"shift": 1}),
    ("shifted left by one", "is shifted by one position to the left", {"shift": -1}),
    ("prompt tokens", "has the prompt's tokens in it", {"prompt": True}),
    ("pad tokens", "has padding in it", {"pad": True}),
    ("first token left out", "leaves out the first token of each row", {"first": False}),
    ("padding on the left", "has padding on the left in it", {"left": True}),
    ("one token more", "has the token behind each row in it", {"extra": 1}),
    ("prompt and pad tokens", "has the prompt's tokens and padding in it", {"prompt": True, "pad": True}),
    ("prompt and padding on the left", "has all before the completion in it", {"prompt": True, "left": True}),
    ("all tokens", "has every position in it", {"prompt": True, "left": True, "pad": True}),
)
END, LAST = "leaves out the end-of-sequence token of each row", "leaves out the last token of each row"
# The estimators of the KL, each with its settings.
KL_ESTIMATORS: dict[str, dict[str, Any]] = {
    "k1": {"estimator": "k1"},
    "abs": {"estimator": "abs"},
    "k2": {"estimator": "k2"},
    "squared log-ratio, no half": {"estimator": "k2", "scale": 2.0},
    "k3": {"estimator": "k3"},
    "k3 clipped as low_var_kl": {"estimator": "low_var_kl"},
    "k3 with its value clipped at 10": {"estimator": "k3", "value_clip": 10.0},
}
KL_GRADIENTS = {
    "value": "the KL's gradient is that of its estimator",
    "k2": "the KL has the straight-through gradient of k2",
    "none": "the KL has no gradient",
}
# Losses with two clips, by function.
FAMILY = {
    "ppo_clip_loss": "PPO's, with a ratio per token",
    "gspo_loss": "GSPO's, with a ratio per sequence",
    "cispo_loss": "CISPO's, whose clipped ratio is a constant",
}
GROUPS = {
    "interleaved": ("groups interleaved", "row i belongs to prompt i modulo the number of prompts"),
    "consecutive": ("groups consecutive", "rows that follow each other are one group, whatever their prompt"),
    "batch": ("one group", "the whole batch is one group"),
}
CENTERED = {"none": "not centered", "others": "centered on the mean of the other rows"}
SIDES = ((1, "right"), (-1, "left"))
MODES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("token mean", "token_mean", {}),
    ("token sum", "token_sum", {}),
    ("sequence mean of token means", "seq_mean_token_mean", {"empty_rows": "count"}),
    ("sequence mean of token means, empty rows dropped", "seq_mean_token_mean", {"empty_rows": "drop"}),
    ("sequence mean of token sums", "seq_mean_token_sum", {"empty_rows": "count"}),
    ("sequence mean of token sums, empty rows dropped", "seq_mean_token_sum", {"empty_rows": "drop"}),
)
# Settings that choose the rows of sums: they hold for both terms, whatever else divides these.
OF_ROWS = {"micro_batches", "parts"}


def causes_of(replay: Replay, recipe: Recipe) -> list[Cause]:
    """Lists every hypothesis about a dump, in the order of the data; causes that change nothing are left out."""
    batch = replay.batch
    causes = [*_masks(batch, "mask_rule", "recorded mask", recipe), *_scores(replay, recipe), *_ratios(replay)]
    causes += [*_corrections(replay, recipe), *_kl(replay, recipe), *_advantages(batch, recipe)]
    causes += [*_losses(replay, recipe), *_reductions(batch, recipe)]
    causes += _masks(batch, "mask", "mask of the loss", recipe)
    if recipe.kl is not None and recipe.kl.place != "advantage":
        causes += _masks(batch, "kl_mask", f"mask of the KL in the {recipe.kl.place}", recipe)
    causes += _gradients(recipe)
    unique: dict[Recipe, Cause] = {}
    for cause in causes:
        if getattr(recipe, cause.stage, None) is not None:
            changed = cause.apply(recipe)
            if changed != recipe:
                unique.setdefault(changed, cause)
    return list(unique.values())


def _masks(batch: Replay, stage: str, title: str, recipe: Recipe) -> Iterator[Cause]:
    """Yields the faults of a mask that change it; of several that give the same mask, the first.

    An empty mask is left out: nothing would be compared, and every number explained.
    """
    ends = [("end of sequence left out", END, {"last": "cut"}), ("last token left out", LAST, {"last": "none"})]
    if not batch.layout.ends_known:
        ends = [("end of sequence left out", LAST, {"last": "none"})]
    base = batch.arrays["mask"]
    if stage == "mask_rule":
        if not {"prompt_lengths", "lengths"} <= set(batch.arrays):
            return
        completions = batch.layout.completions(batch.shape[1])
        base = apply_rule(completions, recipe.mask_rule, batch.layout)
    masks = {base.tobytes(), np.zeros_like(base).tobytes()}
    for name, text, settings in (*MASKS, *ends):
        rule = MaskRule(**settings)
        if stage == "mask_rule":
            mask = apply_rule(completions, recipe.changed("mask_rule", **settings).mask_rule, batch.layout)
        else:
            mask = apply_rule(base, rule, batch.layout)
        # The KL in the reward of a token outside the mask is not recorded.
        outside = "in the reward" in title and (mask & ~base).any()
        if mask.tobytes() not in masks and not outside:
            masks.add(mask.tobytes())
            yield make(stage, name, f"the {title} {text}", **settings)


def _scores(replay: Replay, recipe: Recipe) -> Iterator[Cause]:
    """Yields other ways to score tokens, where logits or hidden states are recorded."""
    for stage, side in (("log_probs", ""), ("reference", "ref_")):
        if f"{side}logits" in replay.dump or f"{side}hidden" in replay.dump:
            title = f"{side}log_probs"
            yield from _of_logits(stage, title, getattr(recipe, stage))
            for moved, where in SIDES:
                text = f"{title} are moved by one position: moved by one ({where})"
                yield make(stage, f"moved by one ({where})", text, moved=moved)
            sources = ("log_probs", "old_log_probs", "rollout_log_probs") if side else ("ref_log_probs",)
            for source in (name for name in sources if name in replay.arrays):
                name = {"log_probs": "adapter on", "ref_log_probs": "adapter off"}.get(source, f"of {source}")
                yield make(stage, name, f"{title} are {source}: those of another policy", source=source)


def _of_logits(stage: str, title: str, base: LogProbRecipe) -> Iterator[Cause]:
    """Yields other ways from logits to log-probs."""
    if base.temperature != 1:
        yield make(stage, "temperature missing", f"{title} are not divided by the temperature", temperature=1.0)
        square = base.temperature**2
        yield make(stage, "temperature twice", f"{title} are divided by the temperature twice", temperature=square)
    yield make(
        stage,
        "alignment off by one",
        f"{title} are off by one: they read the logits at the token's own position",
        shift=1,
    )
    text = f"{title} are off by one: they read the logits two positions before the token"
    yield make(stage, "alignment off by one (back)", text, shift=-1)
    yield make(stage, "softcap left out", f"{title} leave out the cap of the logits", softcap=None)
    yield make(stage, "logit scale left out", f"{title} leave out the scale of the logits", logit_scale=1.0)
    yield make(stage, "vocabulary padding", f"{title} count the padding of the vocabulary", vocab_size=None)
    yield make(stage, "no top-p renormalisation", f"{title} are of the whole vocabulary, not of top-p", top_p=None)
    for top_p in (0.8, 0.9, 0.95, 0.99):
        text = f"{title} are renormalised over the top-p set of {top_p}"
        yield make(stage, f"top-p {top_p} renormalised", text, top_p=top_p)
    for dtype in ("bfloat16", "float16"):
        yield make(stage, f"logits in {dtype}", f"{title} come from logits rounded to {dtype}", logits_dtype=dtype)


def _ratios(replay: Replay) -> Iterator[Cause]:
    """Yields other pairs of policies in the ratio."""
    yield make("ratio", "direction swapped", "the ratio is exp(old - log_probs)", swapped=True)
    for shift, where in SIDES:
        text = f"old_log_probs are off by one in the ratio: moved to the {where}"
        yield make("ratio", f"old log-probs off by one ({where})", text, shift=shift)
    for old in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "log_probs"):
        if old in replay.arrays and not (old == "log_probs" and "old_log_probs" not in replay.arrays):
            yield make("ratio", f"{old} as the old policy", f"{old} are the denominator of the ratio", old=old)


def _corrections(replay: Replay, recipe: Recipe) -> Iterator[Cause]:
    """Yields other weights of the rollout correction."""
    if recipe.correction is None:
        return
    call = replay.call("correction", recipe.correction)
    signature = inspect.signature(getattr(kljax, call.function)).parameters
    yield make("correction", "direction swapped", "the correction's ratio is rollout / old", swapped=True)
    for argument, words in (("level", ("token", "sequence", "geometric")), ("mode", ("truncate", "mask", "clip"))):
        for word in words if argument in signature else ():
            text = f"the correction has the {argument} {word}"
            yield make("correction", f"{argument} {word}", text, arguments=((argument, word),))
    if call.arguments.get("upper") is not None:
        yield make("correction", "no cap", "the correction's weights are not capped", arguments=(("upper", None),))
    for shift, where in SIDES:
        text = f"the sampler's log-probs are off by one in the correction: moved to the {where}"
        yield make("correction", f"sampler off by one ({where})", text, shift=shift)
    text = "the correction's weights are divided by their mean"
    yield make("correction", "divided by their mean", text, normalized=True)
    for policy in ("log_probs", "old_log_probs", "ref_log_probs"):
        if policy in replay.arrays and policy != replay.array_name("correction", "log_probs"):
            yield make("correction", f"of {policy}", f"the correction's ratio is {policy} / sampler", policy=policy)
    yield make("correction", "weights squared", "the correction's weights are squared", weights=2)
    yield make("loss", "weights left out", "the policy loss leaves out the correction's weights", weights=0)
    yield make("loss", "weights twice", "the policy loss has the correction's weights twice", weights=2)


def _kl(replay: Replay, recipe: Recipe) -> Iterator[Cause]:
    """Yields other KL terms."""
    kl = recipe.kl
    if kl is None:
        return
    plain = {"log_ratio_clip": None, "value_clip": None, "scale": 1.0}
    for name, settings in KL_ESTIMATORS.items():
        yield make("kl", f"estimator {name}", f"the KL is {name}", **{**plain, **settings})
    yield make("kl", "direction swapped", "the KL has its direction swapped: KL(ref || pi)", swapped=True)
    for shift, where in SIDES:
        text = f"the reference's log-probs are off by one in the KL: moved to the {where}"
        yield make("kl", f"reference off by one ({where})", text, shift=shift)
    if kl.corrected:
        yield make("kl", "importance ratio detached", "the KL's importance ratio is a constant", detached=True)
        text = "the KL has the importance ratio of its row"
        yield make("kl", "importance ratio of the row", text, ratio="row")
    if recipe.ratio.old in replay.arrays:
        flag = "importance ratio left out" if kl.corrected else "importance ratio multiplied"
        yield make("kl", flag, f"the KL has its {flag}", corrected=not kl.corrected)
    samplers = [name for name in ("old_log_probs", "rollout_log_probs") if name in replay.arrays]
    for policy in ("log_probs", *samplers):
        yield make("kl", f"of {policy}", f"the KL is that of {policy}", policy=policy)
    for reference in (*(["ref_log_probs"] if "ref_log_probs" in replay.arrays else []), *samplers):
        yield make("kl", f"against {reference}", f"the KL is taken to {reference}", reference=reference)
    for gradient, text in KL_GRADIENTS.items():
        yield make("kl", f"gradient {gradient}", text, gradient=gradient)
    usual = {"loss": ("reward", "old_log_probs"), "reward": ("loss", "log_probs")}
    if kl.place in usual and {"rewards", "group_ids", usual[kl.place][1]} <= set(replay.arrays):
        other, policy = usual[kl.place]
        text = f"the KL of {policy} is in the {other}, not in the {kl.place}"
        yield make("kl", f"in the {other}, of {policy}", text, place=other, policy=policy)
    if kl.place == "advantage":
        text = "the KL in the advantage does not have its mean over the batch taken off"
        yield make("kl", "not centered", text, centered=False)
    if kl.place == "reward" and "advantage" in replay.plan.calls:
        text = "the KL is taken off the reward before the rewards of a group are compared"
        yield make("kl", "taken off before the comparison", text, early=True)
    yield make("kl", "coefficient missing", "the KL term has no coefficient", coef=1.0)
    yield make("kl", "term missing", "the KL term is left out", coef=0.0)
    yield make("kl", "coefficient twice", "the KL term has its coefficient squared", coef=kl.coef**2)
    yield make("kl", "sign flipped", "the KL term has the other sign", coef=-kl.coef)


def _advantages(batch: Replay, recipe: Recipe) -> Iterator[Cause]:
    """Yields other comparisons of rewards, and other treatments of advantages."""
    if recipe.advantage is None:
        return
    call = batch.call("advantage", recipe.advantage)
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
    for other, title in (("rloo_advantages", "leave-one-out"), ("grpo_advantages", "of GRPO")):
        if call.function in ("grpo_advantages", "rloo_advantages") and call.function != other:
            yield make("advantage", other, f"advantages are {title}", arguments=(("function", other),))
    yield make("advantage", "sign flipped", "advantages have the other sign", scale=-1.0)
    yield from _comparisons(batch, call)
    text = "advantages are spread over the tokens: divided by the length of their row"
    yield make("advantage", "divided by the length", text, per_length=True)
    if any(step.function == "masked_whiten" for step in call.then):
        yield make("advantage", "not whitened", "advantages are not whitened", skip="masked_whiten")
    for whiten in ("tokens", "rows"):
        for ddof, eps in ((1, 1e-8), (0, 1e-8), (1, 1e-6), (1, 1e-4)):
            extra = "" if (ddof, eps) == (1, 1e-8) else f", ddof {ddof}, eps {eps:g}"
            text = f"advantages are whitened again, over the {whiten}{extra}"
            settings = {"whiten": whiten, "whiten_ddof": ddof, "whiten_eps": eps}
            yield make("advantage", f"whitened again over the {whiten}{extra}", text, **settings)


def _comparisons(batch: Replay, call: Call) -> Iterator[Cause]:
    """Yields other groups of rows, and other centers of their rewards."""
    seen = {grouped(batch)[0].tobytes()}
    for groups in GROUPINGS:
        ids = np.unique(grouped(batch, groups)[0], return_inverse=True)[1].astype(int).tobytes()
        if ids not in seen:
            seen.add(ids)
            yield make("advantage", *GROUPS[groups], groups=groups)
    if call.function in ("grpo_advantages", "rloo_advantages", "reinforce_plus_plus_baseline_advantages"):
        for center in CENTERS:
            title = CENTERED.get(center, f"centered on the {center}")
            yield make("advantage", title, f"rewards are {title}", center=center)


def _losses(replay: Replay, recipe: Recipe) -> Iterator[Cause]:
    """Yields other policy losses."""
    if recipe.loss is None:
        return
    call = replay.call("loss", recipe.loss)
    signature = inspect.signature(getattr(kljax, call.function)).parameters
    value = {name: call.arguments.get(name, parameter.default) for name, parameter in signature.items()}
    changes: list[tuple[str, str, str, Any]] = []
    if value.get("dual_clip") is not None:
        changes.append(("no dual clip", "the policy loss has no dual clip", "dual_clip", None))
    if has_clips(call):
        changes.append(("no upper clip", "the policy loss is not clipped from above", "clip_high", 1e6))
        yield from _clips(call, value["clip_low"], value["clip_high"])
    if "log_ratio_clip" in signature:
        bound = None if value["log_ratio_clip"] is not None else 20.0
        text = f"the log-ratio is {'not clipped' if bound is None else 'clipped at 20'}"
        changes.append(("log-ratio clip", text, "log_ratio_clip", bound))
    if value.get("max_ratio") is not None:
        changes.append(("no cap of the ratio", "the ratio is not capped", "max_ratio", None))
    for name, parameter in signature.items():
        words: tuple[Any, ...] = (True, False) if parameter.annotation is bool else ()
        if get_origin(parameter.annotation) is Literal:
            words = tuple(word for word in get_args(parameter.annotation) if "average" not in str(word))
        changes += [(f"{name} {word}", f"the {name} of the policy loss is {word}", name, word) for word in words]
    for name, text, argument, setting in changes:
        if value[argument] != setting:
            yield make("loss", name, text, arguments=((argument, setting),))
    yield make("loss", "sign flipped", "the policy loss has the other sign", scale=-1.0)
    if call.function in BY_ROW:
        product = (("kl", (("ratio", "product"),)),) if recipe.kl is not None and recipe.kl.ratio == "row" else ()
        text = "the ratio is that of the whole row"
        yield Cause("loss", "ratio summed over the row", text, (("summed", True),), product)
    if call.function == "cispo_loss":
        yield make("loss", "weight has a gradient", "the clipped ratio is differentiated, too", weight_gradient=True)


def _clips(call: Call, low: float, high: float) -> Iterator[Cause]:
    """Yields exchanged clips, and other losses with the same clips."""
    function = call.function
    if low != high:
        text = f"the clips are exchanged: {high:g} below and {low:g} above"
        yield make("loss", "clips exchanged", text, arguments=(("clip_low", high), ("clip_high", low)))
    text = "the policy loss is not clipped, from below or above"
    yield make("loss", "unclipped", text, arguments=(("clip_low", 0.999999), ("clip_high", 1e6)))
    yield make("loss", "outside masked", "tokens whose ratio is beyond a clip are left out", outside="masked")
    text = "the policy loss is -A log pi, without a ratio"
    yield make("loss", "reinforce_loss", text, arguments=(("function", "reinforce_loss"),))
    if function == "ppo_clip_loss":
        text = "the clipped surrogate alone is taken, not the larger of both"
        yield make("loss", "clipped alone", text, outside="clipped")
        text = "the smaller of the clipped and the unclipped loss is taken, not the larger"
        yield make("loss", "optimistic", text, flipped=True)
        without = (("dual_clip", None),)
        yield make("loss", "optimistic, no dual clip", f"{text}, without a dual clip", flipped=True, arguments=without)
    for other, title in FAMILY.items() if function in FAMILY else ():
        if other != function:
            settings = (("function", other), ("clip_low", low), ("clip_high", high))
            yield make("loss", other, f"the policy loss is {title}", arguments=settings)


def _reductions(batch: Replay, recipe: Recipe) -> Iterator[Cause]:
    """Yields other reductions: of the whole loss, then of the policy loss or the KL term alone."""
    options = [*_reduction_options(batch, recipe)]
    shared = recipe.kl_reduction == recipe.reduction
    separate = recipe.kl_reduction is not None
    for name, text, settings in options:
        both = shared or settings.keys() <= OF_ROWS
        also = (("kl_reduction", tuple(settings.items())),) if both else ()
        title = "the reduction" if both or not separate else "the reduction of the policy loss"
        yield Cause("reduction", name, f"{title} {text}", tuple(settings.items()), also)
    for name, text, settings in options if separate else ():
        if shared or settings.keys() <= OF_ROWS:
            title = "the reduction of the policy loss alone"
            yield make("reduction", f"{name}, policy loss alone", f"{title} {text}", **settings)
        yield make("kl_reduction", name, f"the reduction of the KL term alone {text}", **settings)


def _reduction_options(batch: Replay, recipe: Recipe) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the other reductions: name, text and settings."""
    base = recipe.reduction
    mask = batch.arrays["mask"]
    plain: dict[str, Any] = {"denominator": None, "micro_batches": 1, "eps_batch": 0.0, "eps_row": 0.0}
    tokens = {**plain, "mode": "token_mean", "max_length": None}
    for name, mode, settings in MODES:
        yield name, f"is the {name}", {"mode": mode, "max_length": None, **plain, **settings}
    norm = {**plain, "mode": "seq_mean_token_sum_norm", "empty_rows": base.empty_rows}
    lengths = {"the padded length": mask.shape[1], "the longest row": int(mask.sum(1).max())}
    if base.max_length:
        lengths["the constant length"] = int(base.max_length)
    for title, size in lengths.items():
        yield f"Dr. GRPO over {title}", f"is Dr. GRPO's, over {title} {size}", {**norm, "max_length": size}
        total = {**norm, "max_length": size, "denominator": 1.0}
        yield f"sum over {title}", f"is a sum over {title} {size}, without a mean over rows", total
    if not mask.any(1).all():
        # Without an empty row, that is Dr. GRPO's over the padded length.
        padded = {**tokens, "denominator": float(mask.size)}
        yield "mean over the padded batch", f"is a mean over the {mask.size} positions of the padded batch", padded
    if "divisor" in batch.arrays and base.denominator is None:
        counted = {**tokens, "denominator": float(max(int(mask.sum()), 1))}
        yield "token mean of its own", f"is a mean over the {mask.sum()} trained tokens, not over `divisor`", counted
    if "group_ids" in batch.arrays:
        yield "mean per prompt", "is a mean over prompts", {**plain, "mode": "prompt_mean", "groups": "group_ids"}
    if base.mode not in ("token_sum", "seq_mean_token_sum_norm") and "advantages" in batch.arrays:
        yield "rows of equal groups dropped", "leaves out rows of groups with equal rewards", {"rows": "spread"}
    for parts in (part for part in range(2, min(len(mask), 16) + 1) if len(mask) % part == 0):
        text = f"is the mean of the means of {parts} micro-batches"
        yield f"mean of {parts} micro-batches", text, {"micro_batches": parts}
        if base.mode != "token_mean":
            text = f"is the mean of the token means of {parts} micro-batches"
            yield f"token means of {parts} micro-batches", text, {**tokens, "micro_batches": parts}
    if "micro_batch_ids" in batch.arrays:
        recorded = "of the means of the recorded micro-batches"
        yield "mean of micro-batches", f"is the mean {recorded}", {"micro_batches": 0}
        yield "sum of micro-batches", f"is the sum {recorded}", {"micro_batches": 0, "parts": "sum"}
        text = f"is the mean {recorded}, weighted by their rows"
        yield "mean of micro-batches by rows", text, {"micro_batches": 0, "parts": "rows"}
    setting = "eps_row" if base.mode == "seq_mean_token_mean" else "eps_batch"
    for eps in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3):
        yield f"eps {eps:g}", f"adds {eps:g} to the number of tokens", {setting: eps}
    yield "no eps", "adds no epsilon to the number of tokens", {"eps_batch": 0.0, "eps_row": 0.0}


def _gradients(recipe: Recipe) -> Iterator[Cause]:
    """Yields terms without a gradient, and a gradient of the other sign."""
    yield make("gradient", "KL detached", "the KL term has no gradient", through_kl=False)
    yield make("gradient", "policy detached", "the policy loss has no gradient", through_policy=False)
    yield make("gradient", "sign flipped", "the gradient has the other sign", scale=-recipe.gradient.scale)
