"""Corrections of the mismatch between training and rollout of verl, SkyRL and TRL, and their metrics."""

import math

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import cases, compare
from tests.goldens.cases import GENERATED

REDUCTIONS = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}


def training(case: cases.Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probs of training and of the rollout, and the mask."""
    return case.given("log_probs"), case.given("rollout_log_probs"), case.given("mask")


def old_policy(case: cases.Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The old policy, which SkyRL and TRL compare with the rollout."""
    return case.given("old_log_probs"), case.given("rollout_log_probs"), case.given("mask")


def counted(tokens: jax.Array, mask: jax.Array, eps: float | None = None) -> jax.Array:
    """The fraction of the unmasked tokens."""
    return compare.mean(tokens.astype(jnp.float64), mask, eps)


def rows(values: jax.Array) -> jax.Array:
    """The mean over all rows."""
    return jnp.mean(values, dtype=jnp.float64)


def verl_rejection(case: cases.Case) -> jax.Array:
    """Tokens that every option of verl keeps; the bounds of a k1 are on the ratio of rollout to training."""
    arrays = training(case)
    kept = arrays[-1]
    names, thresholds = case.params["rollout_rs"], str(case.params["rollout_rs_threshold"])
    for name, threshold in zip(names.split(","), thresholds.split(","), strict=True):
        level, estimator = name.rsplit("_", 1)
        low, high = (math.log(float(bound)) for bound in threshold.split("_")) if "_" in threshold else (None, None)
        bounds = {"lower": low, "upper": float(threshold) if high is None else high}
        options = {"estimator": estimator, "reduction": REDUCTIONS[level], "log_ratio_clip": 20.0}
        kept &= kljax.kl_rejection_mask(*arrays, **options, **bounds)
    return kept


@cases.parametrize(("verl", "compute_rollout_rejection_mask"), file=GENERATED)
def test_verl_rejection(case: cases.Case) -> None:
    kept, mask = verl_rejection(case), case.given("mask")
    assert kept.any()
    assert (mask & ~kept).any()
    case.assert_outputs(
        kept=kept,
        metric_rollout_rs_masked_fraction=counted(~kept, mask, 1e-8),
        metric_rollout_rs_seq_masked_fraction=rows((mask & ~kept).any(-1)),
    )


def verl_weights(case: cases.Case, normalize: str = "none") -> jax.Array:
    """verl's importance weights: one bound truncates, two mask."""
    params, bound = case.params, str(case.params["rollout_is_threshold"])
    low, high = (float(part) for part in bound.split("_")) if "_" in bound else (None, float(bound))
    mode = {"mode": "truncate", "upper": high} if low is None else {"mode": "mask", "lower": low, "upper": high}
    options = {"level": params["rollout_is"], "log_ratio_clip": 20.0, "normalize": normalize}
    return kljax.importance_weights(*training(case), **mode, **options)


@cases.parametrize(("verl", "compute_rollout_correction_weights"), file=GENERATED)
def test_verl_weights(case: cases.Case) -> None:
    (_, _, mask), level = training(case), case.params["rollout_is"]
    raw = weights = verl_weights(case)
    lengths = mask.sum(-1).astype(jnp.float64)
    per_row = lengths / (lengths + 1e-8) * kljax.masked_mean(weights, mask, axis=-1)
    if case.params["rollout_is_batch_normalize"]:
        weights = verl_weights(case, "tokens" if level == "token" else "rows")
        # verl's means have an epsilon in their divisors.
        mean, exact = compare.mean(raw, mask), kljax.masked_mean(raw, mask)
        if level == "sequence":
            has_token = mask.any(-1)
            mean, exact = (kljax.masked_mean(v, has_token) for v in (per_row, raw.max(-1)))
        weights = weights * exact / mean
    metrics = {**verl_weight_metrics(case, raw), "seq_mean": rows(per_row)}
    case.assert_outputs(weights=weights, **{f"metric_rollout_is_{name}": value for name, value in metrics.items()})


def verl_weight_metrics(case: cases.Case, weights: jax.Array) -> dict[str, jax.Array]:
    """Mean, spread, extremes and fractions outside the bounds, of tokens or of rows."""
    (log_probs, rollout, mask), level = training(case), case.params["rollout_is"]
    bound = str(case.params["rollout_is_threshold"])
    low, high = (float(part) for part in bound.split("_")) if "_" in bound else (1 / float(bound), float(bound))
    number = mask.sum().astype(jnp.float64)
    factor = number / (number + 1e-8)
    mean, square = (factor * kljax.masked_mean(values, mask) for values in (weights, jnp.square(weights)))
    size = kljax.effective_sample_size(weights, mask) / factor * jnp.square((mean + 1e-8) / mean) * jnp.square(factor)
    metrics = {"mean": mean, "std": jnp.sqrt(square - jnp.square(mean)), "eff_sample_size": size}
    arrays = log_probs, rollout, mask
    if level == "token":
        unmasked = jnp.where(mask, weights, jnp.nan)
        metrics |= {"max": jnp.nanmax(unmasked), "min": jnp.nanmin(unmasked)}
        scale = factor
    else:
        # Of the ratios before the bounds; a row without a token has ratio 1 and counts.
        extremes = kljax.log_prob_diff_extremes(*arrays, level="sequence")
        metrics |= {"max": jnp.exp(extremes.max), "min": jnp.exp(extremes.min)}
        if not mask.any(-1).all():
            metrics |= {"max": jnp.maximum(metrics["max"], 1), "min": jnp.minimum(metrics["min"], 1)}
        scale = rows(mask.any(-1))
    for name, bounds in (("low", {"lower": low}), ("high", {"upper": high})):
        metrics[f"ratio_fraction_{name}"] = scale * kljax.ratio_fraction(*arrays, **bounds, level=level).value()
    if "_" in bound:
        metrics["oob_ratio"] = counted(weights == 0, mask, 1e-8)
    return metrics


@cases.parametrize(("verl", "compute_rollout_correction_and_rejection_mask"), file=GENERATED)
def test_verl_weights_and_rejection(case: cases.Case) -> None:
    # Neither sees what the other leaves; the product is what the loss uses.
    kept, weights = verl_rejection(case), verl_weights(case)
    case.assert_outputs(kept=kept, weights=weights)
    steps = [lambda *_: verl_weights(case), lambda *_: verl_rejection(case)]
    corrected = kljax.correct_rollout(*training(case), steps=steps)
    case.assert_matches(corrected.weights, case.result("weights") * case.result("kept"))


@cases.parametrize(("verl", "compute_offpolicy_metrics"), file=GENERATED)
def test_verl_metrics_with_a_row_without_a_token(case: cases.Case) -> None:
    # verl counts the row, with log-perplexity 0; here a mean over rows is one over the rows that have a token.
    log_probs, rollout, mask = training(case)
    share = rows(mask.any(-1))
    difference = kljax.masked_mean(rollout - log_probs, mask, axis=-1)
    logs = {
        "training": kljax.log_perplexity(log_probs, mask).value(),
        "rollout": kljax.log_perplexity(rollout, mask).value(),
    }
    expected = {
        **{f"{name}_log_ppl": share * value for name, value in logs.items()},
        "training_ppl": share * kljax.perplexity(log_probs, mask).value() + 1 - share,
        "rollout_ppl": share * kljax.perplexity(rollout, mask).value() + 1 - share,
        "ppl_ratio": share * kljax.perplexity_ratio(log_probs, rollout, mask).value() + 1 - share,
        "log_ppl_diff": share * kljax.log_perplexity_diff(log_probs, rollout, mask).value(),
        "log_ppl_abs_diff": share * kljax.log_perplexity_diff(log_probs, rollout, mask, absolute=True).value(),
        "log_ppl_diff_max": jnp.maximum(difference.max(), 0),
        "log_ppl_diff_min": jnp.minimum(difference.min(), 0),
        "kl": compare.mean(kljax.rollout_kl(log_probs, rollout, mask, estimator="k1"), mask),
        "k3_kl": compare.mean(kljax.rollout_kl(log_probs, rollout, mask, estimator="k3"), mask),
        "chi2_token": kljax.chi_squared(log_probs, rollout, mask, log_ratio_clip=20.0).value(),
        "chi2_seq": share * kljax.chi_squared(log_probs, rollout, mask, level="sequence", log_ratio_clip=20.0).value(),
    }
    case.assert_outputs(**expected)


SKYRL_TOKENS = ("token_mask_is_threshold_low", "token_mask_is_threshold_high")


def skyrl(case: cases.Case) -> tuple[dict[str, jax.Array], jax.Array, jax.Array | None]:
    """SkyRL's steps in its order: each sees the mask that those before it leave."""
    params, (old, rollout, mask) = case.params, old_policy(case)
    metrics, weights, total = {}, None, len(mask)
    if any(name.startswith("outlier") for name in params):
        low, high = (params.get(f"outlier_token_is_threshold_{side}") for side in ("low", "high"))
        kept = kljax.veto_mask(old, rollout, mask, min_ratio=low, max_ratio=high)
        outside = {
            side: mask & ~kljax.rejection_mask(old, rollout, mask, **bound)
            for side, bound in (("over_high", {"upper": high}), ("under_low", {"lower": low or 0.0}))
        }
        metrics |= {f"outlier_seq_{side}_ratio": rows(tokens.any(-1)) for side, tokens in outside.items()}
        metrics["outlier_seq_masked_ratio"] = rows((mask & ~kept).any(-1))
        mask &= kept
    if SKYRL_TOKENS[0] in params:
        kept = kljax.rejection_mask(old, rollout, mask, lower=params[SKYRL_TOKENS[0]], upper=params[SKYRL_TOKENS[1]])
        metrics["token_mask_ratio"] = kljax.masked_fraction(kept, mask).value()
        mask &= kept
    if "tis_ratio_type" in params:
        level = params["tis_ratio_type"]
        upper = params[f"{level}_tis_ratio_clip_high"]
        weights = kljax.importance_weights(old, rollout, mask, level=level, upper=upper)
        over = kljax.ratio_fraction(old, rollout, mask, upper=upper, level=level)
        name = {"token": "tis_token_clip_high_ratio", "sequence": "tis_seq_clip_high_ratio"}[level]
        metrics[name] = over.value() if level == "token" else over.sum / total
    if "sequence_mask_metric" in params:
        metric = params["sequence_mask_metric"]
        level, prefix = {"geometric": ("geometric", "geo"), "product": ("sequence", "product")}[metric]
        low, high = (params[f"{prefix}_mask_{side}"] for side in ("low", "high"))
        kept = kljax.rejection_mask(old, rollout, mask, level=level, lower=low, upper=high)
        outside = {
            side: kljax.ratio_fraction(old, rollout, mask, **bound, level=level).sum / total
            for side, bound in (("over_high", {"upper": high}), ("under_low", {"lower": low}))
        }
        metrics |= {f"{prefix}_sequence_mask_{side}_ratio": value for side, value in outside.items()}
        metrics[f"{prefix}_sequence_mask_masked_ratio"] = sum(outside.values())
        mask &= kept
    return metrics, mask, weights


@cases.parametrize(("skyrl", "compute_off_policy_correction"), file=GENERATED)
def test_skyrl(case: cases.Case) -> None:
    metrics, kept, weights = skyrl(case)
    ratios, mask = kljax.token_ratios(*old_policy(case)), case.given("mask")
    metrics |= {"is_ratio_mean": kljax.masked_mean(ratios, mask), "is_ratio_max": jnp.where(mask, ratios, 0).max()}
    expected = {"kept": kept, **{f"metric_{name}": value for name, value in metrics.items()}}
    assert set(expected) == set(case.outputs) - {"weights"}
    for name, value in expected.items():
        case.assert_matches(value.astype(jnp.float64), case.result(name))
    if weights is not None:
        # SkyRL leaves the weights of masked tokens, which its loss drops.
        case.assert_matches(jnp.where(kept, weights, 0), jnp.where(kept, case.result("weights"), 0))


@cases.parametrize(("trl", "vllm_importance_sampling"), file=GENERATED)
def test_trl_weights(case: cases.Case) -> None:
    # Masked tokens have ratio 1 in TRL; here their weight is 0.
    level, mode = case.params["vllm_importance_sampling_mode"].split("_")
    low = case.params["vllm_importance_sampling_clip_min"]
    modes = {"truncate": "truncate" if low is None else "clip", "mask": "mask"}
    bounds = {"upper": case.params["vllm_importance_sampling_clip_max"], **({} if low is None else {"lower": low})}
    arrays = old_policy(case)
    weights = kljax.importance_weights(*arrays, level=level, mode=modes[mode], **bounds)
    assert case.outputs == ("weights",)
    case.assert_matches(weights, jnp.where(arrays[-1], case.result("weights"), 0))


@cases.parametrize(("trl", "get_off_policy_mask"), file=GENERATED)
def test_trl_off_policy_mask(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    threshold = case.params["off_policy_threshold"]
    kept = mask & kljax.off_policy_sequence_mask(log_probs, old, advantages, mask, max_kl=threshold)
    assert (mask & ~kept).any()
    assert case.outputs == ("kept",)
    case.assert_matches(kept.astype(jnp.float64), jnp.where(mask, case.result("kept"), 0))
