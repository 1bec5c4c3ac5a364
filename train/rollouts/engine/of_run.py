"""The engine for the config of a run."""

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


def rows_of_run(context: RunContext, wanted: int | None) -> int:
    """Returns the rows of the engine of a run: those that are wanted, at most as many as episodes run at once."""
    most = max(context.config.rows_per_batch(), context.config.eval.rows())
    return min(wanted or most, most)
