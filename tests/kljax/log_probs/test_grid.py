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
from tests.kljax.log_probs.oracle import FIELDS, Arrays, Expected, Numbers, expected, token_by_token
from tests.kljax.log_probs.points import Point, pairwise

ROWS, LENGTH, WIDTH, VOCABULARY, PADDING = 3, 7, 5, 37, 4
BETA = 0.3
# The fields of each kind of call, and those of them whose gradient is the derivative.
ALL_FIELDS = {
    "log_prob": ("log_prob", "logsumexp"),
    "entropy": ("log_prob", "logsumexp", "entropy"),
    "squares": ("log_prob", "logsumexp", "sum_squared_probs"),
    "kept": ("kept_log_prob", "log_kept_mass", "logsumexp"),
    "reverse": ("log_prob", "logsumexp", "entropy", "reverse"),
    "forward": ("log_prob", "logsumexp", "forward"),
    "kl": ("reverse",),
    "jsd": ("jsd",),
}
OUTPUTS = {
    **{name: (fields, fields) for name, fields in ALL_FIELDS.items()},
    "constant entropy": (("log_prob", "logsumexp", "entropy"), ("log_prob", "logsumexp")),
}
OPTIONS = {
    "outputs": tuple(OUTPUTS),
    "dtype": ("float64", "float32", "bfloat16"),
    # Chunks and a remainder, the last tile of tokens partly empty; all at once; one token by one column.
    "tile": (Tile(8, 10), Tile(4096, 4096), Tile(1, 6)),
    "to": ("all", "hidden", "heads"),
    # The reference has a `Head` of its own, other weights in the policy's head, or the policy's head.
    "ref_head": ("own", "weights", "shared"),
    "softcap": (0.0, 3.0),
    "bias": (True, False),
    "layout": ("dv", "vd"),
    "mask": (True, False),
    "padding": (True, False),
    "temperature": ("per token", "scalar"),
}
FROZEN = {"outputs": "log_prob", "to": "hidden", "ref_head": "shared"}
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
# Kept tokens: a few of each position, none at one, and one listed twice; -1 pads the lists.
KEPT_IDS = np.random.default_rng(3).integers(-1, VOCABULARY, (ROWS, LENGTH, 6))
KEPT_IDS[1, 2] = -1
KEPT_IDS[1, 3, 1] = KEPT_IDS[1, 3, 0]
KEPT = (KEPT_IDS[..., None] == np.arange(VOCABULARY)).any(-2)


def name_of(point: Point) -> str:
    return ", ".join(f"{name}={value}" for name, value in point.items() if value != PLAIN[name]) or "plain"


def dtypes(point: Point) -> tuple[Any, Any]:
    """Types of the hidden states, and of the heads and biases."""
    first, _, second = point["dtype"].partition(", ")
    return jnp.dtype(first), jnp.dtype(second or first)


@functools.cache
def drawn() -> Arrays:
    # Logits of a few nats: an absolute error of a logit in float32 is a relative one of a probability.
    rng = np.random.default_rng(0)
    hidden = 0.5 * rng.normal(size=(2, ROWS, LENGTH, WIDTH))
    heads = rng.normal(size=(2, WIDTH, VOCABULARY + PADDING))
    biases = 0.5 * rng.normal(size=(2, VOCABULARY + PADDING))
    return Arrays(hidden[0], heads[0], biases[0], hidden[1], heads[1], biases[1])


def has_reference(point: Point) -> bool:
    return any(kind in OUTPUTS[point["outputs"]][0] for kind in ("reverse", "forward", "jsd"))


def own_head(point: Point) -> bool:
    return has_reference(point) and point["ref_head"] == "own"


def layouts(point: Point) -> tuple[str, str]:
    """The layouts of policy and reference; a head of its own has the other one."""
    other = {"dv": "vd", "vd": "dv"}
    return point["layout"], other[point["layout"]] if own_head(point) else point["layout"]


def arrays_of(point: Point) -> Arrays:
    """The arrays as they are passed: in their types and layouts, a head with its padding; None where absent."""
    narrow, wide = dtypes(point)
    kinds = Arrays(narrow, wide, wide, narrow, wide, wide)
    arrays = Arrays(*(jnp.asarray(x, kind) for x, kind in zip(drawn(), kinds, strict=True)))
    # A head of its own has the opposite padding and bias.
    padded = point["padding"], point["padding"] != own_head(point)
    columns = [VOCABULARY + (PADDING if padding else 0) for padding in padded]
    heads = [head[:, :size] for head, size in zip((arrays.head, arrays.ref_head), columns, strict=True)]
    heads = [head.at[:, VOCABULARY:].set(1e3) for head in heads]
    heads = [head.T if layout == "vd" else head for head, layout in zip(heads, layouts(point), strict=True)]
    return Arrays(
        hidden=arrays.hidden,
        head=heads[0],
        bias=arrays.bias[: columns[0]] if point["bias"] else None,
        ref_hidden=arrays.ref_hidden if has_reference(point) else None,
        ref_head=heads[1] if has_reference(point) and point["ref_head"] != "shared" else None,
        ref_bias=arrays.ref_bias[: columns[1]] if own_head(point) and not point["bias"] else None,
    )


