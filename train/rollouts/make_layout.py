"""The layout for sampling that a config asks for, or the one that fits the devices."""

import contextlib
import dataclasses
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from train.config.checks.layout import SPLIT_BY_TENSOR, named_sizes
from train.config.plan import Plan
from train.config.schema import Config
from train.distributed.exchange import exchange_json
from train.distributed.global_arrays import are_processes_whole
from train.models import Decoder
from train.models.blocks import state_bytes
from train.models.devices import find_device
from train.models.layers import copies_layers
from train.models.parameters import abstract_adapter, abstract_params
from train.models.sharding import axis_size, device_bytes, replicated, reshape_mesh
from train.rl.state import abstract_optimizer_state
from train.rollouts.choose_layout import USABLE, Choice, Option, choose, describe, tensor_sizes
from train.rollouts.layout import SAMPLING_RULES, SamplingLayout

Tree = Any
LOGITS = 4
"""Arrays of the size of the logits in a draw: logits, their exponentials, running sums, and the filtered ones."""


def make_layout(
    plan: Plan, model: Decoder, mesh: Mesh, optimizer: optax.GradientTransformation, *, memory: int | None
) -> SamplingLayout:
    """Makes the layout that the config names, or chooses one.

    Args:
      plan: the needs of the config.
      model: the decoder.
      mesh: of the update.
      optimizer: its moments take memory while the sampler runs.
      memory: bytes of a device; None: unknown.
    """
    config = plan.config
    section = plan.config.rollout
    devices = mesh.size
    expert = mesh.shape["expert"]
    gathers = axis_size("embed", mesh) * mesh.shape["context"] > 1
    sampler = Decoder(dataclasses.replace(model.config, dtype=section.dtype or model.config.dtype))

    def layout_of(tensor: int | None) -> SamplingLayout:
        same = not gathers and mesh.shape["tensor"] == tensor
        target = mesh if tensor is None or same else reshape_mesh(mesh, devices // tensor // expert, tensor)
        copied = tensor is not None or section.dtype is not None
        # With axis expert the sampler may have the mesh of the update, which splits more than experts over it.
        rules = None if tensor is None or same else SAMPLING_RULES
        return SamplingLayout(mesh, target, sampler, narrows=copied, wide_head=section.dtype is None, rules=rules)

    def option_of(tensor: int) -> Option:
        cache = _cache_bytes(config, sampler, data=devices // tensor, tensor=tensor)
        weights = layout_of(tensor).bytes
        # The engine of episodes copies the weights before it has a cache.
        return Option(tensor, weights, max(cache, weights) if config.runs_episodes() else cache)

    resident = resident_bytes(plan, model, mesh, optimizer)
    if section.in_place:
        choice = Choice(None, "rollout.in_place")
    elif section.mesh is not None:
        choice = Choice(section.mesh.tensor, "rollout.mesh")
    else:
        rows = [config.rows_per_batch(), section.slots or config.rows_per_batch(), config.eval.rows()]
        shape = named_sizes(dataclasses.asdict(model.config))
        sizes = [shape[name] for name in SPLIT_BY_TENSOR if name in shape]
        tensors = tensor_sizes(devices, mesh.shape["tensor"], mesh.shape["fsdp"] * mesh.shape["tensor"], sizes, rows)
        if config.runs_episodes():
            # Each process has an engine of its own.
            tensors = [tensor for tensor in tensors if are_processes_whole(layout_of(tensor).mesh)]
        choice = choose(
            [option_of(tensor) for tensor in tensors],
            resident=resident,
            memory=memory,
            gathers=gathers,
            narrows=not SamplingLayout(mesh, mesh, sampler).in_place,
        )
    layout = layout_of(choice.tensor)
    shape = layout.mesh.shape
    weights = 0 if layout.in_place else layout.bytes
    cache = _cache_bytes(config, sampler, data=layout.row_parts, tensor=shape["tensor"])
    # Unrolled layers take a copy of their weights.
    fits = memory is None or resident + weights + cache + layout.bytes <= USABLE * memory
    layout.unroll = copies_layers(mesh.devices.flat[0].device_kind) and fits
    layout.line = describe(
        choice,
        Option(shape["tensor"], weights, cache),
        data=layout.row_parts,
        expert=expert,
        dtype=sampler.config.dtype,
        resident=resident,
        memory=memory,
    )
    return layout


def device_memory(mesh: Mesh) -> int | None:
    """Returns the bytes that programs may use on a device of a mesh, the fewest of all processes; None if unknown.

    The backend says how many; for devices without memory, of a topology that is compiled for, a table does.
    """
    known = find_device(mesh.devices.flat[0].device_kind)
    memory = None if known is None else known.usable
    if mesh.local_devices:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            memory = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", memory)
    sizes = exchange_json("memory of a device", memory)
    return None if None in sizes else min(sizes)


def resident_bytes(plan: Plan, model: Decoder, mesh: Mesh, optimizer: optax.GradientTransformation) -> int:
    """Estimates the bytes on a device of everything but the sampler's weights, KV cache and temporaries."""
    config = plan.config
    params = abstract_params(model, mesh)
    trained = params if config.lora is None else abstract_adapter(model, mesh)
    moments = abstract_optimizer_state(optimizer, trained, replicated(mesh), in_host=config.optim.host_memory)
    copies = config.rollout.policy_lag
    # An adapter that is switched off, or another one, has no weights of its own.
    separate = config.reference.source == "checkpoint" or config.lora is None
    references = device_bytes(params) if plan.reference and separate else 0
    adapter = 0 if config.lora is None else device_bytes(trained)
    return device_bytes(params) + adapter + references + copies * device_bytes(trained) + device_bytes(moments)


def _cache_bytes(config: Config, model: Decoder, *, data: int, tensor: int) -> int:
    """Estimates the bytes on a device of the KV cache and of the logits of a decode step."""
    section = config.rollout
    slots = max(section.slots or config.rows_per_batch(), config.eval.rows())
    prompts = max(section.prompts_per_step, config.eval.rows())
    prompt = config.data.max_prompt_length
    tokens = slots * (prompt + config.data.completion_length()) + prompts * prompt
    logits = LOGITS * slots * model.config.vocab_size * 4
    return (state_bytes(model.config, tokens) + logits) // (data * tensor)
