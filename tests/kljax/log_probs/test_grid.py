"""Values and gradients of every option against float64, for sizes that divide nothing and tiles smaller than each."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax import Tile
from tests.kljax.calls import known_options
from tests.kljax.log_probs.oracle import Arrays, Expected, Numbers, expected, token_by_token
from tests.kljax.log_probs.points import Point, pairwise

ROWS, LENGTH, WIDTH, VOCABULARY, PADDING = 3, 7, 5, 37, 4
BETA = 0.3
FIELDS = ("log_prob", "logsumexp", "entropy", "reverse", "forward", "jsd")
# What is computed: the fields, and those of them whose gradient is the derivative.
OUTPUTS = {
    "log_prob": (("log_prob", "logsumexp"), ("log_prob", "logsumexp")),
    "entropy": (("log_prob", "logsumexp", "entropy"), ("log_prob", "logsumexp", "entropy")),
    "entropy as data": (("log_prob", "logsumexp", "entropy"), ("log_prob", "logsumexp")),
    "reverse": (("log_prob", "logsumexp", "entropy", "reverse"), ("log_prob", "logsumexp", "entropy", "reverse")),
    "forward": (("log_prob", "logsumexp", "forward"), ("log_prob", "logsumexp", "forward")),
    "kl": (("reverse",), ("reverse",)),
    "jsd": (("jsd",), ("jsd",)),
}
OPTIONS = {
    "outputs": tuple(OUTPUTS),
    "dtype": ("float64", "float32", "bfloat16"),
    # Chunks and a remainder, the last tile of tokens partly empty; all at once; one token by one column.
    "tile": (Tile(8, 10), Tile(4096, 4096), Tile(1, 6)),
    "to": ("all", "hidden", "heads"),
    "own_head": (True, False),
    "softcap": (0.0, 3.0),
    "bias": (True, False),
    "layout": ("dv", "vd"),
    "mask": (True, False),
    "padding": (True, False),
    "temperature": ("per token", "scalar"),
}
FROZEN = {"outputs": "log_prob", "to": "hidden", "own_head": False}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
POINTS = [
    *pairwise(OPTIONS),
    # A frozen head is a way of its own; float16 and mixed types differ from the others in the types alone.
    {**PLAIN, **FROZEN, "dtype": "float64"},
    {**PLAIN, **FROZEN, "dtype": "float32", "softcap": 3.0, "layout": "vd", "bias": False},
    {**PLAIN, **FROZEN, "dtype": "bfloat16", "padding": False, "temperature": "scalar"},
    {**PLAIN, "outputs": "reverse", "dtype": "float16"},
    {**PLAIN, "outputs": "reverse", "dtype": "bfloat16, float32"},
]
MASKS = {
    "half": np.arange(ROWS * LENGTH).reshape(ROWS, LENGTH) % 2 == 0,
    "a row and a token": np.arange(ROWS)[:, None] + 0 * np.arange(LENGTH) == 1,
    "nothing left": np.zeros((ROWS, LENGTH), bool),
    "all": np.ones((ROWS, LENGTH), bool),
}
MASKS["a row and a token"][2, 3] = True


def name_of(point: Point) -> str:
    return ", ".join(f"{name}={value}" for name, value in point.items() if value != PLAIN[name]) or "plain"


def dtypes(point: Point) -> tuple[Any, Any]:
    """Of the hidden states, and of the heads and the bias."""
    first, _, second = point["dtype"].partition(", ")
    return jnp.dtype(first), jnp.dtype(second or first)


@functools.cache
def drawn() -> Arrays:
    # Logits of a few nats: what is an absolute error of a logit in float32 is a relative one of a probability.
    rng = np.random.default_rng(0)
    hidden = 0.5 * rng.normal(size=(2, ROWS, LENGTH, WIDTH))
    heads = rng.normal(size=(2, WIDTH, VOCABULARY + PADDING))
    return Arrays(hidden[0], heads[0], 0.5 * rng.normal(size=VOCABULARY + PADDING), hidden[1], heads[1])


def arrays_of(point: Point) -> Arrays:
    """As they are given: in their types, a head with its padding; None for what is not."""
    narrow, wide = dtypes(point)
    kinds = Arrays(narrow, wide, wide, narrow, wide)
    arrays = Arrays(*(jnp.asarray(x, kind) for x, kind in zip(drawn(), kinds, strict=True)))
    columns = VOCABULARY + (PADDING if point["padding"] else 0)
    heads = [head[:, :columns] for head in (arrays.head, arrays.ref_head)]
    if point["padding"]:
        heads = [head.at[:, VOCABULARY:].set(1e3) for head in heads]
    heads = [head.T if point["layout"] == "vd" else head for head in heads]
    divergence = any(kind in OUTPUTS[point["outputs"]][0] for kind in ("reverse", "forward", "jsd"))
    return Arrays(
        hidden=arrays.hidden,
        head=heads[0],
        bias=arrays.bias[:columns] if point["bias"] else None,
        ref_hidden=arrays.ref_hidden if divergence else None,
        ref_head=heads[1] if divergence and point["own_head"] else None,
    )


def numbers_of(point: Point, mask: np.ndarray) -> Numbers:
    rng = np.random.default_rng(1)
    temperature = rng.uniform(0.7, 1.5, (ROWS, LENGTH)) if point["temperature"] == "per token" else 0.7
    targets = rng.integers(0, VOCABULARY, (ROWS, LENGTH))
    targets[0, :3] = [0, VOCABULARY - 1, 9]
    # float32 numbers, so that they are the same in every type.
    return Numbers(targets, mask, np.float64(np.float32(temperature)), point["softcap"], 0.75, BETA)


def weights_of(point: Point) -> dict[str, np.ndarray]:
    """What each field counts in the number that is differentiated, token by token; not 1, so that nothing cancels."""
    rng = np.random.default_rng(2)
    drawn = {name: np.float64(np.float32(rng.normal(size=(ROWS, LENGTH)))) for name in FIELDS}
    return {name: drawn[name] * (name in OUTPUTS[point["outputs"]][1]) for name in FIELDS}


def fields_of(point: Point, arrays: Arrays, numbers: Numbers, implementation: str) -> dict[str, Any]:
    names = OUTPUTS[point["outputs"]][0]
    options = {
        "mask": numbers.mask if point["mask"] else None,
        "temperature": numbers.temperature,
        "softcap": numbers.softcap if point["softcap"] else None,
        "logit_scale": numbers.logit_scale,
        "bias": arrays.bias,
        "vocab_size": VOCABULARY if point["padding"] else None,
        "head_layout": point["layout"],
        "tile": point["tile"],
        "implementation": implementation,
    }
    pair = (arrays.ref_hidden, arrays.ref_head)
    if names == ("jsd",):
        return {"jsd": kljax.jsd_from_hidden(arrays.hidden, arrays.head, *pair, beta=numbers.beta, **options)}
    if names == ("reverse",):
        return {"reverse": kljax.kl_from_hidden(arrays.hidden, arrays.head, *pair, **options)}
    direction = "forward" if "forward" in names else "reverse"
    stats = kljax.log_probs_from_hidden(
        arrays.hidden,
        arrays.head,
        numbers.targets,
        entropy="entropy" in names,
        entropy_gradient=point["outputs"] != "entropy as data",
        reference=None if arrays.ref_hidden is None else pair,
        direction=direction,
        **options,
    )
    fields = {"log_prob": stats.log_prob, "logsumexp": stats.logsumexp, "entropy": stats.entropy, direction: stats.kl}
    assert {name for name, value in fields.items() if value is not None} == set(names)
    return {name: fields[name] for name in names}


def asked_of(point: Point) -> tuple[str, ...]:
    return {"all": Arrays._fields, "hidden": ("hidden",), "heads": ("head", "bias", "ref_head")}[point["to"]]


def program(point: Point, arrays: Arrays, numbers: Numbers) -> Any:
    """Fields and gradients of both implementations, compiled."""

    def loss(given: dict[str, Any], numbers: Numbers, weights: Any, implementation: str) -> tuple[jax.Array, Any]:
        fields = fields_of(point, arrays._replace(**given), numbers, implementation)
        return sum((x * weights[name].astype(x.dtype)).sum() for name, x in fields.items()), fields  # type: ignore[return-value]

    def both(given: dict[str, Any], numbers: Numbers, weights: Any) -> dict[str, Any]:
        # A weight for the entropy as well where it is data: its gradient must not flow.
        weights = {name: jnp.where(weights[name] == 0, 1.0, weights[name]) for name in weights}
        return {name: jax.grad(loss, has_aux=True)(given, numbers, weights, name) for name in ("tile", "reference")}

    given = {name: x for name, x in arrays._asdict().items() if name in asked_of(point) and x is not None}
    lowered = jax.jit(both).lower(given, numbers, weights_of(point))
    compiled = lowered.compile(compiler_options=known_options())
    return lambda mask: compiled(given, numbers._replace(mask=mask), weights_of(point))


def wanted_of(point: Point, arrays: Arrays, numbers: Numbers) -> Expected:
    """Of the numbers that the arrays hold in their types, in the layout and with the padding of the point."""

    def head(x: Any) -> Any:
        return np.asarray(x.T if point["layout"] == "vd" else x, np.float64)[:, :VOCABULARY]

    wide = Arrays(
        hidden=np.asarray(arrays.hidden, np.float64),
        head=head(arrays.head),
        bias=np.zeros(VOCABULARY) if arrays.bias is None else np.asarray(arrays.bias, np.float64)[:VOCABULARY],
        ref_hidden=np.asarray(drawn().ref_hidden if arrays.ref_hidden is None else arrays.ref_hidden, np.float64),
        ref_head=head(arrays.head if arrays.ref_head is None else arrays.ref_head),
    )
    full = numbers._replace(temperature=np.broadcast_to(numbers.temperature, (ROWS, LENGTH)))
    wanted = jax.device_get(expected(wide, full, weights_of(point)))
    by_token = token_by_token(wide, full)
    for name, value in wanted.fields.items():
        np.testing.assert_allclose(value, by_token[name], rtol=1e-12, atol=1e-13)
    return wanted._replace(fields=by_token)


def unit_roundoff(dtype: Any) -> float:
    return float(jnp.finfo(dtype).eps) / 2


def check_gradient(point: Point, name: str, actual: Any, wanted: Expected, where: str) -> None:
    exact, scale = getattr(wanted.gradients, name), getattr(wanted.scales, name)
    if name in ("head", "ref_head"):
        actual = actual.T if point["layout"] == "vd" else actual
    actual = np.asarray(actual)
    columns = name in ("head", "ref_head", "bias")
    assert not actual[..., VOCABULARY:].any() or not columns, f"{where}: padding has a gradient"
    error = np.abs(np.float64(actual[..., :VOCABULARY] if columns else actual) - exact)
    # Statistics have the error of float32 or float64. Beside it a gradient is rounded twice: the slopes that enter the
    # matrix product, in the type of the heads, and the result, in its own.
    statistics = 1e-12 if point["dtype"] == "float64" else 1e-6
    rounding = 0.0 if name == "bias" else unit_roundoff(dtypes(point)[1])
    own = unit_roundoff(actual.dtype)
    smallest = float(jnp.finfo(actual.dtype).smallest_subnormal)
    bound = statistics * scale.max() + rounding * scale + own * np.abs(exact) + smallest
    assert (error <= bound).all(), f"{where}: {(error / bound).max():.3g} of what rounding explains"


@pytest.mark.parametrize("point", POINTS, ids=name_of)
def test_values_and_gradients(point: Point) -> None:
    masks = MASKS if point["mask"] else {"all": MASKS["all"]}
    arrays, numbers = arrays_of(point), numbers_of(point, MASKS["all"])
    run = program(point, arrays, numbers)
    close = {"rtol": 1e-12, "atol": 1e-13} if point["dtype"] == "float64" else {"rtol": 1e-6, "atol": 1e-6}
    statistics = jnp.float64 if point["dtype"] == "float64" else jnp.float32
    for kept, mask in masks.items():
        wanted = wanted_of(point, arrays, numbers._replace(mask=mask))
        for implementation, (gradients, fields) in jax.device_get(run(mask)).items():
            where = f"{implementation}, mask: {kept}"
            for name, value in fields.items():
                assert value.dtype == statistics, f"{where}: {name}"
                assert not value[~mask].any(), f"{where}: {name}"
                np.testing.assert_allclose(value, wanted.fields[name], **close, err_msg=f"{where}: {name}")
            for name, gradient in gradients.items():
                given = getattr(arrays, name)
                assert (gradient.dtype, gradient.shape) == (given.dtype, given.shape), f"{where}: {name}"
                check_gradient(point, name, gradient, wanted, f"{where}: {name}")


def test_the_grid_has_every_pair_of_options() -> None:
    for one, values in OPTIONS.items():
        for other, others in OPTIONS.items():
            if one != other:
                assert {(p[one], p[other]) for p in POINTS} >= {(a, b) for a in values for b in others}
