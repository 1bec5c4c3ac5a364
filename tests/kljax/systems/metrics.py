"""The metrics that the recorded functions return beside their results, from the arrays of a case.

Most have no name in the table. A mean over tokens is divided as the system divides it, with its epsilon.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import compare, epsilon
from tests.goldens.cases import Case

Metrics = dict[str, jax.Array]
METRICS: dict[tuple[str, str], Callable[[Case], Metrics]] = {}
KEY = jax.random.key(0)
# verl clips the log-ratios of these losses at 20 in its ppo_kl too.
CLIPPED_KL = ("vanilla", "cispo", "dppo_tv", "dppo_kl", "sapo")
PPO_CLIPS = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}
SKYRL_CLIPS = {"clip_low": "eps_clip_low", "clip_high": "eps_clip_high"}
TRL_CLIPS = {"clip_low": "epsilon", "clip_high": "epsilon_high"}


def metrics_of(*functions: tuple[str, str]) -> Callable[[Callable[[Case], Metrics]], Callable[[Case], Metrics]]:
    """Registers what computes the metrics of the given (system, function) pairs."""

    def register(function: Callable[[Case], Metrics]) -> Callable[[Case], Metrics]:
        METRICS.update(dict.fromkeys(functions, function))
        return function

    return register


def mean(metric: Any, mask: jax.Array, eps: float | None = epsilon.EPS) -> jax.Array:
    """A mean over tokens as a system divides it."""
    return compare.mean(metric if isinstance(metric, kljax.WeightedSum) else metric.astype(jnp.float64), mask, eps)


def rows(values: jax.Array) -> jax.Array:
    """The mean over all rows."""
    return jnp.mean(values, dtype=jnp.float64)


def outside(log_probs: jax.Array, old: jax.Array, mask: jax.Array, low: float, high: float) -> jax.Array:
    """Tokens whose ratio is outside the bounds, whatever the sign of their advantage."""
    return mask & ~kljax.rejection_mask(log_probs, old, mask, lower=low, upper=high)


VERL_LOSSES = ("vanilla", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo", "geo_mean", "dro", "clip_cov")


@metrics_of(*(("verl", f"compute_policy_loss_{name}") for name in VERL_LOSSES))
def verl_policy_loss(case: Case) -> Metrics:
    log_probs, *rest = compare.policy(case)
    (old, advantages, mask), clips = rest, compare.renamed(case, **PPO_CLIPS)
    name = case.function.removeprefix("compute_policy_loss_")
    kl = kljax.ppo_kl(log_probs, old, mask, log_ratio_clip=20.0 if name in CLIPPED_KL else None)
    actual = {"metric_ppo_kl": mean(kl, mask)}
    if name in ("dro", "clip_cov"):
        return actual | ({"metric_pg_clipfrac": mean(_dropped(case, clips), mask)} if name == "clip_cov" else {})
    clipped = lower = jnp.zeros(mask.shape, bool)
    if name == "vanilla":
        clipped = kljax.clip_fraction(log_probs, *rest, **clips)
        lower = kljax.dual_clip_fraction(log_probs, *rest, dual_clip=case.params["clip_ratio_c"])
    elif name == "gspo":
        clipped = kljax.clip_fraction(log_probs, *rest, **clips, level="geometric")
    elif name == "cispo":
        clipped = outside(log_probs, old, mask, 1 - clips["clip_low"], 1 + clips["clip_high"])
    elif name == "geo_mean":
        # What is beyond either bound, the one that has no effect as well, apart by the sign of the advantage.
        beyond = outside(log_probs, old, mask, jnp.exp(-clips["clip_low"]), jnp.exp(clips["clip_high"]))
        clipped, lower = beyond & (advantages > 0), beyond & (advantages < 0)
    elif name != "sapo":
        selected = kljax.dppo_mask(log_probs, *rest, **clips, divergence=name.removeprefix("dppo_"))
        clipped, lower = ~selected, selected & (kljax.token_ratios(log_probs, old, mask) > case.params["clip_ratio_c"])
    return actual | {"metric_pg_clipfrac": mean(clipped, mask), "metric_pg_clipfrac_lower": mean(lower, mask)}


def _dropped(case: Case, clips: dict[str, float]) -> jax.Array:
    """Tokens that verl's clip_cov drops."""
    log_probs, *rest = compare.policy(case)
    cov = compare.renamed(case, lower="clip_cov_lb", upper="clip_cov_ub", fraction="clip_cov_ratio")
    loss = kljax.clip_cov_loss(log_probs, *rest, KEY, **cov, **clips)
    return rest[-1] & (loss == 0) & (kljax.ppo_clip_loss(log_probs, *rest, **clips) != 0)