def numbers_of(point: Point, mask: np.ndarray) -> Numbers:
    rng = np.random.default_rng(1)
    temperature = rng.uniform(0.7, 1.5, (ROWS, LENGTH)) if point["temperature"] == "per token" else 0.7
    targets = rng.integers(0, VOCABULARY, (ROWS, LENGTH))
    targets[0, :3] = [0, VOCABULARY - 1, 9]
    softcap, scale = (point["softcap"], 3.0 - point["softcap"]), (0.75, 1.25)
    if not own_head(point):
        softcap, scale = (softcap[0],) * 2, (scale[0],) * 2
    # float32 numbers, so that they are the same in every type.
    return Numbers(targets, mask, np.float64(np.float32(temperature)), softcap, scale, BETA, KEPT)


def weights_of(point: Point) -> dict[str, np.ndarray]:
    """The weight of each field in the number that is differentiated, token by token; not 1, so that nothing cancels."""
    rng = np.random.default_rng(2)
    drawn = {name: np.float64(np.float32(rng.normal(size=(ROWS, LENGTH)))) for name in FIELDS}
    return {name: drawn[name] * (name in OUTPUTS[point["outputs"]][1]) for name in FIELDS}


def head_of(point: Point, arrays: Arrays, implementation: str) -> kljax.Head:
    return kljax.Head(
        arrays.head,
        bias=arrays.bias,
        softcap=point["softcap"] or None,
        logit_scale=0.75,
        vocab_size=VOCABULARY if point["padding"] else None,
        layout=point["layout"],
        tile=point["tile"],
        implementation=implementation,
    )


def ref_head_of(point: Point, arrays: Arrays) -> Any:
    if not own_head(point):
        return arrays.ref_head
    return kljax.Head(
        arrays.ref_head,
        bias=arrays.ref_bias,
        softcap=3.0 - point["softcap"] or None,
        logit_scale=1.25,
        vocab_size=None if point["padding"] else VOCABULARY,
        layout=layouts(point)[1],
    )


def fields_of(point: Point, arrays: Arrays, numbers: Numbers, implementation: str) -> dict[str, Any]:
    names = OUTPUTS[point["outputs"]][0]
    options = {"mask": numbers.mask if point["mask"] else None, "temperature": numbers.temperature}
    head, ref_head = head_of(point, arrays, implementation), ref_head_of(point, arrays)
    if names in (("jsd",), ("reverse",)):
        options["hidden_mask"] = options.pop("mask")
    if names == ("jsd",):
        return {"jsd": kljax.jsd_from_hidden(arrays.hidden, head, arrays.ref_hidden, ref_head, beta=BETA, **options)}
    if names == ("reverse",):
        return {"reverse": kljax.kl_from_hidden(arrays.hidden, head, arrays.ref_hidden, ref_head, **options)}
    if "log_kept_mass" in names:
        stats = kljax.renormalized_log_probs(arrays.hidden, head, numbers.targets, KEPT_IDS, **options)
        return {"kept_log_prob": stats.log_prob, "log_kept_mass": stats.log_kept_mass, "logsumexp": stats.logsumexp}
    direction = "forward" if "forward" in names else "reverse"
    reference = kljax.ReferenceStates(arrays.ref_hidden, ref_head, direction) if has_reference(point) else None
    entropy = "constant" if point["outputs"] == "constant entropy" else "entropy" in names
    options |= {"entropy": entropy, "sum_squared_probs": "sum_squared_probs" in names, "reference": reference}
    stats = kljax.log_probs_from_hidden(arrays.hidden, head, numbers.targets, **options)
    fields = {name: getattr(stats, name) for name in ("log_prob", "logsumexp", "entropy", "sum_squared_probs")}
    fields[direction] = stats.kl
    assert {name for name, value in fields.items() if value is not None} == set(names)
    return {name: fields[name] for name in names}


def differentiated(point: Point) -> tuple[str, ...]:
    return {"all": Arrays._fields, "hidden": ("hidden",), "heads": ("head", "bias", "ref_head", "ref_bias")}[
        point["to"]
    ]


def implementations(point: Point) -> tuple[str, ...]:
    """The reference implementation has no tiles: one of their sizes has it beside every value of the other options."""
    return ("tile", "reference") if point["tile"] == OPTIONS["tile"][0] else ("tile",)


