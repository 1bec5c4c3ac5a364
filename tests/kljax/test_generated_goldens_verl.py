"""verl's policy losses, value loss and reductions that the shared cases lack: value and gradient."""

import functools

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import batches, cases, compare
from tests.goldens.cases import GENERATED
from tests.goldens.compare import Reduction

CLIPS = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}
KEY = jax.random.key(0)


def assert_metrics(case: cases.Case, log_ratio_clip: float | None = None, **metrics: jax.Array) -> None:
    """Asserts the KL metric and every other metric of the case."""
    log_probs, old, _, mask = compare.policy(case)
    kl = compare.mean(kljax.ppo_kl(log_probs, old, mask, log_ratio_clip=log_ratio_clip), mask)
    case.assert_outputs(metric_ppo_kl=kl, **metrics)


@cases.parametrize(("verl", "compute_policy_loss_clip_cov"), file=GENERATED)
def test_clip_cov(case: cases.Case) -> None:
    # Where a part of the candidates is dropped, which ones is a matter of chance; all of them, or none, is not.
    log_probs, *rest, mask = compare.policy(case)
    cov = compare.renamed(case, lower="clip_cov_lb", upper="clip_cov_ub", fraction="clip_cov_ratio", **CLIPS)

    def loss(log_probs: jax.Array, **changed: float) -> jax.Array:
        return kljax.clip_cov_loss(log_probs, *rest, mask, KEY, **{**cov, **changed})

    all_tokens = kljax.ppo_clip_loss(log_probs, *rest, mask, **compare.renamed(case, **CLIPS))
    dropped = mask & (loss(log_probs) == 0) & (all_tokens != 0)
    assert_metrics(case, metric_pg_clipfrac=compare.mean(dropped.astype(jnp.float64), mask))
    if case.params["clip_cov_ratio"] == 1.0:
        compare.assert_loss(case, loss, compare.VERL[case.params["loss_agg_mode"]])
    else:
        candidates = (loss(log_probs, fraction=1.0) == 0) & (all_tokens != 0)
        assert dropped.any()
        assert candidates[dropped].all()
        assert (candidates & ~dropped).any()


