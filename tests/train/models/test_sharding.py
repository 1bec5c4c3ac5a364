"""The mesh, the table of axes, and parameters that do not depend on either."""

from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from train.models import Decoder, DecoderConfig, LoraConfig
from train.models.parameters import abstract_adapter, abstract_params, init_adapter, init_params
from train.models.shard_rows import shard_rows
from train.models.sharding import (
    RULES,
    batch_sharding,
    constrain,
    make_mesh,
    param_shardings,
    partition_spec,
    replicated,
    split_slices,
)

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj"))
CONFIG = DecoderConfig(
    vocab_size=24, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24, qkv_bias=True, lora=LORA
)


def test_mesh_takes_the_first_devices_and_auto_axes():
    mesh = make_mesh(2, 1, 2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 5
    assert set(mesh.devices.flat) == set(jax.devices()[:4])


def test_impossible_mesh_is_explained():
    with pytest.raises(ValueError, match=r"data=4 x fsdp=4 x tensor=1 needs 16 devices, got 8 \(cpu\)"):
        make_mesh(4, 4, 1)
    with pytest.raises(ValueError, match=r"mesh\.fsdp: got 0"):
        make_mesh(1, 0, 1)


def test_slices_split_the_data_axis_first():
    mesh = make_mesh(4, 1, 2, slices=2)
    assert dict(mesh.shape) == {"data": 4, "fsdp": 1, "expert": 1, "context": 1, "tensor": 2}
    first, second = jax.devices()[:4], jax.devices()[4:]
    assert set(mesh.devices[:2].flat) == set(first)
    assert set(mesh.devices[2:].flat) == set(second)


def test_slices_split_the_fsdp_axis_where_asked():
    mesh = make_mesh(2, 2, 2, slices=2, slice_axis="fsdp")
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}
    first, second = jax.devices()[:4], jax.devices()[4:]
    assert set(mesh.devices[:, 0].flat) == set(first)
    assert set(mesh.devices[:, 1].flat) == set(second)
    with pytest.raises(ValueError, match=r"mesh\.slices: got 2, expected a divisor of mesh\.fsdp = 1"):
        make_mesh(2, 1, 2, slices=2, slice_axis="fsdp")


def test_impossible_slices_are_explained():
    with pytest.raises(ValueError, match=r"mesh\.slices: got 3, expected a divisor of mesh\.data = 4"):
        make_mesh(4, 1, 2, slices=3)
    with pytest.raises(ValueError, match=r"mesh\.slices: got 0, expected at least 1"):
        make_mesh(4, 1, 2, slices=0)


def fake_devices(*slices: int | None, platform: str = "tpu") -> list[Any]:
    return [SimpleNamespace(id=number, slice_index=of, platform=platform) for number, of in enumerate(slices)]


