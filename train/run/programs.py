"""The compiled functions of a run, and shapes of what a step calls them with."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from train.context import RunContext
from train.models.sharding import batch_sharding, replicated, with_sharding
from train.references.follow import Follow, make_follow, with_abstract_reference
from train.references.store import ReferenceStore, make_reference_store
from train.rl.objective import coefficients
from train.rl.preparation import Control, Preparation
from train.rl.reference import FrozenWeights, reference_head
from train.rl.state import TrainState
from train.rl.step import (
    ScoreProgram,
    UpdateProgram,
    make_control,
    make_prepare,
    make_reference_score,
    make_score,
    make_update,
    update_rows,
)
from train.sequences.batch import Batch
from train.sequences.packing import Packer, make_packer

Tree = Any


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled functions of a run; each compiles once.

    Attributes:
      store: scores the rows of a recording with a constant reference, each once; None: `score` runs the reference.
    """

    score: ScoreProgram
    prepare: Preparation
    update: UpdateProgram
    control: Control | None
    follow: Follow | None
    pack: Packer | None = None
    store: ReferenceStore | None = None

    @classmethod
    def of(
        cls, context: RunContext, state: TrainState, recorded_rows: int | None = None, *, per_token: bool = False
    ) -> "Programs":
        """Compiles, lazily, the programs of a run for states of this layout.

        Args:
          context: of the run.
          state: its layout counts.
          recorded_rows: number of the rows of a recording, which come again in every epoch; None for other samples.
          per_token: whether updates return the values of each token too.
        """
        plan = context.plan
        model = context.model
        mesh = context.mesh
        moving = with_abstract_reference(plan, state).reference
        return cls(
            score=make_score(plan, model, mesh),
            prepare=make_prepare(plan, mesh),
            update=make_update(plan, model, context.optimizer, updated_part(state), mesh, per_token=per_token),
            control=make_control(plan, mesh),
            follow=None if moving is None else make_follow(context.config, moving),
            pack=make_packer(plan, mesh),
            store=make_reference_store(plan, model, mesh, recorded_rows),
        )


class ProgramCall(NamedTuple):
    """A call of a program of a step with shapes, types and shardings for arrays.

    Attributes:
      name: "score reference", "score", "prepare" or "update".
      arguments: of the program, and `keywords`.
      traced: the program, traced with them.
      runs: how often a step calls it.
    """

    name: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    traced: jax.stages.Traced
    runs: int = 1

    @classmethod
    def of(cls, name: str, program: Any, *arguments: Any, runs: int = 1, **keywords: Any) -> "ProgramCall":
        """Traces a program."""
        return cls(name, arguments, keywords, program.trace(*arguments, **keywords), runs)


def describe_step(
    context: RunContext, programs: Programs, state: TrainState, frozen: FrozenWeights, batch: Batch
) -> Iterator[ProgramCall]:
    """Describes the calls of a step after its rollout, in their order; those of packed rows as of padded ones.

    Args:
      context: of the run.
      programs: of the run, which are traced.
      state: the state, or its shapes.
      frozen: the base, and the reference that is scored.
      batch: the shapes of a batch that was drawn.
    """
    config = context.config
    plan = context.plan
    by_rows = batch_sharding(context.mesh)
    everywhere = replicated(context.mesh)
    reference = frozen.reference
    scored = dict[str, Any]()
    if plan.keeps_ref_log_probs:
        # Rows of a recording that are new need it; the others have log-probs.
        score_reference = make_reference_score(plan, context.model, context.mesh)
        yield (call := ProgramCall.of("score reference", score_reference, frozen.base, reference, batch))
        scored["ref_log_probs"] = call.traced.out_info[0]
        reference = None
    if plan.scores_policy or not plan.keeps_ref_log_probs:
        yield (call := ProgramCall.of("score", programs.score, state.trainable, frozen.base, reference, batch))
        batch = call.traced.out_info

    judged: dict[str, Any] = {"rewards": jax.ShapeDtypeStruct(batch.tokens.shape[:1], jnp.float32)}
    if config.loss.unfinished == "drop":
        judged["kept_mask"] = batch.completion_mask
    batch = with_sharding(dataclasses.replace(batch, **scored, **judged), by_rows)
    yield (call := ProgramCall.of("prepare", programs.prepare, batch, state.controllers))
    batch = with_sharding(call.traced.out_info[0], by_rows)

    key = jax.eval_shape(lambda: jax.random.key(0))
    updates = jax.eval_shape(lambda key: update_rows(config, key), key)
    coefs = jax.eval_shape(lambda states: coefficients(config, states), state.controllers)
    coefs |= {"key": key} if plan.key else {}
    rows, coefs = with_sharding((updates[0], coefs), everywhere)
    head = reference_head(plan, frozen.reference)
    arguments = (updated_part(state), frozen.base, batch, rows, coefs)
    yield ProgramCall.of("update", programs.update, *arguments, ref_head=head, packed=None, runs=len(updates))


def updated_part(state: TrainState) -> TrainState:
    """Drops the ring and the reference, which an update reads and must not donate."""
    return dataclasses.replace(state, past=None, reference=None)
