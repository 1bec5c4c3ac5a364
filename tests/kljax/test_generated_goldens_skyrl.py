"""SkyRL's policy losses, value loss and reductions: value and gradient."""

import jax
import jax.numpy as jnp
import pytest

import kljax
from tests.goldens import cases, compare
from tests.goldens.cases import GENERATED

CLIPS = {"clip_low": "eps_clip_low", "clip_high": "eps_clip_high"}
KEY = jax.random.key(0)


def mean(values: jax.Array | kljax.WeightedSum, mask: jax.Array) -> jax.Array:
    """SkyRL's masked mean divides by the number of tokens, 1 for none."""
    return compare.mean(values.astype(jnp.float64) if isinstance(values, jax.Array) else values, mask, None)


@cases.parametrize(("skyrl", "ppo_policy_loss"), file=GENERATED)
def test_ppo(case: cases.Case) -> None:
    log_probs, *rest = compare.policy(case)
    (old, _, mask), clips = rest, compare.renamed(case, **CLIPS)
    dual = compare.renamed(case, dual_clip="clip_ratio_c") if case.params["name"] == "dual_clip" else {}
    weights, kept = 1.0, mask
    if "tis_ratio_type" in case.params:
        rollout, params = case.given("rollout_log_probs"), case.params
        weights = kljax.importance_weights(old, rollout, mask, upper=params["token_tis_ratio_clip_high"])
        bounds = {"lower": params["geo_mask_low"], "upper": params["geo_mask_high"]}
        kept = kljax.rejection_mask(old, rollout, mask, level="geometric", **bounds)

    def loss(lp: jax.Array) -> jax.Array:
        per_token = kljax.ppo_clip_loss(lp, *rest, **clips, **dual, log_ratio_clip=20.0)
        return jnp.where(kept, weights * per_token, 0)

    compare.assert_loss(case, loss, compare.TOKEN_SUM)
    case.assert_outputs(metric_clip_ratio=mean(kljax.clip_fraction(log_probs, *rest, **clips), mask))


@cases.parametrize(("skyrl", "sapo_policy_loss"), file=GENERATED)
def test_sapo(case: cases.Case) -> None:
    _, *rest = compare.policy(case)
    taus = compare.renamed(case, tau_positive="tau_pos", tau_negative="tau_neg")
    compare.assert_loss(case, lambda lp: kljax.sapo_loss(lp, *rest, **taus, log_ratio_clip=20.0), compare.TOKEN_SUM)
    case.assert_outputs(metric_clip_ratio=jnp.zeros(()))  # SkyRL's constant: there is no clip


@cases.parametrize(("skyrl", "gspo_policy_loss"), file=GENERATED)
def test_gspo(case: cases.Case) -> None:
    log_probs, *rest = compare.policy(case)
    clips = compare.renamed(case, **CLIPS)
    compare.assert_loss(case, lambda lp: kljax.gspo_loss(lp, *rest, **clips, max_log_ratio=10.0), compare.TOKEN_SUM)
    fraction = kljax.clip_fraction(log_probs, *rest, **clips, level="geometric")
    case.assert_outputs(metric_clip_ratio=mean(fraction, rest[-1]))


@cases.parametrize(("skyrl", "compute_policy_loss_cispo"), file=GENERATED)
def test_cispo(case: cases.Case) -> None:
    log_probs, *rest = compare.policy(case)
    clips = compare.renamed(case, clip_low="cispo_eps_clip_low", clip_high="cispo_eps_clip_high")
    compare.assert_loss(case, lambda lp: kljax.cispo_loss(lp, *rest, **clips), compare.TOKEN_SUM)
    old, _, mask = rest
    bounds = {"lower": 1 - clips["clip_low"], "upper": 1 + clips["clip_high"]}
    outside = mask & ~kljax.rejection_mask(log_probs, old, mask, **bounds)
    case.assert_outputs(metric_clip_ratio=mean(outside, mask))


@cases.parametrize(("skyrl", "rollout_is_policy_loss"), file=GENERATED)
def test_rollout_is(case: cases.Case) -> None:
    # -A w log pi with the masked importance weight to the rollout, which is data.
    log_probs, _, advantages, mask = compare.policy(case)
    rollout, clips = case.given("rollout_log_probs"), compare.renamed(case, **CLIPS)
    bounds = {"lower": 1 - clips["clip_low"], "upper": 1 + clips["clip_high"]}
    weights = kljax.importance_weights(log_probs, rollout, mask, mode="mask", **bounds)
    weights = jax.lax.stop_gradient(weights)
    compare.assert_loss(case, lambda lp: weights * kljax.reinforce_loss(lp, advantages, mask), compare.TOKEN_SUM)
    case.assert_outputs(metric_clip_ratio=mean(mask & (weights == 0), mask))


