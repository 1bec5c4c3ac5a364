"""Scores the parity command on dumps from outside: `python -m tests.parity_trial [--only TEXT] [--cases FILE]`.

The dumps and their answers are those of `tests/parity_outside`, whose vocabulary is translated here.
"""

import argparse
import collections
import math
import pathlib
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax

from kljax.tools.parity.causes import Cause
from kljax.tools.parity.command import compare
from kljax.tools.parity.comparison import ParityReport
from tests.parity_outside.batches import PAD
from tests.parity_outside.write import CASES, read_cases, write_dump

GROUPS = ("clean", "single", "pair", "impossible")
VERDICTS = ("right", "tied", "half", "unknown", "silent", "wrong")
# A number of a cause is right within this relative difference.
TOLERANCE = 1e-2
# The shares of right dumps that the tests ask for; no dump may have a wrong cause.
BAR = {"clean": 1.0, "single": 0.95, "pair": 0.85}
# The kinds of causes that a solved number is.
NUMBERS = {
    "log_probs.temperature": ("temperature",),
    "log_probs.softcap": ("softcap",),
    "reference.temperature": ("reference_temperature",),
    "correction.upper": ("correction_cap",),
    "correction.lower": ("correction_floor",),
    "correction.scale": ("correction_factor",),
    "ratio.log_ratio_clip": ("log_ratio_clip",),
    "kl.coef": ("kl_coefficient",),
    "kl.scale": ("kl_factor",),
    "kl.value_clip": ("kl_value_clip",),
    "kl.bound": ("kl_value_clip",),
    "kl.max_ratio": ("kl_ratio_cap",),
    "advantage.eps": ("advantage_epsilon",),
    "advantage.gamma": ("gamma", "advantage_decay"),
    "advantage.discount": ("gamma", "advantage_decay"),
    "advantage.lam": ("lambda",),
    "advantage.scale": ("advantage_factor",),
    "advantage.offset": ("advantage_offset",),
    "advantage.clip": ("advantage_clip",),
    "advantage.reward_scale": ("reward_scale",),
    "advantage.reward_clip": ("reward_clip",),
    "loss.clip_low": ("clip_lower",),
    "loss.clip_high": ("clip_upper",),
    "loss.dual_clip": ("dual_clip",),
    "loss.tau_positive": ("sapo_tau_positive",),
    "loss.tau_negative": ("sapo_tau_negative",),
    "loss.log_ratio_clip": ("log_ratio_clip",),
    "loss.scale": ("token_loss_factor",),
    "reduction.scale": ("loss_factor",),
    "reduction.max_length": ("max_length",),
    "reduction.offset": ("loss_offset",),
    "reference.softcap": ("softcap",),
    "log_probs.scale": ("field_factor",),
    "reference.scale": ("field_factor",),
    "reduction.eps_batch": ("divisor_epsilon",),
    "reduction.eps_row": ("divisor_epsilon",),
    "entropy.coef": ("entropy_bonus",),
    "gradient.scale": ("gradient_factor",),
    "gradient.norm": ("gradient_norm_clip",),
    "gradient.clip": ("gradient_value_clip",),
    "ratio.factor": ("log_ratio_factor",),
    "kl.offset": ("kl_offset",),
    "kl.floor": ("kl_floor",),
    "advantage.low": ("advantage_floor",),
    "advantage.high": ("advantage_ceiling",),
    "advantage.negative": ("negative_factor",),
    "advantage.cut_penalty": ("overlong_penalty",),
    "advantage.cut_reward": ("truncated_reward",),
    "advantage.kl_coef": ("kl_coefficient",),
    "loss.max_drift": ("sequence_mask",),
    "loss.max_mismatch": ("row_rejection",),
    "kl.log_ratio_clip": ("kl_log_ratio_clip",),
    "correction.veto": ("correction_veto",),
    "advantage.floor": ("group_scale_floor",),
    "advantage.length_penalty": ("length_penalty",),
    "advantage.buffer": ("overlong_buffer",),
    "gradient.part_norm": ("gradient_norm_of_micro_batch",),
    "loss.max_row_distance": ("row_band",),
}
MASKS = {
    "shifted right by one": "late by one",
    "shifted left by one": "early by one",
    "prompt tokens": "prompt",
    "pad tokens": "padding",
    "prompt and padding on the left": "prompt and left padding",
    "end of sequence left out": "no end token",
    "last token left out": "no last token",
    "first token left out": "no first token",
    "rows cut at the limit left out": "no truncated rows",
    "last row left out": "no last row",
    "prompt and pad tokens": "all",
    "all tokens": "all",
    "tokens within rows left out": "no middle tokens",
}
# The order of rows, by its name.
ROWS = {"rows reversed": "reversed", "rows by length": "by length", "rows moved by one": "moved by one"}
# The kind and the value of a choice, by its key.
CHOICES: dict[str, tuple[str, Any]] = {
    "log_probs: vocabulary padding": ("padded_vocabulary", "padded"),
    "reference: vocabulary padding": ("reference_padded_vocabulary", "padded"),
    "log_probs: moved by one (left)": ("log_probs_shift", -1),
    "log_probs: moved by one (right)": ("log_probs_shift", 1),
    "reference: moved by one (left)": ("reference_shift", -1),
    "reference: moved by one (right)": ("reference_shift", 1),
    "reference: of old_log_probs": ("wrong_reference", "old"),
    "reference: of log_probs": ("wrong_reference", "policy"),
    "reference: of rollout_log_probs": ("wrong_reference", "rollout"),
    "reference: adapter on": ("wrong_reference", "policy"),
    "reference: rows moved by one": ("reference_rows", "moved by one"),
    "ratio: old log-probs off by one (left)": ("old_shift", -1),
    "ratio: old log-probs off by one (right)": ("old_shift", 1),
    "ratio: direction swapped": ("ratio_inverse", True),
    "ratio: log_probs as the old policy": ("old_policy", "policy"),
    "ratio: rollout_log_probs as the old policy": ("old_policy", "rollout"),
    "ratio: ref_log_probs as the old policy": ("old_policy", "reference"),
    "ratio: old_log_probs as the old policy": ("old_policy", "old"),
    "correction: sampler off by one (right)": ("rollout_shift", 1),
    "correction: sampler off by one (left)": ("rollout_shift", -1),
    "correction: direction swapped": ("correction_inverse", True),
    "correction: no cap": ("correction_cap", None),
    "correction: mode mask": ("correction_mode", "mask"),
    "correction: mode clip": ("correction_mode", "clip"),
    "loss: weights left out": ("correction_mode", None),
    "correction: level sequence": ("correction_level", "sequence"),
    "correction: level geometric": ("correction_level", "geometric"),
    "correction: of log_probs": ("correction_policy", "policy"),
    "correction: divided by their mean": ("correction_normalized", True),
    "correction: weights squared": ("correction_twice", 2),
    "loss: weights twice": ("correction_twice", 2),
    "kl: estimator k1": ("kl_estimator", "k1"),
    "kl: estimator abs": ("kl_estimator", "abs"),
    "kl: estimator k2": ("kl_estimator", "k2"),
    "kl: estimator k3": ("kl_estimator", "k3"),
    "kl: estimator squared log-ratio, no half": ("kl_estimator", "squared"),
    "kl: estimator k3 clipped as low_var_kl": ("kl_estimator", "low_var_kl"),
    "kl: direction swapped": ("kl_direction", True),
    "kl: of old_log_probs": ("kl_policy", "old"),
    "kl: against rollout_log_probs": ("kl_against", "rollout"),
    "kl: against old_log_probs": ("kl_against", "old"),
    "kl: importance ratio left out": ("kl_importance_ratio", False),
    "kl: importance ratio multiplied": ("kl_importance_ratio", True),
    "kl: importance ratio multiplied after the clip": ("kl_importance_ratio", True),
    "kl: importance ratio detached": ("kl_ratio_gradient", True),
    "kl: gradient value": ("kl_gradient", "value"),
    "kl: gradient k2": ("kl_gradient", "k2"),
    "kl: gradient none": ("kl_gradient", "none"),
    "gradient: policy detached": ("ratio_gradient", "none"),
    "gradient: KL detached": ("kl_gradient", "none"),
    "kl: not centered": ("kl_centering", False),
    "kl: taken off before the comparison": ("kl_reward_order", "early"),
    "kl: end of sequence left out": ("kl_reward_mask", "no end token"),
    "advantage: epsilon inside the root": ("advantage_epsilon_inside", True),
    "advantage: rloo_advantages": ("group_center", "others"),
    "advantage: not centered": ("group_center", "none"),
    "advantage: centered on the median": ("group_center", "median"),
    "advantage: centered on the batch": ("group_center", "batch"),
    "advantage: scale none": ("group_scale", "none"),
    "advantage: scale std": ("group_scale", "std"),
    "advantage: scale batch_std": ("group_scale", "batch std"),
    "advantage: scale variance": ("group_scale", "variance"),
    "advantage: scale range": ("group_scale", "range"),
    "advantage: scale mean absolute": ("group_scale", "mean absolute"),
    "advantage: scale mean": ("group_scale", "mean"),
    "advantage: groups interleaved": ("group_ids", "interleaved"),
    "advantage: groups moved by one": ("group_ids", "moved by one"),
    "advantage: one group": ("group_ids", "batch"),
    "advantage: rows in 2": ("group_ids", "pairs of rows"),
    "advantage: groups in 2": ("group_ids", "pairs of groups"),
    "advantage: centered on the best": ("group_center", "best"),
    "advantage: centered on the first": ("group_center", "first"),
    "advantage: centered on the mean weighted by length": ("group_center", "by length"),
    "advantage: scale root mean square": ("group_scale", "root mean square"),
    "advantage: scale std of all centered": ("group_scale", "batch std of centered"),
    "advantage: whitening: center": ("whitening_parts", "center"),
    "advantage: whitening: scale": ("whitening_parts", "scale"),
    "advantage: whitening: padded": ("whitening_mean", "padding"),
    "advantage: members not empty": ("group_members", "no empty rows"),
    "advantage: members not cut": ("group_members", "no truncated rows"),
    "advantage: sign alone": ("advantage_sign", True),
    "advantage: values off by one (right)": ("values_shift", 1),
    "advantage: values off by one (left)": ("values_shift", -1),
    "advantage: returns": ("gae_returns", True),
    "advantage: reward at the last column": ("reward_column", "last column"),
    "advantage: reward at every token": ("reward_column", "every token"),
    "kl: at the last token": ("kl_reward_place", "row"),
    "kl: log-ratio in bfloat16": ("kl_log_ratio_dtype", "bfloat16"),
    "kl: weighted as the policy loss": ("correction_on_kl", True),
    "reference: rows reversed": ("reference_rows", "reversed"),
    "reference: rows by length": ("reference_rows", "by length"),
    "correction: divided by the mean of their row": ("correction_normalized", "row"),
    "loss: advantages along the tokens": ("advantage_axis", "columns"),
    "loss: ratio summed over the row": ("ratio_level", "product"),
    "loss: ratio over the padded length": ("ratio_level", "padded mean"),
    "loss: reinforce_loss": ("loss_function", "reinforce"),
    "loss: symmetric True": ("loss_function", "ipo"),
    "loss: through ratio": ("loss_function", "sapo gate"),
    "loss: outside masked": ("loss_function", "cispo masked"),
    "loss: weight has a gradient": ("loss_function", "cispo with gradient"),
    "gradient: last micro-batch alone": ("gradient_rows", "last micro-batch"),
    "reduction: mean of micro-batches by rows": ("micro_batches", "rows"),
    "advantage: rows moved by one (up)": ("field_rows", -1),
    "advantage: divided by the length": ("advantage_spread", True),
    "advantage: whitened again over the tokens": ("whitening", 1),
    "advantage: whitened again over the rows": ("row_whitening", True),
    "advantage: masked tokens zero": ("gae_mask", "count"),
    "advantage: reward at the first token": ("reward_column", "first token"),
    "loss: level token": ("ratio_level", "token"),
    "loss: level sequence": ("ratio_level", "sequence"),
    "loss: no dual clip": ("dual_clip", None),
    "loss: unclipped": ("loss_function", "unclipped"),
    "loss: optimistic": ("clip_optimistic", True),
    "loss: sign flipped": ("loss_sign", -1.0),
    "reduction: rows of equal groups dropped": ("rows_dropped", True),
    "reduction: token mean": ("reduction", "token_mean"),
    "reduction: token sum": ("reduction", "token_sum"),
    "reduction: sequence mean of token means": ("reduction", "seq_mean_token_mean"),
    "reduction: sequence mean of token sums": ("reduction", "seq_mean_token_sum"),
    "reduction: sum over the padded length": ("reduction", "sum_norm"),
    "reduction: mean per prompt": ("reduction", "prompt_mean"),
    "reduction: mean over the padded batch": ("reduction", "padded_mean"),
    "reduction: length divided twice": ("reduction", "length_twice"),
    "reduction: divided by the root of the length": ("reduction", "root_length"),
    "reduction: empty rows counted": ("empty_rows", "count"),
    "reduction: empty rows dropped": ("empty_rows", "drop"),
    "reduction: mean of micro-batches": ("micro_batches", True),
    "reduction: sum of micro-batches": ("micro_batches", "sum"),
    "reduction: no eps": ("divisor_epsilon", 0.0),
    "log_probs: alignment off by one": ("logits_shift", -1),
    "log_probs: alignment off by one (back)": ("logits_shift", 1),
    "reference: alignment off by one": ("reference_logits_shift", -1),
    "reference: alignment off by one (back)": ("reference_logits_shift", 1),
    **{f"log_probs: logits in {dtype}": ("logits_dtype", dtype) for dtype in ("bfloat16", "float16")},
    **{f"reference: logits in {dtype}": ("reference_logits_dtype", dtype) for dtype in ("bfloat16", "float16")},
    **{f"ratio: old {name}": ("old_rows", word) for name, word in ROWS.items()},
    "ratio: first micro-batch on its own policy": ("old_rows", "policy in the first micro-batch"),
    **{f"ratio: log-ratio in {dtype}": ("log_ratio_dtype", dtype) for dtype in ("bfloat16", "float16")},
    **{f"correction: sampler {name}": ("rollout_rows", word) for name, word in ROWS.items()},
    **{f"correction: log-ratio in {dtype}": ("correction_log_ratio_dtype", dtype) for dtype in ("bfloat16", "float16")},
    "correction: level prefix": ("correction_level", "prefix"),
    "correction: divided by the mean of rows": ("correction_normalized", "mean of rows"),
    "correction: divided by their mean before the bounds": ("correction_normalized", "before the bounds"),
    "correction: tokens rejected": ("correction_mode", "reject"),
    "kl: of rollout_log_probs": ("kl_policy", "rollout"),
    "kl: of log_probs": ("kl_policy", "policy"),
    "kl: within the clips alone": ("kl_on_trusted", True),
    "correction: last token not sampled": ("rollout_fill", "zero"),
    "correction: last token of weight 1": ("rollout_fill", "old"),
    "correction: divided by their mean over all columns": ("correction_normalized", "all columns"),
    "advantage: rewards whitened first": ("reward_transform", "standardized"),
    "advantage: rewards whole numbers": ("reward_transform", "whole numbers"),
    "advantage: whitening: mean added back": ("whitening_parts", "mean added back"),
    "advantage: centered on the mean of the other rows": ("group_center", "others"),
    "advantage: scale std of the others": ("group_scale", "others std"),
    "advantage: rewards left out": ("reward_column", "last column"),
    "loss: advantages off by one (right)": ("advantage_shift", 1),
    "loss: advantages off by one (left)": ("advantage_shift", -1),
    "loss: clips of the log-ratio": ("loss_function", "log clip"),
    "loss: recorded weights": ("correction_mode", "clip"),
    "reduction: empty rows as a token": ("reduction", "token_mean_min_one"),
    "reduction: whole micro-batches of 2 rows": ("reduction", "token_mean_of_pairs"),
    **{f"reduction: rows of every {count} processes": ("rank_means", count) for count in (2, 3, 4, 8)},
    **{f"advantage: whitened over rows of {count} processes": ("whitening_over", "ranks") for count in (2, 3, 4, 8)},
    "kl: importance ratio of the row": ("kl_importance_ratio", "row"),
    "kl: importance ratio sampler": ("kl_importance_ratio", "to the sampler"),
    "kl: importance ratio inverse": ("kl_importance_ratio", "inverse"),
    "kl: of the row": ("kl_level", "row"),
    "kl: centered over the row": ("kl_centering", "row"),
    "kl: mean over the row": ("kl_reward_place", "row mean"),
    "kl: in the reward off by one (right)": ("kl_reward_shift", 1),
    "kl: in the reward off by one (left)": ("kl_reward_shift", -1),
    "advantage: rows interleaved": ("advantage_rows", "interleaved"),
    **{f"advantage: rewards: {name}": ("reward_rows", word) for name, word in ROWS.items()},
    "advantage: rewards ranks": ("reward_transform", "ranks"),
    "advantage: rewards above 0.5": ("reward_transform", "right or wrong"),
    "advantage: rewards per token": ("reward_transform", "per token"),
    **{f"advantage: rewards in {dtype}": ("reward_dtype", dtype) for dtype in ("bfloat16", "float16")},
    "advantage: pass_at_k_advantages": ("advantage_function", "pass at k"),
    "advantage: at the last token": ("advantage_place", "last token"),
    "advantage: groups cut by micro-batches": ("group_ids", "within micro-batches"),
    "advantage: scale std of its micro-batches": ("group_scale", "micro-batch std"),
    "advantage: centered on the log mean exp": ("group_center", "log mean exp"),
    "advantage: centered on the worst": ("group_center", "worst"),
    "advantage: reward at the token before the last": ("reward_column", "one before the last"),
    "advantage: rows bootstrapped": ("gae_bootstrap", True),
    "advantage: whitened over micro-batches": ("whitening_over", "micro-batches"),
    "advantage: whitened over groups": ("whitening_over", "groups"),
    "advantage: returns forward": ("returns_direction", "forward"),
    "advantage: divided by the mean absolute": ("advantage_norm", "mean absolute"),
    "loss: mean of ratios": ("ratio_level", "mean of ratios"),
    "loss: dual clip of both signs": ("dual_clip_side", "both"),
    "loss: region around old_log_probs": ("trust_policy", "old"),
    "loss: outside of PPO's clip masked": ("loss_function", "cispo without clipped"),
    "loss: clipped alone": ("loss_function", "clipped only"),
    "loss: gmpo_loss": ("loss_function", "geometric mean"),
    "loss: vespo_loss": ("loss_function", "vespo"),
    "loss: kl_cov_loss, fraction 0.2": ("loss_function", "kl cov"),
    "loss: divergence kl": ("loss_function", "dppo binary kl"),
    "loss: through log_prob": ("loss_function", "dppo through log-probs"),
    "reduction: rows without a positive advantage dropped": ("rows_dropped", "negative, too"),
    "reduction: Dr. GRPO over the longest row of a micro-batch": ("reduction", "longest_of_micro_batch"),
    "gradient: first micro-batch alone": ("gradient_rows", "first micro-batch"),
}
# Faults that no dump tells from random numbers on their field: the README of the dumps has the proof.
UNTELLABLE = {("wrong_reference", "stale reference")}


