import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
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


def test_infinite_kl_raises_the_coefficient_unlike_nan() -> None:
    controller = kljax.adaptive_kl(0.1, target=0.1, horizon=100)
    assert controller.update(controller.init(), np.nan, 10).coef == controller.init().coef
    np.testing.assert_allclose(controller.update(controller.init(), np.inf, 10).coef, 0.1 * 1.02, 1e-14)


def test_updates_of_any_array_type_do_not_recompile() -> None:
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


def test_state_is_a_pytree_of_one_float_array() -> None:
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


def follow(controller: kljax.Controller, plant, steps: int, late: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """KL and coefficient over time; `plant(k, coef)` is the KL of step `k` at the coefficient `late` steps back."""

    def step(carry, k):
        state, coefs = carry
        coefs = jnp.append(coefs[1:], state.coef)
        kl = plant(k, coefs[0])
        return (controller.update(state, kl, 64), coefs), (kl, state.coef)

    first = controller.init()
    start = first, jnp.full(late + 1, first.coef)
    _, (kls, coefs) = jax.lax.scan(step, start, jnp.arange(steps))
    return np.asarray(kls), np.asarray(coefs)


def falling(k: jax.Array, coef: jax.Array) -> jax.Array:
    return 0.4 * jnp.exp(-10 * coef)


def test_pi_follows_its_formula() -> None:
    options = {"target": 0.1, "kp": 0.05, "ki": 0.02, "min_coef": 0.01, "max_coef": 0.12, "max_error": 0.5}
    controller = kljax.pi_kl(0.05, **options)
    state, update, total = controller.init(), jax.jit(controller.update), 0.0
    # Within the error's bound, beyond it, into the upper bound, out of it, into the lower bound.
    for kl in (0.12, 0.5, 0.3, 0.3, np.inf, 0.08, 0.0, 0.0, 0.0, 0.1):
        error = np.clip(kl / 0.1 - 1, -0.5, 0.5)
        # How far the sum may go until it meets its bound.
        slack = (0.12 if error > 0 else 0.01) - 0.05 - 0.05 * error - total
        total += np.sign(error) * np.clip(np.sign(error) * slack, 0, 0.02 * abs(error))
        state = update(state, kl, 64)
        np.testing.assert_allclose(state.coef, np.clip(0.05 + 0.05 * error + total, 0.01, 0.12), 1e-13)
        np.testing.assert_allclose(state.integral, total, 1e-12, 1e-15)


def test_pi_reaches_the_target_of_a_delayed_plant() -> None:
    target, late, settled = 0.1, 10, slice(-100, None)

    def kls_of(controller: kljax.Controller) -> np.ndarray:
        return follow(controller, falling, 400, late)[0][settled]

    for coef in (0.0, 0.02, 0.5):
        kls, coefs = follow(kljax.pi_kl(coef, target=target, kp=0.03, ki=0.005), falling, 400, late)
        np.testing.assert_allclose(kls[settled], target, rtol=1e-5)
        np.testing.assert_allclose(coefs[settled], np.log(4) / 10, rtol=1e-5)
    # Without the sum, a lasting error is what holds the coefficient up.
    assert (kls_of(kljax.pi_kl(0.02, target=target, kp=0.03, ki=0.0)) > 2 * target).all()
    # An adaptive coefficient that moves fast swings about the target for good,
    swinging = kls_of(kljax.adaptive_kl(0.02, target=target, horizon=64))
    assert swinging.max() > 3 * target
    assert swinging.min() < 0.1 * target
    # one that moves slowly is not there yet, and one that starts at 0 never leaves.
    for coef, horizon in ((0.02, 6400), (0.0, 64)):
        assert (kls_of(kljax.adaptive_kl(coef, target=target, horizon=horizon)) > 2 * target).all()


def test_pi_leaves_a_bound_when_the_error_turns() -> None:
    # For 200 updates the KL is twice its target whatever the coefficient; then it is half of it.
    def stuck(k: jax.Array, coef: jax.Array) -> jax.Array:
        return jnp.where(k < 200, 0.2, 0.05)

    _, coefs = follow(kljax.pi_kl(0.1, target=0.1, kp=0.02, ki=0.01, max_coef=0.3), stuck, 260)
    assert coefs[200] == 0.3
    # The sum stopped at the bound: one update at the error -1/2, and the coefficient is below it.
    np.testing.assert_allclose(coefs[201], 0.3 - 1.5 * 0.02 - 0.5 * 0.01, 1e-12)
    np.testing.assert_allclose(np.diff(coefs[201:206]), -0.005, 1e-10)
    # A sum that had gone on would have been at 0.1 + 200 * 0.01 and stayed at the bound for all of the 60 updates.
    free = 0.1 + np.cumsum(0.01 * np.where(np.arange(260) < 200, 1.0, -0.5))
    assert (np.clip(free, 0, 0.3)[200:] == 0.3).all()
    # And the same at the lower bound, from which it rises at once.
    _, coefs = follow(kljax.pi_kl(0.1, target=0.1, kp=0.0, ki=0.01), lambda k, c: jnp.where(k < 99, 0.0, 0.2), 104)
    assert coefs[99] == 0
    np.testing.assert_allclose(np.diff(coefs[99:]), 0.01, 1e-10)


@pytest.mark.parametrize("sign", [1, -1], ids=["above", "below"])
def test_pi_keeps_its_sum_where_the_proportional_part_is_beyond_a_bound(sign: int) -> None:
    controller = kljax.pi_kl(0.2, target=0.1, kp=0.3, ki=0.05, min_coef=0.1, max_coef=0.3, max_error=0.5)
    # A first error of 0.2 puts a part into the sum; 0.2 + 0.3 * 0.5 alone is beyond the bound then, for many updates.
    state = controller.update(controller.init(), 0.1 * (1 + 0.2 * sign), 8)
    for _ in range(5):
        state = controller.update(state, 0.1 * (1 + 0.5 * sign), 8)
        np.testing.assert_allclose(state.coef, 0.2 + 0.1 * sign, 1e-6)
    state = controller.update(state, 0.1, 8)
    np.testing.assert_allclose(state.coef, 0.2 + 0.05 * 0.2 * sign, 1e-6)


def test_pi_ignores_a_batch_without_measurements() -> None:
    controller = kljax.pi_kl(0.1, target=0.1, kp=0.02, ki=0.01)
    state = controller.update(controller.init(), 0.15, 8)
    for kl, samples in ((np.nan, 8), (0.0, 0)):
        jax.tree.map(np.testing.assert_array_equal, controller.update(state, kl, samples), state)
    far = controller.update(state, np.inf, 8)
    jax.tree.map(np.testing.assert_array_equal, far, controller.update(state, 0.2, 8))


def test_scheduled_follows_any_schedule_of_optax() -> None:
    for schedule in (
        optax.cosine_decay_schedule(0.2, 10),
        optax.warmup_constant_schedule(0.0, 0.1, 4),
        optax.piecewise_constant_schedule(0.1, {3: 0.5, 6: 0.5}),
        optax.linear_schedule(0.1, -0.1, 10),
    ):
        with jax.numpy_dtype_promotion("standard"):  # optax compares the count with floats
            _, coefs = follow(kljax.scheduled_kl(schedule), lambda k, coef: coef, 15)
        np.testing.assert_allclose(coefs, [max(float(schedule(k)), 0) for k in range(15)], 1e-6, 1e-9)
    assert kljax.scheduled_kl(optax.constant_schedule(0.5)).init().coef == 0.5


@pytest.mark.parametrize(
    "controller",
    [
        kljax.pi_kl(0.1, target=0.1, kp=0.02, ki=0.01),
        kljax.scheduled_kl(optax.linear_schedule(0.1, 0.0, 10)),
        kljax.adaptive_kl(0.1, target=0.1, horizon=100),
    ],
    ids=["pi", "scheduled", "adaptive"],
)
def test_a_controller_goes_on_from_its_checkpoint(controller: kljax.Controller, tmp_path: pathlib.Path) -> None:
    state = controller.init()
    for kl in (0.3, 0.2):
        state = controller.update(state, kl, 8)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, controller.init())
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert type(restored) is type(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    jax.tree.map(np.testing.assert_array_equal, controller.update(restored, 0.1, 8), controller.update(state, 0.1, 8))
    with jax.enable_x64(False):
        floats = [x.dtype for x in jax.tree.leaves(controller.init()) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert set(floats) == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 0.0}, "target: got 0.0, expected a number > 0"),
        ({"kp": -1.0}, "kp: got -1.0, expected a number >= 0"),
        ({"ki": -1.0}, "ki: got -1.0"),
        ({"min_coef": 0.2}, "coef: got 0.1, expected a number >= 0.2"),
        ({"min_coef": -0.2}, "min_coef: got -0.2"),
        ({"max_coef": 0.05}, "max_coef: got 0.05, expected a number >= 0.1"),
        ({"max_error": 0.0}, "max_error: got 0.0"),
    ],
)
def test_bad_arguments_of_pi_are_refused_at_construction(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kljax.pi_kl(0.1, **{"target": 0.1, "kp": 0.1, "ki": 0.1, **arguments})


def test_entropy_coefficient_steps_and_rests_above_target() -> None:
    """TRL's controller, one window after the other: an infinite entropy before the first."""
    controller = kljax.adaptive_entropy(0.02, target=0.5, delta=0.01, min_coef=0.01, max_coef=0.04)
    state, level, last = controller.init(), 0.02, np.inf
    for entropy in (0.2, 0.3, 0.5, 0.4, 0.6, 0.9, 0.8, 0.7, 0.9, 0.1, np.nan, 0.1):
        np.testing.assert_allclose(state.coef, level if last <= 0.5 else 0.0)
        state = controller.update(state, entropy, 8)
        if not np.isnan(entropy):
            level = min(level + 0.01, 0.04) if entropy <= 0.5 else max(level - 0.01, 0.01)
            last = entropy
    same = controller.update(state, 0.9, 0)
    assert same == state or jax.tree.all(jax.tree.map(lambda x, y: bool(x == y), same, state))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delta": 0.0}, "delta: got 0.0"),
        ({"target": -1.0}, "target: got -1.0"),
        ({"max_coef": 0.01}, "max_coef: got 0.01"),
        ({"min_coef": 0.1}, "coef: got 0.02"),
    ],
)
def test_bad_arguments_of_entropy_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kljax.adaptive_entropy(0.02, **{"target": 0.5, "delta": 0.01, **arguments})
