"""The options of ART's loss: value and gradient."""

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import cases, compare
from tests.goldens.cases import GENERATED
from tests.goldens.compare import Reduction

MEAN = Reduction({"mode": "token_mean"}, "batch", 1e-6)


LEVELS = {"token": "token", "sequence": "geometric", "average": "average", "geometric_average": "geometric_average"}


def policy_term(case: cases.Case, lp: jax.Array, advantages: jax.Array) -> jax.Array:
    """PPO's surrogate or CISPO's, at the level and under the bounds that the options ask for."""
    _, old, _, mask = compare.policy(case)
    params = case.params
    low, high = params["epsilon"], params["epsilon_high"]
    surrogate = kljax.ppo_clip_loss if params["ppo"] else kljax.cispo_loss
    options = {
        "clip_low": low,
        "clip_high": high,
        "level": LEVELS.get(params.get("importance_sampling_level"), "token"),
    }
    if params.get("mask_prob_ratio"):
        # Tokens outside the bounds have ratio 0, which PPO's and CISPO's clips then raise to their lower bound.
        inside = kljax.rejection_mask(lp, old, mask, lower=1 - low, upper=1 + high)
        lowest = (1 - low) * kljax.reinforce_loss(lp, advantages, mask)
        lost = jnp.maximum(-advantages * (1 - low), 0) if params["ppo"] else lowest
        return jnp.where(inside, surrogate(lp, old, advantages, mask & inside, **options), lost)
    bound = "max_negative_advantage_importance_sampling_weight"
    if params["ppo"] and bound in params:
        # The bound is on the ratio before both terms, so that the clip can be no wider.
        options |= {"max_ratio": params[bound], "clip_high": min(high, params[bound] - 1)}
    return surrogate(lp, old, advantages, mask, **options)


@cases.parametrize(("art", "loss_fn"), file=GENERATED)
def test_art(case: cases.Case) -> None:
    log_probs, old, advantages, mask = compare.policy(case)
    params, mean_kl = case.params, None
    if "kimi_k2_tau" in params:
        advantages = kljax.kimi_advantages(advantages, log_probs, old, mask, tau=params["kimi_k2_tau"])
    if "kl_penalty_coef" in params:
        ref, number = case.given("ref_log_probs"), mask.sum().astype(jnp.float64)
        mean_kl = kljax.masked_mean(log_probs - ref, mask) * (number / (number + 1e-6))
        adjust = {"coef": params["kl_penalty_coef"], "mean_kl": mean_kl}
        advantages, mean_kl = kljax.centered_kl_advantages(advantages, log_probs, ref, mask, **adjust)
    weights = 1.0
    if "truncated_importance_sampling" in params:
        # Without log-probs of the rollout, ART takes the ratio to the old policy a second time.
        pair = (old, case.given("rollout_log_probs")) if params["original"] else (log_probs, old)
        weights = kljax.importance_weights(*pair, mask, upper=params["truncated_importance_sampling"])
    compare.assert_loss(case, lambda lp: weights * policy_term(case, lp, advantages), MEAN)
    case.assert_outputs(**({} if mean_kl is None else {"kl_policy_ref": mean_kl}))


@cases.parametrize(("art", "loss_fn"))
def test_mean_kl_that_art_logs(case: cases.Case) -> None:
    # Of the shared cases; the loss itself is compared with the losses.
    if "kl_policy_ref" in case.outputs:
        mask = case.given("mask")
        mean = kljax.masked_mean(kljax.k1(case.given("log_probs"), case.given("ref_log_probs")), mask)
        number = mask.sum().astype(jnp.float64)
        case.assert_matches(mean * number / (number + 1e-6), case.result("kl_policy_ref"))
    else:
        assert case.params["kl_penalty_coef"] == 0
