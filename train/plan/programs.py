"""The programs of a step, lowered for a mesh of devices that are not here, with what is in memory beside each."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import kljax
from kljax.log_probs._head import head_defaults
from train.config.errors import UserError
from train.config.schema import Config
from train.context import RunContext, make_bare_context
from train.models.attention.blocks import expected_visits
from train.models.blocks import state_bytes
from train.models.dispatch import ROUNDS, ROW_BLOCKS, ChunkSizes
from train.models.grouped import choose_implementation, expected_trips
from train.models.sharding import HOST, batch_sharding, device_bytes
from train.plan.abstract import AbstractEngine, abstract_reference, abstract_state
from train.plan.shapes import planned_model
from train.rl.host_memory import has_host_memory
from train.rl.objective import tile
from train.rl.policy import ScoredPolicy
from train.rl.reference import FrozenWeights
from train.rl.state import TrainState, policy_of
from train.rollouts.describe import describe_batch
from train.rollouts.engine.of_run import check_processes
from train.rollouts.engine.programs import extend_name
from train.rollouts.jax_source import rollout_rows, sampling_programs
from train.run.programs import Programs, describe_step

Tree = Any


@dataclasses.dataclass(frozen=True)
class LoweredProgram:
    """A program of a step.

    Attributes:
      name: "lay out", "sample", "evaluate", "score", "score reference", "prepare" or "update"; or a name of the engine
        of episodes, such as "decode_64_after_512".
      lowered: ready to be compiled.
      beside: bytes on a device of the arrays of the run that are in memory and no arguments.
      parts: bytes on a device of known arrays, by name.
      runs: executions in a step; 0 for an evaluation, of which memory alone is planned.
      loops: expected iterations of loops that depend on data, by scope.
    """

    name: str
    lowered: jax.stages.Lowered
    beside: int
    parts: Mapping[str, int]
    runs: int
    loops: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class AbstractRun:
    """A run without memory: all of its arrays are shapes, types and shardings.

    Attributes:
      context: its config, model, optimizer, mesh and layout for sampling; no task and no prompts.
      state: before RL.
      base: frozen weights under an adapter; None without one.
      reference: the reference; None without one.
      engine: of episodes, whose weights and KV cache are in memory while they run; None without one.
    """

    context: RunContext
    state: TrainState
    base: Tree
    reference: ScoredPolicy | None
    engine: AbstractEngine | None = None

    @classmethod
    def of(cls, config: Config, mesh: Mesh) -> "AbstractRun":
        """Describes the run of a config on a mesh.

        Raises:
          UserError: the shape of its model is not known here, or does not fit the mesh; or the compiler knows no memory
            of the host.
        """
        device = mesh.devices.flat[0]
        if config.optim.host_memory and not has_host_memory(device):
            raise UserError(
                f"optim.host_memory: got true, but the compiler knows no {HOST} memory of a {device.device_kind} "
                "that is not here; plan with false, and subtract the optimizer from the memory of a device"
            )
        model, tokenizer = planned_model(config)
        context = make_bare_context(config, model, mesh, tokenizer)
        state, base = abstract_state(context.plan, model, context.optimizer, mesh)
        check_processes(context)
        run = cls(context, state, base, abstract_reference(context.plan, model, mesh, state))
        return dataclasses.replace(run, engine=AbstractEngine.of(context, run.sampling_policy()))

    def resident(self) -> dict[str, Tree]:
        """Returns the arrays that stay in memory from step to step, by name."""
        trees = {
            "parameters": (self.state.trainable, self.base),
            "optimizer": self.state.opt_state,
            "reference": (self.reference, self.state.reference),
            "lagged policies": self.state.past,
        }
        return {name: tree for name, tree in trees.items() if jax.tree.leaves(tree)}

    def beside(self, arguments: Tree, *extra: Tree) -> int:
        """Counts the bytes on a device of the resident arrays, and of `extra`, that are no arguments."""
        known = {id(leaf) for leaf in jax.tree.leaves(arguments)}
        distinct = {id(leaf): leaf for leaf in jax.tree.leaves((self.resident(), extra))}
        return device_bytes([leaf for key, leaf in distinct.items() if key not in known])

    def lower(self) -> Iterator[LoweredProgram]:
        """Lowers the programs of a step, one at a time: laying out weights, sampling, scoring, preparing, updating.

        An evaluation is lowered if its KV cache is larger, or if rollouts come from elsewhere. Of the programs of an
        engine those are lowered that episodes of full length run.
        """
        with jax.set_mesh(self.context.mesh):
            policy = self.policy()
            if not self.context.layout.in_place:
                yield from self._lay_out(policy)
            yield from self._samplers() if self.engine is None else self._engine(self.engine)
            yield from self._step()

    def policy(self) -> kljax.Policy:
        """Returns the weights that sample: the weights of the state, or the oldest of a lagged policy."""
        return policy_of(self.state.past[0] if self.state.past else self.state.trainable, self.base)

    def sampling_policy(self) -> kljax.Policy:
        """Returns the weights that sample, as the layout for sampling has them."""
        layout = self.context.layout
        return self.policy() if layout.in_place else layout.abstract_policy()

    def _lay_out(self, policy: kljax.Policy) -> Iterator[LoweredProgram]:
        layout = self.context.layout
        for part in ("params", "adapter"):
            weights = getattr(policy, part)
            if weights is not None:
                lowered = cast(Any, layout.program(part)).lower(weights)
                # A frozen base is laid out once.
                runs = int(part == "adapter" or policy.adapter is None)
                yield LoweredProgram(f"lay out {part}", lowered, self.beside(weights), {}, runs, {})

    def _engine(self, engine: AbstractEngine) -> Iterator[LoweredProgram]:
        """Lowers the programs of the engine that episodes of full length run."""
        config = self.context.config
        section = config.rollout
        counts = engine.engine.executions(
            prompts=section.prompts_per_step,
            samples=section.samples_per_prompt - section.fork_rows,
            prompt_length=config.data.max_prompt_length,
            length=config.data.completion_length(),
        )
        sizes = engine.engine.sizes
        largest = extend_name(max(sizes.extends), sizes.lengths[-1])
        policy = self.sampling_policy()
        yield LoweredProgram("engine weights", engine.unstack, self.beside(policy), {}, 1, {})
        # A frozen base that is laid out stays beside the engine's weights.
        base = () if policy.adapter is None or self.context.layout.in_place else policy.params
        both = engine.weights, engine.pool
        for name, lowered, arguments in engine.lower():
            # Shorter prompts may need the largest program.
            if name in counts or name == largest:
                loops = {"decode": sizes.chunk, **self._expert_tiles(sizes.rows)}
                beside = self.beside(arguments, base, both)
                yield LoweredProgram(name, lowered, beside, {}, counts.get(name, 0), loops)

    def _samplers(self) -> Iterator[LoweredProgram]:
        """Lowers the sampler of rollouts, and that of an evaluation where it may need more memory."""
        config = self.context.config
        context = self.context
        repeats, samples = rollout_rows(context)
        length = config.data.max_prompt_length
        largest = 0
        if config.rollout.source.type == "jax" and not config.runs_episodes():
            prompts = config.rollout.prompts_per_step * repeats
            program = self._sampler("sample", sampling_programs(context, "rollout")[length], prompts, samples)
            largest = program.parts["KV cache"]
            yield program
        if not config.runs_episodes() and self._sampler_cache(config.eval.rows(), 1) > largest:
            program = self._sampler("evaluate", sampling_programs(context, "held_out")[length], config.eval.rows(), 1)
            yield dataclasses.replace(program, runs=0)

    def _sampler(self, name: str, program: Any, prompts: int, samples: int) -> LoweredProgram:
        """Lowers a sampler's program for a number of prompts and of completions per prompt."""
        config = self.context.config
        layout = self.context.layout
        length = config.data.max_prompt_length
        with layout.active():
            policy = self.sampling_policy()
            rows = batch_sharding(layout.mesh)
            tokens = jax.ShapeDtypeStruct((prompts, length), jnp.int32, sharding=rows)
            mask = jax.ShapeDtypeStruct((prompts, length), jnp.bool, sharding=rows)
            arguments = (policy, tokens, mask, jax.eval_shape(lambda: jax.random.key(0)))
            lowered = program.lower(*arguments)
        count = prompts * samples
        slots = min(config.rollout.slots or count, count)
        steps = config.data.completion_length() * math.ceil(count / slots) - 1
        loops = {"decode": steps, "refill": slots, "decode/while/body/refill": (count - slots) / max(steps, 1)}
        parts = {"KV cache": self._sampler_cache(prompts, samples)}
        loops |= self._expert_tiles(math.ceil(slots / layout.row_parts)) | expected_visits(length)
        return LoweredProgram(name, lowered, self.beside(arguments), parts, 1, loops)

    def _sampler_cache(self, prompts: int, samples: int) -> int:
        """Counts the bytes on a device of the keys and values of slots and of prompts."""
        config = self.context.config
        layout = self.context.layout
        count = prompts * samples
        slots = min(config.rollout.slots or count, count)
        length = config.data.max_prompt_length
        tokens = slots * (length + config.data.completion_length()) + prompts * length
        return state_bytes(layout.model.config, tokens) // layout.mesh.size

    def _row_loops(self, *, fused: bool = False) -> dict[str, float]:
        """Counts the iterations of loops over the rows of a micro-batch of a device, if all tokens are real.

        The LM head takes a tile of tokens at a time; `fused`: a chunk, as with the loss behind it.
        """
        config = self.context.config
        kind = self.context.mesh.devices.flat[0].device_kind
        rows = config.rows_per_micro_batch()
        layout = self.context.plan.layout
        completion = config.data.completion_length()
        if fused:
            tokens = config.log_probs.token_chunk or head_defaults(kind).token_chunk
        else:
            tokens = (tile(config.log_probs) or head_defaults(kind).tile).tokens
        experts = self._expert_tiles(rows * config.data.row_length() // config.mesh.context)
        visits = expected_visits(layout.slots(layout.group))
        return {"token_tiles": math.ceil(rows * completion / tokens), **visits, **experts}

    def _expert_tiles(self, tokens: int) -> dict[str, float]:
        """Counts the tiles of the experts of a device for so many tokens, if all experts get as many."""
        model = self.context.model.config
        ways = self.context.config.mesh.expert
        if model.experts is None:
            return {}
        row_bytes = model.width * jnp.dtype(model.dtype).itemsize
        sizes = ChunkSizes.of(tokens, model.experts.active, ways=ways, row_bytes=row_bytes)
        # Devices that share the experts compute a chunk at a time, and get as many rows as they have.
        rows = tokens * model.experts.active / (sizes.chunks if ways > 1 else 1)
        kind = self.context.mesh.devices.flat[0].device_kind
        loops = choose_implementation(kind, model.dtype) == "loop"
        # A kernel counts all rows of a block, of which so many are there.
        blocks = 1.0 if loops else rows / sizes.block_rows
        return {ROW_BLOCKS: blocks, ROUNDS: 1.0} | expected_trips(math.ceil(rows), model.experts.count // ways)

    def _step(self) -> Iterator[LoweredProgram]:
        """Lowers the programs that a step calls after its rollout."""
        context = self.context
        programs = Programs.of(context, self.state)
        frozen = FrozenWeights(self.base, self.reference)
        scoring = self._row_loops()
        loops = {"prepare": {}, "update": self._row_loops(fused=context.plan.treats_tokens_alone)}
        # The sum over the micro-batches, and that of the current one.
        parts = {"update": {"gradients": 2 * device_bytes(self.state.trainable)}}
        for call in describe_step(context, programs, self.state, frozen, describe_batch(context)):
            yield LoweredProgram(
                call.name,
                call.traced.lower(),
                self.beside((call.arguments, call.keywords)),
                parts.get(call.name, {}),
                call.runs,
                loops.get(call.name, scoring),
            )