@pytest.mark.parametrize(
    ("devices", "slices", "size", "expected"),
    [
        (fake_devices(0, 1, 0, 1), 2, 2, [[0, 2], [1, 3]]),
        (fake_devices(1, 1, 0, 0), 2, 1, [[2], [0]]),
        (fake_devices(None, None, None, None), 1, 3, [[0, 1, 2]]),
        (fake_devices(0, 0, 1, 1), 1, 2, [[0, 1]]),
        (fake_devices(*[None] * 6, platform="cpu"), 2, 3, [[0, 1, 2], [3, 4, 5]]),
        (fake_devices(0, 0, 1, 1, 2, 2, 3, 3, platform="gpu"), 2, 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (fake_devices(0, 0, 1, 1, platform="gpu"), 1, 4, [[0, 1, 2, 3]]),
    ],
)
def test_devices_of_a_slice_stay_together(devices, slices, size, expected):
    assert [[device.id for device in block] for block in split_slices(devices, slices, size)] == expected


def test_devices_in_other_slices_are_an_error():
    with pytest.raises(ValueError, match=r"mesh\.slices: got 1, but the devices lie in 2 slices; set it to that"):
        split_slices(fake_devices(0, 0, 1, 1), 1, 4)
    with pytest.raises(ValueError, match=r"mesh\.slices: got 3, but the devices lie in 2 slices; set it to that"):
        split_slices(fake_devices(0, 0, 1, 1), 3, 1)
    with pytest.raises(ValueError, match=r"needs 2 devices in each of 2 slices, got 1"):
        split_slices(fake_devices(0, 0, 0, 1), 2, 2)


def test_logical_axes_follow_the_table():
    assert partition_spec(("layers", "embed", "heads")) == P(None, ("fsdp", "expert"), "tensor")
    assert partition_spec(("expert", "expert_embed", "mlp")) == P("expert", "fsdp", "tensor")
    assert partition_spec(("rows", None)) == P(("data", "fsdp", "expert"), None)
    with pytest.raises(ValueError, match="logical axis: got 'colour', expected one of rows"):
        partition_spec(("colour",))


def test_doubled_mesh_axis_error_names_the_parameter():
    with pytest.raises(ValueError, match="'heads' and 'mlp' of one array both map to mesh axis 'tensor'"):
        partition_spec(("heads", "mlp"))
    rules = {**RULES, "embed": "tensor"}
    with pytest.raises(ValueError, match=r"a\.kernel: logical axes 'embed' and 'mlp'"):
        param_shardings(make_mesh(), {"a": {"kernel": P("embed", "mlp")}}, {"a": {"kernel": jnp.zeros((2, 2))}}, rules)


def test_indivisible_size_error_names_the_parameter():
    model = Decoder(DecoderConfig(vocab_size=24, layers=1, width=18, heads=2, kv_heads=2, head_dim=4, mlp_width=8))
    expected = r"embed_tokens\.embedding: axis 'embed' of size 18 is not divisible by mesh\.fsdp=4"
    with pytest.raises(ValueError, match=expected):
        init_params(model, jax.random.key(0), make_mesh(1, 4, 1))


def test_specs_must_fit_the_shape():
    with pytest.raises(ValueError, match="w: logical axes"):
        param_shardings(make_mesh(), {"w": P("embed")}, {"w": jnp.zeros((2, 2))})


def test_parameters_are_initialised_sharded_independent_of_the_mesh():
    model, key = Decoder(CONFIG), jax.random.key(3)
    single, mesh = make_mesh(), make_mesh(2, 2, 2)
    params, adapter = init_params(model, key, mesh), init_adapter(model, key, mesh)
    kernel = params["layers"]["self_attn"]["q_proj"]["kernel"]
    assert kernel.sharding.spec == P(None, ("fsdp", "expert"), "tensor")
    assert kernel.addressable_shards[0].data.shape == (2, 8, 8)
    to_host = lambda tree: jax.tree.map(np.asarray, tree)  # noqa: E731
    chex.assert_trees_all_equal(to_host(params), to_host(init_params(model, key, single)))
    chex.assert_trees_all_equal(to_host(adapter), to_host(init_adapter(model, key, single)))


def test_abstract_trees_describe_the_real_ones():
    model, mesh = Decoder(CONFIG), make_mesh(1, 2, 2)
    for abstract, init in ((abstract_params, init_params), (abstract_adapter, init_adapter)):
        described, real = abstract(model, mesh), init(model, jax.random.key(0), mesh)
        chex.assert_trees_all_equal_shapes_and_dtypes(described, real)
        same = jax.tree.map(lambda x, y: x.sharding == y.sharding, described, real)
        assert all(jax.tree.leaves(same))


def test_rows_are_split_over_data_and_fsdp():
    mesh = make_mesh(2, 2, 2)
    batch = shard_rows({"tokens": np.arange(8).reshape(4, 2), "scores": np.ones(4)}, mesh)
    assert batch["tokens"].sharding == batch_sharding(mesh)
    assert batch["tokens"].addressable_shards[0].data.shape == (1, 2)
    with pytest.raises(ValueError, match=r"tokens: 6 rows are not divisible by mesh\.data x mesh\.fsdp = 4"):
        shard_rows({"tokens": np.ones((6, 2))}, mesh)
    assert jax.device_put(np.ones(3), replicated(mesh)).is_fully_replicated


def test_constraints_apply_under_a_mesh_alone():
    x = jnp.ones((8, 2))
    assert constrain(x, "rows", None) is x
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x * 2, "rows", None))(x)
    assert y.sharding.is_equivalent_to(batch_sharding(mesh), 2)