@cases.parametrize(("skyrl", "dppo_policy_loss"), file=GENERATED)
def test_dppo(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    behaviour = case.given("rollout_log_probs") if case.params["anchor"] == "rollout" else old
    bounds = compare.renamed(case, clip_low="delta_low", clip_high="delta_high")
    bounds["divergence"] = case.params["dppo_type"].removeprefix("binary_")

    def loss(lp: jax.Array) -> jax.Array:
        return kljax.dppo_loss(lp, behaviour, advantages, mask, **bounds, through="ratio", log_ratio_clip=20.0)

    compare.assert_loss(case, loss, compare.TOKEN_SUM)
    dropped = mask & ~kljax.dppo_mask(log_probs, behaviour, advantages, mask, **bounds)
    assert dropped.any()
    case.assert_outputs(metric_clip_ratio=mean(dropped, mask))


@cases.parametrize(("skyrl", "compute_policy_loss_clip_cov"), file=GENERATED)
def test_clip_cov(case: cases.Case) -> None:
    log_probs, *rest = compare.policy(case)
    cov = compare.renamed(case, lower="clip_cov_lb", upper="clip_cov_ub", fraction="clip_ratio", **CLIPS)

    def loss(lp: jax.Array) -> jax.Array:
        return kljax.clip_cov_loss(lp, *rest, KEY, **cov)

    compare.assert_loss(case, loss, compare.TOKEN_SUM)
    ppo = kljax.ppo_clip_loss(log_probs, *rest, **compare.renamed(case, **CLIPS))
    case.assert_outputs(metric_clip_ratio=mean((loss(log_probs) == 0) & (ppo != 0), rest[-1]))


@cases.parametrize(("skyrl", "compute_policy_loss_kl_cov"), file=GENERATED)
def test_kl_cov(case: cases.Case) -> None:
    _, *rest = compare.policy(case)
    cov = compare.renamed(case, fraction="kl_cov_frac", coef="ppo_kl_coef")
    compare.assert_loss(case, lambda lp: kljax.kl_cov_loss(lp, *rest, **cov), compare.TOKEN_SUM)
    case.assert_outputs(metric_clip_ratio=jnp.zeros(()))


@cases.parametrize(("skyrl", "cross_entropy_loss"), file=GENERATED)
def test_cross_entropy(case: cases.Case) -> None:
    mask = case.given("mask")
    compare.assert_loss(case, lambda lp: kljax.cross_entropy_loss(lp, mask), compare.TOKEN_SUM)
    case.assert_outputs(metric_clip_ratio=jnp.zeros(()))


@cases.parametrize(("skyrl", "importance_sampling_loss"), file=GENERATED)
def test_importance_sampling(case: cases.Case) -> None:
    log_probs, *rest = compare.policy(case)
    compare.assert_loss(case, lambda lp: kljax.importance_sampling_loss(lp, *rest), compare.TOKEN_SUM)
    old, _, mask = rest
    case.assert_outputs(metric_importance_ratio=mean(kljax.token_ratios(log_probs, old, mask), mask))


@cases.parametrize(("skyrl", "ppo_critic_loss"), file=GENERATED)
def test_value_loss(case: cases.Case) -> None:
    clip = case.params["value_clip"]
    names = ("values", "returns", "mask") if clip is None else ("values", "returns", "mask", "old_values")
    values, returns, mask, *old = (case.given(name) for name in names)
    previous = old[0] if old else None
    compare.assert_loss(case, lambda v: kljax.value_loss(v, previous, returns, mask, clip=clip), compare.ROW_MEAN)
    metrics = {}
    if clip is not None:
        clipped = kljax.value_loss(values, previous, returns, mask, clip=clip)
        metrics["metric_clipfrac"] = mean(clipped > kljax.value_loss(values, None, returns, mask), mask)
    case.assert_outputs(**metrics)


# `test_systems` compares the same values with the calls of the table.
@pytest.mark.thorough
@cases.parametrize(("skyrl", "apply_loss_reduction_to_advantages_minibatch"), file=GENERATED)
def test_reductions_of_the_mini_batch(case: cases.Case) -> None:
    advantages, mask, params = case.given("advantages"), case.given("mask"), case.params
    if params["loss_reduction"] == "prompt_mean":
        ids = case.given("group_ids")
        weights = kljax.token_weights(mask, mode="prompt_mean", group_ids=ids, num_groups=compare.NUM_GROUPS)
    else:
        # The token mean of each micro-batch, then of the micro-batches; rows that do not fill one get nothing.
        size = params["micro_batch_size"]
        number = len(mask) // size
        parts = [kljax.token_weights(part, mode="token_mean") for part in jnp.split(mask[: number * size], number)]
        weights = jnp.concatenate([*parts, jnp.zeros((len(mask) - number * size, mask.shape[1]))]) / number
    case.assert_outputs()
    case.assert_matches(advantages * weights, jnp.where(mask, case.result("value"), 0))
