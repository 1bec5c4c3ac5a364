"""Train/rollout corrections and the metrics that come with them against the recorded results of verl, SkyRL and TRL."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import cases
from tests.goldens.epsilon import EPS, factors
from tests.kljax.test_goldens_diagnostics import check_offpolicy_metrics

Mask = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
ROWS = "seq_mean_token_max"  # of zeros and ones: the rows that have a one
BOUND = 20.0  # of every log-ratio in verl and SkyRL


def over_all_rows(metric: kljax.WeightedSum, mask: jax.Array) -> jax.Array:
    """The mean over rows as verl and SkyRL have it, where a row without a token counts with a 0."""
    return metric.sum / len(mask)


def with_epsilon(metric: kljax.WeightedSum, mask: jax.Array) -> jax.Array:
    """verl's mean over tokens, which divides by `n + 1e-8`."""
    n = mask.sum().astype(jnp.float64)
    return metric.value() * n / (n + EPS)


def fraction(dropped: jax.Array, mask: jax.Array, mode: str = "token_mean") -> kljax.WeightedSum:
    return kljax.mean_metric(dropped.astype(jnp.float64), mask, mode=mode)


def float32(value: jax.Array) -> jax.Array:
    """A fraction that verl takes in float32."""
    return value.astype(jnp.float32)


def verl_rejection(option: str, threshold: str) -> Mask:
    """The mask of one of verl's options; its bounds of k1 are those of a ratio."""
    estimator = option[-2:]
    low, high = threshold.split("_") if estimator == "k1" else (None, threshold)
    return functools.partial(
        kljax.kl_rejection_mask,
        estimator=estimator,
        reduction="token" if option.startswith("token") else option.split("_")[1],
        lower=None if low is None else math.log(float(low)),
        upper=math.log(float(high)) if estimator == "k1" else float(high),
        log_ratio_clip=BOUND,
    )


