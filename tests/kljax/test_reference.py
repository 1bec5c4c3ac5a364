"""Reference policies: shared buffers, restores into shardings, messages, fingerprints."""

import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import kljax

Tree = dict[str, object]


@pytest.fixture(scope="module")
def rows() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:8]), ("data",)), PartitionSpec("data"))


def tree() -> Tree:
    return {"layer": {"w": jnp.arange(16.0).reshape(8, 2), "b": jnp.ones(8, jnp.bfloat16)}, "step": jnp.int32(3)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A checkpoint that holds a policy, an adapter and a step, as a training run writes it."""
    path = tmp_path_factory.mktemp("checkpoint") / "0"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"trainable": {"adapter": tree(), "params": tree()}, "step": jnp.int32(7)})
    return path


def abstract(of: Tree, sharding: object = None) -> Tree:
    """Shapes and dtypes, with arrays of eight rows in the given sharding."""

    def leaf(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding if x.ndim and sharding else x.sharding)

    return jax.tree.map(leaf, of)


def test_restores_a_subtree_into_its_sharding(saved: pathlib.Path, rows: NamedSharding) -> None:
    restored = kljax.restore_tree(saved, abstract(tree(), rows), item="trainable.adapter")
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(tree()))
    assert restored["layer"]["w"].sharding == rows
    assert len(restored["layer"]["w"].addressable_shards) == 8
    assert restored["layer"]["b"].dtype == jnp.bfloat16


def test_restores_the_whole_checkpoint(saved: pathlib.Path) -> None:
    full = {"trainable": {"adapter": tree(), "params": tree()}, "step": jnp.int32(7)}
    chex.assert_trees_all_equal(kljax.restore_tree(str(saved), abstract(full)), full)


def test_adapter_reference_shares_the_base(saved: pathlib.Path, rows: NamedSharding) -> None:
    policy = kljax.Policy({"w": jnp.ones(3)}, jax.tree.map(jnp.zeros_like, tree()))
    reference = kljax.adapter_reference(policy, saved, abstract(tree(), rows), item="trainable.adapter")
    assert reference.params["w"] is policy.params["w"]
    chex.assert_trees_all_equal(jax.device_get(reference.adapter), jax.device_get(tree()))


def test_checkpoint_reference_has_no_adapter(saved: pathlib.Path, rows: NamedSharding) -> None:
    reference = kljax.checkpoint_reference(saved, abstract(tree(), rows), item="trainable.params")
    assert reference.adapter is None
    chex.assert_trees_all_equal(jax.device_get(reference.params), jax.device_get(tree()))


def test_base_reference_shares_every_buffer() -> None:
    policy = kljax.Policy(tree(), {"a": jnp.ones(2)})
    reference = kljax.base_reference(policy)
    assert reference.adapter is None
    for actual, expected in zip(jax.tree.leaves(reference), jax.tree.leaves(policy.params), strict=True):
        assert actual is expected
        assert actual.unsafe_buffer_pointer() == expected.unsafe_buffer_pointer()


def test_base_reference_needs_an_adapter() -> None:
    with pytest.raises(
        ValueError, match=r"policy\.adapter: got None; without an adapter the base weights are the ones"
    ):
        kljax.base_reference(kljax.Policy(tree()))


def test_policy_is_a_pytree() -> None:
    policy = kljax.Policy({"w": jnp.ones(2)}, {"a": jnp.ones(3)})
    assert len(jax.tree.leaves(policy)) == 2
    doubled = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))(policy)
    assert isinstance(doubled, kljax.Policy)
    chex.assert_trees_all_equal(doubled.adapter["a"], jnp.full(3, 2.0))
    assert len(jax.tree.leaves(kljax.Policy({"w": jnp.ones(2)}))) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer": {"w": np.ones((8, 3))}}, r"layer\.w: got float64\[8, 2\], expected float64\[8, 3\]"),
        ({"layer": {"w": np.ones((8, 2), np.float32)}}, r"layer\.w: got float64\[8, 2\], expected float32\[8, 2\]"),
        ({"layer": {"v": np.ones(2)}}, r"layer\.v: got no such leaf, expected float64\[2\]"),
        ({"other": np.ones(2), "third": np.ones(2)}, r"other: got no such leaf, .*third: got no such leaf"),
    ],
)
def test_mismatched_checkpoints_are_named(saved: pathlib.Path, change: Tree, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kljax.restore_tree(saved, abstract(jax.tree.map(jnp.asarray, change)), item="trainable.params")


def test_missing_paths_and_items_are_named(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere"):
        kljax.restore_tree(tmp_path / "nowhere", abstract(tree()))
    with pytest.raises(ValueError, match=r"trainable\.ema\.step: got no such leaf, expected int32\[\]"):
        kljax.restore_tree(saved, abstract({"step": jnp.int32(0)}), item="trainable.ema")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no readable checkpoint at .*empty"):
        kljax.restore_tree(tmp_path / "empty", abstract(tree()))


def test_equal_trees_have_equal_fingerprints(rows: NamedSharding) -> None:
    mixed = {**tree(), "wide": jnp.arange(8.0), "flags": jnp.array([True, False]), "long": jnp.arange(8) << 40}
    first = kljax.fingerprint(mixed)
    assert first.dtype == jnp.uint32
    assert first.shape == (len(jax.tree.leaves(mixed)),)
    chex.assert_trees_all_equal(first, kljax.fingerprint(jax.tree.map(jnp.copy, mixed)))
    chex.assert_trees_all_equal(first, jax.jit(kljax.fingerprint)(mixed))
    spread = jax.tree.map(lambda x: jax.device_put(x, rows) if x.shape[:1] == (8,) else x, mixed)
    chex.assert_trees_all_equal(jax.device_get(first), jax.device_get(kljax.fingerprint(spread)))


@pytest.mark.parametrize(
    "dtype", [jnp.float32, jnp.float64, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int64, jnp.uint8]
)
def test_one_flipped_bit_changes_the_fingerprint(dtype: jnp.dtype) -> None:
    leaf = np.asarray(jnp.arange(24).astype(dtype).reshape(4, 6))
    before = kljax.fingerprint(leaf).item()
    width = 8 * leaf.dtype.itemsize
    for bit in range(0, leaf.size * width, 29):
        raw = bytearray(leaf.tobytes())
        raw[bit // 8] ^= 1 << bit % 8
        flipped = np.frombuffer(bytes(raw), leaf.dtype).reshape(leaf.shape)
        assert kljax.fingerprint(flipped).item() != before, f"bit {bit % width} of element {bit // width}"


def test_a_permutation_of_the_values_changes_the_fingerprint() -> None:
    values = jnp.arange(12.0).reshape(3, 4)
    swapped = values.at[0, 0].set(values[2, 3]).at[2, 3].set(values[0, 0])
    for other in (swapped, values[::-1], values.T.reshape(3, 4), values[:, ::-1]):
        assert kljax.fingerprint(values).item() != kljax.fingerprint(other).item()
    square = jnp.arange(9.0).reshape(3, 3)
    assert kljax.fingerprint(square).item() != kljax.fingerprint(square.T).item()


def test_signed_zeros_and_nans_change_the_fingerprint() -> None:
    assert kljax.fingerprint(jnp.zeros(2)).item() != kljax.fingerprint(-jnp.zeros(2)).item()
    nans = jnp.full(2, jnp.nan)
    assert kljax.fingerprint(nans).item() == kljax.fingerprint(nans + 0).item()
