"""The behaviours the project was founded on, library side. What holds for batches of the trainer is tested there."""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import oracles

MASK = jnp.asarray(oracles.MASK_KINDS)
POLICY_LOSSES = {"ppo": kljax.ppo_clip_loss, "cispo": kljax.cispo_loss, "gspo": kljax.gspo_loss}


def draw(*names: str) -> list[jax.Array]:
    rng = np.random.default_rng(7)
    return [jnp.asarray(rng.normal(-1.0, 0.5, MASK.shape)) for _ in names]


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_raw_kl_survives_reward_shaping(estimator: str, jitted: bool) -> None:
    log_probs, ref = draw("log_probs", "ref")
    scores = jnp.arange(1.0, 7.0)
    arguments = (scores, log_probs, ref, MASK)
    before = [np.array(array) for array in arguments]

    def shape(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        return kljax.kl_shaped_rewards(*arrays, coef=0.25, estimator=estimator)

    rewards, kl = (jax.jit(shape) if jitted else shape)(*arguments)
    raw = jnp.where(MASK, kljax.estimate_kl(log_probs, ref, estimator=estimator), 0)
    chex.assert_trees_all_close(kl, raw, rtol=1e-14)
    for array, copy in zip(arguments, before, strict=True):
        chex.assert_trees_all_equal(np.asarray(array), copy)
    # The rewards are made of that KL: nothing scaled or negated it in between, and the same call gives it again.
    last = jnp.where(kljax.last_token_mask(MASK), scores[:, None], 0)
    chex.assert_trees_all_close(rewards, last - 0.25 * kl, rtol=1e-14)
    chex.assert_trees_all_equal(shape(*arguments)[1] if not jitted else jax.jit(shape)(*arguments)[1], kl)


def test_raw_kl_does_not_depend_on_the_coefficient() -> None:
    log_probs, ref = draw("log_probs", "ref")
    shape = jax.jit(lambda coef: kljax.kl_shaped_rewards(jnp.ones(6), log_probs, ref, MASK, coef=coef))
    chex.assert_trees_all_equal(shape(0.0)[1], shape(5.0)[1])
    chex.assert_trees_all_equal(shape(0.0)[0], kljax.place_rewards(jnp.ones(6), MASK))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("sizes", [[6], [1] * 6, [2, 4], [5, 1]], ids=str)
def test_centred_adjustment_sums_to_zero_whatever_the_split(sizes: list[int], estimator: str) -> None:
    arrays = (*draw("advantages", "log_probs", "ref"), MASK)
    cuts = np.cumsum(sizes)[:-1]
    parts = list(zip(*(jnp.split(array, cuts) for array in arrays), strict=True))
    sums = [kljax.reference_kl(lp, ref, mask, estimator=estimator) for _, lp, ref, mask in parts]
    full = sums[0]
    for more in sums[1:]:
        full = full + more
    results = [kljax.centered_kl_advantages(*part, coef=0.5, estimator=estimator, mean_kl=full) for part in parts]
    shift = jnp.concatenate([adjusted for adjusted, _ in results]) - jnp.where(MASK, arrays[0], 0)
    chex.assert_trees_all_close(shift.sum(), jnp.zeros(()), rtol=0, atol=1e-13)
    chex.assert_trees_all_equal(shift[~MASK], jnp.zeros(int((~MASK).sum())))
    assert jnp.abs(shift).max() > 0.01
    # A token that drifted more than the average loses, one that drifted less gains.
    kl = kljax.estimate_kl(arrays[1], arrays[2], MASK, estimator=estimator)
    chex.assert_trees_all_close(shift, jnp.where(MASK, 0.5 * (full.value() - kl), 0), rtol=1e-12, atol=1e-14)


def test_centred_adjustment_carries_no_gradient_of_the_kl() -> None:
    advantages, log_probs, ref = draw("advantages", "log_probs", "ref")
    grad = jax.grad(lambda lp: kljax.centered_kl_advantages(advantages, lp, ref, MASK, coef=1.0)[0].var())(log_probs)
    chex.assert_trees_all_equal(grad, jnp.zeros_like(grad))


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
@pytest.mark.parametrize("policy", POLICY_LOSSES.values(), ids=POLICY_LOSSES)
def test_rollout_kl_composes_with_any_policy_loss(policy: Callable[..., jax.Array], estimator: str) -> None:
    log_probs, old, rollout, advantages = draw("log_probs", "old", "rollout", "advantages")
    weights = kljax.token_weights(MASK, mode="token_mean")

    def loss(lp: jax.Array, coef: float) -> jax.Array:
        term = kljax.rollout_kl_loss(lp, rollout, MASK, estimator=estimator)
        return ((policy(lp, old, advantages, MASK) + coef * term) * weights).sum()

    def alone(lp: jax.Array) -> jax.Array:
        return kljax.aggregate(kljax.rollout_kl_loss(lp, rollout, MASK, estimator=estimator), MASK, mode="token_mean")

    without, with_term, term = (
        jax.value_and_grad(loss)(log_probs, 0.0),
        jax.value_and_grad(loss)(log_probs, 0.5),
        jax.value_and_grad(alone)(log_probs),
    )
    added = jax.tree.map(lambda a, b: a + 0.5 * b, without, term)
    chex.assert_trees_all_close(with_term, added, rtol=1e-12, atol=1e-14)
    assert jnp.abs(term[1]).max() > 1e-3


def test_rollout_kl_is_independent_of_the_reference_kl() -> None:
    # The rollout term knows the rollout only, the reference term the reference only; each also where the other is NaN.
    log_probs, ref, rollout = draw("log_probs", "ref", "rollout")
    nothing = jnp.full_like(ref, jnp.nan)

    def terms(ref: jax.Array, rollout: jax.Array) -> tuple[jax.Array, jax.Array]:
        reference = jax.grad(lambda lp: kljax.reference_kl_loss(lp, ref, MASK).sum())(log_probs)
        return reference, jax.grad(lambda lp: kljax.rollout_kl_loss(lp, rollout, MASK).sum())(log_probs)

    both = terms(ref, rollout)
    chex.assert_trees_all_equal(terms(nothing, rollout)[1], both[1])
    chex.assert_trees_all_equal(terms(ref, nothing)[0], both[0])
    assert jnp.abs(both[0] - both[1]).max() > 0.1
