"""Functions that no release can be called for, on results recorded in PyTorch from their published formulas."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests.kljax.calls import traced_program

with np.load(Path(__file__).parents[1] / "goldens" / "formulas" / "formulas.npz") as file:
    FORMULAS: Mapping[str, np.ndarray] = dict(file)
MASK, GROUPS = FORMULAS["in/mask"], {"group_ids": FORMULAS["in/group_ids"], "num_groups": 2}
OLD, REF, ADVANTAGES = (FORMULAS[f"in/{name}"] for name in ("old_log_probs", "ref_log_probs", "token_advantages"))
ROW_ADVANTAGES = np.where(MASK, FORMULAS["in/row_advantages"][:, None], 0)
BALANCES = {"positive": 0.4, "zero": 0.0, "negative": -0.4}

Loss = Callable[[jax.Array], jax.Array]


def total(mode: str, **options) -> jax.Array:
    return kljax.token_weights(MASK, mode=mode, **options)


LOSSES: Mapping[str, Loss] = {
    "m2po": lambda x: (kljax.m2po_loss(x, OLD, ADVANTAGES, MASK, threshold=0.04) * total("token_mean")).sum(),
    "gvpo": lambda x: (
        kljax.gvpo_loss(x, OLD, ROW_ADVANTAGES, MASK, **GROUPS, coef=0.1) * total("seq_mean_token_mean")
    ).sum(),
    "flowrl": lambda x: (
        kljax.flowrl_loss(
            x,
            OLD,
            REF,
            ROW_ADVANTAGES,
            MASK,
            **GROUPS,
            log_partition=FORMULAS["in/turn_scores"][:, 0],
            reward_scale=2.0,
            max_weight=1.5,
        )
        * total("seq_mean_token_mean")
    ).sum(),
}


def test_recorded_formulas_are_all_compared():
    names = {name.partition("/")[0] for name in FORMULAS if not name.startswith("in/")}
    others = {"topd", "turn_credit", "advantage_balance", "loglinear", "bema", "adaptive_entropy"}
    assert names == {*LOSSES, *others}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_the_recorded_formula(name):
    value, gradient = jax.jit(jax.value_and_grad(LOSSES[name]))(FORMULAS["in/log_probs"])
    np.testing.assert_allclose(value, FORMULAS[f"{name}/value"], rtol=1e-12)
    np.testing.assert_allclose(gradient, FORMULAS[f"{name}/grad"], rtol=1e-12, atol=1e-15)
    assert np.abs(FORMULAS[f"{name}/grad"]).max() > 1e-3


def test_second_moment_mask_drops_the_recorded_tokens():
    mask = traced_program(functools.partial(kljax.second_moment_mask, threshold=0.04))
    remaining = mask(FORMULAS["in/log_probs"], OLD, ADVANTAGES, MASK)
    np.testing.assert_array_equal(remaining, FORMULAS["m2po/kept"])
    assert 0 < FORMULAS["m2po/kept"].sum() < MASK.sum()


def test_topd_advantages_equal_the_recorded_formula():
    advantages = traced_program(functools.partial(kljax.topd_advantages, **GROUPS, alpha=0.3))(OLD, REF, MASK)
    np.testing.assert_allclose(advantages, FORMULAS["topd/value"], rtol=1e-12, atol=1e-13)


def test_turn_credit_equals_the_recorded_formula():
    arrays = [FORMULAS[f"in/{name}"] for name in ("rewards", "turn_scores", "scored", "turn_ids")]
    credit = traced_program(functools.partial(kljax.turn_credit_advantages, **GROUPS, coef=0.8, gamma=0.6))
    advantages = credit(*arrays, MASK)
    np.testing.assert_allclose(advantages, FORMULAS["turn_credit/value"], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", BALANCES)
def test_balanced_advantages_equal_the_recorded_formula(name):
    weights = FORMULAS["in/weights"]
    advantages = kljax.balanced_advantages(ADVANTAGES, MASK, balance=BALANCES[name], weights=weights)
    np.testing.assert_allclose(advantages, FORMULAS[f"advantage_balance/{name}"], rtol=1e-12)


def test_loglinear_policy_equals_the_recorded_formula():
    arrays = FORMULAS["in/log_probs"], OLD, FORMULAS["in/versions"], MASK
    np.testing.assert_allclose(kljax.loglinear_log_probs(*arrays, version=8), FORMULAS["loglinear/value"], rtol=1e-12)


def test_bema_equals_the_recorded_formula():
    initial, *later = FORMULAS["in/parameters"]
    average, references = initial, []
    for step, params in enumerate(later, start=1):
        average, reference = kljax.bema_reference(average, params, initial, step, min_rate=0.25)
        references.append(reference)
    np.testing.assert_allclose(jnp.stack(references), FORMULAS["bema/value"], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(average, FORMULAS["bema/average"], rtol=1e-12, atol=1e-13)


def test_entropy_coefficient_equals_the_recorded_formula():
    controller = kljax.adaptive_entropy(0.01, target=0.2, delta=0.004, min_coef=0.002, max_coef=0.016)
    state, coefs = controller.init(), []
    for entropy in FORMULAS["in/entropies"]:
        coefs.append(state.coef)
        state = controller.update(state, entropy, 8)
    np.testing.assert_allclose(coefs, FORMULAS["adaptive_entropy/value"], rtol=1e-12)
    assert len({*np.round(FORMULAS["adaptive_entropy/value"], 6)}) > 3
