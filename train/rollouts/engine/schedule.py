"""The schedule of the engine: which turns have a row of the pool, which run new tokens, and which decode.

It is a function of the turns and of their order alone, so that a run that is resumed draws the same bits.
"""

import collections
import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import kljax
from train.models import Decoder
from train.rollouts.engine.programs import (
    ChunkRows,
    EnginePrograms,
    EngineSizes,
    ExtendSize,
    decode_name,
    empty_segments,
    extend_name,
    put_name,
)
from train.rollouts.sampler import Sampling, StopTable
from train.sequences.sample import common_length
from train.sequences.token_fields import UNKNOWN

LEAST_COPIED = 16
"""Tokens that a session has to share with another one, at least, to start with a copy of its row."""

DRAWS = 64
"""Tokens that take as long as the part of an extend that does not depend on their number; measured on a CPU."""


@dataclasses.dataclass(eq=False)
class Turn:
    """A request, and its answer once `TurnEngine.step` returns it.

    Attributes:
      ids: the prompt, at least one.
      max_tokens: the most tokens that are drawn, at least 1.
      key: [2] uint32, data of the key: token n is drawn with `fold_in(key, n)`.
      first: n of the first token.
      session: turns of a session come one after another, and use one row.
      tokens, rollout_log_probs, versions: of the drawn tokens, and the number of the weights that drew each.
      finish: `stop` for EOS or a stop string, `length` for the limit; empty until the turn ends.
    """

    ids: list[int]
    max_tokens: int
    key: np.ndarray
    first: int = 0
    session: Hashable = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    rollout_log_probs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)
    finish: Literal["", "stop", "length"] = ""
    row: int = -1
    stop_state: int = 0

    def all_ids(self) -> list[int]:
        """Returns the prompt and what was drawn after it."""
        return self.ids + self.tokens