@cases.parametrize(("verl", "compute_policy_loss_kl_cov"), file=GENERATED)
def test_kl_cov(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    cov = compare.renamed(case, fraction="kl_cov_ratio", coef="ppo_kl_coef")
    reduction = compare.VERL[case.params["loss_agg_mode"]]
    compare.assert_loss(case, lambda lp: kljax.kl_cov_loss(lp, old, advantages, mask, **cov), reduction)
    difference = compare.mean(kljax.log_prob_abs_diff(log_probs, old, mask), mask)
    case.assert_outputs(metric_ppo_kl=difference)


@cases.parametrize(("verl", "compute_policy_loss_dro"), file=GENERATED)
def test_dro(case: cases.Case) -> None:
    _, *rest = compare.policy(case)
    reduction = compare.VERL[case.params["loss_agg_mode"]]
    compare.assert_loss(case, lambda lp: kljax.dro_loss(lp, *rest, coef=case.params["dro_beta"]), reduction)
    assert_metrics(case)


@cases.parametrize(
    ("verl", "compute_policy_loss_vanilla"),
    ("verl", "compute_policy_loss_cispo"),
    ("verl", "compute_policy_loss_gspo"),
    file=GENERATED,
)
def test_losses_under_importance_weights(case: cases.Case) -> None:
    log_probs, *rest = compare.policy(case)
    (old, _, mask), clips = rest, compare.renamed(case, **CLIPS)
    name, lower = case.params["name"], jnp.zeros(())
    if name == "vanilla":
        dual = {"dual_clip": case.params["clip_ratio_c"]}
        loss, more = kljax.ppo_clip_loss, {**dual, "log_ratio_clip": 20.0}
        clipped = kljax.clip_fraction(log_probs, *rest, **clips)
        lower = compare.mean(kljax.dual_clip_fraction(log_probs, *rest, **dual), mask)
    elif name == "gspo":
        loss, more = kljax.gspo_loss, {"gradient": "token", "max_log_ratio": 10.0}
        clipped = kljax.clip_fraction(log_probs, *rest, **clips, level="geometric")
    else:
        loss, more = kljax.cispo_loss, {}
        bounds = {"lower": 1 - clips["clip_low"], "upper": 1 + clips["clip_high"]}
        outside = ~kljax.rejection_mask(log_probs, old, mask, **bounds)
        clipped = kljax.WeightedSum.of(outside.astype(jnp.float64), mask)
    weights, reduction = case.given("is_weights"), compare.VERL[case.params["loss_agg_mode"]]
    compare.assert_loss(case, lambda lp: weights * loss(lp, *rest, **clips, **more), reduction)
    fraction = compare.mean(clipped, mask)
    assert_metrics(case, metric_pg_clipfrac=fraction, metric_pg_clipfrac_lower=lower)


@cases.parametrize(("verl", "compute_policy_loss_geo_mean"), file=GENERATED)
def test_geo_mean_under_importance_weights(case: cases.Case) -> None:
    # verl weighs a row by the geometric mean of its weights, and means over all rows, those without a token too.
    log_probs, old, advantages, mask = compare.policy(case)
    lengths = mask.sum(-1, keepdims=True).astype(jnp.float64)
    epsilons = lengths / (lengths + 1e-8)  # in the geometric mean of the ratios, of the weights, and in the advantage
    logs = kljax.masked_mean(jnp.log(case.given("is_weights") + 1e-10), mask, axis=-1)[:, None]
    weights = jnp.exp(epsilons * logs) * epsilons
    clips = compare.renamed(case, **CLIPS)
    loss = functools.partial(kljax.gmpo_loss, **clips)
    compare.assert_loss(case, lambda lp: weights * loss(lp, old, advantages, mask), compare.ROW_MEAN)
    d = kljax.log_ratios(log_probs, old, mask)
    outside = (d < -clips["clip_low"]) | (d > clips["clip_high"])
    signs = advantages > 0, advantages < 0
    high, low = (compare.mean((outside & sign).astype(jnp.float64), mask) for sign in signs)
    assert_metrics(case, metric_pg_clipfrac=high, metric_pg_clipfrac_lower=low)


@cases.parametrize(("verl", "compute_policy_loss_reinforce"), file=GENERATED)
def test_reinforce(case: cases.Case) -> None:
    log_probs, advantages, mask = (case.given(name) for name in ("log_probs", "advantages", "mask"))
    weights = case.given("is_weights") if case.params["weights"] else 1.0
    reduction = compare.VERL[case.params["loss_agg_mode"]]
    compare.assert_loss(case, lambda lp: weights * kljax.reinforce_loss(lp, advantages, mask), reduction)
    case.assert_outputs(
        metric_ppo_kl=compare.mean(kljax.ppo_kl(log_probs, case.given("rollout_log_probs"), mask), mask)
    )


@cases.parametrize(("verl", "compute_policy_loss_bypass_mode"), file=GENERATED)
def test_bypass_mode(case: cases.Case) -> None:
    # verl divides by the number of tokens that the rejection leaves. Its weights are data, and see the whole mask.
    names = ("log_probs", "rollout_log_probs", "advantages", "mask")
    (log_probs, rollout, advantages, mask), params = (case.given(name) for name in names), case.params
    kept = mask
    if "rollout_rs" in params:
        low, high = (float(bound) for bound in params["rollout_rs_threshold"].split("_"))
        reduction = {"token_k1": "token", "seq_mean_k1": "mean"}[params["rollout_rs"]]
        bounds = {"lower": jnp.log(low), "upper": jnp.log(high)}
        rejection = kljax.kl_rejection_mask(log_probs, rollout, mask, estimator="k1", reduction=reduction, **bounds)
        kept = mask & rejection
    metrics = {"metric_ppo_kl": compare.mean(kljax.ppo_kl(log_probs, rollout, kept), kept)}
    if params["loss_type"] == "reinforce":
        weights = kljax.importance_weights(
            log_probs,
            rollout,
            mask,
            level=params["rollout_is"],
            upper=params["rollout_is_threshold"],
            log_ratio_clip=20.0,
        )
        weights = jax.lax.stop_gradient(weights)

        def loss(lp: jax.Array) -> jax.Array:
            return weights * kljax.reinforce_loss(lp, advantages, kept)

    else:
        clips = compare.renamed(case, **CLIPS)
        rest, options = (rollout, advantages, kept), {**clips, "dual_clip": 3.0}
        fractions = (
            kljax.clip_fraction(log_probs, *rest, **clips),
            kljax.dual_clip_fraction(log_probs, *rest, dual_clip=3.0),
        )
        metrics |= {
            name: compare.mean(fraction, kept)
            for name, fraction in zip(("metric_pg_clipfrac", "metric_pg_clipfrac_lower"), fractions, strict=True)
        }

        def loss(lp: jax.Array) -> jax.Array:
            return kljax.ppo_clip_loss(lp, *rest, **options)

    compare.assert_loss(case, loss, compare.VERL[params["loss_agg_mode"]], kept)
    case.assert_outputs(**metrics)


@cases.parametrize(("verl", "compute_value_loss"), file=GENERATED)
def test_value_loss(case: cases.Case) -> None:
    values, old, returns, mask = (case.given(name) for name in ("values", "old_values", "returns", "mask"))
    clip = case.params["cliprange_value"]
    reduction = compare.VERL[case.params["loss_agg_mode"]]
    compare.assert_loss(case, lambda v: kljax.value_loss(v, old, returns, mask, clip=clip), reduction)
    clipped = kljax.value_loss(values, old, returns, mask, clip=clip) > kljax.value_loss(values, None, returns, mask)
    case.assert_outputs(metric_vf_clipfrac=compare.mean(clipped.astype(jnp.float64), mask))


@cases.parametrize(("verl", "agg_loss"), file=GENERATED)
def test_reductions_over_a_batch_on_two_devices(case: cases.Case) -> None:
    # Each of two devices divides by the numbers of the whole batch, and by 2 less for the mean of their gradients.
    params = case.params
    tokens, rows, length = params["batch_num_tokens"], params["global_batch_size"], batches.LENGTH
    reductions = {
        "token-mean": Reduction({"mode": "token_mean", "denominator": tokens}),
        "token-sum": Reduction({"mode": "token_sum"}),
        "seq-mean-token-sum": Reduction({"mode": "seq_mean_token_sum", "denominator": rows}),
        "seq-mean-token-mean": Reduction({"mode": "seq_mean_token_mean", "denominator": rows}, "row"),
        "seq-mean-token-sum-norm": Reduction(
            {"mode": "seq_mean_token_sum_norm", "max_length": length, "denominator": rows}
        ),
    }
    reduction = reductions[params["loss_agg_mode"]]._replace(scale=params["dp_size"])
    compare.assert_loss(case, lambda values: values, reduction)
