"""NaN and infinity under the mask, for every public function that takes one: value, gradient, exact zeros.

Each function is called through a builder. Its result and its gradient with poison under the mask must be those with
harmless numbers there, bit for bit; gradients there are exactly 0, and so are outputs that have the mask's shape. A
public function with a `mask` that has no builder fails the test.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax.aggregation import MODES
from tests import oracles

MASK = jnp.asarray(oracles.MASK_KINDS)
SHAPE = MASK.shape
POISON = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
Arrays = dict[str, jax.Array]


class Builder(NamedTuple):
    """How to call a function: which arrays lie under the mask, and the rest of its arguments.

    `call` gets the arrays by name and returns one array or a pytree of arrays.
    """

    arrays: tuple[str, ...]
    call: Callable[..., Any]


LP = ("log_probs", "other")
LOSS = ("log_probs", "other", "advantages")


def lp_pair(function: Callable[..., Any], **kwargs: object) -> Builder:
    return Builder(LP, lambda log_probs, other: function(log_probs, other, MASK, **kwargs))


def policy_loss(function: Callable[..., Any], **kwargs: object) -> Builder:
    return Builder(LOSS, lambda log_probs, other, advantages: function(log_probs, other, advantages, MASK, **kwargs))


def statistic(function: Callable[..., Any], **kwargs: object) -> Builder:
    return Builder(("values",), lambda values: function(values, MASK, **kwargs))


BUILDERS: dict[str, list[Builder]] = {
    "masked": [statistic(kljax.masked)],
    "masked_sum": [statistic(kljax.masked_sum), statistic(kljax.masked_sum, axis=-1)],
    "masked_mean": [statistic(kljax.masked_mean), statistic(kljax.masked_mean, axis=-1)],
    "masked_var": [statistic(kljax.masked_var, ddof=ddof, axis=axis) for ddof in (0, 1) for axis in (None, -1)],
    "masked_whiten": [statistic(kljax.masked_whiten), statistic(kljax.masked_whiten, axis=-1, shift_mean=False)],
    "estimate_kl": [
        *(lp_pair(kljax.estimate_kl, estimator=e) for e in ("none", "k1", "abs", "k2", "k3", "low_var_kl")),
        lp_pair(kljax.estimate_kl, estimator="k3", gradient="k2", value_clip=10.0, log_ratio_clip=20.0),
        Builder(
            ("log_probs", "other", "values"),
            lambda log_probs, other, values: kljax.estimate_kl(
                log_probs, other, MASK, estimator="k3", sampling_log_probs=values, max_ratio=2.0
            ),
        ),
    ],
    "aggregate": [
        statistic(
            kljax.aggregate,
            mode=mode,
            max_length=9.0 if mode == "seq_mean_token_sum_norm" else None,
            group_ids=jnp.array([0, 1, 0, 1, 2, 2]) if mode == "prompt_mean" else None,
            num_groups=3 if mode == "prompt_mean" else None,
            empty_rows=empty_rows,
        )
        for mode in MODES
        for empty_rows in ("drop", "count")
    ],
    "kl_shaped_rewards": [
        Builder(
            ("values", "log_probs", "other"),
            lambda values, log_probs, other: kljax.kl_shaped_rewards(values, log_probs, other, MASK, coef=0.1),
        )
    ],
    "centered_kl_advantages": [
        Builder(
            ("advantages", "log_probs", "other"),
            lambda advantages, log_probs, other: kljax.centered_kl_advantages(
                advantages, log_probs, other, MASK, coef=0.1, estimator="k3"
            ),
        )
    ],
    "reinforce_plus_plus_returns": [
        statistic(kljax.reinforce_plus_plus_returns, gamma=0.9, masked_tokens=rule)
        for rule in ("carry", "reset", "none")
    ],
    "gae": [Builder(("advantages", "values"), lambda advantages, values: kljax.gae(advantages, values, MASK, lam=0.9))],
    "log_ratios": [lp_pair(kljax.log_ratios), lp_pair(kljax.log_ratios, log_ratio_clip=20.0)],
    "token_ratios": [lp_pair(kljax.token_ratios)],
    "sequence_ratios": [lp_pair(kljax.sequence_ratios)],
    "geometric_ratios": [lp_pair(kljax.geometric_ratios)],
    "truncated_importance_weights": [
        lp_pair(kljax.truncated_importance_weights, level=level) for level in ("token", "sequence", "geometric")
    ],
    "rejection_mask": [lp_pair(kljax.rejection_mask, lower=0.5, upper=2.0)],
    "veto_mask": [lp_pair(kljax.veto_mask, min_ratio=0.5)],
    "rollout_kl_loss": [lp_pair(kljax.rollout_kl_loss, estimator=e) for e in ("k1", "abs", "k2", "k3")],
    "reference_kl_loss": [lp_pair(kljax.reference_kl_loss)],
    "ppo_clip_loss": [policy_loss(kljax.ppo_clip_loss), policy_loss(kljax.ppo_clip_loss, dual_clip=3.0)],
    "gspo_loss": [policy_loss(kljax.gspo_loss, gradient=gradient) for gradient in ("token", "sequence")],
    "cispo_loss": [policy_loss(kljax.cispo_loss)],
    "value_loss": [
        Builder(
            LOSS, lambda log_probs, other, advantages: kljax.value_loss(log_probs, other, advantages, MASK, clip=0.2)
        )
    ],
    "ppo_kl": [lp_pair(kljax.ppo_kl)],
    "reference_kl": [lp_pair(kljax.reference_kl)],
    "rollout_kl": [lp_pair(kljax.rollout_kl)],
    "log_prob_abs_diff": [lp_pair(kljax.log_prob_abs_diff)],
    "clip_fraction": [policy_loss(kljax.clip_fraction, level=level) for level in ("token", "sequence", "geometric")],
    "dual_clip_fraction": [policy_loss(kljax.dual_clip_fraction, dual_clip=3.0)],
    "effective_sample_size": [statistic(lambda values, mask: kljax.effective_sample_size(jnp.abs(values), mask))],
    "explained_variance": [lp_pair(kljax.explained_variance)],
}
# These take a mask but no array of values that lie under it.
NO_VALUES_UNDER_THE_MASK = {"token_weights", "last_token_mask", "broadcast_to_tokens", "place_rewards"}
CASES = [
    pytest.param(builder, id=f"{name}-{i}") for name, builders in BUILDERS.items() for i, builder in enumerate(builders)
]


def draw(names: tuple[str, ...]) -> Arrays:
    rng = np.random.default_rng(0)
    return {name: jnp.asarray(rng.normal(-1.0, 0.5, SHAPE)) for name in names}


def poisoned(arrays: Arrays, value: float) -> Arrays:
    return {name: jnp.where(MASK, array, value) for name, array in arrays.items()}


def value_and_grads(builder: Builder, arrays: Arrays) -> tuple[Any, Arrays]:
    def total(arrays: Arrays) -> tuple[jax.Array, Any]:
        out = builder.call(**arrays)
        floats = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
        # Different weights of the outputs, so that gradients of opposite sign do not cancel.
        weighted = [(x * jnp.arange(1, x.size + 1, dtype=x.dtype).reshape(x.shape)).sum() for x in floats]
        return sum(weighted, jnp.zeros(())), out

    (_, out), grads = jax.value_and_grad(total, has_aux=True)(arrays)
    return out, grads


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
@pytest.mark.parametrize("builder", CASES)
def test_nothing_under_the_mask_reaches_value_or_gradient(builder: Builder, poison: float) -> None:
    arrays = draw(builder.arrays)
    clean = value_and_grads(builder, poisoned(arrays, -0.5))
    out, grads = value_and_grads(builder, poisoned(arrays, poison))
    chex.assert_tree_all_finite((out, grads))
    chex.assert_trees_all_equal((out, grads), clean)
    for leaf in jax.tree.leaves(out):
        if leaf.shape == SHAPE:
            chex.assert_trees_all_equal(leaf[~MASK], jnp.zeros_like(leaf[~MASK]))
    for grad in grads.values():
        chex.assert_trees_all_equal(grad[~MASK], jnp.zeros_like(grad[~MASK]))


@pytest.mark.parametrize("builder", CASES)
def test_poison_in_every_array_on_its_own(builder: Builder) -> None:
    # NaN in one array and ordinary numbers in the others: a mask that is applied to only one of them shows here.
    arrays = poisoned(draw(builder.arrays), -0.5)
    clean = value_and_grads(builder, arrays)
    for name, array in arrays.items():
        chex.assert_trees_all_equal(value_and_grads(builder, {**arrays, name: jnp.where(MASK, array, jnp.nan)}), clean)


def test_values_do_reach_value_and_gradient_where_the_mask_is_set() -> None:
    # The poison test would pass for a function that returns zeros: NaN at an unmasked position must show.
    hidden = []
    for name, builders in BUILDERS.items():
        if name in ("rejection_mask", "veto_mask", "clip_fraction", "dual_clip_fraction"):
            continue  # a comparison with NaN is False, not NaN
        for builder in builders[1:] if name == "estimate_kl" else builders:  # estimator "none" is 0 by its meaning
            arrays = {key: array.at[1, 2].set(jnp.nan) for key, array in draw(builder.arrays).items()}
            if not any(bool(jnp.isnan(leaf).any()) for leaf in jax.tree.leaves(builder.call(**arrays))):
                hidden.append(name)
    assert not hidden


@pytest.mark.parametrize("scale", ["std", "none"])
def test_nan_rewards_show_in_their_group_and_only_there(scale: str) -> None:
    rewards, ids = jnp.array([1.0, jnp.nan, 2.0, 0.0]), jnp.array([0, 0, 1, 1])
    advantages = kljax.grpo_advantages(rewards, ids, num_groups=2, scale=scale)
    chex.assert_trees_all_equal(jnp.isnan(advantages), jnp.array([True, True, False, False]))


def functions_with_a_mask() -> set[str]:
    functions = {name: getattr(kljax, name) for name in kljax.__all__}
    return {
        name
        for name, function in functions.items()
        if inspect.isfunction(function) and "mask" in inspect.signature(function).parameters
    }


def test_every_public_function_with_a_mask_is_tested_here() -> None:
    assert functions_with_a_mask() == set(BUILDERS) | NO_VALUES_UNDER_THE_MASK
    assert not set(BUILDERS) & NO_VALUES_UNDER_THE_MASK


@pytest.mark.parametrize("poison", POISON.values(), ids=POISON)
def test_rows_without_a_token_ignore_their_score_and_advantage(poison: float) -> None:
    per_row = jnp.where(MASK.any(-1), 2.0, poison)
    for function in (kljax.broadcast_to_tokens, kljax.place_rewards):
        value, grad = jax.value_and_grad(lambda rows, f=function: f(rows, MASK).sum())(per_row)
        assert jnp.isfinite(value)
        chex.assert_trees_all_equal(grad[0], jnp.zeros(()))
        chex.assert_trees_all_equal(function(per_row, MASK)[~MASK], jnp.zeros(int((~MASK).sum())))


def test_masks_of_integers_are_the_same_masks_and_floats_are_refused() -> None:
    values = draw(("values",))["values"]
    for name in ("masked_mean", "masked_whiten"):
        function = getattr(kljax, name)
        chex.assert_trees_all_equal(function(values, MASK.astype(jnp.int32)), function(values, MASK))
        with pytest.raises(TypeError, match=r"mask: got dtype float64, expected bool"):
            function(values, MASK.astype(jnp.float64))
