"""The compiled programs of the engine: for each size one, compiled before the first request.

What a program reads of the pool and what it writes there are two programs: one that does both with a donated pool
copies it.

Shapes: R rows of the pool, S old columns, N new tokens in E segments, B rows of a chunk, V vocabulary; of each of the D
shards of a mesh in the sizes, and of all together in arrays.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

import kljax
from train.models import Decoder, Transformer, rope_tables
from train.models.blocks import layer_stacks
from train.models.cache import DecoderState, GroupCache, SlotCache
from train.models.head import make_logits
from train.models.parameters import bind
from train.models.sharding import axis_size, partition_spec
from train.rollouts.engine.pool import (
    POOL_AXES,
    NewTokens,
    Pool,
    SegmentCache,
    by_layer,
    by_stack,
    copy_rows,
    last_tokens,
    make_pool,
    put_rows,
    split_pool,
    take_rows,
)
from train.rollouts.sampler import Sampling, StopTable
from train.rollouts.sampler.draw import draw
from train.rollouts.sampler.stops import row_ends

log = logging.getLogger(__name__)
Tree = Any


class ExtendSize(NamedTuple):
    """The size of a program that runs new tokens.

    Attributes:
      tokens: N, of all segments together.
      segments: E, the most of them.
      width: T, the longest.
    """

    tokens: int
    segments: int
    width: int


@dataclasses.dataclass(frozen=True)
class EngineSizes:
    """The sizes of each shard for which programs are compiled. More of them waste less, and take longer to compile.

    Attributes:
      rows: R, sessions that keep their cache.
      columns: the most tokens of a session.
      chunk: decode steps of a chunk, between which rows join and leave.
      batches: B, rows of a chunk, ascending; the last is at most R.
      lengths: S, ascending; the last is `columns`.
      extends: in any order.
    """

    rows: int
    columns: int
    chunk: int
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    extends: tuple[ExtendSize, ...]

    @classmethod
    def of(cls, rows: int, columns: int) -> "EngineSizes":
        """Chooses the sizes for so many rows of so many tokens: at most 16 programs."""
        batches = (rows // 4, rows // 2, rows) if rows >= 16 else (rows,)
        lengths = (columns // 2, columns) if columns >= 256 else (columns,)
        width = min(columns, 32)
        extends: tuple[ExtendSize, ...] = (ExtendSize(min(rows * width, 64), min(rows, 4), width),)
        if rows > 4:
            extends += (ExtendSize(min(rows * width, 256), min(rows, 12), width),)
        return cls(rows, columns, 8, batches, lengths, extends)

    @property
    def slack(self) -> int:
        """Columns after the last, which take what is written for rows that end before."""
        return max(self.chunk, *(size.width for size in self.extends))


class DrawnTokens(NamedTuple):
    """Tokens that were drawn: [B] of an extend, [B, chunk] of a chunk; and how many of each row, [B]."""

    tokens: Any
    rollout_log_probs: Any
    counts: Any
    stop_states: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkRows:
    """The rows of a program, on the host, the same number in each shard.

    Attributes:
      rows: [B] int32, their numbers in their shard of the pool; of missing ones any, with a length after the last
        column.
      lengths: [B] int32, tokens that are in the cache.
      keys: [B, 2] uint32, data of the key of each row's session.
      numbers: [B] int32, the number of the next token, of those of its session that the key draws.
      stop_states: [B] int32, of the search for stop strings, before the next token.
    """

    rows: Any
    lengths: Any
    keys: Any
    numbers: Any
    stop_states: Any

    @classmethod
    def empty(cls, count: int, columns: int) -> "ChunkRows":
        """Makes missing rows: what they write goes to the columns after the last."""
        zeros = (np.zeros(count, np.int32) for _ in range(3))
        keys = np.zeros((count, 2), np.uint32)
        lengths = np.full(count, columns, np.int32)
        return cls(next(zeros), lengths, keys, next(zeros), next(zeros))


class LoweredEngineProgram(NamedTuple):
    """A program of the engine that is ready to be compiled: its name, and its arguments."""

    name: str
    lowered: Any
    arguments: Any


class EnginePrograms:
    """The programs for one model and one sampling distribution.

    Each device reads and writes rows of its own shard alone, and of the heads that its weights have.

    Attributes:
      compiled: the executables by their names.
      shards: D, the parts into which the mesh splits rows.

    Args:
      model: the decoder, with attention in all layers.
      sizes: of the programs, for each shard.
      sampling: temperature and filters; `record_kept_tokens` and `record_routes` are off.
      eos_ids: [E], the tokens that end a turn.
      stop: the table of strings that end a turn, or None.
      mesh: of the weights; None: one device.
    """

    def __init__(
        self,
        model: Decoder,
        sizes: EngineSizes,
        *,
        sampling: Sampling,
        eos_ids: Sequence[int],
        stop: StopTable | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        self.model = model
        self.sizes = sizes
        self.shards = 1 if mesh is None else axis_size("rows", mesh)
        self._mesh = mesh
        self.sampling = sampling
        self.stop = stop
        self.compiled: dict[str, Any] = {}
        self._layers = [list(stack.layers) for stack in layer_stacks(model.config)]
        self._eos = np.asarray(tuple(eos_ids) or (-1,), np.int32)
        self._structure: Any = None
        self._unstack = jax.jit(self._prepared)
        # Rows have some columns more than sessions have tokens.
        make = functools.partial(make_pool, model.config, self.shards * sizes.rows, sizes.columns + sizes.slack)
        self._make_pool = jax.jit(make)

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def make_pool(self) -> Pool:
        """Makes an empty pool."""
        with self._on_mesh():
            return self._make_pool()

    def abstract_pool(self) -> Pool:
        """Describes the pool."""
        return self._split(jax.eval_shape(self._make_pool))

    def _split(self, pool: Pool) -> Pool:
        """Gives shapes of keys and values their sharding."""
        if self._mesh is None:
            return pool
        sharding = NamedSharding(self._mesh, partition_spec(POOL_AXES))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), pool)

    def weights(self, policy: kljax.Policy) -> list[jax.Array]:
        """Takes the layers out of their stacks, once for all chunks, which would each copy all weights otherwise."""
        with self._on_mesh():
            leaves, self._structure = jax.tree.flatten(self._unstack(policy))
        return leaves

    def abstract_weights(self, policy: kljax.Policy) -> tuple[list[jax.ShapeDtypeStruct], Any]:
        """Returns the shapes of the `weights` of a described policy, and the lowered program that makes them."""
        with self._on_mesh():
            lowered = self._unstack.lower(policy)
        leaves, self._structure = jax.tree.flatten(lowered.out_info)
        # The compiler decides how parts of split weights lie.
        shardings = jax.tree.leaves(lowered.compile().output_shardings)
        pairs = zip(leaves, shardings, strict=True)
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in pairs], lowered

    def _prepared(self, policy: kljax.Policy) -> tuple[Transformer, Tree]:
        head = "embed_tokens" if self.model.config.tie_embeddings else "lm_head"
        return bind(self.model, policy).unrolled(), {head: policy.params[head]}

    def compile(self, weights: list[jax.Array], pool: Pool) -> None:
        """Compiles all programs, and logs their names."""
        for program in self.lower(weights, pool):
            self.compiled[program.name] = program.lowered.compile()
        log.info("engine: %d programs: %s", len(self.compiled), ", ".join(self.compiled))

    def lower(self, weights: Sequence[Any], pool: Pool) -> Iterator[LoweredEngineProgram]:
        """Lowers all programs, one after the other, for weights and a pool or for what describes them."""
        sizes = self.sizes
        shards = self.shards
        put = jax.jit(put_rows, donate_argnums=0)
        greedy = np.zeros((), bool)

        def lowered(name: str, program: Any, *arguments: Any, **static: Any) -> LoweredEngineProgram:
            with self._on_mesh():
                return LoweredEngineProgram(name, program.lower(*arguments, **static), arguments)

        for size, columns in itertools.product(sizes.extends, sizes.lengths):
            name = extend_name(size, columns)
            segments = empty_segments(size, shards)
            rows = ChunkRows.empty(shards * size.segments, sizes.columns)
            program = jax.jit(_named(self._extend, f"engine_{name}"), static_argnames="columns")
            yield lowered(name, program, weights, pool, segments, rows, greedy, columns=columns)
        for batch, columns in itertools.product(sizes.batches, sizes.lengths):
            name = decode_name(batch, columns)
            numbers = np.zeros(shards * batch, np.int32)
            rows = ChunkRows.empty(shards * batch, sizes.columns)
            program = jax.jit(_named(self._decode, f"engine_{name}"), static_argnames="columns")
            yield lowered(name, program, weights, pool, numbers, numbers, rows, greedy, columns=columns)
        for count, width in {(size.segments, size.width) for size in sizes.extends} | {
            (batch, sizes.chunk) for batch in sizes.batches
        }:
            new = self._split(jax.eval_shape(lambda: make_pool(self.model.config, shards * count, width)))  # noqa: B023
            numbers = np.zeros(shards * count, np.int32)
            yield lowered(put_name(count, width), put, pool, numbers, numbers, new)
        numbers = np.zeros(shards, np.int32)
        yield lowered("copy", jax.jit(copy_rows, donate_argnums=0), pool, numbers, numbers)

    def extend(
        self,
        weights: list[jax.Array],
        pool: Pool,
        segments: NewTokens,
        rows: ChunkRows,
        *,
        size: ExtendSize,
        columns: int,
        greedy: bool,
    ) -> tuple[Pool, DrawnTokens]:
        """Runs new tokens of rows, and draws one more token after each segment."""
        program = self.compiled[extend_name(size, columns)]
        new, drawn = program(weights, pool, segments, rows, np.asarray(greedy))
        put = self.compiled[put_name(size.segments, size.width)]
        return put(pool, rows.rows, rows.lengths, new), drawn

    def decode(
        self,
        weights: list[jax.Array],
        pool: Pool,
        pending: np.ndarray,
        limits: np.ndarray,
        rows: ChunkRows,
        *,
        columns: int,
        greedy: bool,
    ) -> tuple[Pool, DrawnTokens]:
        """Draws up to `chunk` tokens of each row, at most `limits` [B]; `pending` [B] were drawn last."""
        batch = len(pending) // self.shards
        program = self.compiled[decode_name(batch, columns)]
        new, drawn = program(weights, pool, pending, limits, rows, np.asarray(greedy))
        put = self.compiled[put_name(batch, self.sizes.chunk)]
        return put(pool, rows.rows, rows.lengths, new), drawn

    def copy(self, pool: Pool, source: int, target: int) -> Pool:
        """Copies a row of the pool to another one of its shard."""
        shard, first = divmod(source, self.sizes.rows)
        # In other shards a row to itself.
        sources = np.zeros(self.shards, np.int32)
        targets = np.zeros(self.shards, np.int32)
        sources[shard] = first
        targets[shard] = target % self.sizes.rows
        return self.compiled["copy"](pool, sources, targets)

    def _draw(self, head: Tree, hidden: jax.Array, rows: ChunkRows, numbers: jax.Array, greedy: jax.Array) -> Any:
        """Draws the tokens `numbers` [B] of the sessions of rows after hidden states [B, D]."""
        dtype = jnp.promote_types(hidden.dtype, jnp.float32)
        logits = make_logits(self.model, head)(hidden, dtype) / self.sampling.temperature

        def uniforms_of(key: jax.Array, number: jax.Array) -> jax.Array:
            return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), number), (2,), dtype)

        def draw_with(greedy: bool) -> Any:
            sampling = dataclasses.replace(self.sampling, greedy=greedy)
            return lambda: draw(logits, jax.vmap(uniforms_of)(rows.keys, numbers), sampling)

        drawn = lax.cond(greedy, draw_with(True), draw_with(False))
        return drawn["tokens"], drawn["rollout_log_probs"]

    def _extend(
        self,
        weights: list[jax.Array],
        pool: Pool,
        segments: NewTokens,
        rows: ChunkRows,
        greedy: jax.Array,
        *,
        columns: int,
    ) -> tuple[Pool, DrawnTokens]:
        transformer, head = jax.tree.unflatten(self._structure, weights)
        caches = [
            SegmentCache(take_rows(cache, rows.rows, columns), segments.members, segments.places) for cache in pool
        ]
        state = DecoderState(by_stack(caches, self._layers), 0, unrolled=True)
        mask = segments.mask(columns, self.model.config.sliding_window)
        flat = (x.reshape(self.shards, -1) for x in (segments.tokens, segments.positions, segments.real))
        hidden, state = transformer.extend(*flat, state, mask)
        new = split_pool([SlotCache.of(cache.segments()) for cache in by_layer(state.stacks, self._layers)])
        tokens, log_probs = self._draw(head, last_tokens(hidden, segments), rows, rows.numbers, greedy)
        ended, stop_states = row_ends(tokens, self._eos, self.stop, rows.stop_states)
        return new, DrawnTokens(tokens, log_probs, jnp.where(ended, 0, 1), stop_states)

    def _decode(  # noqa: PLR0917 (the arguments of a program)
        self,
        weights: list[jax.Array],
        pool: Pool,
        pending: jax.Array,
        limits: jax.Array,
        rows: ChunkRows,
        greedy: jax.Array,
        *,
        columns: int,
    ) -> tuple[Pool, DrawnTokens]:
        transformer, head = jax.tree.unflatten(self._structure, weights)
        count = len(pending)
        steps = self.sizes.chunk
        # All rows are there in their order.
        gathered = None if count == self.shards * self.sizes.rows else rows.rows
        if gathered is None and columns == self.sizes.columns:
            # A slice without the slack would be a copy of all rows, which takes longer than to read the slack.
            columns += self.sizes.slack
        old = [take_rows(cache, gathered, columns) for cache in pool]
        drawn = split_pool([SlotCache.zeros(cache, count, steps) for cache in old])
        caches = [GroupCache(*pair) for pair in zip(old, drawn, strict=True)]
        lengths = jnp.where(rows.lengths < self.sizes.columns, rows.lengths, 0)
        rope = rope_tables(
            transformer.config, jnp.arange(self.sizes.columns + steps)[None], jnp.dtype(transformer.config.dtype)
        )
        in_cache = jnp.arange(columns) < lengths[:, None]
        every = jnp.arange(columns + steps)
        key_positions = jnp.where(every < columns, every, lengths[:, None] + every - columns)

        def advance(carry: Any) -> Any:
            step, active, last, stop_states, state, tokens, log_probs, done = carry
            positions = lengths + step
            new_columns = jnp.broadcast_to(jnp.arange(steps) <= step, (count, steps))
            hidden, state, _ = transformer.decode(
                last,
                positions,
                state,
                jnp.concatenate([in_cache, new_columns], axis=1),
                columns + step,
                key_positions=key_positions,
                rope=jax.tree.map(lambda x: jnp.take(x[0], positions, axis=0, mode="clip")[:, None], rope),
            )
            new, log_prob = self._draw(head, hidden, rows, rows.numbers + step, greedy)
            tokens = lax.dynamic_update_slice(tokens, new[:, None], (0, step))
            log_probs = lax.dynamic_update_slice(log_probs, log_prob[:, None], (0, step))
            ended, new_states = row_ends(new, self._eos, self.stop, stop_states)
            stop_states = jnp.where(active, new_states, stop_states)
            done = done + active
            return step + 1, active & ~ended & (done < limits), new, stop_states, state, tokens, log_probs, done

        dtype = jnp.promote_types(transformer.config.dtype, jnp.float32)
        start = (
            *(jnp.int32(0), limits > 0, pending, rows.stop_states),
            DecoderState(by_stack(caches, self._layers), steps, unrolled=True),
            *(jnp.zeros((count, steps), jnp.int32), jnp.zeros((count, steps), dtype), jnp.zeros(count, jnp.int32)),
        )
        with jax.named_scope("decode"):
            end = lax.while_loop(lambda carry: (carry[0] < steps) & jnp.any(carry[1]), advance, start)
        _, _, _, stop_states, state, tokens, log_probs, done = end
        new = split_pool([cache.completions for cache in by_layer(state.stacks, self._layers)])
        return new, DrawnTokens(tokens, log_probs, done, stop_states)


def empty_segments(size: ExtendSize, shards: int) -> NewTokens:
    """Makes arrays of an extend without a token, for so many shards."""
    tokens = shards * size.tokens
    segments = shards * size.segments
    width = size.width
    flat = (np.zeros(tokens, np.int32) for _ in range(3))
    return NewTokens(
        tokens=next(flat),
        positions=next(flat),
        real=np.zeros(tokens, bool),
        members=np.zeros((segments, width), np.int32),
        counts=np.zeros(segments, np.int32),
        places=next(flat),
        lengths=np.zeros(segments, np.int32),
    )


def _named(function: Any, name: str) -> Any:
    def named(*arguments: Any, columns: int) -> Any:
        return function(*arguments, columns=columns)

    named.__name__ = name
    return named


def extend_name(size: ExtendSize, columns: int) -> str:
    """Returns the name of a program that runs new tokens."""
    return f"extend_{size.tokens}x{size.segments}x{size.width}_after_{columns}"


def decode_name(rows: int, columns: int) -> str:
    """Returns the name of a program that draws a chunk."""
    return f"decode_{rows}_after_{columns}"


def put_name(rows: int, width: int) -> str:
    """Returns the name of a program that writes new columns into the pool."""
    return f"put_{rows}x{width}"
