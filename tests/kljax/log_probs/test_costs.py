"""Nothing is computed, kept or built that is not requested: matrix products, residuals, buffers.

Products are counted in the traced program, or, where a mask decides how often a loop runs, as it runs: with
`jax.disable_jit` each tile calls `lax.dot_general`.
"""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import kljax
from kljax import Tile

TOKENS, WIDTH, VOCABULARY = 24, 4, 36
TILE = Tile(8, 12)
CHUNKS = 3
TILES = 3 * CHUNKS


def arrays() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"hidden": (TOKENS, WIDTH), "head": (WIDTH, VOCABULARY), "bias": (VOCABULARY,)}
    shapes |= {"ref_hidden": shapes["hidden"], "ref_head": shapes["head"]}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def loss(given: dict[str, Any], kind: str, mask: Any = None, tile: Tile = TILE) -> jax.Array:
    """A number from each kind of call; arrays that are not in `given` are constants."""
    x = {name: jax.lax.stop_gradient(x) for name, x in arrays().items()} | given
    targets = jnp.arange(x["hidden"].shape[0], dtype=jnp.int32) % VOCABULARY
    head = kljax.Head(x["head"], bias=x["bias"] if kind == "bias" else None, tile=tile)
    if kind == "jsd":
        return kljax.jsd_from_hidden(x["hidden"], head, x["ref_hidden"], x["ref_head"], hidden_mask=mask).sum()
    options: dict[str, Any] = {
        "shared": {"reference": (x["ref_hidden"], None)},
        "own": {"reference": (x["ref_hidden"], x["ref_head"])},
        "forward": {"reference": kljax.ReferenceStates(x["ref_hidden"], x["ref_head"], "forward")},
        "entropy": {"entropy": True},
        "constant entropy": {"entropy": "constant"},
        "squares": {"sum_squared_probs": True},
    }.get(kind, {})
    if kind == "kept":
        kept_ids = jnp.stack([targets, (targets + 5) % VOCABULARY], -1)
        stats = kljax.renormalized_log_probs(x["hidden"], head, targets, kept_ids, mask=mask)
    else:
        stats = kljax.log_probs_from_hidden(x["hidden"], head, targets, mask=mask, **options)
    return sum(field.sum() for field in jax.tree.leaves(stats))  # type: ignore[return-value]


