"""Digests: every bit counts, shardings and devices do not, and records of digests are protected themselves."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kljax.checkpoint import _digests as digests
from kljax.checkpoint import read_metadata, restore
from kljax.checkpoint._lanes import ROWS_OF_CPU, device_lanes, host_lanes
from tests.kljax import word_changes
from tests.kljax.flipped_bits import count_outcomes

ARRAYS = {
    "matrix": np.arange(35, dtype=np.float32).reshape(5, 7),
    "stacked": np.arange(60, dtype=np.int32).reshape(3, 4, 5),
    "scalar": np.float32(3),
    "row": np.arange(9, dtype=np.int8),
    "half": np.arange(12).reshape(3, 4).astype(jnp.bfloat16),
    "odd half": np.arange(15).reshape(3, 5).astype(jnp.bfloat16),
    "bytes": np.arange(24, dtype=np.int8).reshape(2, 12),
    "flags": np.array([[True, False], [True, True]]),
    "long": np.arange(6, dtype=np.int64).reshape(2, 3) << 40,
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_every_flipped_bit_changes_the_digest(array):
    before = digests.array_digest(array)
    raw = bytearray(np.asarray(array).tobytes())
    for bit in range(8 * len(raw) if array.dtype != np.bool_ else 0):
        raw[bit // 8] ^= 1 << bit % 8
        flipped = np.frombuffer(bytes(raw), array.dtype).reshape(array.shape)
        assert digests.array_digest(flipped) != before, f"bit {bit}"
        raw[bit // 8] ^= 1 << bit % 8


def test_a_bit_that_orbax_overlooks_is_refused(tmp_path):
    """Where orbax begins to notice, the digests of arrays can go."""
    outcomes = count_outcomes(tmp_path, flips=5)
    assert outcomes["orbax"]["silent"] > 0
    assert outcomes["digests"]["silent"] == 0


@pytest.mark.parametrize("rows_at_once", [1, 2, ROWS_OF_CPU])
@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_host_and_devices_agree(array, rows_at_once):
    on_device = jnp.asarray(array)
    assert on_device.dtype == array.dtype
    parts, expected = jax.jit(device_lanes, static_argnums=1)(on_device, rows_at_once), host_lanes(np.asarray(array))
    assert {part.dtype for part in parts} == {expected.dtype}
    assert b"".join(np.asarray(part).tobytes() for part in parts) == expected.tobytes()
    assert digests.array_digest(on_device) == digests.array_digest(array)


def lanes_in_bytes(array, **options):
    (parts,) = digests.lanes_of([array], **options)
    return b"".join(part.tobytes() for part in parts)


def test_large_arrays_of_a_cpu_are_compiled():
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    copies, halves = (jax.device_put(values, NamedSharding(mesh, PartitionSpec(*axes))) for axes in ((), ("a",)))
    arrays = [values, jnp.asarray(values), jnp.asarray(values[:3]), jnp.asarray(values.ravel()), copies, halves]
    programs = digests.inputs_of_programs(arrays, values.nbytes)
    # The array of one device with one of the copies, and both halves.
    assert [(list(inputs), inputs[max(inputs)].devices()) for inputs in programs] == [
        ([1, 4], {jax.devices()[0]}),
        ([5], set(jax.devices()[:2])),
    ]
    for array in arrays:
        assert lanes_in_bytes(array, large=values.nbytes) == host_lanes(np.asarray(array)).tobytes()


def test_arrays_on_the_same_devices_share_one_program():
    values = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    first, other = (Mesh(np.array(devices), ("a",)) for devices in (jax.devices()[:2], jax.devices()[2:6]))
    split, replicated = PartitionSpec("a"), PartitionSpec()
    layouts = [(first, split), (other, replicated), (other, split), (first, split), (other, PartitionSpec(None))]
    arrays = [jax.device_put(values + i, NamedSharding(*layout)) for i, layout in enumerate(layouts)]
    assert [list(inputs) for inputs in digests.inputs_of_programs(arrays, 0)] == [[0, 3], [1, 4], [2]]
    expected = [host_lanes(values + i).tobytes() for i in range(len(arrays))]
    assert [b"".join(part.tobytes() for part in parts) for parts in digests.lanes_of(arrays, large=0)] == expected


def test_the_digest_does_not_depend_on_the_sharding():
    values = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    for spec in (PartitionSpec(), PartitionSpec("a"), PartitionSpec("b", "a"), PartitionSpec(None, ("a", "b"))):
        sharded = jax.device_put(values, NamedSharding(mesh, spec))
        assert digests.array_digest(sharded) == digests.array_digest(values)
        assert lanes_in_bytes(sharded, large=0) == host_lanes(values).tobytes()


def test_row_order_shape_and_dtype_change_the_digest():
    values = np.arange(12, dtype=np.float32)
    others = [values[::-1], np.roll(values, 1), values.reshape(3, 4), values.reshape(4, 3), values.view(np.int32)]
    others += [values.reshape(3, 4)[::-1], np.roll(values, 1).reshape(3, 4)]
    assert len({digests.array_digest(np.ascontiguousarray(x)) for x in [values, *others]}) == 8


@pytest.mark.parametrize("kind", word_changes.KINDS)
def test_changed_words_always_change_the_digest(kind):
    counted = word_changes.missed(kind, 4000, np.random.default_rng(0))
    assert counted.changes >= 2000
    assert (counted.both, counted.first, counted.second) == (0, 0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", word_changes.KINDS)
def test_no_change_in_a_million_is_missed(kind):
    counted = word_changes.missed(kind, 1_000_000, np.random.default_rng(1))
    assert counted.changes >= 500_000
    assert counted.both == 0
    # One lane alone misses about one in 2^17 where the highest bits cancel, and one in 2^32 elsewhere.
    assert max(counted.first, counted.second) < 40


def test_long_rows_and_many_rows_join_their_blocks():
    words = np.random.default_rng(0).integers(1 << 32, size=(7, 50), dtype=np.uint32)
    assert np.array_equal(host_lanes(words, block_size=16), host_lanes(words))


def test_former_digests_are_not_taken_for_damage(tmp_path):
    tree = {"w": jnp.arange(6, dtype=jnp.float32).reshape(2, 3)}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        sealed = digests.seal({"arrays": {"w": "float32[2, 3] 0123456789abcdef"}})
        checkpointer.save(tmp_path / "tree", args=ocp.args.StandardSave(tree, custom_metadata=sealed))
    metadata = read_metadata(tmp_path / "tree")
    assert not metadata.is_checked
    abstract = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=tree["w"].sharding)}
    assert jnp.array_equal(restore(metadata, abstract)["w"], tree["w"])


@pytest.mark.parametrize(("names", "missing"), [(["b", "w"], "b"), ([], "w")])
def test_record_of_other_arrays_is_refused(names, missing, tmp_path):
    tree = {"w": np.zeros((2, 3), np.float32)}
    record = {name: digests.array_digest(tree["w"]) for name in names}
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        sealed = digests.seal({"arrays": record})
        checkpointer.save(tmp_path / "tree", args=ocp.args.StandardSave(tree, custom_metadata=sealed))
    with pytest.raises(ValueError, match=rf"is damaged: its metadata and its record of digests differ in {missing}$"):
        read_metadata(tmp_path / "tree")


def test_other_noise_in_a_block_changes_the_digest():
    draw = np.random.default_rng(0)
    values = draw.normal(size=(16, 32)).astype(np.float32)
    before = digests.array_digest(values)
    for _ in range(200):
        damaged = bytearray(values.tobytes())
        start = draw.integers(len(damaged) - 40)
        damaged[start : start + 40] = draw.bytes(40)
        assert digests.array_digest(np.frombuffer(bytes(damaged), np.float32).reshape(values.shape)) != before


def test_arrays_with_other_or_no_digest_are_named():
    tree = {"a": {"w": np.ones(3, np.float32)}, "b": np.zeros((2, 2), np.float32)}
    saved = digests.tree_digests(tree)
    assert list(saved) == ["a.w", "b"]
    digests.check_digests("it", tree, saved | {"more": "float32[] 00"})
    changed = {**tree, "b": tree["b"] + 1}
    with pytest.raises(
        ValueError, match=r"^it is damaged: arrays differ .*: b: got float32\[2, 2\] lanes:\w+, expected float32"
    ):
        digests.check_digests("it", changed, saved)
    with pytest.raises(ValueError, match=r"a\.w: got .*, expected a digest"):
        digests.check_digests("it", tree, {"b": saved["b"]})


def test_every_change_of_a_sealed_record_is_noticed():
    content = {"arrays": {"w": "float32[2] 0a"}, "step": 3}
    text = json.dumps(digests.seal(content))
    assert digests.open_sealed("it", json.loads(text)) == content
    noticed = 0
    for position in range(len(text)):
        for bit in range(7):
            changed = text[:position] + chr(ord(text[position]) ^ 1 << bit) + text[position + 1 :]
            try:
                parsed = json.loads(changed)
            except ValueError:
                continue
            with pytest.raises(ValueError, match=r"^it is damaged"):
                digests.open_sealed("it", parsed)
            noticed += 1
    assert noticed > 300
    for other in (None, [], {}, {"kljax": 3, "digest": ""}):
        with pytest.raises(ValueError, match=r"^it is damaged"):
            digests.open_sealed("it", other)
