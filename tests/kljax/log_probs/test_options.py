"""Errors name the argument, what was got and what is allowed; the tile is that of the devices of the mesh."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import kljax
from kljax import Head, HeadSharding, Tile
from kljax.log_probs._head import DEFAULTS, HeadDefaults, device_kind, head_defaults

# ---- arguments ----

# Of numpy, as all processes import this module: each operation of JAX would be compiled.
HIDDEN, HEAD, TARGETS = np.zeros((3, 5, 7), np.float32), np.zeros((7, 11), np.float32), np.zeros((3, 5), np.int32)
TURNED = np.zeros((11, 7), np.float32)
WIDE = np.zeros((3, 5, 6), np.float32)
ERRORS: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"head": np.zeros((3, 4), np.float32)},
        ValueError,
        "head: got shape [3, 4], expected [D, V] with hidden [3, 5, 7] [..., D]",
    ),
    ({"head": np.zeros(7, np.float32)}, ValueError, "head: got shape [7], expected [D, V]"),
    (
        {"head": TURNED},
        ValueError,
        "head: got shape [11, 7], expected [D, V] with hidden [3, 5, 7] [..., D]; did you mean [V, D]? "
        'Set `kljax.Head(weights, layout="vd")`',
    ),
    (
        {"head": Head(HEAD, layout="vd")},
        ValueError,
        "head: got shape [7, 11], expected [V, D] with hidden [3, 5, 7] [..., D]; did you mean [D, V]? "
        'Set `kljax.Head(weights, layout="dv")`',
    ),
    ({"targets": np.zeros(3, np.int32)}, ValueError, "targets: got shape [3], expected [3, 5] as hidden has"),
    ({"mask": np.zeros(5, bool)}, ValueError, "mask: got shape [5], expected [3, 5] as hidden has"),
    ({"mask": np.ones((3, 5), np.float32)}, TypeError, "mask: got dtype float32, expected bool or an integer type"),
    ({"temperature": 0.0}, ValueError, "temperature: got 0.0, expected a number > 0"),
    ({"temperature": np.ones(5, np.float32)}, ValueError, "temperature: got shape [5], expected a scalar or [3, 5]"),
    ({"entropy": "data"}, ValueError, "entropy: got 'data', expected True, False or 'constant'"),
    (
        {"head": Head(HEAD, np.zeros(7, np.float32))},
        ValueError,
        "head.bias: got shape [7], expected [11], one per column",
    ),
    (
        {"head": Head(HEAD, vocab_size=12)},
        ValueError,
        "head.vocab_size: got 12, expected at most the 11 columns of the weights",
    ),
    (
        {"reference": (np.zeros((3, 7), np.float32), None)},
        ValueError,
        "reference.hidden: got shape [3, 7], expected the leading axes of hidden [3, 5, 7]",
    ),
    (
        {"reference": (WIDE, None)},
        ValueError,
        "reference.hidden: got shape [3, 5, 6], expected [..., D] with the D of reference.head [7, 11] [D, V]",
    ),
    (
        {"reference": (HIDDEN, np.zeros((7, 9), np.float32))},
        ValueError,
        "reference.head: got 9 tokens, expected the 11 of head; where the weights are padded, set",
    ),
    (
        {"reference": (HIDDEN, TURNED)},
        ValueError,
        'with the D of reference.head [11, 7] [D, V]; did you mean [V, D]? Set `kljax.Head(weights, layout="vd")`',
    ),
    ({"reference": (HIDDEN, HEAD[0])}, ValueError, "reference.head: got shape [11], expected [D, V]"),
    (
        {"reference": (HIDDEN, Head(HEAD, sharding=HeadSharding(P(), P())))},
        ValueError,
        "reference.head.sharding: got HeadSharding",
    ),
]


@pytest.mark.parametrize(("change", "error", "message"), ERRORS)
def test_errors_of_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {"hidden": HIDDEN, "head": HEAD, "targets": TARGETS, **change}
    with pytest.raises(error, match=re.escape(message)):
        kljax.log_probs_from_hidden(**arguments)


def test_errors_name_the_arguments_of_the_called_function() -> None:
    shape = jnp.zeros((3, 4), int)
    with pytest.raises(ValueError, match=re.escape("tokens: got shape [3, 4], expected [3, 5] as hidden has")):
        kljax.token_log_probs(HIDDEN, HEAD, shape, shape)
    with pytest.raises(ValueError, match=re.escape("hidden: got shape [7], expected [..., T, D]")):
        kljax.token_log_probs(HIDDEN[0, 0], HEAD, TARGETS[0, 0])
    for function in (kljax.kl_from_hidden, kljax.jsd_from_hidden):
        with pytest.raises(ValueError, match=re.escape("ref_hidden: got shape [3, 7], expected the leading axes")):
            function(HIDDEN, HEAD, HIDDEN[:, 0])
        with pytest.raises(ValueError, match=re.escape("ref_head: got 9 tokens, expected the 11 of head")):
            function(HIDDEN, HEAD, HIDDEN, jnp.zeros((7, 9)))
    with pytest.raises(ValueError, match="direction: got 'revrse', expected one of reverse, forward; did you mean"):
        kljax.kl_from_hidden(HIDDEN, HEAD, HIDDEN, direction="revrse")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=re.escape("kept_ids: got shape [3, 5], expected [3, 5, K] as hidden has")):
        kljax.renormalized_log_probs(HIDDEN, HEAD, TARGETS, TARGETS)
    with pytest.raises(TypeError, match="kept_ids: got dtype float32, expected integer token ids"):
        kljax.renormalized_log_probs(HIDDEN, HEAD, TARGETS, jnp.zeros((3, 5, 2), jnp.float32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "d"}, "head.layout: got 'd', expected one of dv, vd"),
        (
            {"implementation": "tiles"},
            "head.implementation: got 'tiles', expected one of tile, xla, reference; did you mean",
        ),
        ({"softcap": 0.0}, "head.softcap: got 0.0, expected a number > 0"),
        ({"softcap": -1.0}, "head.softcap: got -1.0, expected a number > 0"),
        ({"vocab_size": 0}, "head.vocab_size: got 0, expected a number >= 1"),
    ],
)
def test_errors_of_a_head(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Head(HEAD, **fields)


def test_the_direction_of_a_reference_is_checked() -> None:
    with pytest.raises(ValueError, match=r"reference\.direction: got 'revrse', expected one of reverse, forward"):
        kljax.ReferenceStates(HIDDEN, direction="revrse")  # type: ignore[arg-type]


# ---- a head as a pytree ----


def test_leaves_of_a_head_are_its_arrays() -> None:
    head = Head(HEAD, jnp.ones(11), softcap=30.0, logit_scale=jnp.float32(0.5), vocab_size=9, tile=Tile(2, 3))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(head)]
    assert names == [".weights", ".bias", ".logit_scale"]
    doubled = jax.tree.map(lambda x: 2 * x, head)
    assert (doubled.softcap, doubled.vocab_size, doubled.tile) == (30.0, 9, Tile(2, 3))
    assert float(doubled.logit_scale) == 1.0
    assert jax.tree.structure(head) == jax.tree.structure(doubled)
    assert jax.tree.structure(head) != jax.tree.structure(dataclasses.replace(head, softcap=20.0))
    assert jax.jit(lambda head: jax.tree.leaves(head)[1].sum())(Head(HEAD, jnp.ones(11), softcap=2.0)) == 11
    assert jax.tree.leaves(Head(HEAD)) == [HEAD]


def test_head_is_a_pytree_of_anything() -> None:
    head = kljax.Head(HEAD, softcap=jnp.asarray(30.0), logit_scale=2.0)
    trainable = jax.tree.map(lambda leaf: True, head)
    assert (trainable.weights, trainable.softcap, trainable.logit_scale) == (True, True, 2.0)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, 1, np.float32(1.5)])
def test_beta_is_between_its_ends(beta: float) -> None:
    message = rf"beta: got {re.escape(repr(beta))}, expected a number between 0 and 1; at the ends see `kl_from_hidden`"
    with pytest.raises(ValueError, match=message):
        kljax.jsd_from_hidden(HIDDEN, HEAD, HIDDEN, beta=beta)


@pytest.mark.parametrize(("sizes", "message"), [((0, 4), "tile.tokens: got 0"), ((4, -1), "tile.vocab: got -1")])
def test_errors_of_a_tile(sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + ", expected a number >= 1"):
        Tile(*sizes)


# ---- shardings ----


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("data", "fsdp", "tensor"))


SHARDINGS: list[tuple[P, P, tuple[int, ...], tuple[int, int], str]] = [
    (P("rows"), P(), (4,), (4, 8), r"sharding: got the axes \['rows'\], expected some of \['data', 'fsdp', 'tensor'\]"),
    (P("data"), P("fsdp", "tensor"), (4,), (4, 8), "expected axes along D that split the tokens too, and axes along V"),
    (
        P("data"),
        P(None, "data"),
        (4,),
        (4, 8),
        r"sharding: got tokens over \('data',\) and a head over \(\) along D and",
    ),
    (P("data", "fsdp"), P(), (4,), (4, 8), "sharding: got .* for hidden with 1 axes to split"),
    (P(("data", "fsdp")), P(), (6,), (4, 8), "hidden: got an axis of size 6, expected a multiple of 4, the devices"),
    (
        P(("data", "fsdp")),
        P("fsdp"),
        (4,),
        (5, 8),
        r"head: got an axis of size 5, expected a multiple of 2, the devices",
    ),
    (P("data"), P(None, "tensor"), (4,), (4, 9), r"head: got an axis of size 9, expected a multiple of 2, the devices"),
]


@pytest.mark.parametrize(("tokens", "head", "leading", "shape", "message"), SHARDINGS)
def test_errors_of_a_sharding(
    tokens: P, head: P, leading: tuple[int, ...], shape: tuple[int, int], message: str
) -> None:
    sharding = HeadSharding(tokens, head, mesh())
    hidden, targets = jnp.zeros((*leading, shape[0])), jnp.zeros(leading, int)
    with pytest.raises(ValueError, match=message):
        kljax.log_probs_from_hidden(hidden, Head(jnp.zeros(shape), sharding=sharding), targets)


def test_the_axes_of_a_head_by_its_layout() -> None:
    sharding = HeadSharding(P(("data", "fsdp"), None), P("fsdp", ("tensor", "expert")))
    assert sharding.token_axes() == ("data", "fsdp")
    assert sharding.head_axes("dv") == (("fsdp",), ("tensor", "expert"))
    assert sharding.head_axes("vd") == (("tensor", "expert"), ("fsdp",))
    assert HeadSharding(P("data"), P()).head_axes("dv") == ((), ())


# ---- the table of tiles ----


def test_the_row_with_the_longest_name_counts() -> None:
    assert head_defaults("TPU v5 lite") == DEFAULTS["TPU v5 lite"]
    assert head_defaults("TPU v5") == DEFAULTS["TPU v5"]
    assert head_defaults("TPU v5p") == DEFAULTS["TPU v5"]
    assert head_defaults("TPU v9") == DEFAULTS["TPU"]
    assert head_defaults("NVIDIA H100 80GB HBM3") == head_defaults("NVIDIA H200") == DEFAULTS["NVIDIA H"]
    assert head_defaults("NVIDIA A100-SXM4-80GB") == DEFAULTS["NVIDIA"]
    assert head_defaults("cpu") == head_defaults("something else") == DEFAULTS["cpu"]


def test_device_kind_is_read_from_the_mesh() -> None:
    here = jax.devices()[0].device_kind
    assert device_kind(None) == here
    assert device_kind(HeadSharding(P(), P(), mesh())) == here
    # Of no devices in particular: those of this process.
    assert device_kind(HeadSharding(P(), P(), AbstractMesh((2,), ("data",)))) == here

    class OtherDevice:
        device_kind = "TPU v6 lite"

    class Elsewhere(Mesh):
        """A mesh of devices that this process does not have."""

        devices = np.array([OtherDevice()])
        empty = False

    assert device_kind(HeadSharding(P(), P(), object.__new__(Elsewhere))) == "TPU v6 lite"


@pytest.mark.parametrize("tile", [None, Tile(2, 3)])
def test_explicit_tile_is_used(tile: Tile | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "cpu", HeadDefaults(Tile(2, 3), 512))
    hidden, head = jnp.ones((4, 7), jnp.float32), jnp.ones((7, 6), jnp.float32)
    program = jax.make_jaxpr(lambda h, w: kljax.log_probs_from_hidden(h, Head(w, tile=tile), jnp.zeros(4, jnp.int32)))
    assert "f32[2,3] = dot_general" in str(program(hidden, head))
