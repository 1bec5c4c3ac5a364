"""NaN and infinity under the mask, for every public function that takes one: value, gradient, exact zeros.

The functions, and the calls of each, come from `tests.kljax.calls`. Their results and gradients with poison under the
mask must be those with harmless numbers there, bit for bit; gradients there are exactly 0, and so are outputs that have
the mask's shape. Arrays of one number per row are poisoned in the rows without a token.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import oracles, other_seeds
from tests.kljax import calls
from tests.kljax.calls import FunctionCall, calls_of
from tests.kljax.jitted import program

POISON = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
HARMLESS = -0.5
# By their meaning they look under the mask.
LOOK_UNDER_THE_MASK = {
    "gae(masked_tokens=none)": "values there enter as they are, the rule of SkyRL, Trinity-RFT and TRL",
    "opo_advantages": "a row without a token has a reward and an advantage; the mask gives lengths alone",
    **dict.fromkeys(
        ("token_log_probs", "token_kl", "token_jsd"),
        "the hidden state before a trained token, the last one of a prompt, predicts it",
    ),
}
# A comparison with NaN is False, and what it rejects is left out.
COMPARE = {
    "clip_fraction": "counts",
    "correct_rollout": "rejects a ratio that is NaN",
    "dual_clip_fraction": "counts",
    "importance_weights(lower=0.7, mode=mask, upper=1.3)": "rejects a ratio that is NaN",
    "ratio_fraction": "counts",
    "value_clip_fraction": "counts",
}

Inputs = list[tuple[Any, Any]]


def looks_under(call: FunctionCall) -> bool:
    """Whether a call, or every call of its function, looks under the mask."""
    return bool({call.name, call.name.partition("(")[0]} & LOOK_UNDER_THE_MASK.keys())


def lying_under(call: FunctionCall) -> list[str]:
    """The float arrays of a call that hold something for each token or for each row."""
    return [name for name, array in call.arrays.items() if hidden(call, array) is not None]


def hidden(call: FunctionCall, array: Any) -> np.ndarray | None:
    """Where the mask hides an array, in its shape; None for one that is neither of tokens nor of rows."""
    mask = calls.mask_of(call)
    if not isinstance(array, jax.Array):
        return None
    if array.shape[:2] == mask.shape:
        return np.broadcast_to(~mask.reshape(mask.shape + (1,) * (array.ndim - 2)), array.shape)
    return ~mask.any(-1) if array.shape == mask.shape[:1] else None


MASKED = calls.masked_functions()


def filled(name: str, value: float, only: str | None = None) -> Inputs:
    """The inputs of every call with `value` where the mask hides them, in all arrays or in one, else harmless."""

    def fill(call: FunctionCall, parameter: str, array: Any) -> Any:
        at = hidden(call, array)
        return array if at is None else np.where(at, value if only in (None, parameter) else HARMLESS, array)

    return [({k: fill(call, k, array) for k, array in call.arrays.items()}, call.data) for call in calls_of(name)]


@functools.cache
def clean(name: str) -> Any:
    return program(name)(filled(name, HARMLESS))


def check_equal(name: str, results: list[Any], expected: list[Any]) -> None:
    for call, result, wanted in zip(calls_of(name), results, expected, strict=True):
        if looks_under(call):
            continue
        for (path, leaf), other in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(leaf, other, err_msg=f"{call.name}{jax.tree_util.keystr(path)}")


@pytest.mark.parametrize("name", MASKED)
def test_masked_values_reach_no_value_and_no_gradient(name: str) -> None:
    for poison in POISON.values():
        check_equal(name, program(name)(filled(name, poison)), clean(name))


@pytest.mark.thorough
@pytest.mark.parametrize("name", MASKED)
def test_poison_in_every_array_on_its_own(name: str) -> None:
    # NaN in one array and ordinary numbers in the others: a mask that is applied to only one of them shows here.
    for parameter in {parameter for call in calls_of(name) for parameter in lying_under(call)}:
        check_equal(name, program(name)(filled(name, np.nan, parameter)), clean(name))


@pytest.mark.parametrize("name", MASKED)
def test_masked_results_and_gradients_are_exactly_zero(name: str) -> None:
    for call, (out, grads) in zip(calls_of(name), clean(name), strict=True):
        if looks_under(call):
            continue
        for leaf in jax.tree.leaves((out, grads)):
            assert np.isfinite(leaf).all(), call.name
        for leaf in jax.tree.leaves(out):
            if leaf.shape == calls.mask_of(call).shape:
                assert not leaf[~calls.mask_of(call)].any(), call.name
        for parameter in lying_under(call):
            assert not grads[parameter][hidden(call, call.arrays[parameter])].any(), f"{call.name}, {parameter}"


@pytest.mark.parametrize("name", MASKED)
def test_every_unmasked_array_element_reaches_the_result(name: str) -> None:
    # A function of zeros would pass the tests above: other numbers at unmasked positions must change something.
    def values(given: Inputs) -> list[Any]:
        return [out for out, _ in program(name)(given)]

    before = values(calls.inputs(name))
    parameters = {parameter for call in calls_of(name) for parameter in lying_under(call)}
    for parameter in parameters:
        inputs = [(dict(call.arrays), call.data) for call in calls_of(name)]
        for (arrays, _), call, other in zip(inputs, calls_of(name), calls_of(name, seed=1), strict=True):
            if parameter in lying_under(call):
                array = arrays[parameter]
                arrays[parameter] = np.where(hidden(call, array), array, other.arrays[parameter])
        same = jax.tree.map(lambda x, y: bool((x == y).all()), before, values(inputs))
        assert other_seeds.shown(not jax.tree.all(same)), parameter


@pytest.mark.parametrize("name", sorted(set(MASKED) - set(COMPARE)))
def test_unmasked_nan_is_not_hidden(name: str) -> None:
    inputs = [(jax.tree.map(lambda x: np.full_like(x, np.nan), call.arrays), call.data) for call in calls_of(name)]
    for call, (out, _) in zip(calls_of(name), program(name)(inputs), strict=True):
        if call.name in COMPARE or "estimator=none" in call.name or not lying_under(call):
            continue
        floats = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        assert not floats or any(np.isnan(leaf).any() for leaf in floats), call.name


@pytest.mark.parametrize("call_name", LOOK_UNDER_THE_MASK)
def test_functions_reading_masked_values_give_a_reason(call_name: str) -> None:
    name = call_name.partition("(")[0]
    results = zip(calls_of(name), program(name)(filled(name, 7.0)), clean(name), strict=True)
    changed = [
        np.any(np.asarray(jax.tree.leaves(values)[0]) != jax.tree.leaves(harmless)[0])
        for call, (values, _), (harmless, _) in results
        if call.name.startswith(call_name)
    ]
    # One number for two policies with one head makes no difference.
    assert any(changed)


@pytest.mark.parametrize("scale", ["std", "none"])
def test_nan_rewards_show_in_their_group_alone(scale: str) -> None:
    rewards, ids = jnp.array([1.0, jnp.nan, 2.0, 0.0]), jnp.array([0, 0, 1, 1])
    advantages = kljax.grpo_advantages(rewards, ids, num_groups=2, scale=scale)
    np.testing.assert_array_equal(jnp.isnan(advantages), [True, True, False, False])


def test_integer_masks_are_accepted_and_floats_refused() -> None:
    mask = jnp.asarray(oracles.MASK_KINDS)
    values = jnp.cos(jnp.arange(mask.size, dtype=float)).reshape(mask.shape)
    for function in (kljax.masked_mean, kljax.masked_whiten):
        np.testing.assert_array_equal(function(values, mask.astype(jnp.int32)), function(values, mask))
        with pytest.raises(TypeError, match=r"mask: got dtype float64, expected bool"):
            function(values, mask.astype(jnp.float64))
