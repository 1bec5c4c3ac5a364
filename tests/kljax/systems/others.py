"""Controllers, placements, metrics and value losses on recorded cases."""

from typing import Any

import jax
import jax.numpy as jnp

import kljax
from kljax.systems import Entry
from kljax.systems._call import run
from tests.goldens import compare, epsilon
from tests.goldens.cases import Case
from tests.kljax.systems.estimators import reduction
from tests.kljax.systems.exercises import call_of, exercise, options, part
from tests.kljax.systems.losses import policy_loss

SCORES = ("token_level_scores", "token_rewards", "rewards")
ROWS = {"mode": "seq_mean_token_mean", "empty_rows": "count"}


def controlled(entry: Entry, case: Case) -> kljax.Controller:
    """The controller of an entry, or of the entry that the case names, with the numbers of the case."""
    renamed = {"init_kl_coef": "coef", "kl_coef": "coef", "kl_loss_coef": "coef", "target_kl": "target"}
    renamed |= {"kl_target": "target", "target": "target", "horizon": "horizon"}
    call = call_of(part("controller", entry, case))
    numbers = {argument: case.params[parameter] for parameter, argument in renamed.items() if parameter in case.params}
    wanted = {"fixed_kl": ("coef",), "adaptive_kl": ("coef", "target", "horizon")}[call.function]
    arguments = {name: numbers.get(name, call.arguments.get(name)) for name in wanted}
    coef = arguments.pop("coef")
    return getattr(kljax, call.function)(coef, **arguments)


@exercise(
    *((system, f"{kind}KLController") for system in ("verl", "skyrl", "openrlhf") for kind in ("Fixed", "Adaptive"))
)
def trajectory(entry: Entry, case: Case) -> None:
    controller = controlled(entry, case)
    state, coefs = controller.init(), []
    for kl, number in zip(case.given("kls"), case.given("num_samples"), strict=True):
        state = controller.update(state, kl, number)
        coefs.append(state.coef)
    case.assert_matches(jnp.stack(coefs), case.result("coefs"))


@exercise(("trinity", "apply_kl_penalty_to_reward"), ("verl", "apply_kl_penalty"), ("skyrl", "apply_reward_kl_penalty"))
def kl_in_the_reward(entry: Entry, case: Case) -> None:
    """Rewards with the KL in them; for a controller the coefficient after the update as well."""
    mask, params, placement = case.given("mask"), case.params, part("placement", entry, case)
    state = controlled(entry, case).init() if part("controller", entry, case) else None
    name = params.get("estimator", params.get("kl_penalty", params.get("kl_estimator_type")))
    estimator = kljax.systems.arguments(f"{case.system}/{name}", kind="kl")["estimator"]
    coef = params.get("kl_coef", params.get("kl_loss_coef")) if state is None else state.coef
    arrays = {"scores": case.given(next(n for n in SCORES if n in case.inputs)), "mask": mask}
    arrays |= {"log_probs": case.given("old_log_probs"), "ref_log_probs": case.given("ref_log_probs")}
    if placement is None:
        placement = kljax.systems.entries(system=case.system, kind="placement")[0]
    rewards, kl = run(call_of(placement), arrays, coef=coef, estimator=estimator)
    output = next(n for n in ("token_rewards", "token_level_rewards") if n in case.outputs)
    case.assert_matches(rewards, jnp.where(mask, case.result(output), 0))
    if "coef" in case.outputs:
        mean = kljax.aggregate(kl * epsilon.factors(mask, "row"), mask, **ROWS)
        after = controlled(entry, case).update(state, mean, len(mask))
        case.assert_matches(after.coef, case.result("coef"))


