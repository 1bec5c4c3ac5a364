"""The engine for the config of a run."""

from train.config.errors import UserError
from train.context import RunContext
from train.data.tokenizers import vocabulary_bytes
from train.rollouts.engine.programs import EngineSizes
from train.rollouts.engine.schedule import TurnEngine
from train.rollouts.jax_source import rollout_sampling
from train.rollouts.sampler import stop_table


def make_engine(context: RunContext, rows: int, columns: int) -> TurnEngine:
    """Makes the engine of a run, for so many rows of KV cache of so many tokens; its first `update` compiles it."""
    section = context.config.rollout
    size = context.model.config.vocab_size
    return TurnEngine(
        context.layout.model,
        EngineSizes.of(rows, columns),
        sampling=rollout_sampling(context.config),
        eos_ids=context.tokenizer.eos_ids,
        stop=stop_table(section.stop, vocabulary_bytes(context.tokenizer, size) if section.stop else []),
    )


def check_one_device(context: RunContext) -> None:
    """Raises `UserError` unless the devices of a run are one, if its engine draws the turns of episodes."""
    config = context.config
    source = config.rollout.source.type
    if context.mesh.size == 1 or source not in ("jax", "endpoint"):
        return
    if source == "endpoint":
        got = f"rollout.source.type: got endpoint with a mesh of {context.mesh.size} devices"
        raise UserError(f"{got}, expected 1: episodes run on one")
    if config.environment is not None:
        raise UserError(
            f"environment: got a mesh of {context.mesh.size} devices, expected 1: episodes run on one, unless "
            "rollout.source.type openai draws their turns"
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
