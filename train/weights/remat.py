"""How much of a layer an update recomputes, by the memory of a device: arithmetic, before anything is compiled.

The bound counts what stays in memory, two gradients, the activations that layers keep for the backward pass, those of
one layer, and the logits of a chunk of tokens with the hidden states around the head. It lies above the plans of the
compiler (`make test-aot`).
"""

import dataclasses
import math

import jax.numpy as jnp
from jax.sharding import Mesh

from kljax.log_probs._head import head_defaults
from train.config.plan import Plan
from train.config.schema import Config
from train.config.types import RematSetting
from train.models import Decoder, DecoderConfig
from train.models.config import Remat
from train.models.devices import GIB, Device, find_device
from train.models.parameters import abstract_adapter, abstract_params
from train.models.sharding import device_bytes

ORDER: tuple[Remat, ...] = ("dots", "full")
"""From the least recomputation to the most."""
MARGIN = 0.9
"""Part of the memory that the bound may take."""
LAYER_COPIES = 2
"""Activations of a layer that is computed again, and their gradients."""
GATHERED_LAYERS = 3
"""Layers whose weights are whole on a device at once with axis fsdp."""
PAYS = 2.0
"""Seconds of computing a projection again over those of keeping its output, at published rates, from which it is kept.

Products do not reach these rates. At 1.7, of Qwen3-0.6B on H100, an update with "dots" takes 3 % longer by its plan."""


@dataclasses.dataclass(frozen=True)
class RematChoice:
    """The recomputation of an update, and why.

    Attributes:
      remat: the choice.
      peaks: bytes on a device of each possibility; empty where nothing was compared.
      reason: in words.
    """

    remat: Remat
    peaks: dict[Remat, int]
    reason: str

    @property
    def line(self) -> str:
        """Returns a line for the user."""
        peaks = ", ".join(f"{remat} {size / GIB:.1f}" for remat, size in self.peaks.items())
        counted = f"; an update needs at most, in GiB: {peaks}" if peaks else ""
        return f"model.remat auto: {self.remat} ({self.reason}{counted})"


def choose_remat(plan: Plan, model: Decoder, mesh: Mesh, *, resident: int, memory: int | None) -> RematChoice:
    """Chooses the least recomputation that fits and pays.

    On CPUs, with experts, and where keeping the outputs of projections moves more bytes than computing them again is
    worth, it is "full".

    Args:
      plan: the plan of the run.
      model: the decoder.
      mesh: its mesh.
      resident: bytes on a device of the arrays that stay from step to step.
      memory: bytes of a device, or None if unknown.
    """
    config = model.config
    known = find_device(_kind(mesh))
    if memory is None or known is None:
        return RematChoice("full", {}, "memory and rates of the devices are not known")
    if config.experts is not None:
        return RematChoice("full", {}, "a mixture of experts")
    peaks = {remat: resident + update_bytes(plan, model, mesh, remat) for remat in ORDER}
    if recomputed_over_moved(config, known) < PAYS:
        return RematChoice("full", peaks, f"a width of {config.width} is computed again about as fast as it is read")
    fitting = [remat for remat in ORDER if peaks[remat] <= MARGIN * memory]
    reason = f"of {memory / GIB:.1f} GiB, {MARGIN:.0%} may be used"
    return RematChoice(fitting[0] if fitting else ORDER[-1], peaks, reason)


def with_remat(config: Config, remat: RematSetting) -> Config:
    """Returns the config with a choice in place of "auto"."""
    return config.model_copy(update={"model": config.model.model_copy(update={"remat": remat})})


def recomputed_over_moved(config: DecoderConfig, device: Device) -> float:
    """Returns the time of a projection of the model width over that of writing and reading its output."""
    moved = 2 * jnp.dtype(config.dtype).itemsize / device.bandwidth
    return 2 * config.width / device.flops / moved


def update_bytes(plan: Plan, model: Decoder, mesh: Mesh, remat: Remat) -> int:
    """Bounds the bytes on a device that an update needs beside what stays in memory."""
    run = plan.config
    config = model.config
    shape = mesh.shape
    width = jnp.dtype(config.dtype).itemsize
    rows = run.rows_per_micro_batch()
    completions = rows * run.data.completion_length()
    tokens = math.ceil(plan.layout.slots(rows) / shape["context"])
    # Queries, keys, values, what attention makes of them, and the two inputs of the activation.
    inner = 2 * (config.heads + config.kv_heads) * config.head_dim + 2 * config.mlp_width
    outer = 2 * config.width
    ranks = 0 if config.lora is None else config.lora.rank * len(config.lora.targets)
    projected = (math.ceil(inner / shape["tensor"]) + outer + ranks) * width
    layers = config.layers * tokens
    kept = layers * config.width * width + (layers * projected if remat == "dots" else 0)
    trained = _trained_bytes(model, mesh)
    vocabulary = math.ceil(config.vocab_size / shape["tensor"])
    chunk = min(run.log_probs.token_chunk or head_defaults(_kind(mesh)).token_chunk, completions)
    # Logits in float32, and their gradient in the type of the hidden states; these six times (before and behind the
    # last norm, moved, cut, in tiles, their gradient), and sums for the gradient in float32.
    head = chunk * vocabulary * (4 + width) + tokens * config.width * (6 * width + 8)
    layer = LAYER_COPIES * tokens * (projected + 2 * config.width * width)
    table = 4 * config.width * vocabulary
    # Whole gradients of the head and of the embeddings, and the sum of all gradients with those of a micro-batch.
    gradients = 2 * trained + (0 if config.lora else 2 * table)
    gathered = width * GATHERED_LAYERS * _layer_size(config, shape["tensor"]) + table if shape["fsdp"] > 1 else 0
    return kept + gathered + gradients + max(head, layer)


def _trained_bytes(model: Decoder, mesh: Mesh) -> int:
    return device_bytes(abstract_params(model, mesh) if model.config.lora is None else abstract_adapter(model, mesh))


def _layer_size(config: DecoderConfig, tensor: int) -> int:
    attention = 2 * (config.heads + config.kv_heads) * config.head_dim
    return config.width * (attention + 3 * config.mlp_width) // tensor


def _kind(mesh: Mesh) -> str:
    return str(mesh.devices.flat[0].device_kind)
