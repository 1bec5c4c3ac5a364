"""The loss fused with the head: values, metrics and gradients of `log_probs_from_hidden` with the same loss."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

import kljax
from kljax import Head, Tile
from tests.kljax.calls import known_options, quick
from tests.kljax.log_probs.points import Point, pairwise
from tests.kljax.log_probs.test_costs import products_of
from tests.masks import LENGTH, MASK, ROWS

WIDTH, REF_WIDTH, VOCABULARY, PADDING = 5, 4, 23, 4
MASKS = {"rows of each kind": MASK, "one token": MASK & (np.arange(ROWS) == 2)[:, None], "none": np.zeros_like(MASK)}
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def ones(stats: kljax.TokenStats) -> jax.Array:
    return jnp.ones(stats.log_prob.shape, bool)


def policy_loss(stats: kljax.TokenStats, x: dict[str, Any]) -> jax.Array:
    return kljax.ppo_clip_loss(stats.log_prob, x["old"], x["advantages"], ones(stats), dual_clip=2.0)


def kl_loss(estimator: Any, **options: Any) -> Any:
    def loss(stats: kljax.TokenStats, x: dict[str, Any]) -> Any:
        kl = kljax.reference_kl_loss(stats.log_prob, x["ref"], ones(stats), estimator=estimator, **options)
        return x["weights"] * (policy_loss(stats, x) + x["coef"] * kl), {"kl": kl, "clipped": stats.log_prob < x["old"]}

    return loss


def entropy_loss(stats: kljax.TokenStats, x: dict[str, Any]) -> Any:
    return x["weights"] * (policy_loss(stats, x) - x["coef"] * stats.entropy), (stats.entropy, stats.logsumexp)


def exact_kl_loss(stats: kljax.TokenStats, x: dict[str, Any]) -> Any:
    return policy_loss(stats, x) + x["coef"] * stats.kl, {"kl": stats.kl, "log_prob": stats.log_prob}


def rollout_kl_loss(stats: kljax.TokenStats, x: dict[str, Any]) -> Any:
    return kljax.rollout_kl_loss(stats.log_prob, x["old"], ones(stats)) + x["coef"] * stats.logsumexp**2, None


def squares_loss(stats: kljax.TokenStats, x: dict[str, Any]) -> Any:
    pair = jnp.stack([stats.log_prob, stats.sum_squared_probs], -1)
    return x["coef"] * stats.sum_squared_probs * x["vectors"].sum(-1), pair


def mass_loss(stats: kljax.TokenStats, x: dict[str, Any]) -> Any:
    return -stats.log_prob * x["advantages"] - x[
        "coef"
    ] * stats.log_kept_mass + 0.1 * stats.entropy, stats.log_kept_mass


LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "k1": (kl_loss("k1", gradient="k2"), {}),
    "k2": (kl_loss("k2"), {"entropy": "constant"}),
    "k3": (kl_loss("k3", value_clip=5.0), {}),
    "entropy": (entropy_loss, {"entropy": True}),
    "reverse": (exact_kl_loss, {"direction": "reverse"}),
    "forward": (exact_kl_loss, {"direction": "forward", "entropy": True}),
    "rollout KL": (rollout_kl_loss, {}),
    "squares": (squares_loss, {"sum_squared_probs": True}),
    "kept": (mass_loss, {"kept": True, "entropy": True}),
}
OPTIONS = {
    "loss": tuple(LOSSES),
    # Chunks of rows that divide nothing, and all of them; tiles of columns that overlap, and all of them.
    "chunk": (8, 1000),
    "columns": (10, 4096),
    "to": ("all", "hidden", "heads", "per token"),
    "ref_head": ("own", "weights", "shared"),
    "softcap": (None, 3.0),
    "bias": (True, False),
    "layout": ("dv", "vd"),
    "mask": (True, False),
    "padding": (True, False),
}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
POINTS = pairwise(OPTIONS)
# Every loss once; every two values of two options in the thorough tests.
FIRST = {point["loss"]: index for index, point in reversed(list(enumerate(POINTS)))}
WEIGHTS = ("hidden", "head", "bias", "ref_hidden", "ref_head", "ref_bias")
GIVEN = {"all": (*WEIGHTS, "inputs"), "hidden": ("hidden",), "heads": ("head", "bias", "ref_head", "ref_bias")}
GIVEN["per token"] = ("inputs",)


def name_of(point: Point) -> str:
    return ", ".join(f"{name}={value}" for name, value in point.items() if value != PLAIN[name]) or "plain"


def draw(point: Point, dtype: Any = np.float64) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    columns = VOCABULARY + PADDING * point["padding"]
    separate_head = point["ref_head"] == "own"
    ref_width = REF_WIDTH if separate_head else WIDTH

    def head(width: int) -> np.ndarray:
        weights = rng.normal(size=(width, columns))
        return weights.T if point["layout"] == "vd" else weights

    drawn = {
        "hidden": rng.normal(size=(ROWS, LENGTH, WIDTH)),
        "head": head(WIDTH),
        "bias": rng.normal(size=columns) if point["bias"] else None,
        "ref_hidden": rng.normal(size=(ROWS, LENGTH, ref_width)),
        "ref_head": None if point["ref_head"] == "shared" else head(ref_width),
        "ref_bias": rng.normal(size=columns) if separate_head else None,
    }
    inputs = {name: rng.normal(-2.0, 0.7, (ROWS, LENGTH)) for name in ("old", "ref", "advantages")}
    inputs |= {"weights": rng.uniform(size=(ROWS, LENGTH)), "vectors": rng.normal(size=(ROWS, LENGTH, 3))}
    drawn["inputs"] = inputs | {"coef": np.asarray(0.3)}
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), drawn)


TARGETS = np.random.default_rng(1).integers(0, VOCABULARY, (ROWS, LENGTH))
KEPT_IDS = np.random.default_rng(2).integers(-1, VOCABULARY, (ROWS, LENGTH, 4))


def arguments(point: Point, x: dict[str, Any], mask: Any, implementation: str = "tile") -> dict[str, Any]:
    options = dict(LOSSES[point["loss"]][1])
    selected, direction = options.pop("kept", False), options.pop("direction", None)
    fields = {"vocab_size": VOCABULARY if point["padding"] else None, "layout": point["layout"]}
    fields |= {"tile": Tile(7, point["columns"]), "implementation": implementation}
    head = Head(x["head"], bias=x["bias"], softcap=point["softcap"], logit_scale=0.8, **fields)
    if direction is not None:
        ref = x["ref_head"]
        if point["ref_head"] == "own":
            ref = Head(ref, bias=x["ref_bias"], softcap=2.0, **fields)
        options["reference"] = kljax.ReferenceStates(x["ref_hidden"], ref, direction)
    if selected:
        options["kept_ids"] = KEPT_IDS
    options |= {"mask": mask if point["mask"] else None, "temperature": 0.7}
    return {"hidden": x["hidden"], "head": head, "targets": TARGETS, **options}


def fused(point: Point, x: dict[str, Any], mask: Any, implementation: str = "tile") -> tuple[jax.Array, Any]:
    return kljax.token_loss_from_hidden(
        token_loss=LOSSES[point["loss"]][0],
        per_token=x["inputs"],
        token_chunk=point["chunk"],
        **arguments(point, x, mask, implementation),
    )


def unfused(point: Point, x: dict[str, Any], mask: Any, implementation: str = "tile") -> tuple[jax.Array, Any]:
    """The same from the statistics of all tokens, whose loss is that of the unmasked ones."""
    passed = arguments(point, x, mask, implementation)
    selected = passed.pop("kept_ids", None)
    if selected is None:
        stats = kljax.log_probs_from_hidden(**passed)
    else:
        stats = kljax.renormalized_log_probs(**passed, kept_ids=selected)
    inputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) if x.ndim else x, x["inputs"])
    loss, metrics = LOSSES[point["loss"]][0](jax.tree.map(jnp.ravel, stats), inputs)
    shape = (ROWS, LENGTH)

    def masked(values: jax.Array) -> jax.Array:
        values = values.reshape(*shape, *values.shape[1:])
        keep = mask.reshape(*shape, *(1,) * (values.ndim - 2)) if point["mask"] else True
        return jnp.where(keep, values, jnp.zeros((), values.dtype))

    return masked(loss).sum(), jax.tree.map(masked, metrics)


def value_and_grads(function: Any, point: Point, x: dict[str, Any], mask: Any) -> Any:
    arguments = {name: x[name] for name in GIVEN[point["to"]] if x[name] is not None}
    return jax.value_and_grad(lambda given: function(point, x | given, mask), has_aux=True)(arguments)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, id=name_of(point), marks=[] if index in FIRST.values() else [pytest.mark.thorough])
        for index, point in enumerate(POINTS)
    ],
)
def test_loss_metrics_and_gradients_match_log_probs(point: Point) -> None:
    def tiles(x: dict[str, Any], mask: Any) -> Any:
        return value_and_grads(fused, point, x, mask)

    def by_reference(x: dict[str, Any], mask: Any) -> Any:
        # The reference has no chunks: one of their sizes has it beside every value of the other options.
        actual = {}
        if point["chunk"] == PLAIN["chunk"]:
            actual["reference"] = value_and_grads(lambda *given: fused(*given, "reference"), point, x, mask)
        return actual, value_and_grads(lambda *given: unfused(*given, "reference"), point, x, mask)

    x = draw(point)
    program = jax.jit(tiles).lower(x, jnp.asarray(MASK)).compile(compiler_options=known_options())
    # Without loops NumPy takes less time than a compilation.
    reference = quick(by_reference)
    for mask_name, mask in MASKS.items() if point["mask"] else [("all", np.ones_like(MASK))]:
        result, wanted = reference(x, jnp.asarray(mask))
        result["tile"] = jax.device_get(program(x, jnp.asarray(mask)))
        for name, actual in result.items():
            assert jax.tree.structure(actual) == jax.tree.structure(wanted)
            for (path, leaf), other in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(wanted), strict=True):
                where = f"{name}, mask: {mask_name}, {jax.tree_util.keystr(path)}"
                assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape), where
                np.testing.assert_allclose(leaf, other, **CLOSE, err_msg=where)


def test_loss_is_the_same_with_and_without_gradient() -> None:
    def run(x: dict[str, Any], mask: Any) -> Any:
        return fused(PLAIN, x, mask), value_and_grads(fused, PLAIN, x, mask)[0]

    results = jax.jit(run, compiler_options=known_options())(draw(PLAIN), jnp.asarray(MASK))
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(results))


def test_loss_equals_the_loss_of_the_logits() -> None:
    # An oracle that shares no code with either.
    point = PLAIN | {"loss": "reverse", "ref_head": "weights", "padding": False}
    x = draw(point)
    pairs = ((x["hidden"], x["head"]), (x["ref_hidden"], x["ref_head"]))
    logits = (0.8 * (np.asarray(h) @ np.asarray(w)) + np.asarray(x["bias"]) for h, w in pairs)
    p, q = (log_softmax(z / 0.7, -1) for z in logits)
    log_prob = np.take_along_axis(p, TARGETS[..., None], -1)[..., 0]
    kl = (np.exp(p) * (p - q)).sum(-1)
    inputs = jax.tree.map(np.asarray, x["inputs"])
    ratio = np.exp(log_prob - inputs["old"])
    terms = np.minimum(ratio * inputs["advantages"], np.clip(ratio, 0.8, 1.2) * inputs["advantages"])
    terms = np.where(inputs["advantages"] < 0, np.maximum(terms, 2.0 * inputs["advantages"]), terms)
    loss, metrics = jax.jit(functools.partial(fused, point), compiler_options=known_options())(x, MASK)
    np.testing.assert_allclose(loss, (0.3 * kl - terms)[MASK].sum(), rtol=1e-12)
    np.testing.assert_allclose(metrics["kl"], np.where(MASK, kl, 0), **CLOSE)


@pytest.mark.parametrize("loss", ["k3", "forward"])
@pytest.mark.parametrize("implementation", ["tile", "reference"])
def test_nothing_under_the_mask_reaches_loss_or_gradient(loss: str, implementation: str) -> None:
    point = PLAIN | {"loss": loss}

    def run(x: dict[str, Any]) -> Any:
        return value_and_grads(lambda *given: fused(*given, implementation), point, x, jnp.asarray(MASK))

    def filled(value: float) -> dict[str, Any]:
        def fill(a: jax.Array) -> jax.Array:
            if a.shape[:2] != MASK.shape:
                return a
            return jnp.where(MASK.reshape(*MASK.shape, *(1,) * (a.ndim - 2)), a, value)

        return jax.tree.map(fill, draw(point))

    program = jax.jit(run)
    expected = jax.device_get(program(filled(0.5)))
    for poison in (np.nan, np.inf, -np.inf):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(program(filled(poison))), expected)
    (_, metrics), gradients = expected
    for leaf in jax.tree.leaves((metrics, gradients)):
        assert np.isfinite(leaf).all()
        if leaf.shape[:2] == MASK.shape:
            assert not leaf[~MASK].any()


def test_non_finite_derivative_on_no_token_adds_nothing() -> None:
    def token_loss(stats: kljax.TokenStats, x: dict[str, Any]) -> Any:
        return x["scale"] * jnp.sqrt(x["roots"]) * stats.log_prob, ()

    def loss(scale: jax.Array, mask: Any) -> jax.Array:
        x, roots = draw(PLAIN), jnp.where(MASK, 1.0, -1.0)
        return kljax.token_loss_from_hidden(
            x["hidden"], x["head"], TARGETS, token_loss, {"scale": scale, "roots": roots}, mask=mask, token_chunk=8
        )[0]

    gradient = jax.jit(jax.grad(loss), compiler_options=known_options())
    gradients = [gradient(1.0, mask) for mask in (MASK, np.zeros_like(MASK))]
    assert np.isfinite(gradients[0])
    assert gradients[1] == 0


ALL_WIDE = pytest.param(("float32", "float32"), marks=pytest.mark.thorough)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ALL_WIDE])
def test_narrow_types_are_accumulated_in_float32(dtypes: tuple[str, str]) -> None:
    point = PLAIN | {"loss": "reverse", "ref_head": "shared", "softcap": 3.0}
    x = draw(point, np.float32)
    x = x | {"hidden": x["hidden"].astype(dtypes[0]), "ref_hidden": x["ref_hidden"].astype(dtypes[0])}
    x |= {name: x[name].astype(dtypes[1]) for name in ("head", "bias")}

    def run(x: Any) -> Any:
        return [value_and_grads(function, point, x, jnp.asarray(MASK)) for function in (fused, unfused)]

    actual, wanted = jax.device_get(jax.jit(run, compiler_options=known_options())(x))
    assert actual[0][0].dtype == np.float32
    for (path, leaf), other in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == other.dtype
        # Both round the slopes of the logits and the result, once each.
        rounding = float(jnp.finfo(leaf.dtype).eps) if leaf.dtype != bool else 0.0
        difference = np.abs(np.float64(leaf) - np.float64(other)).max(initial=0)
        assert difference <= 4 * rounding * np.abs(np.float64(other)).max(initial=1), jax.tree_util.keystr(path)


def test_a_cotangent_scales_the_gradients() -> None:
    x = draw(PLAIN)

    @functools.partial(jax.jit, compiler_options=known_options())
    def gradient(scale: float) -> Any:
        return jax.grad(lambda h: scale * fused(PLAIN, x | {"hidden": h}, jnp.asarray(MASK))[0])(x["hidden"])

    np.testing.assert_allclose(gradient(-2.5), -2.5 * gradient(1.0), rtol=1e-15)


def test_metrics_are_constants() -> None:
    x = draw(PLAIN)

    def total(hidden: jax.Array) -> jax.Array:
        return fused(PLAIN, x | {"hidden": hidden}, jnp.asarray(MASK))[1]["kl"].sum()

    assert not jax.jit(jax.grad(total), compiler_options=known_options())(x["hidden"]).any()


def test_one_program_for_all_masks_temperatures_and_coefficients() -> None:
    traces = []

    @jax.jit
    def run(x: Any, mask: Any, temperature: Any) -> jax.Array:
        traces.append(1)

        def loss(hidden: jax.Array) -> jax.Array:
            inputs = arguments(PLAIN, x | {"hidden": hidden}, mask) | {"temperature": temperature}
            return kljax.token_loss_from_hidden(
                token_loss=LOSSES["k3"][0], per_token=x["inputs"], token_chunk=8, **inputs
            )[0]

        return jax.value_and_grad(loss)(x["hidden"])[0]

    x = draw(PLAIN)
    results = {
        float(run(x | {"inputs": x["inputs"] | {"coef": jnp.asarray(coef)}}, jnp.asarray(mask), temperature))
        for mask, temperature, coef in ((MASK, 1.0, 0.1), (MASKS["one token"], 0.7, 0.1), (MASK, 1.0, 0.2))
    }
    assert len(results) == 3
    assert len(traces) == 1


def test_other_derivatives_are_refused() -> None:
    x = draw(PLAIN)

    def loss(hidden: jax.Array, implementation: str = "tile") -> jax.Array:
        return fused(PLAIN, x | {"hidden": hidden}, jnp.asarray(MASK), implementation)[0]

    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(loss, (x["hidden"],), (x["hidden"],))
    for second in (jax.jacfwd, jax.jacrev):
        with pytest.raises(NotImplementedError, match="got a second derivative, expected one; "):
            jax.eval_shape(second(jax.grad(loss)), x["hidden"])
    jax.eval_shape(jax.hessian(lambda hidden: loss(hidden, "reference")), x["hidden"])


# What is differentiated, the loss, products per tile of tokens and columns.
COUNTS = [
    ("k3", (), 1),
    ("entropy", ("hidden", "head"), 3),
    ("k3", ("hidden",), 2),
    ("entropy", ("hidden",), 2),
    ("k3", ("bias",), 1),
    ("k3", ("inputs",), 1),
    ("reverse", ("hidden", "head"), 4),
    ("reverse", ("hidden", "head", "ref_hidden", "ref_head"), 6),
    ("squares", ("hidden", "head"), 3),
]


@pytest.mark.parametrize(("loss", "to", "expected"), COUNTS)
def test_products_per_tile(loss: str, to: tuple[str, ...], expected: int) -> None:
    point = PLAIN | {"loss": loss, "mask": False, "columns": 9}
    x = draw(point)

    def run(given: dict[str, Any]) -> jax.Array:
        return fused(point, x | given, None)[0]

    function = jax.grad(run) if to else run
    products = list(products_of(jax.make_jaxpr(function)({name: x[name] for name in to}).jaxpr))
    chunks, tiles = -(-ROWS * LENGTH // 8), 3
    assert len(products) == expected * chunks * tiles


@pytest.mark.parametrize(("kept", "chunks"), [(0, 0), (9, 2)])
def test_masked_tokens_cost_nothing(kept: int, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    dot_general = jax.lax.dot_general
    monkeypatch.setattr(
        jax.lax, "dot_general", lambda *given, **options: shapes.append(1) or dot_general(*given, **options)
    )
    mask = np.zeros(MASK.size, bool)
    mask[np.random.default_rng(1).permutation(mask.size)[:kept]] = True
    point = PLAIN | {"loss": "entropy", "columns": 4096}
    with jax.disable_jit():
        value_and_grads(fused, point | {"to": "all"}, draw(point), jnp.asarray(mask.reshape(MASK.shape)))
    assert len(shapes) == chunks * 3


@pytest.mark.parametrize("loss", ["entropy", "reverse"])
def test_no_buffer_is_larger_than_a_chunk(loss: str) -> None:
    point = PLAIN | {"loss": loss, "ref_head": "shared", "padding": False, "chunk": 8, "columns": 6}
    tokens, columns = 64, 48
    rng = np.random.default_rng(0)
    x: dict[str, Any] = {"hidden": rng.normal(size=(tokens, WIDTH)), "head": rng.normal(size=(WIDTH, columns))}
    inputs = {name: np.ones(tokens) for name in ("old", "advantages", "weights")} | {"coef": np.asarray(0.1)}
    x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), x | {"inputs": inputs, "ref_hidden": x["hidden"]})
    targets = jnp.zeros(tokens, jnp.int32)

    def run(hidden: Any, head: Any, mask: Any) -> jax.Array:
        options = {"entropy": True} if loss == "entropy" else {"reference": (x["ref_hidden"], None)}
        return kljax.token_loss_from_hidden(
            hidden, Head(head, tile=Tile(1, 6)), targets, LOSSES[loss][0], x["inputs"], mask=mask,
            token_chunk=point["chunk"], **options,
        )[0]  # fmt: skip

    lowered = jax.jit(jax.grad(run, (0, 1))).lower(x["hidden"], x["head"], jnp.arange(tokens) % 2 == 0)
    text = lowered.compile().as_text()
    shapes = [[int(size) for size in dims.split(",")] for dims in re.findall(r"\b[fsu]\d+\[([\d,]+)\]", text)]
    assert max(np.prod(shape) for shape in shapes) == 8 * columns
    assert not [shape for shape in shapes if tokens in shape and columns in shape]


def test_no_tokens_at_all() -> None:
    inputs = {"advantages": jnp.zeros((2, 0)), "coef": jnp.asarray(1.0)}

    def loss(head: jax.Array, coef: jax.Array) -> Any:
        return kljax.token_loss_from_hidden(
            jnp.zeros((2, 0, 3)), head, jnp.zeros((2, 0), int),
            lambda stats, x: (x["coef"] * stats.log_prob, stats.log_prob), inputs | {"coef": coef},
        )  # fmt: skip

    (value, metric), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(np.ones((3, 4)), 1.0)
    assert value == 0
    assert metric.shape == (2, 0)
    assert not any(gradient.any() for gradient in gradients)


def of_log_prob(stats: kljax.TokenStats, inputs: Any) -> Any:
    return stats.log_prob, {"a": stats.log_prob}


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "per token": (
        {"per_token": {"a": [jnp.ones(ROWS)]}},
        r"per_token\['a'\]\[0\]: got shape \[6\], expected a scalar or the leading axes of hidden \[6, 7\]",
    ),
    "loss": (
        {"token_loss": lambda stats, x: (stats.log_prob.sum(), ())},
        r"token_loss: got a loss of shape \[\], expected \[8\], one for each token",
    ),
    "metric": (
        {"token_loss": lambda stats, x: (stats.log_prob, {"m": stats.log_prob.mean()})},
        r"token_loss: got the metric \['m'\] of shape \[\], expected \[8, \.\.\.\], one for each token",
    ),
    "chunk": ({"token_chunk": 0}, r"token_chunk: got 0, expected a number >= 1"),
    "temperature": ({"temperature": 0.0}, r"temperature: got 0\.0, expected a number > 0"),
    "entropy": ({"entropy": "yes"}, r"entropy: got 'yes', expected True, False or 'constant'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_arguments_are_refused(name: str) -> None:
    x = draw(PLAIN)
    arguments = {"token_loss": of_log_prob, "per_token": {}, "token_chunk": 8}
    more, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        kljax.token_loss_from_hidden(x["hidden"], x["head"], TARGETS, **arguments | more)