class Score(NamedTuple):
    """How a report answers a case, by one of `VERDICTS` or "false alarm", and the causes it names."""

    verdict: str
    named: tuple[str, ...]


def answers(cause: Cause) -> list[tuple[str, Any]]:
    """Translates a cause to the kinds and values of the vocabulary; none if it has no word for it."""
    if cause.number is not None:
        kinds = NUMBERS.get(f"{cause.stage}.{cause.name.split()[0]}", ())
        return [(kind, cause.number) for kind in kinds]
    if cause.stage in ("mask_rule", "mask", "kl_mask"):
        kind = {"mask_rule": "mask", "mask": "loss_mask"}.get(cause.stage, cause.stage)
        word = MASKS.get(cause.name, cause.name.removesuffix(" tokens"))
        return [(kind, word), *([("kl_reward_mask", word)] if kind == "kl_mask" else [])]
    settings = dict(cause.settings)
    mask = cause.name.removeprefix("divisor: ").removeprefix("sum: ")
    words = MASKS.get(mask, mask.removesuffix(" tokens"))
    normalizer = "reference_normalizer" if cause.stage == "reference" else "normalizer"
    several: dict[str, list[tuple[str, Any]]] = {
        # A set-up has one divisor of a variance: that of its groups, or that of its whitening.
        **{f"advantage: ddof {ddof}": [("ddof", ddof), ("whitening_ddof", ddof)] for ddof in (0, 1)},
        # The other sign is the factor -1 of the header's.
        "gradient: sign flipped": [("gradient_factor", settings.get("scale"))],
        "advantage: one group": [("group_ids", "batch"), ("group_center", "batch")],
        f"{cause.stage}: top {settings.get('top_k')}": [(normalizer, cause.name)],
        f"reduction: divisor: {mask}": [("divisor_mask", words)],
        f"reduction: sum: {mask}": [("numerator_mask", words)],
        f"reduction: first rows twice: {settings.get('repeated')}": [("repeated_rows", settings.get("repeated"))],
        "advantage: rows moved by one": [("field_rows", 1), ("advantage_rows", "moved by one")],
        "advantage: not whitened": [("whitening", 0), ("whitening", None)],
        "advantage: masked tokens none": [("gae_mask", "count"), ("gae_mask", "all")],
        "kl_reduction: mean of micro-batches": [("kl_reduction", True), ("kl_micro_batches", True)],
        f"{cause.stage}: top-p {settings.get('top_p')} renormalised": [(normalizer, f"top p {settings.get('top_p')}")],
        f"{cause.stage}: without token {PAD}": [(normalizer, "no pad token")],
        f"kl: in the {settings.get('place')}, of {settings.get('policy')}": [("kl_place", settings.get("place"))],
        **{f"reduction: recorded before the division by {n}": [("field_factor", n)] for n in range(2, 17)},
        "loss: optimistic, no dual clip": [("clip_optimistic", True)],
        "loss: gspo_loss": [("ratio_level", "sequence")],
        "loss: ppo_clip_loss": [("loss_function", "ppo"), ("ratio_level", "token")],
        "loss: clips exchanged": [
            ("clip_lower", dict(cause.arguments).get("clip_low")),
            ("clip_upper", dict(cause.arguments).get("clip_high")),
        ],
    }
    if cause.key in several:
        return several[cause.key]
    special = {
        "rounding": ("field_dtype", cause.name),
        "coefficient": ("kl_coefficient", settings.get("coef")),
        "temperature": ("temperature" if cause.stage == "log_probs" else "reference_temperature", None),
    }
    word = cause.stage if cause.stage == "rounding" else cause.name.split()[0]
    if word == "temperature":
        return [(special[word][0], settings["temperature"])]
    if word in special or (cause.stage == "kl" and "coef" in settings):
        return [special.get(word, special["coefficient"])]
    name = cause.name.removesuffix(", policy loss alone")
    key = f"{cause.stage.removeprefix('kl_')}: {name}"
    translated = [CHOICES[key]] if key in CHOICES else []
    if cause.name.startswith(("Dr. GRPO over", "sum over")):
        translated.append(("max_length", settings["max_length"]))
    if name == "Dr. GRPO over the padded length":
        # The mean over rows of sums over a length is the sum over rows times length: the padded batch.
        translated.append(("reduction", "padded_mean"))
    if settings.get("micro_batches") == 1:
        translated.append(("micro_batches", False))
    if "sequence mean" in name:
        translated.append(("empty_rows", settings.get("empty_rows")))
    if cause.stage == "kl_reduction":
        translated = [("kl_reduction", value) for _, value in translated]
    return translated


