"""TRL's GRPO, GMPO and RLOO losses: value and gradient."""

import functools

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import cases, compare
from tests.goldens.cases import GENERATED
from tests.goldens.compare import COUNT, Reduction

MAX_LENGTH = 16
REDUCTIONS = {
    **dict.fromkeys(("grpo", "sapo"), compare.ROW_MEAN),
    **dict.fromkeys(("bnpo", "dapo", "cispo", "vespo"), compare.TOKEN_MEAN),
    "dr_grpo": Reduction({"mode": "seq_mean_token_sum_norm", "max_length": MAX_LENGTH, **COUNT}),
    "luspo": Reduction({"mode": "seq_mean_token_sum", **COUNT}),
}
CLIPS = {"clip_low": "epsilon", "clip_high": "epsilon_high"}


def reduction(case: cases.Case) -> Reduction:
    """The mean of a loss type, divided for the accumulation of gradients."""
    steps = case.params.get("gradient_accumulation_steps", 1)
    of_generation = case.params["loss_type"] in ("dapo", "cispo", "vespo")
    scale = case.params.get("steps_per_generation", 1) / steps if of_generation else 1 / steps
    return REDUCTIONS[case.params["loss_type"]]._replace(scale=scale)


def policy_term(case: cases.Case, lp: jax.Array) -> jax.Array:
    """The loss per token of a loss type."""
    _, *rest = compare.policy(case)
    params, clips = case.params, compare.renamed(case, **CLIPS)
    kind = params["loss_type"]
    if kind == "cispo":
        # The bound of the weight is epsilon_high itself, not one more.
        return kljax.cispo_loss(lp, *rest, clip_low=1.0, clip_high=params["epsilon_high"] - 1)
    if kind == "sapo":
        names = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg"}
        return kljax.sapo_loss(lp, *rest, **compare.renamed(case, **names))
    if kind == "vespo":
        return vespo(case, lp)
    if params.get("importance_sampling_level") == "sequence":
        return kljax.gspo_loss(lp, *rest, **clips, gradient="sequence")
    return kljax.ppo_clip_loss(lp, *rest, **clips, **compare.renamed(case, max_ratio="delta"))


def vespo(case: cases.Case, lp: jax.Array) -> jax.Array:
    """VESPO, whose weight takes in the correction of the rollout."""
    _, *rest = compare.policy(case)
    signs = (("positive", "pos"), ("negative", "neg"))
    names = {f"{name}_{ours}": f"vespo_{name}_{theirs}" for name in ("k", "lambda") for ours, theirs in signs}
    weights = {"weights": case.given("is_weights")} if case.params.get("use_vllm") else {}
    return kljax.vespo_loss(lp, *rest, **compare.renamed(case, **names), **weights, log_ratio_clip=20.0)


def kl_term(case: cases.Case, lp: jax.Array) -> jax.Array:
    """The k3 to the reference; with the bias correction, times the ratio that the policy term takes."""
    _, old, _, mask = compare.policy(case)
    ref, params = case.given("ref_log_probs"), case.params
    if not params["use_bias_correction_kl"]:
        return kljax.estimate_kl(lp, ref, mask, estimator="k3")
    if params.get("importance_sampling_level") == "sequence":
        return kljax.geometric_ratios(lp, old, mask)[:, None] * kljax.estimate_kl(lp, ref, mask, estimator="k3")
    return kljax.estimate_kl(lp, ref, mask, estimator="k3", sampling_log_probs=old)


def loss(case: cases.Case, lp: jax.Array) -> jax.Array:
    """The loss per token: policy term, off-policy mask and rollout weights, and then the KL term."""
    log_probs, old, advantages, mask = compare.policy(case)
    total = policy_term(case, lp)
    if "off_policy_mask_threshold" in case.params:
        threshold = case.params["off_policy_mask_threshold"]
        kept = kljax.off_policy_sequence_mask(log_probs, old, advantages, mask, max_kl=threshold)
        total = jnp.where(kept, total, 0)
    if case.params.get("use_vllm") and case.params["loss_type"] != "vespo":
        total = case.given("is_weights") * total
    return total + case.params["beta"] * kl_term(case, lp) if case.params.get("beta") else total