@metrics_of(("verl", "compute_policy_loss_kl_cov"))
def verl_kl_cov(case: Case) -> Metrics:
    log_probs, old, _, mask = compare.policy(case)
    return {"metric_ppo_kl": mean(kljax.log_prob_abs_diff(log_probs, old, mask), mask)}


@metrics_of(("verl", "compute_policy_loss_reinforce"), ("verl", "compute_policy_loss_bypass_mode"))
def verl_bypass_mode(case: Case) -> Metrics:
    # verl divides by the number of tokens that the rejection leaves.
    log_probs, rollout, mask = training(case)
    selected = mask & verl_rejection(case) if "rollout_rs" in case.params else mask
    actual = {"metric_ppo_kl": mean(kljax.ppo_kl(log_probs, rollout, selected), selected)}
    if "metric_pg_clipfrac" in case.outputs:
        rest, clips = (rollout, case.given("advantages"), selected), compare.renamed(case, **PPO_CLIPS)
        actual["metric_pg_clipfrac"] = mean(kljax.clip_fraction(log_probs, *rest, **clips), selected)
        lower = kljax.dual_clip_fraction(log_probs, *rest, dual_clip=3.0)
        actual["metric_pg_clipfrac_lower"] = mean(lower, selected)
    return actual


@metrics_of(("verl", "compute_value_loss"), ("skyrl", "ppo_critic_loss"))
def value_loss(case: Case) -> Metrics:
    values, old, returns, mask = (case.given(name) for name in ("values", "old_values", "returns", "mask"))
    clip = case.params.get("cliprange_value", case.params.get("value_clip"))
    if clip is None:
        return {}
    clipped = kljax.value_loss(values, old, returns, mask, clip=clip) > kljax.value_loss(values, None, returns, mask)
    if case.system == "verl":
        return {"metric_vf_clipfrac": mean(clipped, mask)}
    return {"metric_clipfrac": mean(clipped, mask, None)}


