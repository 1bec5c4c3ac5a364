"""References that follow the policy: which weights move and how far, which are stored twice, and in which dtype."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kljax
from tests import tiny
from train.config.plan import Plan, follows_policy
from train.config.schema import Config
from train.models.sharding import replicated
from train.references.follow import (
    current_reference,
    make_follow,
    scored_part,
    start_following,
    with_abstract_reference,
)
from train.rl.policy import ScoredPolicy
from train.rl.state import TrainState, initial_state

NEEDED = "kl.loss.coef=0.1"
MODEL = tiny.model_of(tiny.config_of())
EMA = "reference={source: ema, decay: 0.75}"
BEMA = "reference={source: bema, power: 0.5, bias_power: 0.25, multiplier: 2.0, lag: 4.0, every: 2}"
REFRESHED = "reference={source: base, refresh_every: 2}"


def config_of(*overrides: str) -> Config:
    return tiny.config_of(NEEDED, *overrides)


def state_of(part: str, value: float, dtype=jnp.float32) -> TrainState:
    trainable = {part: {"w": jnp.full(3, value, dtype)}, "value_head": {"kernel": jnp.ones(2)}}
    state = initial_state(trainable, optax.identity(), {}, replicated(tiny.mesh_of()))
    return jax.device_put(state, replicated(tiny.mesh_of()))


def begin(config: Config, state: TrainState, found: kljax.Policy) -> TrainState:
    moving = start_following(config, ScoredPolicy(MODEL, found), state.trainable)
    return dataclasses.replace(state, reference=moving)


def followed(config: Config, state: TrainState, values: list[float]) -> list[np.ndarray]:
    """The moving half after each step, when the policy is at these values."""
    follow, (part,) = make_follow(config, state.reference), [name for name in state.trainable if name != "value_head"]
    moving, seen = state.reference, []
    for step, value in enumerate(values, start=1):
        trained = {"w": jnp.full(3, value, state.trainable[part]["w"].dtype)}
        moving = follow(moving, trained, jnp.int32(step))
        seen.append(np.asarray(scored_part(moving)["w"]))
    return seen


@pytest.mark.parametrize("part", ["params", "adapter"])
def test_average_follows_the_policy_after_each_step(part):
    state = state_of(part, 1.0)
    state = begin(config_of(EMA), state, kljax.Policy(None))
    values, expected, average = [3.0, 2.0, 7.0], [], 1.0
    for value in values:
        average = 0.75 * average + 0.25 * value
        expected.append(np.full(3, average))
    np.testing.assert_allclose(followed(config_of(EMA), state, values), expected, rtol=1e-7)


@pytest.mark.parametrize("part", ["params", "adapter"])
def test_corrected_average_equals_the_library(part):
    """It moves at every second step, by the formula in float64, and holds still in between."""
    config, state = config_of(BEMA), state_of(part, 1.0)
    state = begin(config, state, kljax.Policy(None))
    values, average, expected = [3.0, 2.0, 7.0, 5.0, 6.0], 1.0, []
    reference = average
    for step, value in enumerate(values, start=1):
        if step % 2 == 0:
            age = 4 + 2 * step
            average += age**-0.5 * (value - average)
            reference = average + age**-0.25 * (value - 1.0)
        expected.append(np.full(3, reference))
    seen = followed(config, state, values)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    start, now = {"w": jnp.ones(3)}, {"w": jnp.full(3, 2.0)}
    options = {"power": 0.5, "bias_power": 0.25, "multiplier": 2.0, "lag": 4.0}
    _, library = jax.jit(lambda: kljax.bema_reference(start, now, start, 2, **options))()
    np.testing.assert_array_equal(seen[1], library["w"])


def test_corrected_average_scores_its_reference():
    config, state = config_of(BEMA), state_of("params", 1.0, jnp.bfloat16)
    state = begin(config, state, kljax.Policy(None))
    moved = make_follow(config, state.reference)(state.reference, {"w": jnp.full(3, 3.0, jnp.bfloat16)}, jnp.int32(2))
    assert {leaf.dtype for leaf in jax.tree.leaves(moved)} == {jnp.dtype("float32")}
    scored = current_reference(
        ScoredPolicy(MODEL, kljax.Policy(None)), dataclasses.replace(state, reference=moved)
    ).policy.params["w"]
    np.testing.assert_array_equal(scored, np.asarray(moved.reference["w"]).astype(jnp.bfloat16))
    np.testing.assert_allclose(moved.average["w"], 1 + 2 * 8**-0.5, rtol=1e-6)
    np.testing.assert_array_equal(moved.initial["w"], 1.0)


def test_refreshed_reference_is_the_last_refreshed_policy():
    state = begin(config_of(REFRESHED), state_of("params", 1.0), kljax.Policy({"w": jnp.full(3, 5.0)}))
    seen = followed(config_of(REFRESHED), state, [2.0, 3.0, 4.0, 6.0, 7.0])
    np.testing.assert_array_equal(np.array(seen)[:, 0], [5, 3, 3, 6, 6])


def test_refreshed_adapter_starts_from_zeros():
    base = {"base": jnp.ones(2)}
    state = begin(config_of(REFRESHED), state_of("adapter", 1.0), kljax.Policy(None))
    np.testing.assert_array_equal(state.reference["w"], np.zeros(3))
    now = current_reference(ScoredPolicy(MODEL, kljax.Policy(None)), state)
    assert now.on_base(base).policy.params is base
    assert now.policy.adapter["w"] is state.reference["w"]


@pytest.mark.parametrize("option", [EMA, REFRESHED, BEMA])
def test_moving_half_has_separate_buffers(option):
    state = state_of("params", 1.0)
    state = begin(config_of(option), state, kljax.Policy(state.trainable["params"]))
    arrays = [*jax.tree.leaves(state.reference), state.trainable["params"]["w"]]
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == len(arrays)
    old = scored_part(state.reference)["w"]
    make_follow(config_of(option), state.reference)(state.reference, state.trainable["params"], jnp.int32(1))
    assert old.is_deleted()


def test_average_of_bfloat16_weights_stays_in_float32():
    """At a decay of 0.999 a step of the average is below the rounding of bfloat16, where it would stand still."""
    config = config_of("reference={source: ema, decay: 0.999}")
    state = begin(config, state_of("params", 1.0, jnp.bfloat16), kljax.Policy({}))
    seen = followed(config, state, [2.0] * 10)
    np.testing.assert_allclose(seen[-1], 2 - 0.999**10, rtol=1e-6)
    now = current_reference(
        ScoredPolicy(MODEL, kljax.Policy(None)), dataclasses.replace(state, reference={"w": seen[-1]})
    )
    assert now.policy.params["w"].dtype == jnp.bfloat16
    state = begin(config_of(REFRESHED), state_of("params", 1.0, jnp.bfloat16), kljax.Policy({"w": jnp.ones(3)}))
    assert state.reference["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize(("option", "shape"), [(EMA, (1, 4, 1)), (BEMA, (2, 2, 2))])
def test_abstract_moving_half_has_its_final_layout(option, shape):
    config = config_of(option, "mesh={{data: {}, fsdp: {}, tensor: {}}}".format(*shape), "model.kv_heads=2")
    mesh = tiny.mesh_of(*shape)
    state = tiny.state_of(config, optax.identity(), mesh)
    position = with_abstract_reference(Plan.of(config), state).reference
    moving = start_following(config, ScoredPolicy(MODEL, kljax.Policy(None)), state.trainable)

    def layout(tree) -> list:
        return [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(tree)]

    chex.assert_trees_all_equal_structs(position, moving)
    assert layout(position) == layout(moving)
    followed_once = make_follow(config, moving)(moving, state.trainable["params"], jnp.int32(2))
    assert layout(followed_once) == layout(position)
    assert any("fsdp" in str(x.sharding.spec) for x in jax.tree.leaves(moving))


@pytest.mark.parametrize("option", ["reference.source=base", "reference={source: step, step: 0}"])
def test_fixed_reference_has_no_moving_half(option):
    state = state_of("params", 1.0)
    assert not follows_policy(config_of(option))
    assert with_abstract_reference(Plan.of(config_of(option)), state) is state
    assert with_abstract_reference(Plan.of(tiny.config_of(EMA)), state) is state, "nothing needs one here"
    reference = ScoredPolicy(MODEL, kljax.Policy({"w": jnp.ones(3)}))
    assert current_reference(reference, state) is reference
    assert current_reference(None, state) is None