def program(point: Point, arrays: Arrays, numbers: Numbers) -> Any:
    """Fields and gradients of the implementations, compiled."""

    def loss(given: dict[str, Any], numbers: Numbers, weights: Any, implementation: str) -> tuple[jax.Array, Any]:
        fields = fields_of(point, arrays._replace(**given), numbers, implementation)
        return sum((x * weights[name].astype(x.dtype)).sum() for name, x in fields.items()), fields  # type: ignore[return-value]

    def both(given: dict[str, Any], numbers: Numbers, weights: Any) -> dict[str, Any]:
        # A weight for the entropy as well where it is data: its gradient must not flow.
        weights = {name: jnp.where(weights[name] == 0, 1.0, weights[name]) for name in weights}
        return {name: jax.grad(loss, has_aux=True)(given, numbers, weights, name) for name in implementations(point)}

    inputs = {name: x for name, x in arrays._asdict().items() if name in differentiated(point) and x is not None}
    lowered = jax.jit(both).lower(inputs, numbers, weights_of(point))
    compiled = lowered.compile(compiler_options=known_options())
    return lambda mask: compiled(inputs, numbers._replace(mask=mask), weights_of(point))


def wanted_of(point: Point, arrays: Arrays, numbers: Numbers) -> Expected:
    """The fields and gradients of the numbers that the arrays hold in their types, layouts and padding."""

    def head(x: Any, layout: str) -> Any:
        return np.asarray(x.T if layout == "vd" else x, np.float64)[:, :VOCABULARY]

    def bias(x: Any) -> Any:
        return np.zeros(VOCABULARY) if x is None else np.asarray(x, np.float64)[:VOCABULARY]

    first, second = layouts(point)
    wide = Arrays(
        hidden=np.asarray(arrays.hidden, np.float64),
        head=head(arrays.head, first),
        bias=bias(arrays.bias),
        ref_hidden=np.asarray(drawn().ref_hidden if arrays.ref_hidden is None else arrays.ref_hidden, np.float64),
        ref_head=head(arrays.head, first) if arrays.ref_head is None else head(arrays.ref_head, second),
        ref_bias=bias(arrays.ref_bias if own_head(point) else arrays.bias),
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
        actual = actual.T if layouts(point)[name == "ref_head"] == "vd" else actual
    actual = np.asarray(actual)
    columns = name not in ("hidden", "ref_hidden")
    assert not actual[..., VOCABULARY:].any() or not columns, f"{where}: padding has a gradient"
    error = np.abs(np.float64(actual[..., :VOCABULARY] if columns else actual) - exact)
    # Statistics have the error of float32 or float64. Beside it a gradient is rounded twice: the slopes that enter the
    # matrix product, in the type of the heads, and the result, in its own.
    statistics = 1e-12 if point["dtype"] == "float64" else 1e-6
    rounding = 0.0 if "bias" in name else unit_roundoff(dtypes(point)[1])
    roundoff = unit_roundoff(actual.dtype)
    smallest = float(jnp.finfo(actual.dtype).smallest_subnormal)
    bound = statistics * scale.max() + rounding * scale + roundoff * np.abs(exact) + smallest
    assert (error <= bound).all(), f"{where}: {(error / bound).max():.3g} of what rounding explains"


@pytest.mark.parametrize("point", POINTS, ids=name_of)
def test_values_and_gradients(point: Point) -> None:
    masks = MASKS if point["mask"] else {"all": MASKS["all"]}
    arrays, numbers = arrays_of(point), numbers_of(point, MASKS["all"])
    run = program(point, arrays, numbers)
    close = {"rtol": 1e-12, "atol": 1e-13} if point["dtype"] == "float64" else {"rtol": 1e-6, "atol": 1e-6}
    statistics = jnp.float64 if point["dtype"] == "float64" else jnp.float32
    for mask_name, mask in masks.items():
        wanted = wanted_of(point, arrays, numbers._replace(mask=mask))
        for implementation, (gradients, fields) in jax.device_get(run(mask)).items():
            where = f"{implementation}, mask: {mask_name}"
            for name, value in fields.items():
                assert value.dtype == statistics, f"{where}: {name}"
                assert not value[~mask].any(), f"{where}: {name}"
                np.testing.assert_allclose(value, wanted.fields[name], **close, err_msg=f"{where}: {name}")
            for name, gradient in gradients.items():
                inputs = getattr(arrays, name)
                assert (gradient.dtype, gradient.shape) == (inputs.dtype, inputs.shape), f"{where}: {name}"
                check_gradient(point, name, gradient, wanted, f"{where}: {name}")


def test_the_grid_has_every_pair_of_options() -> None:
    for item, values in OPTIONS.items():
        for other, others in OPTIONS.items():
            if item != other:
                assert {(p[item], p[other]) for p in POINTS} >= {(a, b) for a in values for b in others}