@exercise(("openrlhf", "compute_reward"))
def openrlhf_reward(entry: Entry, case: Case) -> None:
    mask, kl, params = case.given("mask"), case.given("kl"), case.params
    scores = case.given("rewards")
    if "reward_clip_range" in params:
        scores = jnp.clip(scores, *params["reward_clip_range"])
    arrays = {"scores": scores, "log_probs": kl, "ref_log_probs": jnp.zeros_like(kl), "mask": mask}
    # The recorded function is given the estimate, bounded before.
    rewards, _ = run(call_of(entry), arrays, coef=params["kl_coef"], value_clip=None)
    output = next(n for n in ("token_rewards", "token_level_rewards") if n in case.outputs)
    case.assert_matches(rewards, jnp.where(mask, case.result(output), 0))


@exercise(("trinity", "calculate_kl_loss"))
def trinity_kl_loss(entry: Entry, case: Case) -> None:
    mask, ref, params = case.given("mask"), case.given("ref_log_probs"), case.params
    rows = kljax.systems.entries(system="trinity", kind="reduction", name=params["loss_agg_mode"])
    reduced, estimator = reduction(rows[0], case), kljax.systems.arguments(f"trinity/{params['estimator']}")

    def loss(lp: jax.Array) -> jax.Array:
        arrays = {"log_probs": lp, "ref_log_probs": ref, "mask": mask}
        return params["kl_coef"] * compare.reduced(run(call_of(entry), arrays, **estimator), mask, reduced)

    case.assert_value_and_grad(loss, "log_probs")


@exercise(("skyrl", "rollout_kl_loss"))
def skyrl_rollout_kl(entry: Entry, case: Case) -> None:
    name, mask, rollout = case.params["rollout_kl_estimator_type"], case.given("mask"), case.given("rollout_log_probs")
    meaning = kljax.systems.arguments(f"skyrl/{name}")

    def loss(lp: jax.Array) -> jax.Array:
        if name == "k3":  # the clamped one, as the entry's note says
            return kljax.aggregate(kljax.estimate_kl(lp, rollout, mask, **meaning), mask, **ROWS)
        arrays = {"log_probs": lp, "rollout_log_probs": rollout, "mask": mask}
        return kljax.aggregate(run(call_of(entry), arrays, **meaning), mask, **ROWS)

    case.assert_value_and_grad(loss, "log_probs")


@exercise(("verl", "masked_mean"), ("verl", "masked_var"))
def verl_statistic(entry: Entry, case: Case) -> None:
    mask, axis = case.given("mask"), case.params.get("axis")
    keywords: dict[str, Any] = {"axis": axis}
    if "unbiased" in case.params:
        keywords["ddof"] = int(case.params["unbiased"])
    factors = epsilon.factors(mask, "batch" if axis is None else "row")

    def statistic(values: jax.Array) -> jax.Array:
        if entry.name == "masked_var":  # the epsilon in the mean that is subtracted is of second order
            return factors.min() * run(call_of(entry), {"values": values, "mask": mask}, **keywords)
        return run(call_of(entry), {"values": values * factors, "mask": mask}, **keywords)

    case.assert_value_and_grad(statistic, "advantages")


@exercise(("verl", "masked_whiten"))
def verl_whiten(entry: Entry, case: Case) -> None:
    # verl also whitens the masked positions, which moves the gradient of the unmasked ones; here they are exactly 0.
    values, mask, shift = case.given("advantages"), case.given("mask"), case.params["shift_mean"]
    case.assert_value_and_grad(lambda v: epsilon.whiten(v, mask, shift_mean=shift), "advantages")
    whitened = run(call_of(entry), {"values": values, "mask": mask}, shift_mean=shift, eps=epsilon.EPS)
    case.assert_matches(whitened, jnp.where(mask, case.result("value"), 0))