def products_of(jaxpr: Any, primitive: str = "dot_general") -> Iterator[tuple[int, ...]]:
    """The shapes of the matrix products of a program, as often as its loops of known length run them."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation.outvars[0].aval.shape
        inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(equation.params.values()))]
        shapes = [shape for x in inner if hasattr(x, "eqns") for shape in products_of(x, primitive)]
        assert not shapes or equation.primitive.name != "while"
        yield from shapes * equation.params.get("length", 1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """The shapes that matrix products have had so far."""
    shapes: list[tuple[int, ...]] = []
    dot_general = jax.lax.dot_general

    def counted(*arguments: Any, **options: Any) -> jax.Array:
        out = dot_general(*arguments, **options)
        shapes.append(out.shape)
        return out

    monkeypatch.setattr(jax.lax, "dot_general", counted)
    with jax.disable_jit():
        yield shapes


# What is differentiated, what is asked for, products per tile in the forward and in the backward pass.
WEIGHTS = ("hidden", "head")
COUNTS: list[tuple[str, tuple[str, ...], int]] = [
    ("log_prob", (), 1),
    ("entropy", (), 1),
    ("own", (), 2),
    ("jsd", (), 4),
    ("log_prob", WEIGHTS, 1 + 3),
    ("entropy", WEIGHTS, 1 + 3),
    ("bias", (*WEIGHTS, "bias"), 1 + 3),
    ("bias", ("bias",), 1 + 1),
    ("log_prob", ("head",), 1 + 2),
    # A frozen head: the forward pass has all that the gradient needs, 4 N D V in total.
    ("log_prob", ("hidden",), 2),
    ("constant entropy", ("hidden",), 2),
    ("entropy", ("hidden",), 1 + 2),
    ("squares", ("hidden",), 1 + 2),
    ("kept", WEIGHTS, 1 + 3),
    ("shared", WEIGHTS, 2 + 4),
    ("own", WEIGHTS, 2 + 4),
    ("own", ("hidden",), 2 + 3),
    ("forward", (*WEIGHTS, "ref_hidden", "ref_head"), 2 + 6),
    ("jsd", WEIGHTS, 4 + 4),
]


@pytest.mark.parametrize(("kind", "to", "expected"), COUNTS)
def test_products_per_tile(kind: str, to: tuple[str, ...], expected: int) -> None:
    inputs = {name: arrays()[name] for name in to}
    function = jax.grad(loss) if to else loss
    products = list(products_of(jax.make_jaxpr(lambda given: function(given, kind))(inputs).jaxpr))
    assert len(products) == expected * TILES
    assert set(products) <= {(8, 12), (8, WIDTH), (WIDTH, 12)}


def test_target_columns_are_gathered_once() -> None:
    # A frozen head: each chunk of the vocabulary would otherwise read and write an array `[N, D]` for them.
    inputs = {"hidden": arrays()["hidden"]}
    program = jax.make_jaxpr(jax.grad(lambda given: loss(given, "log_prob")))(inputs).jaxpr
    gathered = [shape for shape in products_of(program, "gather") if set(shape) == {TOKENS, WIDTH}]
    assert len(gathered) == 1


EVERY_COUNT = [pytest.param(*pair, marks=pytest.mark.thorough) for pair in ((1, 1), (8, 1), (16, 2), (24, 3))]


@pytest.mark.parametrize(("kept", "tiles"), [(0, 0), (9, 2), *EVERY_COUNT])
def test_masked_tokens_cost_nothing(kept: int, tiles: int, products: list[tuple[int, ...]]) -> None:
    mask = jnp.zeros(TOKENS, bool).at[np.random.default_rng(1).permutation(TOKENS)[:kept]].set(True)
    loss({}, "log_prob", mask)
    assert len(products) == tiles * CHUNKS
    jax.grad(loss)({name: arrays()[name] for name in WEIGHTS}, "log_prob", mask)
    assert len(products) == tiles * CHUNKS * (1 + 1 + 3)


def test_scoring_stores_no_residuals() -> None:
    # As old or reference log-probs are in a loss: data beside what is differentiated.
    def score(scale: jax.Array) -> jax.Array:
        return scale * loss({}, "entropy")

    _, pull = jax.vjp(score, jnp.float32(1.0))
    assert [leaf.shape for leaf in jax.tree.leaves(pull)] == [()]


@pytest.mark.parametrize(("kind", "to", "per_token"), [("log_prob", WEIGHTS, 1), ("own", WEIGHTS, 3)])
def test_gradient_stores_a_few_numbers_per_token(kind: str, to: tuple[str, ...], per_token: int) -> None:
    passed = {name: arrays()[name] for name in to}
    _, pull = jax.vjp(lambda given: loss(given, kind), passed)
    sizes = [leaf.size for leaf in jax.tree.leaves(pull)]
    inputs = sorted((TOKENS * WIDTH, WIDTH * VOCABULARY) * (1 if kind == "log_prob" else 2))
    # Beside its inputs: targets and inverse temperatures, and what the statistics have left.
    assert sorted(size for size in sizes if size > TOKENS) == inputs
    assert sizes.count(TOKENS) <= 2 + per_token


@pytest.mark.parametrize(
    ("kind", "to"), [("entropy", WEIGHTS), ("own", (*WEIGHTS, "ref_hidden")), ("jsd", WEIGHTS), ("kept", WEIGHTS)]
)
@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_no_buffer_is_larger_than_the_inputs(kind: str, to: tuple[str, ...], masked: bool) -> None:
    inputs = {name: arrays()[name] for name in to}
    mask = jnp.arange(TOKENS) % 2 == 0 if masked else None
    tile = Tile(8, 8)
    text = jax.jit(jax.grad(lambda x, m: loss(x, kind, m, tile))).lower(inputs, mask).compile().as_text()
    shapes = [[int(size) for size in dims.split(",")] for dims in re.findall(r"\b[fsu]\d+\[([\d,]+)\]", text)]
    # Fewer than the logits of two tiles; all of them would be 864.
    assert max(np.prod(shape) for shape in shapes) <= max(TOKENS * WIDTH, WIDTH * VOCABULARY)
    assert not [shape for shape in shapes if TOKENS in shape and VOCABULARY in shape]


def test_reference_builds_buffers_unlike_the_tiles() -> None:
    # That the test above can fail.
    def full(head: jax.Array) -> jax.Array:
        targets = jnp.zeros(TOKENS, jnp.int32)
        head = kljax.Head(head, implementation="reference")
        return kljax.log_probs_from_hidden(arrays()["hidden"], head, targets).log_prob.sum()

    text = jax.jit(jax.grad(full)).lower(arrays()["head"]).compile().as_text()
    assert f"f32[{TOKENS},{VOCABULARY}]" in text


def temporary_bytes(function: Any, *arguments: Any) -> int:
    plan = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return int(plan.temp_size_in_bytes)


@pytest.mark.parametrize("fused", [False, True])
def test_narrow_head_has_no_float32_copy_on_cpu(fused: bool) -> None:
    # Tied embeddings as they are stored, frozen; wide enough that nothing else has their size.
    hidden, weights = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((8192, 32), jnp.bfloat16)

    def loss(hidden: jax.Array, weights: jax.Array) -> jax.Array:
        head = kljax.Head(weights, layout="vd", tile=Tile(16, 256))
        targets = jnp.zeros(16, jnp.int32)
        if fused:
            token_loss = kljax.token_loss_from_hidden(
                hidden, head, targets, lambda s, _: (-s.log_prob, ()), (), token_chunk=8
            )
            return token_loss[0]
        return kljax.log_probs_from_hidden(hidden, head, targets, entropy=True).entropy.sum()

    # Beside the head: logits of 8 tokens.
    assert temporary_bytes(jax.grad(loss), hidden, weights) < weights.nbytes + 8 * 8192 * 4


def test_axes_of_one_device_exchange_nothing() -> None:
    mesh = jax.make_mesh((1, 1), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharding = kljax.HeadSharding(tokens=P("fsdp"), head=P("fsdp", "tensor"), mesh=mesh)

    def loss(hidden: jax.Array, weights: jax.Array) -> jax.Array:
        head = kljax.Head(weights, sharding=sharding, tile=TILE)
        return kljax.log_probs_from_hidden(hidden, head, jnp.zeros(TOKENS, jnp.int32)).log_prob.sum()

    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(arrays()["hidden"], arrays()["head"]).compile().as_text()
    assert not re.findall(r"all-(?:gather|reduce)|reduce-scatter", text)