def clip_metrics(case: cases.Case) -> dict[str, jax.Array]:
    """Fractions of tokens, or of rows, that are clipped from below and from above."""
    log_probs, old, advantages, mask = compare.policy(case)
    clips = compare.renamed(case, **CLIPS)
    signs = {"low": jnp.where(advantages < 0, advantages, 0), "high": jnp.where(advantages > 0, advantages, 0)}
    if case.params.get("importance_sampling_level") == "sequence":
        ratios = kljax.geometric_ratios(log_probs, old, mask)
        rows = case.given("row_advantages")
        low, high = ratios < 1 - clips["clip_low"], ratios > 1 + clips["clip_high"]
        clipped = {"low": low & (rows < 0), "high": high & (rows > 0)}
        return {f"metric_clip_ratio_{name}_mean": jnp.mean(row, dtype=jnp.float64) for name, row in clipped.items()}
    if case.params.get("delta", 2.0) < 1 + clips["clip_high"]:
        signs["high"] = jnp.zeros_like(advantages)  # TRL looks at the ratio after its bound, which is below the clip
    return {
        f"metric_clip_ratio_{name}_mean": kljax.clip_fraction(log_probs, old, sign, mask, **clips).value()
        for name, sign in signs.items()
    }


@cases.parametrize(("trl", "GRPOTrainer._compute_loss"), file=GENERATED)
def test_grpo(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    compare.assert_loss(case, functools.partial(loss, case), reduction(case))
    metrics = {}
    if case.params["loss_type"] in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        metrics = clip_metrics(case)
    if case.params["loss_type"] == "cispo":
        over = kljax.token_ratios(log_probs, old, mask) > case.params["epsilon_high"]
        metrics["metric_cispo_clip_ratio"] = kljax.masked_mean((over & (advantages > 0)).astype(jnp.float64), mask)
    if case.params.get("beta"):
        metrics["metric_kl"] = kljax.masked_mean(kl_term(case, log_probs), mask)
    case.assert_outputs(**metrics)


@cases.parametrize(("trl", "GMPOTrainer._compute_loss"), file=GENERATED)
def test_gmpo(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    clips, beta = compare.renamed(case, **CLIPS), case.params["beta"]

    def per_token(lp: jax.Array) -> jax.Array:
        policy_part = kljax.gmpo_loss(lp, old, advantages, mask, **clips)
        return policy_part + beta * kljax.estimate_kl(lp, case.given("ref_log_probs"), mask) if beta else policy_part

    # A row without a token has ratio exp(0) in TRL, and so the loss -A, without a gradient; here it has no loss.
    empty = jnp.where(mask.any(-1), 0, -case.given("row_advantages")).mean()
    total = functools.partial(compare.reduced, mask=mask, reduction=compare.ROW_MEAN)
    case.assert_value_and_grad(lambda lp: total(per_token(lp)) + empty, "log_probs")
    difference = kljax.log_ratios(log_probs, old, mask)
    clipped = {
        "low": (difference < -clips["clip_low"]) & (advantages < 0),
        "high": (difference > clips["clip_high"]) & (advantages > 0),
    }
    metrics = {
        f"metric_clip_ratio_{name}_mean": kljax.masked_mean(tokens.astype(jnp.float64), mask)
        for name, tokens in clipped.items()
    }
    if beta:
        metrics["metric_kl"] = kljax.masked_mean(kljax.estimate_kl(log_probs, case.given("ref_log_probs"), mask), mask)
    case.assert_outputs(**metrics)


@cases.parametrize(("trl", "RLOOTrainer._compute_loss"), file=GENERATED)
def test_rloo(case: cases.Case) -> None:
    # PPO's surrogate with the ratio of the whole row: a mean over rows, of which each token has an equal share.
    _, *rest = compare.policy(case)
    clips = compare.renamed(case, **CLIPS)
    compare.assert_loss(case, lambda lp: kljax.ppo_clip_loss(lp, *rest, **clips, level="sequence"), compare.ROW_MEAN)
    case.assert_outputs()