@dataclasses.dataclass(eq=False)
class _PoolRow:
    """A row of the pool on the host: its tokens, whose they are, whether a turn uses it, and when one did last."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    session: Hashable = None
    busy: bool = False
    used: int = 0


@dataclasses.dataclass(eq=False)
class _Part:
    """New tokens to run: of one turn, or of several of one shard whose rows begin with the same ones."""

    turns: list[Turn]
    ids: list[int]
    done: int

    def left(self) -> int:
        return len(self.ids) - self.done


class TurnEngine:
    """Draws turns, in chunks of decode steps that turns join and leave; used from one thread.

    A row of the pool has the tokens of a session with their keys and values. A turn runs the tokens that its row lacks,
    draws, and leaves its row to the next turn of the session. If there are more sessions than rows, the one that was
    not used for the longest time loses its row, and runs its tokens again in its next turn.

    On a mesh that splits rows, each shard has rows, and turns, of its own; all run one program at a time, so that turns
    are spread evenly. Turns of one prompt go to one shard as far as they can, which then runs it once.

    Attributes:
      count: what was done: `prefilled` tokens, in as many `prefill_slots`, and `copied` ones; `sampled` tokens;
        `chunks`, with their `steps` and `slot_steps`; `evicted` and `recomputed` rows.
      greedy: whether the most probable tokens are taken.

    Args:
      model: the decoder, with attention in all layers.
      sizes: of the programs, for each shard.
      sampling: temperature and filters.
      eos_ids: the tokens that end a turn.
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
        self.programs = EnginePrograms(model, sizes, sampling=sampling, eos_ids=eos_ids, stop=stop, mesh=mesh)
        self.sizes = sizes
        self.shards = self.programs.shards
        self.greedy = False
        self.count: collections.Counter[str] = collections.Counter()
        self._eos = frozenset(eos_ids)
        self._matched = None if stop is None else stop.matched
        self._rows = [_PoolRow() for _ in range(self.shards * sizes.rows)]
        self._row_of: dict[Hashable, int] = {}
        self._waiting: collections.deque[Turn] = collections.deque()
        self._active: list[Turn] = []
        self._pool: Any = None
        self._weights: list[jax.Array] = []
        self._version = UNKNOWN

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sets the weights of the next tokens, also of turns under way; compiles all programs at the first call."""
        self._weights = self.programs.weights(policy)
        if self._pool is None:
            self._pool = self.programs.make_pool()
        if not self.programs.compiled:
            self.programs.compile(self._weights, self._pool)
        if version != self._version:
            self.forget()
        self._version = version

    def release(self) -> None:
        """Frees the weights and the keys and values of all rows, until the next `update`, and drops all turns."""
        self.forget()
        self._waiting.clear()
        self._weights = []
        self._pool = None

    def forget(self) -> None:
        """Drops the keys and values of all rows; turns under way run their tokens again."""
        for row in self._rows:
            self.count["recomputed"] += bool(row.tokens)
            row.tokens = []
            row.session = None
            row.busy = False
            # The rows that turns get, and with them the last bits of their numbers, depend on nothing before.
            row.used = 0
        self._row_of.clear()
        self._waiting.extendleft(reversed(self._active))
        self._active = []

    def submit(self, turn: Turn) -> None:
        """Queues a turn.

        Raises:
          ValueError: it has no token, draws none, or does not fit.
        """
        if not turn.ids or turn.max_tokens < 1 or len(turn.ids) + turn.max_tokens > self.sizes.columns:
            raise ValueError(
                f"turn: got {len(turn.ids)} tokens and max_tokens {turn.max_tokens}, expected at least 1 of each and "
                f"at most {self.sizes.columns} together"
            )
        self._waiting.append(turn)

    def cancel(self, turn: Turn) -> None:
        """Ends a turn that waits or is under way; `step` does not return it."""
        if turn in self._waiting:
            self._waiting.remove(turn)
        elif turn in self._active:
            self._active.remove(turn)
            self._leave(turn)

    def step(self) -> list[Turn]:
        """Runs the new tokens of waiting turns, then one chunk of the active ones; returns the turns that ended.

        Raises:
          ValueError: before the first `update`.
        """
        if self._pool is None:
            raise ValueError("policy: missing; call `update` before `step`")
        ended = list[Turn]()
        while self._waiting:
            placed = self._place_waiting()
            if not placed:
                break
            ended += self._run_new_tokens(placed)
        if self._active:
            ended += self._decode()
        return ended

    def is_idle(self) -> bool:
        """Whether no turn waits or is under way."""
        return not self._waiting and not self._active

    def executions(self, *, prompts: int, samples: int, prompt_length: int, length: int) -> dict[str, int]:
        """Counts the executions of programs for episodes that draw all of their tokens in one turn; runs none.

        Observations count as drawn tokens, which are no less work.

        Args:
          prompts: of a batch.
          samples: episodes of a prompt.
          prompt_length: tokens of a prompt.
          length: tokens of an episode after it.
        """
        sizes = self.sizes
        counts: collections.Counter[str] = collections.Counter()
        episodes = prompts * samples
        most = max(size.segments for size in sizes.extends)
        at_once = self.shards * sizes.rows
        for start in range(0, episodes, at_once):
            count = min(at_once, episodes - start)
            level = -(-count // self.shards)
            parts = list[_Part]()
            placed = [(number // samples, (number - start) // level) for number in range(start, start + count)]
            for (_, shard), group in itertools.groupby(placed):
                turns = [Turn([], length, np.zeros(0, np.uint32), row=shard * sizes.rows) for _ in group]
                parts += [
                    _Part(turns[first : first + most], [0] * prompt_length, 0) for first in range(0, len(turns), most)
                ]
            while parts:
                size, chosen = self._choose_size(parts)
                columns = next(columns for columns in sizes.lengths if columns >= max(part.done for part, _ in chosen))
                counts[extend_name(size, columns)] += 1
                counts[put_name(size.segments, size.width)] += 1
                for part, tokens in chosen:
                    part.done += tokens
                parts = [part for part in parts if part.left()]
            batch = next(batch for batch in sizes.batches if batch >= level)
            for drawn in range(1, length, sizes.chunk):
                columns = next(columns for columns in sizes.lengths if columns >= prompt_length + drawn - 1)
                counts[decode_name(batch, columns)] += 1
                counts[put_name(batch, sizes.chunk)] += 1
        return dict(counts)

    def _place_waiting(self) -> list[_Part]:
        """Gives rows to waiting turns, in their order, as far as there are any."""
        parts = list[_Part]()
        later = list[Turn]()
        most = max(size.segments for size in self.sizes.extends)
        level = -(-(len(self._waiting) + sum(row.busy for row in self._rows)) // self.shards)
        while self._waiting:
            turn = self._waiting.popleft()
            ids = turn.all_ids()
            cached = self._place(turn, ids, parts, level)
            if cached is None:
                later.append(turn)
                continue
            row = self._rows[turn.row]
            row.busy = True
            row.session = turn.session
            row.tokens = ids[:cached]
            self._row_of[turn.session] = turn.row
            in_shard = [part for part in parts if self._shard_of(part.turns[0]) == self._shard_of(turn)]
            same = next(
                (x for x in in_shard if not cached and not x.done and x.ids == ids and len(x.turns) < most), None
            )
            if same is None:
                parts.append(_Part([turn], ids, cached))
            else:
                same.turns.append(turn)
        self._waiting.extend(later)
        return parts

    def _shard_of(self, turn: Turn) -> int:
        return turn.row // self.sizes.rows

    def _place(self, turn: Turn, ids: list[int], parts: Sequence[_Part], level: int) -> int | None:
        """Finds a row for a turn; returns how many of its tokens are there. None: it waits, for a row or a prefix.

        Args:
          turn: that waits.
          ids: of its row before the first token that it draws.
          parts: new tokens of the turns that got rows before.
          level: turns of each shard, if they are spread evenly.
        """
        most = len(ids) - 1
        own = None if turn.session is None else self._row_of.get(turn.session)
        if own is not None and not self._rows[own].busy:
            turn.row = own
            return min(common_length(self._rows[own].tokens, ids), most)
        if all(row.busy for row in self._rows):
            return None
        shared = [min(common_length(row.tokens, ids), most) for row in self._rows]
        shard = self._choose_shard(ids, shared, parts, level)
        numbers = range(shard * self.sizes.rows, (shard + 1) * self.sizes.rows)
        free = [number for number in numbers if not self._rows[number].busy]
        best = max(numbers, key=shared.__getitem__)
        planned = (
            common_length(part.ids, ids) for part in parts if part.ids != ids and self._shard_of(part.turns[0]) == shard
        )
        if max(planned, default=0) >= max(shared[best] + LEAST_COPIED, 2 * LEAST_COPIED):
            return None
        turn.row = min(free, key=lambda number: (bool(self._rows[number].tokens), self._rows[number].used))
        row = self._rows[turn.row]
        if row.tokens:
            self.count["evicted"] += 1
            self._row_of.pop(row.session, None)
        if turn.row == best:
            return shared[best]
        if shared[best] < LEAST_COPIED:
            return 0
        self._pool = self.programs.copy(self._pool, best, turn.row)
        self.count["copied"] += shared[best]
        return shared[best]

    def _choose_shard(self, ids: list[int], shared: Sequence[int], parts: Sequence[_Part], level: int) -> int:
        """Chooses the shard with free rows that has most of some ids, now or soon, unless it has its share of turns."""
        if self.shards == 1:
            return 0
        rows = self.sizes.rows
        busy = [sum(row.busy for row in self._rows[first : first + rows]) for first in range(0, len(self._rows), rows)]
        there = [max(shared[first : first + rows]) for first in range(0, len(shared), rows)]
        for part in parts:
            shard = self._shard_of(part.turns[0])
            there[shard] = max(there[shard], common_length(part.ids, ids))

        def cost(shard: int) -> tuple[bool, int, int]:
            return busy[shard] >= level, -there[shard] if there[shard] >= LEAST_COPIED else 0, busy[shard]

        return min((shard for shard in range(self.shards) if busy[shard] < rows), key=cost)

    def _run_new_tokens(self, parts: list[_Part]) -> list[Turn]:
        """Runs the new tokens of parts, and draws the first token of each turn; returns the turns that ended."""
        ended = list[Turn]()
        while parts:
            size, chosen = self._choose_size(parts)
            ended += self._extend(size, chosen)
            parts = [part for part in parts if part.left()]
        return ended

    def _choose_size(self, parts: Sequence[_Part]) -> tuple[ExtendSize, list[tuple[_Part, int]]]:
        """Chooses the program that leads to the least work for all parts, and the tokens of each part that it runs."""
        choices = []
        for size in self.sizes.extends:
            chosen = list[tuple[_Part, int]]()
            tokens = [0] * self.shards
            segments = [0] * self.shards
            left = [0] * self.shards
            for part in parts:
                shard = self._shard_of(part.turns[0])
                count = min(part.left(), size.width, size.tokens - tokens[shard])
                left[shard] += part.left()
                if count and segments[shard] + len(part.turns) <= size.segments:
                    chosen.append((part, count))
                    tokens[shard] += count
                    segments[shard] += len(part.turns)
            if chosen:
                rest = max(all_tokens - run for all_tokens, run in zip(left, tokens, strict=True))
                choices.append((_work(size.tokens) + self._least_work(rest), size, chosen))
        return min(choices, key=lambda choice: choice[0])[1:]

    def _least_work(self, tokens: int) -> int:
        """Estimates the work of so many tokens: as many large programs as are full, and the best one for the rest."""
        sizes = sorted(size.tokens for size in self.sizes.extends)
        full, rest = divmod(tokens, sizes[-1])
        least = min(-(-rest // size) * _work(size) for size in sizes)
        return full * _work(sizes[-1]) + least

    def _extend(self, size: ExtendSize, chosen: Sequence[tuple[_Part, int]]) -> list[Turn]:
        segments = empty_segments(size, self.shards)
        rows = ChunkRows.empty(self.shards * size.segments, self.sizes.columns)
        tokens_of = [0] * self.shards
        places = [shard * size.segments for shard in range(self.shards)]
        complete = list[tuple[int, Turn]]()
        longest = 0
        for part, count in chosen:
            shard = self._shard_of(part.turns[0])
            flat = tokens_of[shard]
            members = slice(shard * size.tokens + flat, shard * size.tokens + flat + count)
            segments.tokens[members] = part.ids[part.done : part.done + count]
            segments.positions[members] = np.arange(part.done, part.done + count)
            segments.real[members] = True
            segments.places[members] = places[shard] % size.segments * size.width + np.arange(count)
            longest = max(longest, part.done)
            is_last = count == part.left()
            for turn in part.turns:
                at = places[shard]
                segments.members[at, :count] = np.arange(flat, flat + count)
                segments.counts[at] = count
                segments.lengths[at] = rows.lengths[at] = part.done
                rows.rows[at] = turn.row % self.sizes.rows
                self._write_draw(rows, at, turn)
                if is_last:
                    complete.append((at, turn))
                self._rows[turn.row].tokens = part.ids[: part.done + count]
                places[shard] += 1
            part.done += count
            tokens_of[shard] += count
        self.count.update({"prefilled": sum(tokens_of), "prefill_slots": self.shards * size.tokens})
        columns = next(columns for columns in self.sizes.lengths if columns >= longest)
        self._pool, drawn = self.programs.extend(
            self._weights, self._pool, segments, rows, size=size, columns=columns, greedy=self.greedy
        )
        if not complete:
            return []
        tokens, log_probs, _, states = jax.device_get(drawn)
        ended = list[Turn]()
        for at, turn in complete:
            self._active.append(turn)
            turn.stop_state = int(states[at])
            ended += self._append(turn, [int(tokens[at])], [float(log_probs[at])])
        return ended

    def _write_draw(self, rows: ChunkRows, at: int, turn: Turn) -> None:
        rows.keys[at] = turn.key
        rows.numbers[at] = turn.first + len(turn.tokens)
        rows.stop_states[at] = turn.stop_state

    def _decode(self) -> list[Turn]:
        """Draws a chunk of tokens of the turns that were started first, and returns those that ended."""
        sizes = self.sizes
        most = max(collections.Counter(map(self._shard_of, self._active)).values())
        batch = next((size for size in sizes.batches if size >= most), sizes.batches[-1])
        count = self.shards * batch
        rows = ChunkRows.empty(count, sizes.columns)
        pending = np.zeros(count, np.int32)
        limits = np.zeros(count, np.int32)
        whole = batch == sizes.rows
        if whole:
            rows.rows[:] = np.tile(np.arange(batch), self.shards)
        turns = list[Turn]()
        places = list[int]()
        later = list[Turn]()
        taken = collections.Counter[int]()
        for turn in self._active:
            shard = self._shard_of(turn)
            if taken[shard] == batch:
                later.append(turn)
                continue
            turns.append(turn)
            places.append(turn.row if whole else shard * batch + taken[shard])
            taken[shard] += 1
        # Turns that have to wait are first in the next chunk.
        self._active = later + turns
        for at, turn in zip(places, turns, strict=True):
            rows.rows[at] = turn.row % sizes.rows
            pending[at] = turn.tokens[-1]
            rows.lengths[at] = len(self._rows[turn.row].tokens)
            limits[at] = turn.max_tokens - len(turn.tokens)
            self._write_draw(rows, at, turn)
        longest = max(int(rows.lengths[at]) for at in places)
        columns = next(columns for columns in sizes.lengths if columns >= longest)
        self._pool, drawn = self.programs.decode(
            self._weights, self._pool, pending, limits, rows, columns=columns, greedy=self.greedy
        )
        tokens, log_probs, done, states = jax.device_get(drawn)
        steps = int(done.max())
        self.count.update({"chunks": 1, "steps": steps, "slot_steps": steps * count})
        ended = list[Turn]()
        for at, turn in zip(places, turns, strict=True):
            drawn_now = int(done[at])
            turn.stop_state = int(states[at])
            # The last token was drawn, and not run.
            self._rows[turn.row].tokens += [turn.tokens[-1], *tokens[at, : drawn_now - 1].tolist()]
            ended += self._append(turn, tokens[at, :drawn_now].tolist(), log_probs[at, :drawn_now].tolist())
        return ended

    def _append(self, turn: Turn, tokens: list[int], log_probs: list[float]) -> list[Turn]:
        """Adds tokens to a turn; returns it if they end it."""
        turn.tokens += tokens
        turn.rollout_log_probs += log_probs
        turn.versions += [self._version] * len(tokens)
        self.count["sampled"] += len(tokens)
        is_stopped = turn.tokens[-1] in self._eos or turn.stop_state == self._matched
        if not is_stopped and len(turn.tokens) < turn.max_tokens:
            return []
        turn.finish = "stop" if is_stopped else "length"
        self._active.remove(turn)
        self._leave(turn)
        return [turn]

    def _leave(self, turn: Turn) -> None:
        row = self._rows[turn.row]
        row.busy = False
        row.used = self.count["chunks"]


def session_keys(key: jax.Array, count: int) -> np.ndarray:
    """Returns the data [count, 2] of the keys of sessions, `fold_in(key, number)`: the keys of the rows of `sample`."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
    return np.asarray(jax.random.key_data(keys))


def _work(tokens: int) -> int:
    """Returns the work of an extend in tokens: its draws, and reading the weights, cost as much as some tokens."""
    return tokens + DRAWS
