"""Without `Head(sharding=...)` on a mesh: the same results under Auto, Explicit and Manual axes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kljax
from kljax import Head, ReferenceStates, Tile
from tests.kljax.calls import known_options

ROWS, LENGTH, WIDTH, VOCABULARY = 8, 4, 5, 12
ROW_AXIS, VOCAB_AXIS = "data", "tensor"
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
# Under Auto axes the compiler does on its own what it is told to do under Explicit ones; `test_everywhere` spreads the
# arrays of a head over them too.
KIND_NAMES = [pytest.param("auto", marks=pytest.mark.thorough), "explicit"]


def inputs() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {
        "hidden": jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH))),
        "head": jnp.asarray(rng.normal(size=(WIDTH, VOCABULARY))),
        "ref_hidden": jnp.asarray(rng.normal(size=(ROWS, LENGTH, WIDTH))),
        "tokens": jnp.asarray(rng.integers(0, VOCABULARY, (ROWS, LENGTH))),
        "kept_ids": jnp.asarray(rng.integers(-1, VOCABULARY, (ROWS, LENGTH, 3))),
        "mask": jnp.asarray(rng.random((ROWS, LENGTH)) < 0.7),
    }


def every_function(x: dict[str, Any]) -> dict[str, Any]:
    """One call of each public function of hidden states; every leaf is `[B, T]`, but that of a loss."""
    head, hidden, ref = Head(x["head"], tile=Tile(8, 5)), x["hidden"], x["ref_hidden"]
    mask, tokens = {"mask": x["mask"]}, x["tokens"]
    reference = ReferenceStates(ref, direction="forward")
    return {
        "log_probs_from_hidden": kljax.log_probs_from_hidden(hidden, head, tokens, reference=reference, **mask),
        "token_log_probs": kljax.token_log_probs(hidden, head, tokens, entropy=True, **mask),
        "renormalized_log_probs": kljax.renormalized_log_probs(hidden, head, tokens, x["kept_ids"], **mask),
        "kl_from_hidden": kljax.kl_from_hidden(hidden, head, ref, x["head"], hidden_mask=x["mask"]),
        "jsd_from_hidden": kljax.jsd_from_hidden(hidden, head, ref, hidden_mask=x["mask"]),
        "token_kl": kljax.token_kl(hidden, head, ref, x["head"], **mask),
        "token_jsd": kljax.token_jsd(hidden, head, ref, **mask),
        "token_loss_from_hidden": token_loss(hidden, head, x),
        "reference": kljax.token_log_probs(hidden, Head(x["head"], implementation="reference"), tokens, **mask),
    }


def token_loss(hidden: Any, head: Head, x: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """A loss fused with the head, spread over the tokens that it is the sum of; and a metric."""
    loss, metrics = kljax.token_loss_from_hidden(
        hidden,
        head,
        x["tokens"],
        lambda stats, inputs: (inputs["weights"] * (stats.log_prob + inputs["coef"] * stats.kl), stats.kl),
        {"weights": x["ref_hidden"][..., 0], "coef": jnp.asarray(0.3)},
        mask=x["mask"],
        reference=(x["ref_hidden"], None),
        token_chunk=8,
        axis_name=ROW_AXIS if ROW_AXIS in jax.typeof(x["mask"]).manual_axis_type.varying else None,
    )
    return loss + jnp.zeros_like(metrics), metrics


def with_gradients(x: dict[str, Any]) -> tuple[Any, Any]:
    def total(arrays: dict[str, Any]) -> tuple[jax.Array, Any]:
        out = every_function({**x, **arrays})
        return sum(leaf.sum() for leaf in jax.tree.leaves(out)), out  # type: ignore[return-value]

    gradients, out = jax.grad(total, has_aux=True)({name: x[name] for name in ("hidden", "head", "ref_hidden")})
    return out, gradients


@functools.cache
def on_one_device() -> Any:
    return jax.device_get(jax.jit(with_gradients, compiler_options=known_options())(inputs()))


def check(actual: Any) -> None:
    for (path, leaf), wanted in zip(
        jax.tree.leaves_with_path(jax.device_get(actual)), jax.tree.leaves(on_one_device()), strict=True
    ):
        np.testing.assert_allclose(leaf, wanted, rtol=1e-9, atol=1e-12, err_msg=jax.tree_util.keystr(path))


SPECS = {
    "rows": dict.fromkeys(("hidden", "ref_hidden", "tokens", "kept_ids", "mask"), P(ROW_AXIS)),
    # Positions as well, the vocabulary on the same axis, and a mask that is whole everywhere.
    "rows, positions, vocabulary": {
        **dict.fromkeys(("hidden", "ref_hidden", "tokens", "kept_ids"), P(ROW_AXIS, VOCAB_AXIS)),
        "head": P(None, VOCAB_AXIS),
    },
}


def spread(mesh: Any, specs: dict[str, P]) -> dict[str, jax.Array]:
    return {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in inputs().items()}


# Rows are split in the second as well.
@pytest.mark.parametrize("specs", [pytest.param("rows", marks=pytest.mark.thorough), "rows, positions, vocabulary"])
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_arrays_on_a_mesh_without_head_sharding(kind: str, specs: str) -> None:
    mesh = jax.make_mesh((4, 2), (ROW_AXIS, VOCAB_AXIS), axis_types=(KINDS[kind],) * 2)
    with jax.set_mesh(mesh):
        out, gradients = jax.jit(with_gradients, compiler_options=known_options())(spread(mesh, SPECS[specs]))
    check((out, gradients))
    if kind == "explicit":
        for leaf in jax.tree.leaves(out):
            assert jax.typeof(leaf).sharding.spec == P(*(*SPECS[specs]["hidden"], None)[:2])


def test_the_default_mesh_needs_no_context() -> None:
    # The axes of `jax.make_mesh` are explicit; arrays on them bring their mesh.
    mesh = jax.make_mesh((4, 2), (ROW_AXIS, VOCAB_AXIS))
    assert set(mesh.axis_types) == {AxisType.Explicit}
    x = spread(mesh, SPECS["rows"])

    def log_prob(x: dict[str, Any]) -> jax.Array:
        return kljax.log_probs_from_hidden(x["hidden"], x["head"], x["tokens"], mask=x["mask"]).log_prob

    wanted = on_one_device()[0]["log_probs_from_hidden"].log_prob
    for values in (jax.jit(log_prob, compiler_options=known_options())(x), log_prob(x)):
        np.testing.assert_allclose(values, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_manual_axes(kind: str) -> None:
    # Rows are manual, and the other axis keeps its type.
    mesh = jax.make_mesh((4, 2), (ROW_AXIS, VOCAB_AXIS), axis_types=(KINDS[kind],) * 2)
    specs = {name: SPECS["rows"].get(name, P()) for name in inputs()}
    gradients = {name: specs[name] for name in ("hidden", "head", "ref_hidden")}

    by_rows = jax.tree.map(lambda _: P(ROW_AXIS), on_one_device()[0])

    def run(x: dict[str, Any]) -> Any:
        return jax.shard_map(with_gradients, in_specs=(specs,), out_specs=(by_rows, gradients), axis_names={ROW_AXIS})(
            x
        )

    with jax.set_mesh(mesh):
        check(jax.jit(run, compiler_options=known_options())(spread(mesh, specs)))
