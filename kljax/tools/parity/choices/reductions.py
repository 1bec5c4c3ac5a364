"""Other reductions."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.choices.masks import mask_causes
from kljax.tools.parity.comparison import residual_of
from kljax.tools.parity.positions import apply_rule
from kljax.tools.parity.recipe import MaskRule, ReductionRecipe
from kljax.tools.parity.replay import Replay
from kljax.tools.parity.stages import reason_not_compared

LONGEST = "Dr. GRPO over the longest row of a micro-batch"
# Settings that choose the rows of sums: they hold for both terms, whatever else divides these.
OF_ROWS = {"micro_batches", "split", "size", "repeated", "parts"}
# Reductions that are not tried together with other choices.
ALONE = (LONGEST, "divisor", "sum:", "token means of", "rows of every", "whole micro-batches", "first rows twice")


def reduction_causes(replay: Replay) -> Iterator[Cause]:
    """Yields other reductions: of the whole loss, then of the policy loss or the KL term alone."""
    recipe = replay.plan.recipe
    base, mask = recipe.reduction, replay.arrays["mask"]
    options = [(name, f"is {text}", settings) for name, text, settings in _reductions(replay, base, mask)]
    for eps in (1e-8, 1e-6, 1e-5, 1e-4, 1e-3):
        options.append((f"eps {eps:g}", f"adds {eps:g} to the number of tokens", _eps(base, eps)))
    options.append(("no eps", "adds no epsilon to the number of tokens", {"eps_batch": 0.0, "eps_row": 0.0}))
    for cause in mask_causes(replay, "mask", "divisor"):
        rule = MaskRule(**dict(cause.settings))
        if rule.tail is None and rule.size is None and rule.inside:
            options.append((f"divisor: {cause.name}", f"has a divisor that {cause.text[12:]}", {"divisor": rule}))
            if (apply_rule(mask, rule, replay.layout) <= mask).all():
                options.append((f"sum: {cause.name}", f"has a sum, alone, that {cause.text[12:]}", {"summed": rule}))
    shared = recipe.kl_reduction == base
    for name, text, settings in options:
        both = shared or settings.keys() <= OF_ROWS
        also = (("kl_reduction", tuple(settings.items())),) if both else ()
        title = "the reduction" if both or recipe.kl_reduction is None else "the reduction of the policy loss"
        alone = name.startswith(ALONE)
        yield Cause("reduction", name, f"{title} {text}", tuple(settings.items()), also, alone=alone)
    # Where the gradient agrees, the loss alone was recorded elsewhere.
    as_declared = "grad_log_probs" in replay.arrays and reason_not_compared(replay, "grad_log_probs") is None
    as_declared = as_declared and residual_of(replay, ["grad_log_probs"], recipe).agrees
    known = len(np.unique(replay.arrays.get("micro_batch_ids", 0)))
    for steps in sorted({*range(2, 17), known} - {1}) if as_declared else ():
        text = f"the loss is recorded before it is divided by {steps} micro-batches"
        scale = (("scale", base.scale * steps),)
        others = [("gradient", (("scale", recipe.gradient.scale / steps),))]
        if recipe.kl_reduction is not None:
            others.append(("kl_reduction", (("scale", recipe.kl_reduction.scale * steps),)))
        yield Cause("reduction", f"recorded before the division by {steps}", text, scale, tuple(others), alone=True)
    if recipe.kl_reduction is None:
        return
    for name, text, settings in options:
        of_rows = settings.keys() <= OF_ROWS
        if "eps" in name or (name.startswith(ALONE) and not of_rows):
            continue
        if shared or of_rows:
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
    text = "not counting rows without a positive advantage"
    yield "rows without a positive advantage dropped", text, {"rows": "positive"}
    if "micro_batch_ids" in replay.arrays:
        text = "Dr. GRPO's, over the longest row of each micro-batch"
        yield LONGEST, text, {**norm, "max_length": 1, "longest": True}
    yield "length divided twice", "divided by the length of each row once more", {"length_power": 1.0}
    root = {"mode": "seq_mean_token_sum", "max_length": None, **plain, "empty_rows": "count", "length_power": 0.5}
    yield "divided by the root of the length", "a sum divided by the root of each row's length", root
    if not mask.any(1).all():
        # Without an empty row, that is Dr. GRPO's over the padded length.
        padded = {"mode": "token_mean", "max_length": None, **plain, "denominator": float(mask.size)}
        yield "mean over the padded batch", f"a mean over the {mask.size} positions of the padded batch", padded
    yield from _reductions_of_parts(replay, base, len(mask), {**plain, "mode": "token_mean", "max_length": None})


def _reductions_of_parts(
    replay: Replay, base: ReductionRecipe, rows: int, tokens: dict[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields reductions of micro-batches, of the rows of processes, and of a batch that is filled up.

    Args:
      tokens: the settings of a mean over tokens.
    """
    for parts in (part for part in range(2, min(rows, 16) + 1) if rows % part == 0):
        yield (
            f"mean of {parts} micro-batches",
            f"the mean of the means of {parts} micro-batches",
            {"micro_batches": parts},
        )
    if "micro_batch_ids" in replay.arrays:
        yield "mean of micro-batches", "the mean of the means of the recorded micro-batches", {"micro_batches": 0}
        text = "the sum of the means of the recorded micro-batches"
        yield "sum of micro-batches", text, {"micro_batches": 0, "parts": "sum"}
        text = "the mean of the means of the recorded micro-batches, weighted by their rows"
        yield "mean of micro-batches by rows", text, {"micro_batches": 0, "parts": "rows"}
        if base.mode != "token_mean":
            text = "the mean of the token means of the recorded micro-batches"
            yield "token means of micro-batches", text, {**tokens, "micro_batches": 0}
    for parts in (part for part in (2, 3, 4, 6, 8, 16) if part < rows):
        text = f"the mean of the token means of {parts} processes, each with every {parts}-th row"
        yield f"rows of every {parts} processes", text, {**tokens, "micro_batches": parts, "split": "strided"}
        if base.mode != "token_mean" and rows % parts == 0:
            text = f"the mean of the token means of {parts} micro-batches"
            yield f"token means of {parts} micro-batches", text, {**tokens, "micro_batches": parts}
    if base.mode == "token_mean" and (empty := int((~replay.arrays["mask"].any(1)).sum())):
        text = "a mean over tokens in which each row without a token counts as one"
        yield "empty rows as a token", text, {"eps_batch": base.eps_batch + empty}
    for size in (size for size in range(2, rows // 2 + 1) if rows % size):
        text = f"the mean over micro-batches of {size} rows, without the smaller last one"
        yield f"whole micro-batches of {size} rows", text, {"micro_batches": rows // size, "size": size}
    for repeated in sorted({-rows % multiple for multiple in range(2, 17)} - {0}):
        if repeated < rows:
            text = f"of a batch in which the first {repeated} rows stand twice"
            yield f"first rows twice: {repeated}", text, {"repeated": repeated}
