"""OpenRLHF's KL with its unbiased gradient, its losses, gates and reductions: value and gradient."""

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import cases, compare
from tests.goldens.cases import GENERATED
from tests.goldens.compare import Reduction

CLIPS = {"clip_low": "clip_eps_low", "clip_high": "clip_eps_high"}
DIVERGENCES = {"binary_kl": "kl", "tv": "tv"}
LEVELS = {"token": "token", "seq": "sequence"}


def reduction(case: cases.Case, token_level: bool) -> Reduction:
    """OpenRLHF's mean over tokens, or over rows of the mean over a row's tokens."""
    names = {"denominator": "batch_num_tokens" if token_level else "global_batch_size"}
    arguments = {"mode": "token_mean"} if token_level else {"mode": "seq_mean_token_mean", **compare.DROP}
    scale = case.params.get("dp_size", 1)
    return Reduction({**arguments, **compare.renamed(case, **names)}, None if token_level else "row", scale=scale)


@cases.parametrize(("openrlhf", "compute_approx_kl"), file=GENERATED)
def test_approx_kl(case: cases.Case) -> None:
    # The unbiased gradient leaves the value alone and weighs the gradient x by a ratio of at most 10.
    arguments = {"estimator": case.params["kl_estimator"], "value_clip": 10.0}
    if case.params["unbiased_gradient"]:
        arguments["gradient"] = "k2"
    if case.params["old"]:
        arguments |= {"sampling_log_probs": case.given("old_log_probs"), "max_ratio": 10.0, "gradient": "weighted_k2"}
    ref = case.given("ref_log_probs")
    case.assert_value_and_grad(lambda lp: kljax.estimate_kl(lp, ref, **arguments), "log_probs")
    case.assert_outputs()


def gate(case: cases.Case, old: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weights of the train-rollout correction, and what it filters: per token, or per row."""
    rollout, params = case.given("rollout_log_probs"), case.params
    (low, high), level = params["is_correction_threshold"], LEVELS[params["is_correction_level"]]
    if params["is_correction_gating"] != "ratio":
        divergence = DIVERGENCES[params["is_correction_gating"]]
        kept = kljax.divergence_mask(old, rollout, mask, divergence=divergence, level=level, max_divergence=high)
        return jnp.where(kept, kljax.token_ratios(old, rollout, mask), 0), ~kept
    kept = kljax.rejection_mask(
        old, rollout, mask, level="geometric" if level == "sequence" else "token", lower=low, upper=high
    )
    if params["is_correction_mode"] == "clip":
        return kljax.importance_weights(old, rollout, mask, mode="clip", lower=low, upper=high), ~kept
    return jnp.where(kept, kljax.token_ratios(old, rollout, mask), 0), ~kept


@cases.parametrize(("openrlhf", "PolicyLoss"), file=GENERATED)
def test_policy_loss(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    params, clips = case.params, compare.renamed(case, **CLIPS)
    gspo, corrected = params["policy_loss_type"] == "gspo", "is_correction_level" in params
    weights, filtered = gate(case, old, mask) if corrected and not gspo else (1.0, None)
    # With a correction, GSPO's ratio is to the rollout.
    behaviour = case.given("rollout_log_probs") if gspo and corrected else old

    def loss(lp: jax.Array) -> jax.Array:
        if gspo:
            return kljax.gspo_loss(lp, behaviour, advantages, mask, **clips, gradient="sequence")
        dual = compare.renamed(case, dual_clip="dual_clip")
        return weights * kljax.ppo_clip_loss(lp, old, advantages, mask, **clips, **dual, log_ratio_clip=20.0)

    compare.assert_loss(case, loss, reduction(case, params.get("token_level_loss", not gspo)))
    level = "geometric" if gspo else "token"
    metrics = {
        "metric_clip_ratio": kljax.clip_fraction(log_probs, behaviour, advantages, mask, **clips, level=level).value(),
        "metric_ppo_kl": kljax.ppo_kl(log_probs, old, mask).value(),
    }
    if filtered is not None:
        rows = jnp.mean((filtered & mask).any(-1), dtype=jnp.float64)
        tokens = kljax.masked_mean(filtered.astype(jnp.float64), mask)
        metrics["metric_is_filter_ratio"] = rows if params["is_correction_level"] == "seq" else tokens
        metrics["metric_vllm_kl"] = kljax.rollout_kl(old, case.given("rollout_log_probs"), mask, estimator="k1").value()
    case.assert_outputs(**metrics)


@cases.parametrize(("openrlhf", "ValueLoss"), file=GENERATED)
def test_value_loss(case: cases.Case) -> None:
    clip = case.params["clip_eps"]
    returns, mask = case.given("returns"), case.given("mask")
    old = case.given("old_values") if clip is not None else None
    mode = reduction(case, case.params["token_level_loss"])
    compare.assert_loss(case, lambda v: kljax.value_loss(v, old, returns, mask, clip=clip), mode)
    case.assert_outputs()


@cases.parametrize(("openrlhf", "aggregate_loss"), file=GENERATED)
def test_reductions(case: cases.Case) -> None:
    compare.assert_loss(case, lambda values: values, reduction(case, case.params["token_level_loss"]))
    case.assert_outputs()
