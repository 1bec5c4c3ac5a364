"""The engine for the config of a run, and its memory on the devices."""

import contextlib
from collections.abc import Iterator

import jax

import kljax
from train.config.errors import UserError
from train.context import RunContext
from train.data.tokenizers import vocabulary_bytes
from train.distributed.global_arrays import (
    are_processes_whole,
    arrays_of_process,
    mesh_of_process,
    processes_of,
    row_owners,
)
from train.models.sharding import batch_sharding, reshape_mesh
from train.rollouts.engine.programs import EngineSizes
from train.rollouts.engine.schedule import TurnEngine
from train.rollouts.jax_source import plain_sampling
from train.rollouts.sampler import stop_table


def make_engine(context: RunContext, rows: int, columns: int) -> TurnEngine:
    """Makes the engine of a run, which has no memory on the devices until `running_engine`.

    Args:
      context: the model, and its layout for sampling.
      rows: of KV cache, on the devices of all processes together; as many more as the mesh asks for.
      columns: tokens of a row.
    """
    section = context.config.rollout
    size = context.model.config.vocab_size
    return TurnEngine(
        context.layout.model,
        EngineSizes.of(-(-rows // context.layout.row_parts), columns),
        sampling=plain_sampling(context.config),
        eos_ids=context.tokenizer.eos_ids,
        stop=stop_table(section.stop, vocabulary_bytes(context.tokenizer, size) if section.stop else []),
        mesh=mesh_of_process(context.layout.mesh),
    )


@contextlib.contextmanager
def running_engine(context: RunContext, engine: TurnEngine, policy: kljax.Policy, version: int) -> Iterator[TurnEngine]:
    """Gives an engine the weights of a policy; frees them and its KV cache at the end, also after an error.

    The first call compiles the engine. It has the weights as the layout for sampling has them; a copy of that is freed
    at once. Turns that an error leaves under way are dropped.
    """
    try:
        with jax.set_mesh(context.mesh):
            try:
                weights = arrays_of_process(context.layout.weights(policy), mesh_of_process(context.layout.mesh))
                engine.update(weights, version)
            finally:
                context.layout.release()
        yield engine
    finally:
        engine.release()


def check_processes(context: RunContext) -> None:
    """Raises `UserError` unless each process can draw the turns of whole groups, with weights of its own.

    An engine in one process has no part in others; servers have the weights themselves.
    """
    config = context.config
    source = config.rollout.source.type
    count = len(processes_of(context.mesh))
    if count == 1 or not (config.environment is not None or source == "endpoint"):
        return
    if source == "endpoint":
        raise UserError(
            f"rollout.source.type: got endpoint in {count} processes, expected 1, which agents connect to; "
            "start one with all devices of the host"
        )
    if source == "jax" and not are_processes_whole(context.layout.mesh):
        rows = context.mesh.size // context.mesh.shape["expert"]
        parts = context.mesh.shape["fsdp"] * context.mesh.shape["tensor"]
        tensors = [tensor for tensor in range(1, parts + 1) if parts % tensor == 0]
        meshes = [(rows // n, n) for n in tensors if are_processes_whole(reshape_mesh(context.mesh, rows // n, n))]
        data, tensor = meshes[-1] if meshes else (0, 0)
        raise UserError(
            f"environment: got weights for sampling that {count} processes share, expected all in each; "
            + (f"set rollout.mesh to {{data: {data}, tensor: {tensor}}}" if meshes else "set mesh.expert to less")
        )
    samples = config.rollout.samples_per_prompt
    owners = row_owners(batch_sharding(context.mesh), config.rows_per_batch()).reshape(-1, samples)
    if (owners != owners[:, :1]).any():
        raise UserError(
            f"rollout.prompts_per_step: got {config.rollout.prompts_per_step}, expected a multiple of the {count} "
            "processes, each of which runs all episodes of a prompt"
        )


def engine_of_run(context: RunContext) -> TurnEngine | None:
    """Makes the engine that a config asks for; None if its rollouts have none."""
    config = context.config
    source = config.rollout.source
    columns = config.data.row_length()
    if source.type == "endpoint":
        return make_engine(context, rows_of_run(context, source.rows), columns)
    if config.environment is not None and source.type == "jax":
        return make_engine(context, rows_of_run(context, config.environment.rows), columns)
    return None


def rows_of_run(context: RunContext, wanted: int | None) -> int:
    """Returns the rows of the engine of a run: those that are wanted, at most as many as episodes run at once."""
    most = max(context.config.rows_per_batch(), context.config.eval.rows())
    return min(wanted or most, most)