@exercise(("verl", "compute_offpolicy_metrics"))
def verl_mismatch(entry: Entry, case: Case) -> None:
    """verl's means per token divide by n + 1e-8, and its means over rows count those without a token."""
    name, mask = entry.name.rpartition("/")[2], case.given("mask")
    scaled = "ppl" in name
    factors = epsilon.factors(mask, "row") if scaled else 1.0
    lp, rollout = case.given("log_probs") * factors, case.given("rollout_log_probs") * factors
    arrays = {"log_probs": rollout if name.startswith("rollout") else lp, "rollout_log_probs": rollout, "mask": mask}
    metric = run(call_of(entry), arrays | {"sampling_log_probs": rollout})
    if name.endswith(("max", "min")):
        bound = jnp.maximum if name.endswith("max") else jnp.minimum
        case.assert_matches(jnp.where(mask.any(-1).all(), metric, bound(metric, 0)), case.result(name))
        return
    n = mask.sum().astype(jnp.float64)
    if scaled or name == "chi2_seq":
        empty = (~mask.any(-1)).sum().astype(jnp.float64)
        of_empty = 1.0 if name in ("training_ppl", "rollout_ppl", "ppl_ratio") else 0.0
        value = (metric.sum + of_empty * empty) / len(mask)
    elif name == "chi2_token":
        value = (metric.value() + 1) * n / (n + epsilon.EPS) - 1
    else:
        value = metric.value() * n / (n + epsilon.EPS)
    case.assert_matches(value, case.result(name))


def _verl_ppo_kl(entry: Entry, case: Case) -> None:
    arrays = {name: case.given(name) for name in ("log_probs", "old_log_probs", "mask")}
    metric = run(call_of(entry), arrays)
    case.assert_matches(compare.mean(metric, arrays["mask"]), case.result("metric_ppo_kl"))


def _art_kl_policy_ref(entry: Entry, case: Case) -> None:
    mask = case.given("mask")
    values = case.given("log_probs") - case.given("ref_log_probs")
    n = mask.sum().astype(jnp.float64)
    mean = run(call_of(entry), {"values": values, "mask": mask}) * n / (n + 1e-6)
    case.assert_matches(mean, case.result("kl_policy_ref"))


def _verl_clip_fraction(entry: Entry, case: Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    arrays = {"log_probs": log_probs, "old_log_probs": old, "advantages": advantages, "mask": mask}
    # verl clips the log-ratio at 20, as the table says; only a dual clip above exp(20) shows it.
    far = log_probs - old
    arrays["log_probs"] = jnp.where(jnp.abs(far) > 20, old + 20 * jnp.sign(far), log_probs)
    metric = run(call_of(entry), arrays, **options(entry, case))
    case.assert_matches(compare.mean(metric, mask), case.result(f"metric_{entry.name.rpartition('/')[2]}"))


# Metrics that are recorded beside a loss.
BESIDE = {
    "verl/actor/ppo_kl": _verl_ppo_kl,
    "verl/actor/pg_clipfrac": _verl_clip_fraction,
    "verl/actor/pg_clipfrac_lower": _verl_clip_fraction,
    "art/kl_policy_ref": _art_kl_policy_ref,
}


@exercise(("verl", "compute_policy_loss_vanilla"), ("art", "loss_fn"))
def loss_or_metric(entry: Entry, case: Case) -> None:
    BESIDE.get(entry.key, policy_loss)(entry, case)


@exercise(("verl", "compute_value_loss"), ("skyrl", "ppo_critic_loss"), ("openrlhf", "ValueLoss"))
def value_loss(entry: Entry, case: Case) -> None:
    arrays = {name: case.given(name) for name in ("old_values", "returns", "mask")}
    if entry.name == "critic/vf_clipfrac":
        if "metric_vf_clipfrac" in case.outputs:
            metric = run(call_of(entry), {**arrays, "values": case.given("values")}, **options(entry, case))
            case.assert_matches(compare.mean(metric, arrays["mask"]), case.result("metric_vf_clipfrac"))
        return
    if case.system == "verl":
        reduced = compare.VERL[case.params["loss_agg_mode"]]
    elif case.system == "openrlhf":
        mode = "token-mean" if case.params["token_level_loss"] else "seq-mean-token-mean"
        reduced = reduction(kljax.systems.entries(system="openrlhf", kind="reduction", name=mode)[0], case)
    else:
        reduced = compare.ROW_MEAN
    compare.assert_loss(case, lambda v: run(call_of(entry), {**arrays, "values": v}, **options(entry, case)), reduced)