def training(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probs of training and of the rollout, and the mask."""
    return case.given("log_probs"), case.given("rollout_log_probs"), case.given("mask")


def old_policy(case: Case) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The old policy, which SkyRL and OpenRLHF compare with the rollout."""
    return case.given("old_log_probs"), case.given("rollout_log_probs"), case.given("mask")


def verl_rejection(case: Case) -> jax.Array:
    """Tokens that every option of verl keeps; the bounds of a k1 are on the ratio of rollout to training."""
    arrays = training(case)
    selected = arrays[-1]
    names, thresholds = case.params["rollout_rs"], str(case.params["rollout_rs_threshold"])
    for name, threshold in zip(names.split(","), thresholds.split(","), strict=True):
        level, estimator = name.rsplit("_", 1)
        low, high = (math.log(float(bound)) for bound in threshold.split("_")) if "_" in threshold else (None, None)
        bounds = {"lower": low, "upper": float(threshold) if high is None else high}
        options = {"estimator": estimator, "reduction": level.removeprefix("seq_"), "log_ratio_clip": 20.0}
        selected &= kljax.kl_rejection_mask(*arrays, **options, **bounds)
    return selected


@metrics_of(("verl", "compute_rollout_rejection_mask"))
def verl_rejected(case: Case) -> Metrics:
    selected, mask = verl_rejection(case), case.given("mask")
    case.assert_matches(selected.astype(jnp.float64), case.result("kept"))
    assert selected.any()
    assert (mask & ~selected).any()
    return {
        "metric_rollout_rs_masked_fraction": mean(~selected, mask),
        "metric_rollout_rs_seq_masked_fraction": rows((mask & ~selected).any(-1)),
    }


@metrics_of(("verl", "compute_rollout_correction_weights"))
def verl_weights(case: Case) -> Metrics:
    """Mean, spread, extremes and fractions outside the bounds, of tokens or of rows, before a normalization."""
    if case.outputs == ("weights",):
        return {}
    arrays, level, bound = training(case), case.params["rollout_is"], str(case.params["rollout_is_threshold"])
    mask, two_bounds = arrays[-1], "_" in bound
    low, high = (float(part) for part in bound.split("_")) if two_bounds else (1 / float(bound), float(bound))
    mode = {"mode": "mask", "lower": low} if two_bounds else {"mode": "truncate"}
    weights = kljax.importance_weights(*arrays, **mode, upper=high, level=level, log_ratio_clip=20.0)
    number = mask.sum().astype(jnp.float64)
    factor = number / (number + epsilon.EPS)
    average, square = (factor * kljax.masked_mean(values, mask) for values in (weights, jnp.square(weights)))
    size = kljax.effective_sample_size(weights, mask) / factor
    size = size * jnp.square((average + epsilon.EPS) / average) * jnp.square(factor)
    per_row = epsilon.factors(mask, "row")[:, 0] * kljax.masked_mean(weights, mask, axis=-1)
    actual = {"mean": average, "std": jnp.sqrt(square - jnp.square(average)), "eff_sample_size": size}
    actual["seq_mean"] = rows(per_row)
    if level == "token":
        unmasked = jnp.where(mask, weights, jnp.nan)
        actual |= {"max": jnp.nanmax(unmasked), "min": jnp.nanmin(unmasked)}
        scale = factor
    else:
        # Of the ratios before the bounds; a row without a token has ratio 1 and counts.
        extremes = kljax.log_prob_diff_extremes(*arrays, level="sequence")
        actual |= {"max": jnp.exp(extremes.max), "min": jnp.exp(extremes.min)}
        if not mask.any(-1).all():
            actual |= {"max": jnp.maximum(actual["max"], 1), "min": jnp.minimum(actual["min"], 1)}
        scale = rows(mask.any(-1))
    for name, bounds in (("low", {"lower": low}), ("high", {"upper": high})):
        actual[f"ratio_fraction_{name}"] = scale * kljax.ratio_fraction(*arrays, **bounds, level=level).value()
    if two_bounds:
        actual["oob_ratio"] = mean(weights == 0, mask)
    return {f"metric_rollout_is_{name}": value for name, value in actual.items()}


@metrics_of(("verl", "compute_offpolicy_metrics"))
def verl_mismatch(case: Case) -> Metrics:
    """verl's means per token divide by `n + 1e-8`, and its means over rows count those without a token."""
    log_probs, rollout, mask = training(case)
    # Means over a row divide by its length + 1e-8: its values are scaled before.
    row_lp, row_rollout = (x * epsilon.factors(mask, "row") for x in (log_probs, rollout))
    n, empty = mask.sum().astype(jnp.float64), (~mask.any(-1)).sum().astype(jnp.float64)

    def over_rows(metric: kljax.WeightedSum, of_nothing: float = 0.0) -> jax.Array:
        assert metric.weight == len(mask) - empty
        return (metric.sum + of_nothing * empty) / len(mask)

    extremes = kljax.log_prob_diff_extremes(row_lp, row_rollout, mask, level="geometric")
    of_empty = jnp.where(empty > 0, 0.0, jnp.array([-jnp.inf, jnp.inf]))
    squares = kljax.chi_squared(log_probs, rollout, mask, log_ratio_clip=20.0)
    of_rows = kljax.chi_squared(log_probs, rollout, mask, level="sequence", log_ratio_clip=20.0)
    return {
        "kl": mean(kljax.rollout_kl(log_probs, rollout, mask, estimator="k1"), mask),
        "k3_kl": mean(kljax.rollout_kl(log_probs, rollout, mask), mask),
        "training_ppl": over_rows(kljax.perplexity(row_lp, mask), 1.0),
        "training_log_ppl": over_rows(kljax.log_perplexity(row_lp, mask)),
        "rollout_ppl": over_rows(kljax.perplexity(row_rollout, mask), 1.0),
        "rollout_log_ppl": over_rows(kljax.log_perplexity(row_rollout, mask)),
        "log_ppl_diff": over_rows(kljax.log_perplexity_diff(row_lp, row_rollout, mask)),
        "log_ppl_abs_diff": over_rows(kljax.log_perplexity_diff(row_lp, row_rollout, mask, absolute=True)),
        "log_ppl_diff_max": jnp.maximum(-extremes.min, of_empty[0]),
        "log_ppl_diff_min": jnp.minimum(-extremes.max, of_empty[1]),
        "ppl_ratio": over_rows(kljax.perplexity_ratio(row_lp, row_rollout, mask), 1.0),
        # E[r^2] - 1, whose mean of r^2 has the epsilon.
        "chi2_token": (squares.value() + 1) * n / (n + epsilon.EPS) - 1,
        "chi2_seq": over_rows(of_rows),
    }


def controller(case: Case) -> kljax.Controller:
    """The controller that the params describe, in the words of any of the systems."""
    params = case.params
    coef = next(params[name] for name in ("init_kl_coef", "kl_coef", "kl_loss_coef") if name in params)
    target = next((params[name] for name in ("target", "target_kl", "kl_target") if name in params), None)
    if target is None or params.get("adaptive") is False:
        return kljax.fixed_kl(coef)
    return kljax.adaptive_kl(coef, target=target, horizon=params["horizon"])


ESTIMATORS = {"verl": {"kl": "k1"}, "skyrl": {"k3": "low_var_kl"}}
REWARDS = ("token_level_scores", "token_rewards")
MEAN_KL = {"skyrl": compare.ROW_MEAN, **dict.fromkeys(("verl", "trinity"), compare.TRINITY["seq-mean-token-mean"])}


@metrics_of(
    ("trinity", "apply_kl_penalty_to_reward"), ("verl", "apply_kl_penalty"), ("skyrl", "apply_reward_kl_penalty")
)
def kl_in_the_reward(case: Case) -> Metrics:
    """The KL and its coefficient, before and after an update; the rewards are compared here too."""
    mask, params = case.given("mask"), case.params
    name = next(params[key] for key in ("estimator", "kl_penalty", "kl_estimator_type") if key in params)
    estimator = ESTIMATORS.get(case.system, {}).get(name, name)
    scores = case.given(next(key for key in REWARDS if key in case.inputs))
    state = controller(case).init()
    arrays = scores, case.given("old_log_probs"), case.given("ref_log_probs"), mask
    rewards, kl = kljax.kl_shaped_rewards(*arrays, coef=state.coef, estimator=estimator)
    case.assert_matches(rewards, case.result(next(key for key in case.outputs if key.startswith("token_"))))
    current = compare.reduced(kl, mask, MEAN_KL[case.system])
    after = controller(case).update(state, current, len(mask)).coef
    if case.system == "verl":
        return {"coef": after, "metric_reward_kl_penalty": current, "metric_reward_kl_penalty_coeff": state.coef}
    if case.system == "trinity":
        more = {"kl_coef_after": after} if params["adaptive"] else {}
        return {"metric_kl": current, "metric_kl_coef": state.coef, **more}
    more = {"coef": after} if "kl_target" in params else {}
    largest = jnp.abs(kl).max(-1).mean()
    return {"metric_avg_kl": current, "metric_avg_kl_max": largest, "metric_kl_loss_coef": state.coef, **more}


@metrics_of(("trinity", "calculate_kl_loss"))
def trinity_kl_loss(case: Case) -> Metrics:
    log_probs, ref, mask = (case.given(name) for name in ("log_probs", "ref_log_probs", "mask"))
    reduction, coef = compare.TRINITY[case.params["loss_agg_mode"]], case.params["kl_coef"]
    kl = kljax.reference_kl_loss(log_probs, ref, mask, gradient="value", estimator=case.params["estimator"])
    return {"metric_kl_loss": compare.reduced(kl, mask, reduction), "metric_kl_coef": jnp.asarray(coef)}


TRINITY_CLIPS = {"clip_low": "clip_range_low", "clip_high": "clip_range_high"}


def trinity_clips(case: Case) -> dict[str, float]:
    """The bounds of the ratio; `clip_range` is both."""
    both = case.params.get("clip_range")
    return compare.renamed(case, **TRINITY_CLIPS) if both is None else {"clip_low": both, "clip_high": both}


@metrics_of(("trinity", "PPOPolicyLossFn"))
def trinity_ppo(case: Case) -> Metrics:
    log_probs, old, advantages, mask = compare.policy(case)
    if case.params.get("fallback_to_policy_gradient"):
        old = log_probs  # the old policy is taken to be this one
    rest, dual = (old, advantages, mask), case.params.get("clip_ratio_c", 3.0)
    return {
        "metric_pg_clipfrac": mean(kljax.clip_fraction(log_probs, *rest, **trinity_clips(case)), mask),
        "metric_pg_clipfrac_lower": mean(kljax.dual_clip_fraction(log_probs, *rest, dual_clip=dual), mask),
        "metric_ppo_kl": mean(kljax.ppo_kl(log_probs, old, mask, log_ratio_clip=20.0), mask),
    }


@metrics_of(("trinity", "GSPOLossFn"))
def trinity_gspo(case: Case) -> Metrics:
    log_probs, *rest = compare.policy(case)
    old, _, mask = rest
    kl = kljax.log_ratios(old, log_probs, mask)
    per_row = rows(kljax.masked_mean(kl, mask, axis=-1) * epsilon.factors(mask, "row")[:, 0])
    clipped = kljax.clip_fraction(log_probs, *rest, **trinity_clips(case), level="geometric")
    return {"metric_pg_clipfrac": mean(clipped, mask), "metric_ppo_kl": mean(kl, mask), "metric_ppo_kl_seq": per_row}


@metrics_of(("trinity", "SAPOPolicyLossFn"))
def trinity_sapo(case: Case) -> Metrics:
    log_probs, old, advantages, mask = compare.policy(case)
    taus = compare.renamed(case, tau_positive="tau_pos", tau_negative="tau_neg")
    # The gate is the loss at advantage 1 (with the temperature of its sign) without the log-prob.
    loss = kljax.sapo_loss(log_probs, old, jnp.sign(advantages), mask, **taus, through="log_prob")
    gates = loss / -(jnp.sign(advantages) * log_probs)
    return {
        "metric_avg_soft_gate": mean(gates, mask),
        "metric_ppo_kl": mean(kljax.ppo_kl(log_probs, old, mask), mask),
    }


@metrics_of(("trinity", "TOPRPolicyLossFn"))
def trinity_topr(case: Case) -> Metrics:
    log_probs, old, advantages, mask = compare.policy(case)
    loss = kljax.topr_loss(log_probs, old, advantages, mask, threshold=case.params["advantage_threshold"])
    return {"metric_avg_alpha": mean(loss / -(advantages * log_probs), mask)}


@metrics_of(("trinity", "CISPOPolicyLossFn"))
def trinity_cispo(case: Case) -> Metrics:
    log_probs, *rest = compare.policy(case)
    (old, _, mask), bounds = rest, trinity_clips(case) or {"clip_low": 1.0, "clip_high": 0.28}
    masked = compare.renamed(case, mask_low="mask_clip_range_low", mask_high="mask_clip_range_high")
    selected = kljax.cispo_loss(log_probs, *rest, **bounds, **masked) != 0
    kl = kljax.ppo_kl(log_probs, old, mask)
    return {"metric_ppo_kl": mean(kl, mask), "metric_unmasked_frac": mean(selected, mask)}


@metrics_of(("trinity", "ImportanceSamplingLossFn"))
def trinity_importance_sampling(case: Case) -> Metrics:
    log_probs, old, _, mask = compare.policy(case)
    return {"metric_approx_kl": mean(kljax.ppo_kl(log_probs, old, mask, log_ratio_clip=20.0), mask)}


@metrics_of(("trinity", "sPPOPolicyLossFn"))
def trinity_sppo(case: Case) -> Metrics:
    log_probs, old, _, mask = compare.policy(case)
    bound = 1 + case.params["epsilon"]
    return {"metric_pg_clipfrac": mean(outside(log_probs, old, mask, 1 / bound, bound), mask)}


@metrics_of(("trinity", "RECPolicyLossFn"))
def trinity_rec(case: Case) -> Metrics:
    log_probs, *rest = compare.policy(case)
    mode = case.params.get("clip_mode", "none").replace("-", "_")
    bare = kljax.rec_loss(log_probs, *rest, ring_low=0.4, ring_high=0.4, clip_mode=mode)
    return {"metric_pg_clipfrac": mean(bare == 0, rest[-1])}


@metrics_of(
    *(("skyrl", f"{name}_policy_loss") for name in ("ppo", "gspo", "rollout_is", "dppo", "sapo")),
    *(("skyrl", f"compute_policy_loss_{name}") for name in ("cispo", "clip_cov", "kl_cov")),
    ("skyrl", "cross_entropy_loss"),
)
def skyrl_clip_ratio(case: Case) -> Metrics:
    """SkyRL's masked mean divides by the number of tokens; 0 is its constant for a loss without a clip."""
    name = case.function.removeprefix("compute_policy_loss_").removesuffix("_policy_loss")
    if name in ("sapo", "kl_cov", "cross_entropy_loss"):
        return {"metric_clip_ratio": jnp.zeros(())}
    log_probs, *rest = compare.policy(case)
    (old, advantages, mask), clips = rest, compare.renamed(case, **SKYRL_CLIPS)
    if name in ("ppo", "gspo"):
        level = "geometric" if name == "gspo" else "token"
        return {"metric_clip_ratio": mean(kljax.clip_fraction(log_probs, *rest, **clips, level=level), mask, None)}
    if name == "dppo":
        behaviour = case.given("rollout_log_probs") if case.params["anchor"] == "rollout" else old
        bounds = compare.renamed(case, clip_low="delta_low", clip_high="delta_high")
        bounds["divergence"] = case.params["dppo_type"].removeprefix("binary_")
        tokens = mask & ~kljax.dppo_mask(log_probs, behaviour, advantages, mask, **bounds)
        assert tokens.any()
    elif name == "clip_cov":
        cov = compare.renamed(case, lower="clip_cov_lb", upper="clip_cov_ub", fraction="clip_ratio")
        loss = kljax.clip_cov_loss(log_probs, *rest, KEY, **cov, **clips)
        tokens = (loss == 0) & (kljax.ppo_clip_loss(log_probs, *rest, **clips) != 0)
    else:
        bounds = compare.renamed(case, clip_low="cispo_eps_clip_low", clip_high="cispo_eps_clip_high") or clips
        sampler = old if name == "cispo" else case.given("rollout_log_probs")
        tokens = outside(log_probs, sampler, mask, 1 - bounds["clip_low"], 1 + bounds["clip_high"])
    return {"metric_clip_ratio": mean(tokens, mask, None)}


@metrics_of(("skyrl", "importance_sampling_loss"))
def skyrl_importance_sampling(case: Case) -> Metrics:
    log_probs, old, _, mask = compare.policy(case)
    return {"metric_importance_ratio": mean(kljax.token_ratios(log_probs, old, mask), mask, None)}


@metrics_of(("skyrl", "compute_off_policy_correction"))
def skyrl_correction(case: Case) -> Metrics:
    """SkyRL's steps in its order: each sees the mask that those before it leave."""
    params, (old, rollout, all_tokens) = case.params, old_policy(case)
    mask, weights, total = all_tokens, None, len(all_tokens)
    ratios = kljax.token_ratios(old, rollout, mask)
    actual = {"is_ratio_mean": kljax.masked_mean(ratios, mask), "is_ratio_max": jnp.where(mask, ratios, 0).max()}
    if any(name.startswith("outlier") for name in params):
        low, high = (params.get(f"outlier_token_is_threshold_{side}") for side in ("low", "high"))
        selected = kljax.veto_mask(old, rollout, mask, min_ratio=low, max_ratio=high)
        for side, bound in (("over_high", {"upper": high}), ("under_low", {"lower": low or 0.0})):
            tokens = mask & ~kljax.rejection_mask(old, rollout, mask, **bound)
            actual[f"outlier_seq_{side}_ratio"] = rows(tokens.any(-1))
        actual["outlier_seq_masked_ratio"] = rows((mask & ~selected).any(-1))
        mask &= selected
    if "token_mask_is_threshold_low" in params:
        low, high = (params[f"token_mask_is_threshold_{side}"] for side in ("low", "high"))
        selected = kljax.rejection_mask(old, rollout, mask, lower=low, upper=high)
        actual["token_mask_ratio"] = kljax.masked_fraction(selected, mask).value()
        mask &= selected
    if "tis_ratio_type" in params:
        level = params["tis_ratio_type"]
        upper = params[f"{level}_tis_ratio_clip_high"]
        weights = kljax.importance_weights(old, rollout, mask, level=level, upper=upper)
        over = kljax.ratio_fraction(old, rollout, mask, upper=upper, level=level)
        name = {"token": "tis_token_clip_high_ratio", "sequence": "tis_seq_clip_high_ratio"}[level]
        actual[name] = over.value() if level == "token" else over.sum / total
    if "sequence_mask_metric" in params:
        prefix = {"geometric": "geo", "product": "product"}[params["sequence_mask_metric"]]
        level = {"geo": "geometric", "product": "sequence"}[prefix]
        low, high = (params[f"{prefix}_mask_{side}"] for side in ("low", "high"))
        selected = kljax.rejection_mask(old, rollout, mask, level=level, lower=low, upper=high)
        sides = {
            side: kljax.ratio_fraction(old, rollout, mask, **bound, level=level).sum / total
            for side, bound in (("over_high", {"upper": high}), ("under_low", {"lower": low}))
        }
        actual |= {f"{prefix}_sequence_mask_{side}_ratio": value for side, value in sides.items()}
        actual[f"{prefix}_sequence_mask_masked_ratio"] = sides["over_high"] + sides["under_low"]
        mask &= selected
    case.assert_matches(mask.astype(jnp.float64), case.result("kept"))
    if weights is not None:  # SkyRL leaves the weights of masked tokens, which its loss drops
        case.assert_matches(jnp.where(mask, weights, 0), jnp.where(mask, case.result("weights"), 0))
    return {f"metric_{name}": value for name, value in actual.items()}


@metrics_of(("openrlhf", "PolicyLoss"))
def openrlhf_policy_loss(case: Case) -> Metrics:
    log_probs, old, advantages, mask = compare.policy(case)
    params, clips = case.params, compare.renamed(case, clip_low="clip_eps_low", clip_high="clip_eps_high")
    gspo, corrected = params["policy_loss_type"] == "gspo", "is_correction_level" in params
    # With a correction, GSPO's ratio is to the rollout.
    behaviour, level = (case.given("rollout_log_probs") if corrected else old, "geometric") if gspo else (old, "token")
    clipped = kljax.clip_fraction(log_probs, behaviour, advantages, mask, **clips, level=level)
    actual = {"metric_clip_ratio": clipped.value(), "metric_ppo_kl": kljax.ppo_kl(log_probs, old, mask).value()}
    if corrected and not gspo:
        tokens = mask & ~_gate(case)
        by_row = params["is_correction_level"] == "seq"
        actual["metric_is_filter_ratio"] = rows(tokens.any(-1)) if by_row else mean(tokens, mask, None)
        actual["metric_vllm_kl"] = kljax.rollout_kl(*old_policy(case), estimator="k1").value()
    return actual


def _gate(case: Case) -> jax.Array:
    """Tokens that OpenRLHF's correction for the sampler leaves alone."""
    arrays, params = old_policy(case), case.params
    (low, high), by_row = params["is_correction_threshold"], params["is_correction_level"] == "seq"
    if params["is_correction_gating"] == "ratio":
        level = "geometric" if by_row else "token"
        return kljax.rejection_mask(*arrays, level=level, lower=low, upper=high)
    divergence = {"binary_kl": "kl", "tv": "tv"}[params["is_correction_gating"]]
    level = "sequence" if by_row else "token"
    return kljax.divergence_mask(*arrays, divergence=divergence, level=level, max_divergence=high)


@metrics_of(("trl", "GRPOTrainer._compute_loss"))
def trl_grpo(case: Case) -> Metrics:
    log_probs, old, advantages, mask = compare.policy(case)
    collected, params = {}, case.params
    if params["loss_type"] in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo"):
        collected = _trl_clipped(case)
    if params["loss_type"] == "cispo":
        over = (kljax.token_ratios(log_probs, old, mask) > params["epsilon_high"]) & (advantages > 0)
        collected["metric_cispo_clip_ratio"] = mean(over, mask, None)
    if params.get("beta"):
        ref, by_row = case.given("ref_log_probs"), params.get("importance_sampling_level") == "sequence"
        corrected = params["use_bias_correction_kl"]
        sampling = {"sampling_log_probs": old} if corrected and not by_row else {}
        kl = kljax.estimate_kl(log_probs, ref, mask, estimator="k3", **sampling)
        kl = kljax.geometric_ratios(log_probs, old, mask)[:, None] * kl if corrected and by_row else kl
        collected["metric_kl"] = mean(kl, mask, None)
    return collected


def _trl_clipped(case: Case) -> Metrics:
    """Fractions of tokens, or of rows, that are clipped from below and from above."""
    log_probs, old, advantages, mask = compare.policy(case)
    clips = compare.renamed(case, **TRL_CLIPS)
    if case.params.get("importance_sampling_level") == "sequence":
        ratios, of_rows = kljax.geometric_ratios(log_probs, old, mask), case.given("row_advantages")
        low, high = ratios < 1 - clips["clip_low"], ratios > 1 + clips["clip_high"]
        actual = {"low": rows(low & (of_rows < 0)), "high": rows(high & (of_rows > 0))}
    else:
        signs = {"low": jnp.minimum(advantages, 0), "high": jnp.maximum(advantages, 0)}
        if case.params.get("delta", 2.0) < 1 + clips["clip_high"]:
            signs["high"] = jnp.zeros_like(advantages)  # TRL looks at the ratio after its bound, below the clip
        actual = {
            side: kljax.clip_fraction(log_probs, old, sign, mask, **clips).value() for side, sign in signs.items()
        }
    return {f"metric_clip_ratio_{side}_mean": value for side, value in actual.items()}


@metrics_of(("trl", "AsyncGRPOTrainer.compute_loss"))
def trl_async_grpo(case: Case) -> Metrics:
    """The clipped tokens, and an estimate of KL(sampler || policy)."""
    log_probs, sampler, mask = (case.given(name) for name in ("log_probs", "rollout_log_probs", "mask"))
    advantages = kljax.broadcast_to_tokens(case.given("row_advantages"), mask)
    clips, signs = (
        compare.renamed(case, **TRL_CLIPS),
        {"low": jnp.minimum(advantages, 0), "high": jnp.maximum(advantages, 0)},
    )
    clipped = {
        f"metric_clip_ratio_{side}_mean": kljax.clip_fraction(log_probs, sampler, sign, mask, **clips).value()
        for side, sign in signs.items()
    }
    return {**clipped, "metric_kl": mean(kljax.k3(sampler, log_probs), mask, None)}


@metrics_of(("trl", "GMPOTrainer._compute_loss"))
def trl_gmpo(case: Case) -> Metrics:
    log_probs, old, advantages, mask = compare.policy(case)
    clips, difference = compare.renamed(case, **TRL_CLIPS), kljax.log_ratios(log_probs, old, mask)
    low = (difference < -clips["clip_low"]) & (advantages < 0)
    high = (difference > clips["clip_high"]) & (advantages > 0)
    actual = {
        "metric_clip_ratio_low_mean": mean(low, mask, None),
        "metric_clip_ratio_high_mean": mean(high, mask, None),
    }
    if case.params["beta"]:
        kl = kljax.estimate_kl(log_probs, case.given("ref_log_probs"), mask)
        actual["metric_kl"] = mean(kl, mask, None)
    return actual


@metrics_of(("art", "loss_fn"))
def art(case: Case) -> Metrics:
    if "kl_policy_ref" not in case.outputs:
        assert not case.params.get("kl_penalty_coef")
        return {}
    log_probs, ref, mask = (case.given(name) for name in ("log_probs", "ref_log_probs", "mask"))
    return {"kl_policy_ref": mean(kljax.k1(log_probs, ref), mask, 1e-6)}
