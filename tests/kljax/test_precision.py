"""Extreme log-ratios, float32 against the exact answer, and derivatives of second order."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import kljax
from tests.kljax import calls, precision
from tests.kljax.calls import FunctionCall, callable_functions, calls_of

pytestmark = pytest.mark.xla

INF = np.inf

# ---- extreme log-ratios ----

# (log_probs, the other log_probs): equal, 200 nats apart either way, impossible for the other, impossible for pi.
PAIRS = {"0": (-1, -1), "200": (-1, -201), "-200": (-201, -1), "inf": (-1, -INF), "-inf": (-INF, -1)}
E200 = float(np.exp(200.0))
# Value and gradient to the log-probs at each of the five; what is above 3e38 is infinite in float32.
HARD: dict[str, dict[str, tuple[float, float]]] = {
    "k1()": {"0": (0, 1), "200": (200, 1), "-200": (-200, 1), "inf": (INF, 1), "-inf": (-INF, 1)},
    "abs_diff()": {"0": (0, 0), "200": (200, 1), "-200": (200, -1), "inf": (INF, 1), "-inf": (INF, -1)},
    "k2()": {"0": (0, 0), "200": (2e4, 200), "-200": (2e4, -200), "inf": (INF, INF), "-inf": (INF, -INF)},
    "k3()": {"0": (0, 0), "200": (199, 1), "-200": (E200 - 201, 1 - E200), "inf": (INF, 1), "-inf": (INF, -INF)},
    "low_var_kl()": {"0": (0, 0), "200": (10, 0), "-200": (10, 0), "inf": (10, 0), "-inf": (10, 0)},
    "estimate_kl(estimator=none)": dict.fromkeys(PAIRS, (0, 0)),
    "estimate_kl(gradient=none)": {"0": (0, 0), "200": (199, 0), "-200": (E200, 0), "inf": (INF, 0), "-inf": (INF, 0)},
    "estimate_kl(gradient=k2)": {
        "0": (0, 0),
        "200": (199, 200),
        "-200": (E200 - 201, -200),
        "inf": (INF, INF),
        "-inf": (INF, -INF),
    },
    # The clips at 0.4 and 0.2: of the log-ratio, and of the value.
    "estimate_kl(log_ratio_clip=0.4)": {
        "0": (0, 0),
        **dict.fromkeys(("200", "inf"), (float(np.exp(-0.4)) - 0.6, 0)),
        **dict.fromkeys(("-200", "-inf"), (float(np.exp(0.4)) - 1.4, 0)),
    },
    "estimate_kl(value_clip=0.2)": {"0": (0, 0), **dict.fromkeys(("200", "-200", "inf", "-inf"), (0.2, 0))},
    "token_ratios()": {
        "0": (1, 1),
        "200": (E200, E200),
        "-200": (1 / E200, 1 / E200),
        "inf": (INF, INF),
        "-inf": (0, 0),
    },
    "sequence_ratios(log_ratio_clip=0.4)": {
        "0": (1, 1),
        **dict.fromkeys(("200", "inf"), (float(np.exp(0.4)), 0)),
        **dict.fromkeys(("-200", "-inf"), (float(np.exp(-0.4)), 0)),
    },
    "truncated_importance_weights()": {
        "0": (1, 1),
        "200": (2, 0),
        "-200": (1 / E200, 1 / E200),
        "inf": (2, 0),
        "-inf": (0, 0),
    },
    # `log(1 + exp(-h / 10))` of the log-ratio `h` of one token.
    "dpo_loss()": {
        "0": (float(np.log(2)), -0.05),
        "200": (float(np.log1p(np.exp(-20.0))), -0.1 / (1 + float(np.exp(20.0)))),
        "-200": (20 + float(np.log1p(np.exp(-20.0))), -0.1 / (1 + float(np.exp(-20.0)))),
        "inf": (0, 0),
        "-inf": (INF, -0.1),
    },
    "importance_weights(lower=0.7, mode=mask, upper=1.3)": {"0": (1, 1), **dict.fromkeys(list(PAIRS)[1:], (0, 0))},
}
# The same for losses, at the advantages 1, -1 and 0. In the last every one of these is 0 with a gradient of 0.
HARD_LOSSES: dict[str, dict[str, tuple[tuple[float, float], tuple[float, float]]]] = {
    "ppo_clip_loss()": {
        "0": ((-1, -1), (1, 1)),
        "200": ((-1.2, 0), (E200, E200)),
        "-200": ((-1 / E200, -1 / E200), (0.8, 0)),
        "inf": ((-1.2, 0), (INF, INF)),
        "-inf": ((0, 0), (0.8, 0)),
    },
    "ppo_clip_loss(dual_clip=1.5)": {
        "0": ((-1, -1), (1, 1)),
        "200": ((-1.2, 0), (1.5, 0)),
        "-200": ((-1 / E200, -1 / E200), (0.8, 0)),
        "inf": ((-1.2, 0), (1.5, 0)),
        "-inf": ((0, 0), (0.8, 0)),
    },
    "cispo_loss()": {
        "0": ((1, -1), (-1, 1)),
        "200": ((5, -5), (-5, 5)),
        "-200": ((201 / E200, -1 / E200), (-201 / E200, 1 / E200)),
        "inf": ((5, -5), (-5, 5)),
        "-inf": ((0, 0), (0, 0)),
    },
    "importance_sampling_loss()": {
        "0": ((-1, -1), (1, 1)),
        "200": ((-E200, -E200), (E200, E200)),
        "-200": ((-1 / E200, -1 / E200), (1 / E200, 1 / E200)),
        "inf": ((-INF, -INF), (INF, INF)),
        "-inf": ((0, 0), (0, 0)),
    },
    "reinforce_loss()": {
        **dict.fromkeys(("0", "200", "inf"), ((1, -1), (-1, 1))),
        "-200": ((201, -1), (-201, 1)),
        "-inf": ((INF, -1), (-INF, 1)),
    },
    "topr_loss()": {
        **dict.fromkeys(("0", "200", "inf"), ((1, -1), (-1, 1))),
        "-200": ((201, -1), (-201 / E200, 1 / E200)),
        "-inf": ((INF, -1), (0, 0)),
    },
}
TINY = 1e-37


def hard_points(name: str, pairs: list[tuple[float, float]], advantages: tuple[float, ...]) -> dict[str, Any]:
    """For each call, in float32 and float64: value and gradient to the log-probs, `[advantages, pairs]` each."""
    log_probs, other = (np.tile(np.array(side, float), len(advantages)) for side in zip(*pairs, strict=True))
    results = precision.evaluate(name, log_probs, other, np.repeat(advantages, len(pairs)))
    shape = (len(advantages), len(pairs))
    return {
        call.name: None if both is None else jax.tree.map(lambda x: np.float64(x).reshape(shape), both)
        for call, both in zip(calls_of(name), results, strict=True)
    }


def check_points(actual: np.ndarray, expected: Any, where: str) -> None:
    expected = np.asarray(expected, float)
    narrow = np.where(np.abs(expected) > np.finfo(np.float32).max, np.copysign(INF, expected), expected)
    wanted = narrow if where.endswith("float32") else expected
    np.testing.assert_allclose(actual, wanted, rtol=2e-5, atol=TINY, err_msg=where)


@pytest.mark.parametrize("call_name", HARD)
def test_value_and_gradient_of_estimates_at_extreme_ratios(call_name: str) -> None:
    expected = np.array([HARD[call_name][key] for key in PAIRS]).T
    both = hard_points(call_name.partition("(")[0], list(PAIRS.values()), (1.0,))[call_name]
    for dtype, (value, gradient) in zip(("float32", "float64"), both, strict=True):
        check_points(value[0], expected[0], f"value of {call_name} in {dtype}")
        check_points(gradient[0], expected[1], f"gradient of {call_name} in {dtype}")


@pytest.mark.parametrize("call_name", HARD_LOSSES)
def test_value_and_gradient_of_losses_at_extreme_ratios(call_name: str) -> None:
    table = HARD_LOSSES[call_name]
    expected = np.array([[*table[key], (0, 0)] for key in PAIRS]).transpose(2, 1, 0)
    both = hard_points(call_name.partition("(")[0], list(PAIRS.values()), (1.0, -1.0, 0.0))[call_name]
    for dtype, (value, gradient) in zip(("float32", "float64"), both, strict=True):
        check_points(value, expected[0], f"value of {call_name} in {dtype}")
        check_points(gradient, expected[1], f"gradient of {call_name} in {dtype}")


# `x`, `w` and the limits of `w f(x)` and of its gradient: (log pi, log ref, log sampling) -> by estimator.
CORRECTED: dict[tuple[float, float, float], dict[str, tuple[float, float]]] = {
    # pi at 0, so that w is 0 and x minus infinity: only the reference is left of k3.
    (-INF, -1, -1): {"k1": (0, 0), "abs": (0, 0), "k2": (0, 0), "k3": (1, 0), "low_var_kl": (0, 0)},
    (-201, -1, -1): {"k1": (0, 0), "abs": (0, 0), "k2": (0, 0), "k3": (1, 0), "low_var_kl": (0, 0)},
    # pi equal to the reference, and w beyond float32.
    (-1, -1, -201): {"k1": (0, E200), "abs": (0, 0), "k2": (0, 0), "k3": (0, 0), "low_var_kl": (0, 0)},
    (-1, -201, -1): {"k1": (200, 201), "abs": (200, 201), "k2": (2e4, 20200), "k3": (199, 200), "low_var_kl": (10, 0)},
    (-1, -INF, -1): {"k1": (INF, INF), "abs": (INF, INF), "k2": (INF, INF), "k3": (INF, INF), "low_var_kl": (10, 0)},
}


@functools.cache
def corrected(dtype: Any) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each estimator its value, its gradient and the one of k2 straight through, at all points: `[points]` each."""

    @jax.jit
    def run(log_probs: jax.Array, ref: jax.Array, sampling: jax.Array) -> dict[str, tuple[jax.Array, ...]]:
        def both(estimator: str, gradient: str) -> tuple[jax.Array, jax.Array]:
            options = {"estimator": estimator, "gradient": gradient, "sampling_log_probs": sampling}
            value, pull = jax.vjp(lambda lp: kljax.estimate_kl(lp, ref, **options), log_probs)
            return value, pull(jnp.ones_like(value))[0]

        return {name: (*both(name, "value"), both(name, "k2")[1]) for name in CORRECTED[(-1, -1, -201)]}

    return jax.device_get(run(*(jnp.asarray(side, dtype) for side in zip(*CORRECTED, strict=True))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("point", CORRECTED, ids=str)
def test_importance_corrected_estimates_at_extreme_log_ratios(point: tuple[float, ...], dtype: Any) -> None:
    index = list(CORRECTED).index(point)
    for estimator, expected in CORRECTED[point].items():
        value, grad, straight = (x[index] for x in corrected(dtype)[estimator])
        where = f"{estimator} in {jnp.dtype(dtype).name}"
        check_points(value, expected[0], where)
        if not (dtype == jnp.float32 and expected[1] == E200):  # finite there, by the largest number that there is
            check_points(grad, expected[1], where)
        weight = np.exp(point[0] - point[2])
        drift = 0 if weight == 0 or point[0] == point[1] else weight * (point[0] - point[1])
        check_points(straight, drift, where)


# Twice as far and twice as far again: an answer that no longer changes has a limit.
FAR = {"inf": [(-1, -351), (-1, -701)], "-inf": [(-351, -1), (-701, -1)]}


@pytest.mark.parametrize("name", precision.functions())
def test_every_function_is_finite_at_limits_without_nan(name: str) -> None:
    pairs = [*PAIRS.values(), *FAR["inf"], *FAR["-inf"]]
    for call, both in hard_points(name, pairs, (1.0, -1.0, 0.0)).items():
        if both is None or any(other in call for other in precision.OTHERS):
            continue
        for dtype, results in zip(("float32", "float64"), both, strict=True):
            for what, result, exact in zip(("value", "gradient"), results, both[1], strict=True):
                where = f"{what} of {call} in {dtype}"
                assert not np.isnan(result).any(), where
                check_points(result[:, :3], exact[:, :3], where)
                for at, (near, far) in ((3, (5, 6)), (4, (7, 8))):
                    with np.errstate(invalid="ignore"):
                        settled = np.isclose(exact[:, near], exact[:, far], rtol=1e-9, atol=1e-100)
                    np.testing.assert_allclose(result[settled, at], exact[settled, far], 2e-5, TINY, err_msg=where)


OF_THE_REFERENCE = ("k1()", "abs_diff()", "k2()", "k3()", "low_var_kl()", "estimate_kl(value_clip=0.2)")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("call_name", OF_THE_REFERENCE)
def test_reference_gradient_is_opposite_at_extreme_ratios(call_name: str, dtype: Any) -> None:
    call = next(call for call in calls_of(call_name.partition("(")[0]) if call.name == call_name)
    log_probs, ref = (jnp.asarray(side, dtype) for side in zip(*PAIRS.values(), strict=True))
    data = {name: jnp.ones(log_probs.shape, bool) for name in call.data}
    grad = jax.grad(lambda ref: call({"log_probs": log_probs, "ref_log_probs": ref}, data).sum())(ref)
    expected = -np.array([HARD[call_name][key][1] for key in PAIRS], float)
    check_points(grad, expected, f"{call_name} in {jnp.dtype(dtype).name}")


def test_advantages_are_constants_of_every_loss() -> None:
    # So the tests here take no gradient to them: where a ratio overflows, theirs is as infinite as the value.
    losses = [name for name in precision.functions() if name.endswith("_loss")]
    taking = [name for name in losses if "advantages" in calls.parameters(name)]
    assert taking
    for name in taking:
        text = getattr(kljax, name).__doc__
        entry = re.search(r"^ +advantages: (.*?)(?=^ +\w+: |^ *$)", text, re.MULTILINE | re.DOTALL)
        assert entry, name
        assert "a constant" in entry[1], name
        gradient = text[text.index("Gradient:") : text.index("Raises:")]
        assert "`advantages`" not in gradient, name


def test_token_impossible_for_both_has_no_estimate() -> None:
    nothing = jnp.array([-INF])
    for function in (kljax.k1, kljax.abs_diff, kljax.k2, kljax.k3, kljax.low_var_kl):
        assert jnp.isnan(function(nothing, nothing)).all()
    assert (kljax.estimate_kl(nothing, nothing, estimator="none") == 0).all()


IMPOSSIBLE = {
    "for pi": ([0.0, -INF, 1.0, -2.0], [0.3, 1.0, 0.2, -2.0]),
    "for the teacher": ([0.0, 0.5, 1.0, -2.0], [0.3, -INF, 0.2, -2.0]),
    "for both": ([0.0, -INF, 1.0, -2.0], [0.3, -INF, 0.2, -2.0]),
    "nearly, for the teacher": ([0.0, -INF, 1.0, -2.0], [0.0, -200.0, 1.0, 200.0]),
    "nearly, for pi": ([0.0, -200.0, 1.0, 200.0], [0.3, 1.0, -INF, -2.0]),
}


BETAS = (0.0, 0.5, 1.0)


@functools.cache
def of_impossible_tokens(dtype: Any) -> tuple[Any, ...]:
    """Policy and teacher of every case, `[cases, V]`, and value and gradient of each divergence of them."""
    logits = np.array(list(IMPOSSIBLE.values()))

    @jax.jit
    def run(policy: jax.Array, teacher: jax.Array) -> tuple[Any, ...]:
        policy, teacher = jax.nn.log_softmax(policy), jax.nn.log_softmax(teacher)
        mask = jnp.ones(policy.shape[:-1], bool)

        def both(divergence: Any) -> tuple[jax.Array, jax.Array]:
            value, pull = jax.vjp(divergence, policy)
            return value, pull(jnp.ones_like(value))[0]

        jsd = {b: both(lambda p, b=b: kljax.generalized_jsd(p, teacher, mask, beta=b)) for b in BETAS}
        return policy, teacher, jsd, both(lambda p: kljax.top_k_forward_kl(p, teacher, mask))

    return jax.device_get(run(*(jnp.asarray(logits[:, side], dtype) for side in (0, 1))))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_divergences_over_a_vocabulary_with_impossible_tokens(case: str, dtype: Any) -> None:
    index = list(IMPOSSIBLE).index(case)
    log_probs, teacher, jsd, top_k = jax.tree.map(lambda x: x[index], of_impossible_tokens(dtype))
    p, q = (np.exp(np.float64(x)) for x in (log_probs, teacher))

    def kl(first: np.ndarray, second: np.ndarray) -> float:
        with np.errstate(divide="ignore"):
            return sum(a * np.log(np.divide(a, b)) for a, b in zip(first, second, strict=True) if a > 0)

    mixed = (p + q) / 2
    expected = {0.0: kl(q, p), 0.5: (kl(p, mixed) + kl(q, mixed)) / 2, 1.0: kl(p, q)}
    for beta, wanted in expected.items():
        value, grads = jsd[beta]
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-7)
        assert not np.isnan(grads).any()
    for result in top_k:
        assert not np.isnan(result).any()


# ---- float32 against the exact answer ----


@pytest.mark.parametrize("name", precision.functions())
def test_relative_error_in_float32(name: str) -> None:
    for error in precision.errors_of(name):
        assert max(error.value, error.gradient) <= 2e-6, error


@pytest.mark.parametrize("call_name", precision.ROOTS)
def test_listed_roots_are_roots(call_name: str) -> None:
    name = call_name.partition("(")[0]
    index = [call.name for call in calls_of(name)].index(call_name)
    for root in precision.ROOTS[call_name]:
        x = root * np.tile([1 - precision.NEAR, 1, 1 + precision.NEAR], 2)
        _, exact = precision.evaluate(name, x, 0 * x, np.repeat([1.0, -1.0], 3))[index]
        sides = np.reshape(exact, (4, 3))  # value and gradient, at each advantage
        crossing = sides[:, 0] * sides[:, 2] < 0
        assert crossing.any(), root
        assert (np.abs(sides[crossing, 1]) < 1e-6).all(), root


def test_table_has_every_estimator_ratio_and_loss() -> None:
    listed = {error.call.partition("(")[0] for name in precision.functions() for error in precision.errors_of(name)}
    losses = {name for name in kljax.losses.__all__ if name.endswith("_loss")}
    expected = losses | {"k1", "abs_diff", "k2", "k3", "low_var_kl", "estimate_kl"} | {"log_ratios", "token_ratios"}
    expected |= {"sequence_ratios", "geometric_ratios", "importance_weights", "truncated_importance_weights"}
    others = {*precision.OTHERS, "kto_loss", "preference_loss", "value_loss"}
    assert expected - listed == (others & losses) | {
        name for name in losses if "distillation" in getattr(kljax, name).__module__
    }


# ---- derivatives ----

DIFFERENTIATED = ("kljax.kl", "kljax.ratios", "kljax.losses", "kljax.masking", "kljax.aggregation", "kljax.log_probs")
# Functions, or calls that hold these options, whose gradient is by intent not the derivative of their value.
DETACHED = {
    "cispo_loss": "the importance weight is a constant",
    "correct_rollout": "weights are data",
    "cross_entropy_loss(weight=": "the weight is a constant",
    "distillation_loss": "the gradient is that of k2 unless asked otherwise",
    "dppo_loss(through=log_prob": "the ratio is a constant",
    "estimate_kl(gradient=": "a gradient of its own",
    "estimate_kl(sampling_log_probs, estimator=k2, gradient=k2": "a gradient of its own",
    **dict.fromkeys(
        ("jsd_from_hidden", "kl_from_hidden", "token_jsd", "token_kl"),
        "the head of a reference without its own is a constant",
    ),
    "log_probs_from_hidden(reference, reference.direction=forward, entropy=constant": "the entropy is a constant",
    "gspo_loss(": "the value of the row's ratio with the gradient of the token's own",
    "rec_loss(weight=gspo": "the weight is a constant",
    "rec_loss(weight=importance": "the weight is a constant",
    "reference_kl_loss": "the gradient is that of k2 unless asked otherwise",
    "rollout_kl_loss(gradient=none": "a constant",
    "sapo_loss(through=log_prob": "the gate is a constant",
    "topr_loss": "the weight is a constant",
    "vespo_loss": "the weight is a constant",
}
# What of them is a derivative nevertheless.
ATTACHED = ("gradient=sequence", "gradient=value", "estimator=none", "(ref_head")


def is_detached(call: FunctionCall) -> bool:
    return call.name.startswith(tuple(DETACHED)) and not any(option in call.name for option in ATTACHED)


def differentiated() -> list[str]:
    return [name for name in callable_functions() if getattr(kljax, name).__module__.startswith(DIFFERENTIATED)]


def of_floats(call: FunctionCall) -> bool:
    shapes = jax.eval_shape(call, call.arrays, call.data)
    return bool(call.arrays) and any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(shapes))


