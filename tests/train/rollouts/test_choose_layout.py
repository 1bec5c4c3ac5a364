"""The choice of the layout for sampling: from bytes, devices and divisibility alone."""

from types import SimpleNamespace

import numpy as np
import pytest

from train.config.load import parse
from train.config.plan import Plan
from train.models import Decoder, DecoderConfig
from train.models.devices import DEVICES
from train.models.layers import copies_layers
from train.models.parameters import abstract_params
from train.models.sharding import device_bytes, make_mesh
from train.rl.optimizer import make_optimizer
from train.rollouts.choose_layout import Choice, Option, choose, tensor_sizes
from train.rollouts.make_layout import device_memory, make_layout

GIB = 2**30
BEST, SECOND = Option(tensor=2, weights=8 * GIB, cache=GIB), Option(tensor=4, weights=4 * GIB, cache=GIB)
FITS = {"resident": 4 * GIB, "memory": 16 * GIB, "gathers": True, "narrows": False}


def test_first_fitting_option_is_chosen():
    assert choose([BEST, SECOND], **FITS) == Choice(2, "no decode step gathers weights, and both layouts fit")
    assert choose([BEST, SECOND], **FITS | {"memory": 14 * GIB}).tensor == 4
    # 0.9 of the memory may be filled: 13 GiB take more than 14.4 of them leave.
    assert choose([BEST], **FITS | {"memory": 13 * GIB / 0.9}).tensor == 2
    assert choose([BEST], **FITS | {"memory": 13 * GIB / 0.9 - 8}).tensor is None


def test_weights_stay_if_a_copy_gains_nothing():
    too_small = choose([BEST, SECOND], **FITS | {"memory": 9 * GIB})
    assert too_small == Choice(None, "both layouts need 9.00 GiB of 9.00 GiB")
    assert choose([], **FITS) == Choice(None, "no other mesh divides the model and the rows")
    assert choose([BEST], **FITS | {"memory": None}) == Choice(None, "the memory of this device is not known")
    assert choose([BEST], **FITS | {"gathers": False}) == Choice(None, "no weight is gathered there")
    narrower = choose([BEST], **FITS | {"gathers": False, "narrows": True})
    assert narrower == Choice(2, "decode steps read fewer bytes, and both layouts fit")


@pytest.mark.parametrize(
    ("mesh", "sizes", "rows", "expected"),
    [
        ((64, 4, 64), (32, 8, 12288, 151936), (1024, 512), [4, 8, 2, 1]),
        ((8, 1, 8), (8, 12), (64,), [1, 2, 4]),
        # Fewer rows than devices leave only meshes with a larger tensor axis.
        ((8, 1, 8), (8,), (4,), [2, 4, 8]),
        # A mesh with replicas: an axis of tensor stays within the devices that hold the weights once.
        ((8, 1, 4), (8,), (64,), [1, 2, 4]),
        ((6, 2, 6), (6,), (6,), [2, 6, 1]),
    ],
)
def test_meshes_divide_model_and_rows(mesh, sizes, rows, expected):
    assert tensor_sizes(*mesh, sizes, rows) == expected


SHAPE = DecoderConfig(
    vocab_size=64, layers=2, width=32, heads=8, kv_heads=8, head_dim=4, mlp_width=40, dtype="bfloat16"
)
RAW = {
    "steps": 1,
    "mesh": {"fsdp": 8},
    "eval": {"batch_size": 8},
    "rollout": {"slots": 16},
    "model": {"heads": 8, "kv_heads": 8},
}


def layout_of(memory: int | None, **rollout):
    config = parse({**RAW, "rollout": {**RAW["rollout"], **rollout}})[0]
    return make_layout(Plan.of(config), Decoder(SHAPE), make_mesh(1, 8, 1), make_optimizer(config.optim), memory=memory)


def test_run_reports_its_layout_and_the_reason():
    layout = layout_of(GIB)
    assert dict(layout.mesh.shape) == {"data": 8, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1}
    start = "sampling: weights laid out once per step, data=8 x tensor=1, bfloat16 (no decode step gathers weights"
    assert layout.line.startswith(start)
    assert layout.line.endswith(", of 1.00 GiB")
    in_place = layout_of(None)
    assert in_place.in_place
    assert in_place.line.startswith("sampling: weights in place, bfloat16 (the memory of this device is not known)")
    assert layout_of(GIB, in_place=True).in_place
    named = layout_of(None, mesh={"data": 2, "tensor": 4})
    assert dict(named.mesh.shape) == {"data": 2, "fsdp": 1, "expert": 1, "context": 1, "tensor": 4}
    assert "data=2 x tensor=4, bfloat16 (rollout.mesh)" in named.line


def test_layers_are_unrolled_where_a_copy_fits():
    """A compiler that copies a layer in each step gets a copy of all of them before."""
    assert layout_of(None).unroll
    resident = layout_of(GIB, in_place=True)
    assert resident.unroll
    assert not layout_of(resident.bytes, in_place=True).unroll
    assert copies_layers("NVIDIA H200")
    assert not copies_layers("TPU v5p")


def test_device_bytes_equal_its_arrays():
    layout = layout_of(GIB, mesh={"data": 2, "tensor": 4})
    kernels = 2 * (32 * 32 * 4 + 3 * 32 * 40) // 4 * 2  # two layers, split four ways, two bytes each
    # Norms and the untied head stay in float32; the embedding is rounded.
    others = (2 * 2 * 32 + 32) * 4 + 64 * 32 // 4 * (4 + 2)
    assert layout.bytes == kernels + others
    mesh = make_mesh(1, 8, 1)
    stored = device_bytes(abstract_params(Decoder(SHAPE), mesh))
    assert stored == 4 * (2 * (32 * 32 * 4 + 3 * 32 * 40) + 2 * 64 * 32) // 8 + 4 * (2 * 2 * 32 + 32)


def test_a_gpu_that_is_not_here_has_what_jax_allocates(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    device = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    mesh = SimpleNamespace(devices=np.array([device]), local_devices=[])
    assert device_memory(mesh) == pytest.approx(0.75 * DEVICES["h100"].memory)


def test_cpu_reports_no_memory():
    assert device_memory(make_mesh(2, 2, 2)) is None