def matches(cause: Cause, answer: dict[str, Any]) -> bool:
    """Tells whether a cause is one that a case planted, or another that leaves the same numbers."""
    for wanted in (answer, *answer.get("also", ())):
        for kind, value in answers(cause):
            if kind != wanted["cause_kind"]:
                continue
            inside = cause.limits is not None and cause.limits[0] <= float(wanted["true"] or 0) <= cause.limits[1]
            if inside or _equal(value, wanted["true"]) or _in_range(value, wanted):
                return True
    return False


def _equal(value: Any, true: Any) -> bool:
    numbers = (int, float)
    if isinstance(value, numbers) and isinstance(true, numbers):
        return math.isclose(value, true, rel_tol=TOLERANCE, abs_tol=1e-12)
    return str(value) == str(true)


def _in_range(value: Any, wanted: dict[str, Any]) -> bool:
    """Tells whether a number leaves the same dump as the true one."""
    low, high = wanted.get("range", (math.inf, -math.inf))
    return isinstance(value, int | float) and low <= value <= high


def judge(report: ParityReport, case: dict[str, Any]) -> Score:
    """Compares the causes of a report with the planted faults."""
    answer = [_complete(entry, case) for entry in case["answer"] if entry["cause_kind"] != "unknown"]
    unknown = [f"unknown {f.difference.field}" for f in report.findings if not f.explanations and not f.follows]
    shown = (*(cause.key for cause in report.causes), *unknown)
    if report.agrees:
        return Score("silent" if case["answer"] and case["first_field"] else "right", shown)
    if case["group"] == "clean":
        return Score("false alarm", shown)
    untellable = any((entry["cause_kind"], entry["true"]) in UNTELLABLE for entry in answer)
    if case["group"] == "impossible" or (untellable and not report.causes):
        first, good = report.findings[0].difference.field, "tied" if untellable else "right"
        return Score("wrong" if report.causes else good if first == case["first_field"] else "unknown", shown)
    for finding in report.findings:
        if finding.explanations and not any(_planted(causes, answer) for causes in finding.explanations):
            return Score("wrong", shown)
    possible = [cause for finding in report.findings for causes in finding.explanations for cause in causes]
    named = [entry for entry in answer if any(matches(cause, entry) for cause in report.causes)]
    tied = [entry for entry in answer if any(matches(cause, entry) for cause in possible)]
    if unknown or len(tied) < len(answer):
        return Score("half" if tied else "unknown", shown)
    return Score("right" if len(named) == len(answer) and _planted(report.causes, answer) else "tied", shown)