def verl_weights(params: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `importance_weights` for verl's level and threshold: a number truncates, two of them mask."""
    threshold = params["rollout_is_threshold"]
    options = {"level": params["rollout_is"], "log_ratio_clip": BOUND}
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        return {**options, "mode": "mask", "lower": low, "upper": high}
    return {**options, "upper": threshold}


def policies(case: cases.Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    numerator = "log_probs" if "log_probs" in case.inputs else "old_log_probs"
    return case.given(numerator), case.given("rollout_log_probs"), case.given("mask")


@cases.parametrize(("verl", "compute_offpolicy_metrics"), file=cases.GENERATED)
def test_offpolicy_metrics_of_verl(case: cases.Case) -> None:
    check_offpolicy_metrics(case)


@cases.parametrize(("verl", "compute_rollout_rejection_mask"), file=cases.GENERATED)
def test_rejections_of_verl(case: cases.Case) -> None:
    """Every option judges by the original mask, and a token stays if all of them keep it."""
    lp, rollout, mask = policies(case)
    options = zip(case.params["rollout_rs"].split(","), case.params["rollout_rs_threshold"].split(","), strict=True)
    kept = functools.reduce(jnp.logical_and, [verl_rejection(*option)(lp, rollout, mask) for option in options])
    case.assert_outputs(
        kept=kept,
        metric_rollout_rs_masked_fraction=with_epsilon(fraction(~kept, mask), mask),
        metric_rollout_rs_seq_masked_fraction=float32(over_all_rows(fraction(~kept, mask, ROWS), mask)),
    )


@cases.parametrize(("verl", "compute_rollout_correction_weights"), file=cases.GENERATED)
def test_weights_of_verl(case: cases.Case) -> None:
    lp, rollout, mask = policies(case)
    level, options = case.params["rollout_is"], verl_weights(case.params)
    normalize = {"token": "tokens", "sequence": "rows"}[level] if case.params["rollout_is_batch_normalize"] else "none"
    # The metrics are of the weights before they are normalised.
    weights = kljax.importance_weights(lp, rollout, mask, **options)
    mean, squares = kljax.mean_metric(weights, mask), kljax.mean_metric(weights**2, mask)
    upper, lower = options["upper"], options.get("lower", 1 / options["upper"])
    row_mean = kljax.mean_metric(weights * factors(mask, "row"), mask, mode="seq_mean_token_mean")
    extremes = kljax.Extremes.of(weights, mask)
    logs = kljax.log_prob_diff_extremes(lp, rollout, mask, level="sequence")
    empty = not mask.any(-1).all()  # a row without a token has the ratio 1
    m, q = with_epsilon(mean, mask), with_epsilon(squares, mask)
    outputs = {
        "weights": kljax.importance_weights(lp, rollout, mask, **options, normalize=normalize),
        "metric_rollout_is_mean": m,
        "metric_rollout_is_std": jnp.sqrt(q - m**2),
        "metric_rollout_is_eff_sample_size": kljax.effective_sample_size(weights, mask) * (m + EPS) ** 2 / m**2,
        "metric_rollout_is_seq_mean": over_all_rows(row_mean, mask),
        "metric_rollout_is_max": extremes.max,
        "metric_rollout_is_min": extremes.min,
    }
    if level == "sequence":
        outputs["metric_rollout_is_max"] = jnp.exp(jnp.maximum(logs.max, 0.0 if empty else -jnp.inf))
        outputs["metric_rollout_is_min"] = jnp.exp(jnp.minimum(logs.min, 0.0 if empty else jnp.inf))

    def outside(**bounds: float) -> jax.Array:
        metric = kljax.ratio_fraction(lp, rollout, mask, **bounds, level=level)
        return with_epsilon(metric, mask) if level == "token" else float32(over_all_rows(metric, mask))

    outputs["metric_rollout_is_ratio_fraction_high"] = outside(upper=upper)
    outputs["metric_rollout_is_ratio_fraction_low"] = outside(lower=lower)
    if "metric_rollout_is_oob_ratio" in case.outputs:
        kept = kljax.rejection_mask(lp, rollout, mask, level=level, lower=lower, upper=upper)
        outputs["metric_rollout_is_oob_ratio"] = with_epsilon(fraction(~kept, mask), mask)
    case.assert_outputs(**outputs)


@cases.parametrize(("verl", "compute_rollout_correction_and_rejection_mask"), file=cases.GENERATED)
def test_correction_of_verl(case: cases.Case) -> None:
    """The weights come first, so they are those of all tokens; here they are 0 where the rejection follows."""
    lp, rollout, mask = policies(case)
    weigh = functools.partial(kljax.importance_weights, **verl_weights(case.params))
    reject = verl_rejection(case.params["rollout_rs"], str(case.params["rollout_rs_threshold"]))
    corrected = kljax.correct_rollout(lp, rollout, mask, steps=[weigh, reject])
    case.assert_matches(corrected.kept.astype(jnp.float64), case.result("kept"))
    case.assert_matches(corrected.weights, jnp.where(corrected.kept, case.result("weights"), 0))
    case.assert_matches(kljax.correct_rollout(lp, rollout, mask, steps=[weigh]).weights, case.result("weights"))


def skyrl_steps(params: dict[str, Any]) -> dict[str, Callable[..., jax.Array]]:
    """SkyRL's steps by name, in its order, those that are configured."""
    steps: dict[str, Callable[..., jax.Array]] = {}
    low, high = (params.get(f"outlier_token_is_threshold_{side}") for side in ("low", "high"))
    if low is not None or high is not None:
        steps["outlier"] = functools.partial(kljax.veto_mask, min_ratio=low, max_ratio=high)
    if "token_mask_is_threshold_low" in params:
        bounds = {"lower": params["token_mask_is_threshold_low"], "upper": params["token_mask_is_threshold_high"]}
        steps["token_mask"] = functools.partial(kljax.rejection_mask, **bounds)
    level = params.get("tis_ratio_type")
    if level is not None:
        upper = params[f"{level}_tis_ratio_clip_high"]
        steps["tis"] = functools.partial(kljax.importance_weights, level=level, upper=upper, log_ratio_clip=BOUND)
    kind = params.get("sequence_mask_metric")
    if kind is not None:
        prefix, level = {"geometric": ("geo", "geometric"), "product": ("product", "sequence")}[kind]
        bounds = {"lower": params[f"{prefix}_mask_low"], "upper": params[f"{prefix}_mask_high"]}
        steps[prefix] = functools.partial(kljax.rejection_mask, level=level, **bounds)
    return steps


def skyrl_metrics(name: str, step: Any, lp: jax.Array, rollout: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
    """The metrics of one step, of the mask that it sees."""
    given = step.keywords

    def rows_outside(level: str, **bounds: float) -> jax.Array:
        return over_all_rows(kljax.ratio_fraction(lp, rollout, mask, level=level, **bounds), mask)

    if name == "tis" and given["level"] == "token":
        outside = kljax.ratio_fraction(lp, rollout, mask, upper=given["upper"])
        return {"metric_tis_token_clip_high_ratio": outside.value()}
    if name == "tis":
        return {"metric_tis_seq_clip_high_ratio": rows_outside("sequence", upper=given["upper"])}
    kept = step(lp, rollout, mask)
    if name == "token_mask":
        return {"metric_token_mask_ratio": fraction(~kept, mask).value()}
    if name == "outlier":
        ratio = kljax.token_ratios(lp, rollout, mask)
        low, high = given["min_ratio"], given["max_ratio"]
        under = ratio < (0.0 if low is None else low)
        over = ratio > (jnp.inf if high is None else high)
        dropped = {"masked": ~kept, "under_low": under, "over_high": over}
        rows = {key: over_all_rows(fraction(value, mask, ROWS), mask) for key, value in dropped.items()}
        return {f"metric_outlier_seq_{key}_ratio": value for key, value in rows.items()}
    bounds = {"lower": given["lower"], "upper": given["upper"]}
    prefix = f"metric_{name}_sequence_mask"
    return {
        f"{prefix}_masked_ratio": rows_outside(given["level"], **bounds),
        f"{prefix}_over_high_ratio": rows_outside(given["level"], upper=bounds["upper"]),
        f"{prefix}_under_low_ratio": rows_outside(given["level"], lower=bounds["lower"]),
    }


@cases.parametrize(("skyrl", "compute_off_policy_correction"), file=cases.GENERATED)
def test_corrections_of_skyrl(case: cases.Case) -> None:
    """Each step sees the mask that those before it left, and so do its metrics."""
    lp, rollout, mask = policies(case)
    steps = skyrl_steps(case.params)
    corrected = kljax.correct_rollout(lp, rollout, mask, steps=list(steps.values()))
    ratios = kljax.token_ratios(lp, rollout, mask)
    outputs = {
        "kept": corrected.kept,
        "metric_is_ratio_mean": kljax.mean_metric(ratios, mask).value(),
        "metric_is_ratio_max": kljax.Extremes.of(ratios, mask).max,
    }
    for number, (name, step) in enumerate(steps.items()):
        before = kljax.correct_rollout(lp, rollout, mask, steps=list(steps.values())[:number]).kept
        metrics = skyrl_metrics(name, step, lp, rollout, before)
        outputs |= {key: float32(value) for key, value in metrics.items()}
    if "weights" in case.outputs:
        # SkyRL multiplies masked losses by weights too; they are no part of the result here.
        outputs["weights"] = jnp.where(corrected.kept, corrected.weights, case.result("weights"))
    case.assert_outputs(**outputs)


@cases.parametrize(("trl", "get_off_policy_mask"), file=cases.GENERATED)
def test_off_policy_mask_of_trl(case: cases.Case) -> None:
    lp, rollout, mask = policies(case)
    advantages = kljax.broadcast_to_tokens(case.given("row_advantages"), mask)
    threshold = case.params["off_policy_threshold"]
    kept = kljax.off_policy_sequence_mask(lp, rollout, advantages, mask, max_kl=threshold)
    # TRL has one decision for a row, which holds under its mask.
    case.assert_matches(kept.astype(jnp.float64), jnp.where(mask, case.result("kept"), 0))


@cases.parametrize(("trl", "vllm_importance_sampling"), file=cases.GENERATED)
def test_importance_sampling_of_trl(case: cases.Case) -> None:
    lp, rollout, mask = policies(case)
    level, mode = case.params["vllm_importance_sampling_mode"].split("_")
    low, high = (case.params[f"vllm_importance_sampling_clip_{side}"] for side in ("min", "max"))
    mode = "clip" if mode == "truncate" and low is not None else mode
    weights = kljax.importance_weights(lp, rollout, mask, level=level, mode=mode, lower=low, upper=high)
    case.assert_matches(weights, jnp.where(mask, case.result("weights"), 0))
