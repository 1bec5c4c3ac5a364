"""Causes of a difference: the choices of every stage that another system may have made. `numbers` solves numbers."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args, get_origin

import numpy as np

from kljax.systems import Call
from kljax.systems._call import parameters, steps
from kljax.tools.parity.advantages import CENTERS, GROUPINGS, grouped
from kljax.tools.parity.losses import BY_ROW, clips_of
from kljax.tools.parity.positions import apply_rule
from kljax.tools.parity.recipe import LogProbRecipe, MaskRule, Recipe
from kljax.tools.parity.replay import Replay

Settings = dict[str, Any]
Choice = tuple[str, str, Settings]
"""Name, text, and settings of the stage."""

MASKS: tuple[Choice, ...] = (
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
END = "leaves out the end-of-sequence token of each row"
LAST = "leaves out the last token of each row"
KL_ESTIMATORS: dict[str, Settings] = {
    "k1": {"estimator": "k1"},
    "abs": {"estimator": "abs"},
    "k2": {"estimator": "k2"},
    "squared log-ratio, no half": {"estimator": "k2", "scale": 2.0},
    "k3": {"estimator": "k3"},
    "k3 clipped as low_var_kl": {"estimator": "low_var_kl"},
    "k3 with its value clipped at 10": {"estimator": "k3", "value_clip": 10.0},
}
WEIGHTS: tuple[Choice, ...] = (
    ("weights left out", "the policy loss leaves out the correction's weights", {"weights": 0}),
    ("weights twice", "the policy loss has the correction's weights twice", {"weights": 2}),
)
GRADIENTS: tuple[Choice, ...] = (
    ("KL detached", "the KL term has no gradient", {"through_kl": False}),
    ("policy detached", "the policy loss has no gradient", {"through_policy": False}),
)
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
MODES: tuple[tuple[str, Settings], ...] = (
    ("token mean", {"mode": "token_mean"}),
    ("token sum", {"mode": "token_sum"}),
    ("sequence mean of token means", {"mode": "seq_mean_token_mean", "empty_rows": "count"}),
    ("sequence mean of token means, empty rows dropped", {"mode": "seq_mean_token_mean", "empty_rows": "drop"}),
    ("sequence mean of token sums", {"mode": "seq_mean_token_sum", "empty_rows": "count"}),
    ("sequence mean of token sums, empty rows dropped", {"mode": "seq_mean_token_sum", "empty_rows": "drop"}),
)


@dataclasses.dataclass(frozen=True)
class Cause:
    """A fault that may explain a difference: a recipe with other settings."""

    stage: str
    name: str  # unique with the stage
    text: str  # one sentence for the report
    changes: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()  # stages, each with its other settings
    number: float | None = None  # that was solved from the arrays; None for a choice
    limits: tuple[float, float] | None = None  # numbers from here to there agree, where that is more than rounding

    @property
    def key(self) -> str:
        """`stage: name`."""
        return f"{self.stage}: {self.name}"

    def apply(self, recipe: Recipe) -> Recipe:
        """Returns the recipe with the fault."""
        for stage, settings in self.changes:
            if stage == "rounding":
                recipe = dataclasses.replace(recipe, rounding=(*recipe.rounding, *settings))
            elif getattr(recipe, stage) is not None:
                recipe = recipe.changed(stage, **dict(settings))
        return recipe


def make(stage: str, name: str, text: str, settings: Settings) -> Cause:
    """Makes a cause of one stage."""
    changed = {key: (*value.items(),) if key == "arguments" else value for key, value in settings.items()}
    return Cause(stage, name, text, ((stage, tuple(changed.items())),))


def causes_of(replay: Replay, recipe: Recipe) -> list[Cause]:
    """Lists every hypothesis about a dump, in the order of the data; causes that change nothing are left out."""
    batch = replay.batch
    kl = recipe.kl
    sections = recipe.calls
    mask_rules = _masks(batch, "mask_rule", "recorded mask", recipe)
    choices: list[tuple[str, Iterable[Choice]]] = [("mask_rule", mask_rules)]
    for stage, side in (("log_probs", ""), ("reference", "ref_")):
        if f"{side}logits" in replay.dump or f"{side}hidden" in replay.dump:
            choices.append((stage, _scores(replay, side, getattr(recipe, stage))))
    choices.append(("ratio", _ratios(replay)))
    if "correction" in sections:
        choices += [("correction", _corrections(replay, recipe)), ("loss", WEIGHTS)]
    choices += [("kl", _kl(replay, recipe))] if kl.place else []
    choices += [("advantage", _advantages(batch, recipe))] if "advantage" in sections else []
    choices += [("loss", _losses(replay, recipe))] if "loss" in sections else []
    causes = [make(stage, *choice) for stage, each in choices for choice in each]
    if "loss" in sections and replay.call("loss", recipe).function in BY_ROW:
        summed = (("loss", (("summed", True),)), *((("kl", (("ratio", "product"),)),) if kl.ratio == "row" else ()))
        causes.append(Cause("loss", "ratio summed over the row", "the ratio is that of the whole row", summed))
    causes += _reductions(batch, recipe)
    choices = [("mask", _masks(batch, "mask", "mask of the loss", recipe))]
    if kl.place in ("loss", "reward"):
        choices.append(("kl_mask", _masks(batch, "kl_mask", f"mask of the KL in the {kl.place}", recipe)))
    flipped = ("sign flipped", "the gradient has the other sign", {"scale": -recipe.gradient.scale})
    choices.append(("gradient", (*GRADIENTS, flipped)))
    causes += [make(stage, *choice) for stage, each in choices for choice in each]
    unique: dict[Recipe, Cause] = {}
    for cause in causes:
        changed = cause.apply(recipe)
        if changed != recipe:
            unique.setdefault(changed, cause)
    return list(unique.values())


def _masks(batch: Replay, stage: str, title: str, recipe: Recipe) -> Iterator[Choice]:
    """Yields the faults of a mask that change it; of several that give the same mask, the first.

    An empty mask is left out: nothing would be compared, and every number explained.
    """
    ends: list[Choice] = [
        ("end of sequence left out", END, {"last": "cut"}),
        ("last token left out", LAST, {"last": "none"}),
    ]
    if not batch.layout.ends_known:
        ends = [("end of sequence left out", LAST, {"last": "none"})]
    source = batch.arrays["mask"]
    rule = MaskRule()
    if stage == "mask_rule":
        if not {"prompt_lengths", "lengths"} <= set(batch.arrays):
            return
        source = batch.layout.completions(batch.shape[1])
        rule = recipe.mask_rule
    base = apply_rule(source, rule, batch.layout)
    masks = {base.tobytes(), np.zeros_like(base).tobytes()}
    for name, text, settings in (*MASKS, *ends):
        mask = apply_rule(source, dataclasses.replace(rule, **settings), batch.layout)
        # The KL in the reward of a token outside the mask is not recorded.
        outside = "in the reward" in title and (mask & ~base).any()
        if mask.tobytes() not in masks and not outside:
            masks.add(mask.tobytes())
            yield name, f"the {title} {text}", settings


def _scores(replay: Replay, side: str, base: LogProbRecipe) -> Iterator[Choice]:
    """Yields other ways to score tokens from recorded logits or hidden states."""
    title = f"{side}log_probs"
    yield "temperature missing", f"{title} are not divided by the temperature", {"temperature": 1.0}
    twice = {"temperature": base.temperature**2}
    yield "temperature twice", f"{title} are divided by the temperature twice", twice
    off = f"{title} are off by one: they read the logits"
    yield "alignment off by one", f"{off} at the token's own position", {"shift": 1}
    yield "alignment off by one (back)", f"{off} two positions before the token", {"shift": -1}
    yield "softcap left out", f"{title} leave out the cap of the logits", {"softcap": None}
    yield "logit scale left out", f"{title} leave out the scale of the logits", {"logit_scale": 1.0}
    yield "vocabulary padding", f"{title} count the padding of the vocabulary", {"vocab_size": None}
    yield "no top-p renormalisation", f"{title} are of the whole vocabulary, not of top-p", {"top_p": None}
    for top_p in (0.8, 0.9, 0.95, 0.99):
        text = f"{title} are renormalised over the top-p set of {top_p}"
        yield f"top-p {top_p} renormalised", text, {"top_p": top_p}
    for dtype in ("bfloat16", "float16"):
        yield f"logits in {dtype}", f"{title} come from logits rounded to {dtype}", {"logits_dtype": dtype}
    for moved, where in SIDES:
        text = f"{title} are moved by one position: moved by one ({where})"
        yield f"moved by one ({where})", text, {"moved": moved}
    for source in ("log_probs", "old_log_probs", "rollout_log_probs") if side else ("ref_log_probs",):
        if source in replay.arrays:
            name = {"log_probs": "adapter on", "ref_log_probs": "adapter off"}.get(source, f"of {source}")
            yield name, f"{title} are {source}: those of another policy", {"source": source}


def _ratios(replay: Replay) -> Iterator[Choice]:
    """Yields other pairs of policies in the ratio."""
    yield "direction swapped", "the ratio is exp(old - log_probs)", {"swapped": True}
    for shift, where in SIDES:
        text = f"old_log_probs are off by one in the ratio: moved to the {where}"
        yield f"old log-probs off by one ({where})", text, {"shift": shift}
    for old in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "log_probs"):
        if old in replay.arrays and not (old == "log_probs" and "old_log_probs" not in replay.arrays):
            yield f"{old} as the old policy", f"{old} are the denominator of the ratio", {"old": old}


def _corrections(replay: Replay, recipe: Recipe) -> Iterator[Choice]:
    """Yields other weights of the rollout correction."""
    call = replay.call("correction", recipe)
    names = {parameter.name for parameter in parameters(call)}
    yield "direction swapped", "the correction's ratio is rollout / old", {"swapped": True}
    for argument, words in (("level", ("token", "sequence", "geometric")), ("mode", ("truncate", "mask", "clip"))):
        for word in words if argument in names else ():
            yield f"{argument} {word}", f"the correction has the {argument} {word}", {"arguments": {argument: word}}
    if call.arguments.get("upper") is not None:
        yield "no cap", "the correction's weights are not capped", {"arguments": {"upper": None}}
    for shift, where in SIDES:
        text = f"the sampler's log-probs are off by one in the correction: moved to the {where}"
        yield f"sampler off by one ({where})", text, {"shift": shift}
    yield "divided by their mean", "the correction's weights are divided by their mean", {"normalized": True}
    for policy in ("log_probs", "old_log_probs", "ref_log_probs"):
        if policy in replay.arrays and policy != replay.array_name("correction", "log_probs"):
            yield f"of {policy}", f"the correction's ratio is {policy} / sampler", {"policy": policy}
    yield "weights squared", "the correction's weights are squared", {"weights": 2}


def _kl(replay: Replay, recipe: Recipe) -> Iterator[Choice]:
    """Yields other KL terms."""
    kl = recipe.kl
    plain = {"log_ratio_clip": None, "value_clip": None, "scale": 1.0}
    for name, settings in KL_ESTIMATORS.items():
        yield f"estimator {name}", f"the KL is {name}", {**plain, **settings}
    yield "direction swapped", "the KL has its direction swapped: KL(ref || pi)", {"swapped": True}
    for shift, where in SIDES:
        text = f"the reference's log-probs are off by one in the KL: moved to the {where}"
        yield f"reference off by one ({where})", text, {"shift": shift}
    if kl.corrected:
        yield "importance ratio detached", "the KL's importance ratio is a constant", {"detached": True}
        yield "importance ratio of the row", "the KL has the importance ratio of its row", {"ratio": "row"}
    if recipe.ratio.old in replay.arrays:
        flag = "importance ratio left out" if kl.corrected else "importance ratio multiplied"
        yield flag, f"the KL has its {flag}", {"corrected": not kl.corrected}
    samplers = [name for name in ("old_log_probs", "rollout_log_probs") if name in replay.arrays]
    for policy in ("log_probs", *samplers):
        yield f"of {policy}", f"the KL is that of {policy}", {"policy": policy}
    for reference in (*(["ref_log_probs"] if "ref_log_probs" in replay.arrays else []), *samplers):
        yield f"against {reference}", f"the KL is taken to {reference}", {"reference": reference}
    yield "gradient value", "the KL's gradient is that of its estimator", {"gradient": "value"}
    yield "gradient k2", "the KL has the straight-through gradient of k2", {"gradient": "k2"}
    yield "gradient none", "the KL has no gradient", {"gradient": "none"}
    usual = {"loss": ("reward", "old_log_probs"), "reward": ("loss", "log_probs")}
    if kl.place in usual and {"rewards", "group_ids", usual[kl.place][1]} <= set(replay.arrays):
        other, policy = usual[kl.place]
        text = f"the KL of {policy} is in the {other}, not in the {kl.place}"
        yield f"in the {other}, of {policy}", text, {"place": other, "policy": policy}
    if kl.place == "advantage":
        text = "the KL in the advantage does not have its mean over the batch taken off"
        yield "not centered", text, {"centered": False}
    if kl.place == "reward" and "advantage" in recipe.calls:
        text = "the KL is taken off the reward before the rewards of a group are compared"
        yield "taken off before the comparison", text, {"early": True}
    yield "coefficient missing", "the KL term has no coefficient", {"coef": 1.0}
    yield "term missing", "the KL term is left out", {"coef": 0.0}
    yield "coefficient twice", "the KL term has its coefficient squared", {"coef": kl.coef**2}
    yield "sign flipped", "the KL term has the other sign", {"coef": -kl.coef}


def _advantages(batch: Replay, recipe: Recipe) -> Iterator[Choice]:
    """Yields other comparisons of rewards, and other treatments of advantages."""
    call = batch.call("advantage", recipe)
    names = {parameter.name for step, _ in steps(call) for parameter in parameters(step)}
    for ddof in (0, 1) if "ddof" in names else ():
        text = f"advantages divide by the standard deviation with ddof {ddof}"
        yield f"ddof {ddof}", text, {"arguments": {"ddof": ddof}}
    for scale in ("std", "batch_std", "mean", "none") if "scale" in names else ():
        yield f"scale {scale}", f"advantages are scaled by {scale}", {"arguments": {"scale": scale}}
    if call.arguments.get("eps") and call.arguments.get("scale", "std") in ("std", "batch_std"):
        text = "advantages add epsilon to the variance, under the root, not to the standard deviation"
        yield "epsilon inside the root", text, {"root": True}
    for other, title in (("rloo_advantages", "leave-one-out"), ("grpo_advantages", "of GRPO")):
        if call.function in ("grpo_advantages", "rloo_advantages") and call.function != other:
            yield other, f"advantages are {title}", {"arguments": {"function": other}}
    yield "sign flipped", "advantages have the other sign", {"scale": -1.0}
    seen = {grouped(batch)[0].tobytes()}
    for groups in GROUPINGS:
        ids = np.unique(grouped(batch, groups)[0], return_inverse=True)[1].astype(int).tobytes()
        if ids not in seen:
            seen.add(ids)
            yield *GROUPS[groups], {"groups": groups}
    if call.function in ("grpo_advantages", "rloo_advantages", "reinforce_plus_plus_baseline_advantages"):
        for center in CENTERS:
            title = CENTERED.get(center, f"centered on the {center}")
            yield title, f"rewards are {title}", {"center": center}
    text = "advantages are spread over the tokens: divided by the length of their row"
    yield "divided by the length", text, {"per_length": True}
    if any(step.function == "masked_whiten" for step in call.then):
        yield "not whitened", "advantages are not whitened", {"skip": "masked_whiten"}
    for whiten in ("tokens", "rows"):
        for ddof, eps in ((1, 1e-8), (0, 1e-8), (1, 1e-6), (1, 1e-4)):
            over = f"the {whiten}" if (ddof, eps) == (1, 1e-8) else f"the {whiten}, ddof {ddof}, eps {eps:g}"
            settings = {"whiten": whiten, "whiten_ddof": ddof, "whiten_eps": eps}
            yield f"whitened again over {over}", f"advantages are whitened again, over {over}", settings


def _losses(replay: Replay, recipe: Recipe) -> Iterator[Choice]:
    """Yields other policy losses."""
    call = replay.call("loss", recipe)
    value = {parameter.name: call.arguments.get(parameter.name, parameter.default) for parameter in parameters(call)}
    if clips := clips_of(call):
        yield from _clips(call, *clips)
    if value.get("dual_clip") is not None:
        yield "no dual clip", "the policy loss has no dual clip", {"arguments": {"dual_clip": None}}
    if clips:
        yield "no upper clip", "the policy loss is not clipped from above", {"arguments": {"clip_high": 1e6}}
    if "log_ratio_clip" in value:
        bound = None if value["log_ratio_clip"] is not None else 20.0
        text = f"the log-ratio is {'not clipped' if bound is None else 'clipped at 20'}"
        yield "log-ratio clip", text, {"arguments": {"log_ratio_clip": bound}}
    if value.get("max_ratio") is not None:
        yield "no cap of the ratio", "the ratio is not capped", {"arguments": {"max_ratio": None}}
    for parameter in parameters(call):
        name = parameter.name
        words = (True, False) if parameter.annotation is bool else ()
        if get_origin(parameter.annotation) is Literal:
            words = tuple(word for word in get_args(parameter.annotation) if "average" not in str(word))
        for word in (word for word in words if word != value[name]):
            yield f"{name} {word}", f"the {name} of the policy loss is {word}", {"arguments": {name: word}}
    yield "sign flipped", "the policy loss has the other sign", {"scale": -1.0}
    if call.function == "cispo_loss":
        yield "weight has a gradient", "the clipped ratio is differentiated, too", {"weight_gradient": True}


def _clips(call: Call, low: float, high: float) -> Iterator[Choice]:
    """Yields exchanged clips, and other losses with the same clips."""
    if low != high:
        text = f"the clips are exchanged: {high:g} below and {low:g} above"
        yield "clips exchanged", text, {"arguments": {"clip_low": high, "clip_high": low}}
    text = "the policy loss is not clipped, from below or above"
    yield "unclipped", text, {"arguments": {"clip_low": 0.999999, "clip_high": 1e6}}
    yield "outside masked", "tokens whose ratio is beyond a clip are left out", {"outside": "masked"}
    text = "the policy loss is -A log pi, without a ratio"
    yield "reinforce_loss", text, {"arguments": {"function": "reinforce_loss"}}
    if call.function == "ppo_clip_loss":
        yield "clipped alone", "the clipped surrogate alone is taken, not the larger of both", {"outside": "clipped"}
        text = "the smaller of the clipped and the unclipped loss is taken, not the larger"
        yield "optimistic", text, {"flipped": True}
        without = {"flipped": True, "arguments": {"dual_clip": None}}
        yield "optimistic, no dual clip", f"{text}, without a dual clip", without
    for other, title in FAMILY.items() if call.function in FAMILY else ():
        arguments = {"function": other, "clip_low": low, "clip_high": high}
        if other != call.function:
            yield other, f"the policy loss is {title}", {"arguments": arguments}


def _reductions(batch: Replay, recipe: Recipe) -> Iterator[Cause]:
    """Yields other reductions: of the whole loss, then of the policy loss or the KL term alone."""
    options = [*_reduction_options(batch, recipe)]
    shared = recipe.kl_reduction == recipe.reduction
    alone = []
    for name, text, settings in options:
        # Rows of sums hold for both terms, whatever else divides these.
        both = shared or settings.keys() <= {"micro_batches", "parts"}
        stages = ("reduction", "kl_reduction") if both else ("reduction",)
        title = "the reduction" if both or recipe.kl_reduction is None else "the reduction of the policy loss"
        changes = tuple((stage, tuple(settings.items())) for stage in stages)
        yield Cause("reduction", name, f"{title} {text}", changes)
        if both:
            text_alone = f"the reduction of the policy loss alone {text}"
            alone.append(make("reduction", f"{name}, policy loss alone", text_alone, settings))
        alone.append(make("kl_reduction", name, f"the reduction of the KL term alone {text}", settings))
    yield from alone if recipe.kl_reduction is not None else ()


def _reduction_options(batch: Replay, recipe: Recipe) -> Iterator[Choice]:
    """Yields the other reductions."""
    base = recipe.reduction
    mask = batch.arrays["mask"]
    plain: Settings = {"denominator": None, "micro_batches": 1, "eps_batch": 0.0, "eps_row": 0.0}
    tokens = {**plain, "mode": "token_mean", "max_length": None}
    for name, settings in MODES:
        yield name, f"is the {name}", {"max_length": None, **plain, **settings}
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
