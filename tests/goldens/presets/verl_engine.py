"""verl's FSDP engine on one process, which the recorders of verl and of Trinity-RFT run.

The engine has a plain module in place of a sharded one, and neither optimizer nor autocast.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.goldens.presets import batch, model, record

ENGINE = "verl.workers.engine.fsdp.transformer_impl"


def make_engine(trained: torch.nn.Module) -> Any:
    """An engine of one process around a plain module."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = object.__new__(FSDPEngineWithLMHead)
    engine.module, engine.pad_to_length, engine.scaler = trained, 0, None
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = False, 1
    engine._autocast_dtype = torch.float32
    engine.get_data_parallel_group = lambda: None
    engine.get_data_parallel_size = lambda: 1
    engine._gradient_sync_context = lambda **_: contextlib.nullcontext()
    return engine


def forward_backward(data: Any, loss: Callable[..., Any], accumulation: int) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and the gradients of `forward_backward_batch` on a `DataProto` with advantages."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    tensors = left_right_2_no_padding(data.to_tensordict())
    tu.assign_non_tensor(
        tensors,
        calculate_entropy=False,
        global_batch_size=batch.ROWS,
        temperature=batch.TEMPERATURE,
        use_remove_padding=False,
        use_dynamic_bsz=False,
        use_fused_kernels=False,
        micro_batch_size_per_gpu=batch.ROWS // accumulation,
    )
    trained = model.load()
    on_cpu = {name: mock.Mock(return_value="cpu") for name in ("get_device_id", "get_device_name")}
    with mock.patch.multiple(ENGINE, **on_cpu):
        actual = make_engine(trained).forward_backward_batch(tensors, loss)
    return float(np.sum(actual["loss"])), record.gradients_of(trained)


def steps(run: record.Run, algorithms: Iterable[str]) -> Iterator[record.Step]:
    """The steps of a recorder in float64, in a process group of one."""
    with model.one_process():
        yield from model.float64_steps(run, algorithms)
