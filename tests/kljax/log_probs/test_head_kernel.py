"""The kernel of Hopper GPUs for logits and their sums, in Pallas' interpreter on a CPU."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import kljax
from kljax import Head, HeadSharding, Tile
from kljax.log_probs._head import ALL_COLUMNS, DEFAULTS, HeadDefaults, head_defaults
from kljax.log_probs._kernel import NAME

TOKENS, WIDTH, COLUMNS = 136, 64, 200
WHOLE = Tile(TOKENS, ALL_COLUMNS)
SPLIT = HeadSharding(tokens=P(("data", "fsdp")), head=P("fsdp", "tensor"))


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU computes the head as these GPUs do."""
    monkeypatch.setitem(DEFAULTS, "cpu", HeadDefaults(WHOLE, TOKENS, one_reduction=True, kernel=True))
    # Without a sharding the kernel runs where there is one device.
    monkeypatch.setattr(jax, "device_count", lambda: 1)


def arrays(dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 2)
    hidden = jax.random.normal(keys[0], (TOKENS, WIDTH)).at[3].set(jnp.nan)
    return hidden.astype(dtype), (jax.random.normal(keys[1], (WIDTH, COLUMNS)) / 4).astype(dtype)


def everything(
    implementation: Any, *, dtype: Any = jnp.bfloat16, layout: str = "dv", sharding: Any = None, **options: Any
) -> Any:
    """All statistics of the tokens, one of them masked and NaN, with the gradients of two losses of them."""
    hidden, weights = (x.astype(dtype) for x in arrays())
    targets = jax.random.randint(jax.random.key(1), (TOKENS,), 0, COLUMNS - 10)
    given: dict[str, Any] = {"mask": jnp.arange(TOKENS) != 3, "entropy": True, "sum_squared_probs": True}
    given["temperature"] = jnp.linspace(0.5, 2, TOKENS, dtype=jnp.float32)

    def token_loss(stats: kljax.TokenStats, scale: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss = scale * stats.log_prob + stats.entropy - 2 * stats.sum_squared_probs
        return loss, {"entropy": stats.entropy}

    def losses(hidden: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
        stored = weights if layout == "dv" else weights.T
        head = Head(stored, layout=layout, sharding=sharding, implementation=implementation, **options)  # type: ignore[arg-type]
        stats = kljax.log_probs_from_hidden(hidden, head, targets, **given)
        fused = kljax.token_loss_from_hidden(
            hidden, head, targets, token_loss, jnp.linspace(-1, 1, TOKENS, dtype=jnp.float32), **given
        )
        return (stats.log_prob + stats.entropy + stats.sum_squared_probs).sum() + fused[0], (stats, fused)

    program = jax.jit(jax.value_and_grad(losses, argnums=(0, 1), has_aux=True))
    assert (NAME in str(jax.make_jaxpr(losses)(hidden, weights))) == (implementation == "tile")
    return program(hidden, weights)


@pytest.mark.parametrize("split", [False, True], ids=["one device", "eight"])
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("dv", {}),
        ("vd", {"vocab_size": 190, "logit_scale": 0.5}),
        ("dv", {"bias": np.linspace(-1, 1, COLUMNS, dtype=np.float32)}),
    ],
    ids=["plain", "padded", "bias"],
)
def test_kernel_equals_the_form_of_the_compiler(layout: str, options: dict[str, Any], split: bool) -> None:
    mesh = jax.make_mesh((2, 2, 2) if split else (1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    spec = HeadSharding(SPLIT.tokens, P(*reversed(SPLIT.head))) if layout == "vd" else SPLIT
    with jax.set_mesh(mesh):
        options |= {"layout": layout, "sharding": spec if split else None}
        actual, expected = (everything(name, **options) for name in ("tile", "xla"))
        truth = everything("xla", dtype=jnp.float32, **options)[1]
    chex.assert_trees_all_close(actual[0], expected[0], rtol=2e-6, atol=2e-6)

    def error(gradient: jax.Array, exact: jax.Array) -> float:
        return float(np.sqrt(np.mean((np.asarray(gradient, np.float32) - np.asarray(exact)) ** 2)))

    for ours, compilers, exact in zip(actual[1], expected[1], truth, strict=True):
        assert error(ours, exact) <= 1.02 * error(compilers, exact)


def test_no_logits_are_written_without_a_gradient() -> None:
    hidden, weights = arrays()
    program = jax.make_jaxpr(lambda h, w: kljax.log_probs_from_hidden(h, Head(w), jnp.zeros(TOKENS, int)))
    assert f"f32[{TOKENS},{COLUMNS}]" not in str(program(hidden, weights))


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(jnp.float32, {}), (jnp.bfloat16, {"softcap": 5.0})],
    ids=["float32", "softcap"],
)
def test_other_heads_are_left_to_the_compiler(dtype: Any, options: dict[str, Any]) -> None:
    hidden, weights = arrays(dtype)
    program = jax.make_jaxpr(lambda h, w: kljax.log_probs_from_hidden(h, Head(w, **options), jnp.zeros(TOKENS, int)))
    assert NAME not in str(program(hidden, weights))


def test_heads_that_the_compiler_splits_are_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weights = arrays()
    monkeypatch.undo()
    monkeypatch.setitem(DEFAULTS, "cpu", HeadDefaults(WHOLE, TOKENS, one_reduction=True, kernel=True))
    assert jax.device_count() > 1
    program = jax.make_jaxpr(lambda h, w: kljax.log_probs_from_hidden(h, Head(w), jnp.zeros(TOKENS, int)))
    assert NAME not in str(program(hidden, weights))


def test_a_token_that_is_not_a_number_shows() -> None:
    hidden, weights = arrays()
    stats = kljax.log_probs_from_hidden(hidden, Head(weights), jnp.zeros(TOKENS, int), entropy=True)
    nan = jnp.isnan(jnp.stack([stats.log_prob, stats.entropy]))
    assert nan.tolist() == [[i == 3 for i in range(TOKENS)]] * 2


def test_hessians_stay_exact() -> None:
    hidden, weights = (x.astype(jnp.bfloat16) for x in arrays())
    hidden = hidden.at[3].set(0)
    targets = jnp.arange(TOKENS, dtype=jnp.int32)

    def product(implementation: Any) -> jax.Array:
        def loss(hidden: jax.Array) -> jax.Array:
            head = Head(weights, implementation=implementation)
            return kljax.log_probs_from_hidden(hidden, head, targets).log_prob.sum()

        return jax.jvp(jax.grad(loss), (hidden,), (hidden,))[1]

    actual, expected = (np.asarray(product(name), np.float32) for name in ("tile", "xla"))
    np.testing.assert_allclose(actual, expected, rtol=2**-7, atol=1e-3)


def test_hopper_has_the_kernel() -> None:
    assert head_defaults("NVIDIA H100 80GB HBM3").kernel
    assert [name for name, row in DEFAULTS.items() if row.kernel and name != "cpu"] == ["NVIDIA H"]