def _complete(entry: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Adds the second name of a fault that the report names by two causes.

    A temperature that all models share is named for each field. A lower bound of weights that had none is another mode
    and its number. A sum over the two micro-batches is twice their mean.
    """
    kind, others = entry["cause_kind"], []
    if kind == "temperature" and "temperature" in case["plant"]:
        others = [{**entry, "cause_kind": "reference_temperature"}]
    if kind == "correction_floor" and entry["declared"] is None:
        others = [{**entry, "cause_kind": "correction_mode", "true": "clip"}]
    if kind == "micro_batches" and entry["true"] == "sum":
        others = [{**entry, "true": True}, {**entry, "cause_kind": "loss_factor", "true": 2.0}]
    return {**entry, "also": [*entry.get("also", ()), *others]} if others else entry


def _planted(causes: tuple[Cause, ...], answer: list[dict[str, Any]]) -> bool:
    return all(any(matches(cause, entry) for entry in answer) for cause in causes)


def score(case: dict[str, Any], folder: pathlib.Path) -> Score:
    """Writes the dump of a case and runs the command on it."""
    path = write_dump(case, folder, values=True)
    with jax.enable_x64(True):
        try:
            report = compare(path)
        except Exception as error:  # Whatever ends the command, the other dumps still have their score.
            return Score("wrong", (f"{type(error).__name__}: {error}",))
        return judge(report, case)


def main() -> int:
    """Prints the cases that are not right, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=pathlib.Path, default=CASES, help="a list of cases (%(default)s)")
    parser.add_argument("--only", default="", help="only cases whose id has this text, or of this group")
    options = parser.parse_args()
    seconds: dict[str, float] = {}
    table: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as folder:
        for case in read_cases(options.cases):
            if options.only not in case["id"] and options.only != case["group"]:
                continue
            start = time.process_time()
            result = score(case, pathlib.Path(folder))
            seconds[f"{case['id']} ({result.verdict})"] = time.process_time() - start
            table[case["group"]].update([result.verdict, "total"])
            if result.verdict != "right":
                wanted = "; ".join(entry["words"] for entry in case["answer"]) or "nothing"
                answer = f"{result.verdict}; planted {wanted}; named {', '.join(result.named)}"
                print(f"{case['id']}: {answer}; {time.process_time() - start:.0f} s", flush=True)
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:10]
    print("slowest, in seconds of processor:", *(f"{name} {seconds[name]:.0f}" for name in slowest), sep="\n  ")
    print(f"| dumps | {' | '.join(VERDICTS)} | false alarm |")
    print("|---" * (len(VERDICTS) + 2) + "|")
    for group in GROUPS:
        counts = table[group]
        columns = [counts[verdict] for verdict in (*VERDICTS, "false alarm")]
        print(f"| {counts['total']} {group} | " + " | ".join(map(str, columns)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