def only_first_order(call: FunctionCall) -> bool:
    """Whether it is computed tile by tile, with a gradient in closed form that is not differentiated again."""
    heads = [x for x in jax.tree.leaves(call.arrays, is_leaf=is_head) if is_head(x)]
    return "head" in calls.parameters(call.of) and not any(head.implementation == "reference" for head in heads)


def is_head(node: Any) -> bool:
    return isinstance(node, kljax.Head)


def total(chosen: list[FunctionCall]) -> Any:
    """All results of some calls in one number, as a function of the arrays of each."""

    def add(arrays: list[Any]) -> jax.Array:
        parts = [calls.total(call(inputs, call.data)) for call, inputs in zip(chosen, arrays, strict=True)]
        return sum(parts[1:], parts[0])

    return add


@pytest.fixture
def _quick() -> Iterator[None]:
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("_quick")
@pytest.mark.thorough
@pytest.mark.parametrize("name", differentiated())
def test_derivatives_of_first_and_second_order(name: str) -> None:
    # The draws are ordinary numbers, none of them on a bound or another kink.
    chosen = [call for call in calls_of(name) if of_floats(call) and not is_detached(call)]
    once = [call for call in chosen if only_first_order(call)]
    twice = [call for call in chosen if not only_first_order(call)]
    for some, order, modes in ((once, 1, ["rev"]), (twice, 2, ["fwd", "rev"])):
        if some:
            arrays = [call.arrays for call in some]
            check_grads(jax.jit(total(some)), (arrays,), order=order, modes=modes, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("prefix", DETACHED)
def test_detached_arguments_fail_the_gradient_check(prefix: str) -> None:
    actual = [call for call in calls_of(prefix.partition("(")[0]) if call.name.startswith(prefix) and is_detached(call)]
    assert actual
    with pytest.raises(AssertionError):
        check_grads(jax.jit(total(actual[:1])), ([actual[0].arrays],), order=1, modes=("rev",), rtol=1e-5, atol=1e-6)
