"""A search over meshes, micro-batches and remat: arithmetic first, then the compiler."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from train.config.errors import UserError
from train.config.load import fill_mesh, load
from train.config.mesh import REMAINING
from train.config.schema import Config
from train.models.devices import GIB
from train.models.sharding import device_bytes, make_mesh
from train.plan.compiler.lowering import LEAST_EFFORT
from train.plan.compiler.topology import Topology, topology_devices
from train.plan.programs import AbstractRun
from train.plan.report import HardwareReport, report

BEST = 3
REMAT = ("dots", "full")
KEPT_AXES = ("expert", "context")
"""Axes that keep the size of the config."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Overrides of a config, and what arithmetic says of them.

    Attributes:
      overrides: `key=value` texts.
      config: the config with them.
      bytes: the least memory of an update on a device.
      exchanged: bytes that a device exchanges in the updates of a step.
    """

    overrides: tuple[str, ...]
    config: Config
    bytes: int
    exchanged: float


def plan_config(
    config: Config,
    topology: Topology,
    *,
    effort: float | None = LEAST_EFFORT,
    keep: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> HardwareReport:
    """Compiles and reads the programs of a config for a topology.

    Args:
      config: its mesh has the size of the topology.
      topology: the hardware.
      effort: of the compiler, see `compile_program`.
      keep: directory for the compiled programs, or None.
      tell: called with a line before each program.

    Raises:
      UserError: the model does not fit the mesh, or its shape is not known here.
    """
    run = abstract_run(config, topology)
    mesh = config.mesh.model_dump()
    return report(run, topology, mesh, effort=effort, keep=keep, tell=tell)


def abstract_run(config: Config, topology: Topology) -> AbstractRun:
    """Describes a run on the devices of a topology; raises `UserError` if the model does not fit the mesh."""
    config = fill_mesh(config, topology.size)
    try:
        mesh = make_mesh(**config.mesh.model_dump(), devices=topology_devices(topology))
        return AbstractRun.of(config, mesh)
    except ValueError as error:
        raise UserError(str(error)) from error


def candidates(path: str | Path, overrides: Sequence[str], topology: Topology) -> Iterator[Candidate]:
    """Lists the meshes, micro-batches and remat policies that a config allows and memory may hold.

    Args:
      path: the config.
      overrides: of the command line.
      topology: every mesh has all of its devices.
    """
    start = load(path, overrides).config
    most = start.rows_per_batch() // start.optim.updates_per_batch
    kept = start.mesh
    if REMAINING in (kept.expert, kept.context):
        kept = start.with_devices(topology.size).mesh
    kept_parts = kept.parts(KEPT_AXES)
    split = "".join(f", {axis}: {getattr(kept, axis)}" for axis in KEPT_AXES)
    split += f", slice_axis: {kept.slice_axis}" if kept.slice_axis != "data" else ""
    meshes = _meshes(topology.size // kept_parts.count, topology.slices, kept.slice_axis)
    for (data, fsdp, tensor), parts, remat in itertools.product(meshes, _divisors(most), REMAT):
        changed = (
            f"mesh={{data: {data}, fsdp: {fsdp}, tensor: {tensor}, slices: {topology.slices}{split}}}",
            f"optim.micro_batches={parts}",
            f"model.remat={remat}",
        )
        try:
            config = fill_mesh(load(path, [*overrides, *changed]).config, topology.size)
            candidate = _estimated(changed, config, topology)
        except UserError:
            continue
        if candidate.bytes <= topology.device.usable:
            yield candidate


def _meshes(size: int, slices: int, slice_axis: str) -> Iterator[tuple[int, int, int]]:
    for tensor in _divisors(size // slices):
        for other in _divisors(size // slices // tensor):
            # The rest has the slices.
            rest = size // other // tensor
            yield (rest, other, tensor) if slice_axis == "data" else (other, rest, tensor)


def _divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def _estimated(overrides: tuple[str, ...], config: Config, topology: Topology) -> Candidate:
    """Counts what stays in memory, two gradients, and the inputs of all layers of a micro-batch."""
    run = abstract_run(config, topology)
    mesh = config.mesh
    optim = config.optim
    model = run.context.model.config
    tokens = config.rows_per_micro_batch() * config.data.row_length() // mesh.context
    width = 2 if model.dtype == "bfloat16" else 4
    saved = tokens * model.layers * model.width * width
    if model.remat == "dots":
        projections = 2 * (model.heads + model.kv_heads) * model.head_dim + 3 * model.mlp_width
        saved += tokens * model.layers * projections * width // mesh.tensor
    state = sum(device_bytes(tree) for tree in run.resident().values())
    passes = optim.micro_batches * optim.updates_per_batch * optim.epochs
    # 0 without fsdp.
    weights = device_bytes(run.state.trainable) * mesh.fsdp * (1 - 1 / mesh.fsdp)
    reduced = tokens * model.width * width * 4 * model.layers if mesh.tensor > 1 else 0
    exchanged = passes * (3 * weights + reduced)
    return Candidate(overrides, config, state + 2 * device_bytes(run.state.trainable) + saved, exchanged)


def best(
    path: str | Path,
    overrides: Sequence[str],
    topology: Topology,
    *,
    most: int,
    effort: float | None,
    tell: Callable[[str], None],
) -> list[tuple[Candidate, HardwareReport]]:
    """Compiles the candidates with the least exchange, and returns the best three that fit, the fastest first.

    Args:
      path: the config.
      overrides: of the command line.
      topology: the hardware.
      most: candidates that are compiled.
      effort: of the compiler, see `compile_program`.
      tell: called with a line for every candidate.

    Raises:
      UserError: no candidate passes the arithmetic.
    """
    listed = sorted(candidates(path, overrides, topology), key=lambda candidate: (candidate.exchanged, candidate.bytes))
    if not listed:
        raise UserError(f"--search: no mesh of {topology} holds the state of {path}; take a larger topology, or lora")
    tell(f"{len(listed)} candidates pass the arithmetic; the first {min(most, len(listed))} are compiled")
    plans = []
    for candidate in listed[:most]:
        planned = plan_config(candidate.config, topology, effort=effort)
        needed = f"{planned.peak.total / GIB:.1f} GiB"
        verdict = f"fits in {needed}, at least {planned.seconds:,.1f} s a step" if planned.fits else f"needs {needed}"
        tell(f"{' '.join(candidate.overrides)}: {verdict}")
        if planned.fits:
            plans.append((candidate, planned))
    return sorted(plans, key=lambda pair: pair[1].seconds)[:BEST]
