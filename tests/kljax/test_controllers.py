import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax


def test_fixed_controller_never_changes() -> None:
    controller = kljax.fixed_kl(0.3)
    state = controller.init()
    for kl in (0.0, 5.0, np.nan):
        state = controller.update(state, kl, 100)
    assert state.coef == 0.3


def test_adaptive_controller_follows_ziegler() -> None:
    controller = kljax.adaptive_kl(0.1, target=0.1, horizon=10_000)
    state, expected = controller.init(), 0.1
    update = jax.jit(controller.update)
    for kl, samples in ((0.5, 256), (0.0, 256), (0.11, 64), (0.1, 8)):
        expected *= 1 + np.clip(kl / 0.1 - 1, -0.2, 0.2) * samples / 10_000
        state = update(state, kl, samples)
        np.testing.assert_allclose(state.coef, expected, 1e-14)


def test_the_recorded_sequence_of_verl() -> None:
    controller = kljax.adaptive_kl(0.1, target=0.1, horizon=1e4)
    state = controller.update(controller.init(), 0.5, 256)
    np.testing.assert_allclose(state.coef, 0.100512, 1e-12)
    np.testing.assert_allclose(controller.update(state, 0.0, 256).coef, 0.09999737856, 1e-10)


def test_the_coefficient_never_falls_below_zero() -> None:
    controller = kljax.adaptive_kl(0.1, target=0.1, horizon=100)
    state = controller.update(controller.init(), 0.0, 1000)
    assert state.coef == 0


def test_a_kl_that_is_not_a_number_leaves_the_coefficient_and_an_infinite_one_raises_it() -> None:
    controller = kljax.adaptive_kl(0.1, target=0.1, horizon=100)
    assert controller.update(controller.init(), np.nan, 10).coef == controller.init().coef
    np.testing.assert_allclose(controller.update(controller.init(), np.inf, 10).coef, 0.1 * 1.02, 1e-14)


def test_updates_do_not_recompile_and_take_arrays_of_any_type() -> None:
    controller = kljax.adaptive_kl(0.1, target=0.1, horizon=100)
    traces = []

    @jax.jit
    def update(state, kl, samples):
        traces.append(1)
        return controller.update(state, kl, samples)

    state = update(controller.init(), jnp.float32(0.2), jnp.int32(5))
    state = update(state, jnp.float32(0.3), jnp.int32(6))
    assert len(traces) == 1
    assert state.coef.dtype == jnp.float64


def test_the_state_is_a_pytree_of_one_float_array() -> None:
    (leaf,) = jax.tree.leaves(kljax.fixed_kl(1).init())
    assert leaf.shape == ()
    assert leaf.dtype == jnp.float64
    with jax.enable_x64(False):
        assert kljax.adaptive_kl(1, target=1, horizon=1).init().coef.dtype == jnp.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coef": -0.1, "target": 0.1, "horizon": 10}, "coef: got -0.1, expected a number >= 0"),
        ({"coef": 0.1, "target": 0, "horizon": 10}, "target: got 0, expected a number > 0"),
        ({"coef": 0.1, "target": 0.1, "horizon": -3}, "horizon: got -3"),
        ({"coef": float("nan"), "target": 0.1, "horizon": 10}, "coef: got nan"),
    ],
)
def test_bad_arguments_are_refused_at_construction(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kljax.adaptive_kl(**arguments)


def test_a_negative_fixed_coefficient_is_refused() -> None:
    with pytest.raises(ValueError, match="coef"):
        kljax.fixed_kl(-1)
