"""The places of rows in packed rows, chosen on the host from the lengths of a batch.

An update has n rows, in M micro-batches and over the S devices that split rows: a cell is the part of a micro-batch on
one device. All cells have equal row counts, so that one compiled program serves them all. A packed row has W slots, at
least T, so that every row fits into one.
"""

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from train.config.plan import Plan
from train.distributed.global_arrays import to_host
from train.models.sharding import axis_size, replicated
from train.sequences.batch import Batch, prompt_lengths
from train.sequences.forest import Forest
from train.sequences.token_fields import TOKEN_FIELDS
from train.sequences.write_forest import Placed, write_forest

FINER = 8
"""Numbers of packed rows to choose from between a number and its double; each is a program."""
FEWER = 4
"""A packed update may have this many times fewer micro-batches, whose layers take no more memory."""


class Lengths(NamedTuple):
    """The real tokens of each row.

    Attributes:
      prompts: [B] int.
      completions: [B] int; 0 for rows that need no place.
      groups: [B] int, rows with one number share their prompt.
      tokens: [B, T] int, the tokens of rows, or numbers that are equal in rows of a group that can share one, if these
        share those with which they begin alike; None if they share their prompt alone.
    """

    prompts: np.ndarray
    completions: np.ndarray
    groups: np.ndarray
    tokens: np.ndarray | None = None

    def shared(self, first: int, second: int) -> int:
        """Counts the tokens with which two rows of a group begin alike."""
        prompt = int(self.prompts[second])
        if self.tokens is None:
            return prompt
        end = prompt + int(min(self.completions[first], self.completions[second]))
        differ = np.flatnonzero(self.tokens[first, prompt:end] != self.tokens[second, prompt:end])
        return prompt + int(differ[0]) if len(differ) else end

    def real(self, rows: np.ndarray) -> int:
        """Counts the tokens of rows, with each prompt once."""
        shown = {int(self.groups[row]): int(self.prompts[row]) for row in rows if self.completions[row]}
        return sum(shown.values()) + int(self.completions[rows].sum())


class Packing(NamedTuple):
    """The places of the rows of one pass.

    Attributes:
      rows: [n] int32, the rows in the order that their cells take.
      packed: the places, with the micro-batches on a leading axis.
      moved: whether there are several cells, so that rows have to be put in this order.
      share: share of the slots that hold a token.
    """

    rows: np.ndarray
    packed: Forest
    moved: bool
    share: float


class StepPacking(NamedTuple):
    """The packing of a step. Where packed rows would have more slots than padded ones have tokens, rows stay padded.

    Attributes:
      score: keyword arguments of the program that scores.
      updates: the rows of each update, and their places, or None.
      metrics: share of the slots of the updates that hold a token, or of padded tokens that are real.
      programs: numbers of packed rows that the updates of the run have had so far, each of which is a program.
    """

    score: Mapping[str, Any]
    updates: Sequence[tuple[Any, Forest | None]]
    metrics: Mapping[str, float]
    programs: Mapping[str, float]

    @classmethod
    def off(cls, updates: Sequence[Any]) -> "StepPacking":
        """Returns the padded rows of each update."""
        return cls({}, [(rows, None) for rows in updates], {}, {})


Packer = Callable[[Batch, Sequence[Any]], StepPacking]


@dataclasses.dataclass(frozen=True)
class Cells:
    """The cells of a pass over n rows.

    Attributes:
      width: W.
      columns: T.
      shards: S.
      padded: tokens of a cell of padded rows, which packed ones may not exceed.
      shared: whether completions of a packed row share their prompt.
      group: consecutive rows that stay in one micro-batch if rows do not move.
    """

    width: int
    columns: int
    shards: int
    padded: int
    shared: bool
    group: int

    @property
    def limit(self) -> int:
        """The most packed rows of a cell."""
        return self.padded // self.width

    def positions(self, count: int, micro_batches: int, group: int = 1) -> np.ndarray:
        """Returns the rows of each cell, [M, S, n / M S], as `batch.micro_batches` and the mesh split them."""
        groups = np.arange(count).reshape(-1, micro_batches, group)
        return groups.swapaxes(0, 1).reshape(micro_batches, self.shards, -1)


def make_packer(plan: Plan, mesh: Mesh) -> Packer | None:
    """Makes `(rollout batch, rows of each update) -> packing` of a step; None if the config packs nothing.

    Only lengths come to the host, and numbers of tokens if rows share prefixes, of all rows in every process, so that
    all choose the same places.
    """
    config = plan.config
    layout = plan.layout
    if not config.optim.packing:
        return None
    scores = plan.scores_policy or plan.reference
    columns = config.data.row_length()
    width = config.optim.packed_tokens or columns
    shards = axis_size("rows", mesh)
    together = math.gcd(config.rollout.samples_per_prompt, config.rows_per_batch() // config.optim.updates_per_batch)
    prefixes = config.optim.share_prefixes

    def measured(batch: Batch) -> tuple[jax.Array, ...]:
        prompts = prompt_lengths(batch)
        lengths = prompts, batch.token_mask.sum(-1) - prompts
        return (*lengths, _number_tokens(batch, config.rollout.samples_per_prompt)) if prefixes else lengths

    measure = jax.jit(measured, out_shardings=replicated(mesh))
    sizes: set[tuple[int, ...] | None] = set()

    def pack(batch: Batch, updates: Sequence[Any]) -> StepPacking:
        prompts, completions, *tokens = to_host(measure(batch))
        groups = np.arange(len(prompts)) // config.rollout.samples_per_prompt
        lengths = Lengths(prompts, completions, groups, *tokens)

        def pack_rows(rows: np.ndarray, parts: int, moves: bool) -> Packing | None:
            padded = layout.slots(len(rows) // (parts * shards))
            cells = Cells(width, columns, shards, padded, config.optim.share_prompts, layout.group)
            return choose_packing(cells, lengths, rows, parts, together, moves=moves)

        parts = config.optim.micro_batches
        every = np.arange(len(prompts))
        scored = pack_rows(every, parts * config.optim.updates_per_batch, True) if scores else None
        score = {} if scored is None else {"rows": scored.rows if scored.moved else None, "packed": scored.packed}
        chosen = [(rows, pack_rows(np.asarray(rows), parts, plan.rows_move)) for rows in updates]
        sizes.update(None if packing is None else packing.packed.readers.shape for _, packing in chosen)
        shares = [
            lengths.real(np.asarray(rows)) / layout.slots(len(rows)) if packing is None else packing.share
            for rows, packing in chosen
        ]
        return StepPacking(
            score,
            [(rows, None) if packing is None else (packing.rows, packing.packed) for rows, packing in chosen],
            {"packed_share": float(np.mean(shares))},
            {"update_programs": len(sizes)},
        )

    return pack


def _number_tokens(batch: Batch, group: int) -> jax.Array:
    """Numbers the tokens of rows, [B, T] int32: each by the first row of its group that has the same there.

    The same are tokens of one id and with equal fields, on which log-probs depend.
    """
    scored = (x for name, x in batch.fields.items() if TOKEN_FIELDS[name].scored)
    shape = (-1, group, batch.tokens.shape[1])
    arrays = [jnp.reshape(x, (*shape, math.prod(x.shape[2:]))) for x in (batch.tokens, *scored)]

    def number(row: jax.Array, numbers: jax.Array) -> jax.Array:
        rows = [jax.lax.dynamic_index_in_dim(x, row, axis=1) for x in arrays]
        same = [jnp.all(x == of_row, axis=-1) for x, of_row in zip(arrays, rows, strict=True)]
        return jnp.where((numbers == group) & functools.reduce(jnp.logical_and, same), row, numbers)

    numbers = jnp.full(arrays[0].shape[:-1], group, jnp.int32)
    return jax.lax.fori_loop(0, group, number, numbers).reshape(-1, shape[-1])


def choose_packing(
    cells: Cells, lengths: Lengths, rows: np.ndarray, micro_batches: int, together: int, *, moves: bool
) -> Packing | None:
    """Chooses the places of rows, in as few micro-batches as the limit of a cell allows.

    Args:
      cells: the cells.
      lengths: of all rows of the batch.
      rows: [n] numbers of the rows.
      micro_batches: M of the padded rows.
      together: consecutive rows that share a prompt.
      moves: whether rows may change their cell, and micro-batches be fewer.

    Returns:
      None if packed rows do not have fewer slots than padded ones have tokens.
    """
    fewest = -(-micro_batches // FEWER) if moves else micro_batches
    for count in range(fewest, micro_batches + 1):
        if micro_batches % count:
            continue
        places = cells.positions(len(rows), count, 1 if moves else cells.group)
        # Rows that share a prompt stay together, or are spread over cells that are then of more equal size.
        runs = {math.gcd(together, places.shape[2]), 1}
        orders = [_balance(cells, lengths, rows, places, run) for run in sorted(runs)] if moves else [rows]
        fitted = [
            [_fit(cells, lengths, cell) for cell in order[places].reshape(-1, places.shape[2])] for order in orders
        ]
        # Rows without a completion take no place, and a program no fewer than one packed row.
        most = [max(1, *map(len, cell_rows)) for cell_rows in fitted]
        chosen = int(np.argmin(most))
        if most[chosen] > cells.limit:
            continue
        size = min(round_up(most[chosen]), cells.limit)
        if size * cells.width * count < cells.padded * micro_batches:
            order = orders[chosen]
            packed = _write_places(cells, lengths, order[places], fitted[chosen], size)
            moved = places.shape[0] * places.shape[1] > 1
            share = float((packed.readers[..., 0] >= 0).mean())
            return Packing(order.astype(np.int32), packed, moved, share)
    return None


def round_up(number: int) -> int:
    """Rounds up to a number of packed rows that programs have; all numbers up to 2 `FINER` are among them."""
    step = max(1, 2 ** max((number - 1).bit_length() - 1, 0) // FINER)
    return -(-number // step) * step


def _balance(cells: Cells, lengths: Lengths, rows: np.ndarray, places: np.ndarray, run: int) -> np.ndarray:
    """Orders rows so that cells have about as many tokens each: the longest run goes to the emptiest cell with room."""
    if places.shape[0] * places.shape[1] == 1:
        return rows
    runs = rows.reshape(-1, run)
    tokens = lengths.completions[runs]
    # A prompt costs nothing if no completion reads it.
    sizes = tokens.sum(1) + np.where(tokens.any(1), lengths.prompts[runs].max(1), 0)
    capacity = places.shape[2] // run
    contents: list[list[int]] = [[] for _ in range(places.shape[0] * places.shape[1])]
    heap = [(0, cell) for cell in range(len(contents))]
    for number in np.argsort(-sizes, kind="stable"):
        size, cell = heapq.heappop(heap)
        contents[cell].append(int(number))
        if len(contents[cell]) < capacity:
            heapq.heappush(heap, (size + int(sizes[number]), cell))
    order = np.empty_like(rows)
    order[places.reshape(len(contents), -1)] = [runs[sorted(cell)].reshape(-1) for cell in contents]
    return order


def _fit(cells: Cells, lengths: Lengths, rows: np.ndarray) -> list[dict[int, list[int]]]:
    """Fits the rows of a cell into packed rows, the largest first; each maps a prompt to the places of its completions.

    Two orders are tried: by completions, and by prompts with all of their completions, which repeats fewer prompts.
    """
    groups = lengths.groups[rows] if cells.shared else np.arange(len(rows))
    sizes = lengths.completions[rows]
    prompts = np.maximum(lengths.prompts[rows], 1)
    _, number = np.unique(groups, return_inverse=True)
    totals = np.bincount(number, sizes)[number]
    by_completion = np.argsort(-sizes, kind="stable")
    by_prompt = np.lexsort((-sizes, number, -totals))
    if lengths.tokens is not None:
        # Depth first: after a row come those with which it shares the most.
        ends = lengths.prompts[rows] + sizes
        texts = [lengths.tokens[row, lengths.prompts[row] : end].tolist() for row, end in zip(rows, ends, strict=True)]
        by_prompt = np.array(sorted(by_prompt, key=lambda row: (-totals[row], number[row], texts[row])))

    def fit(order: Iterable[int]) -> list[dict[int, list[int]]]:
        packed: list[dict[int, list[int]]] = []
        free: list[int] = []
        for index in order:
            group = int(groups[index])
            size = int(sizes[index])
            prompt = int(prompts[index])
            if size == 0:
                continue
            at = None
            for candidate, row in enumerate(packed):
                if group in row:
                    shared = lengths.shared(int(rows[row[group][-1]]), int(rows[index]))
                    if free[candidate] >= prompt + size - shared:
                        at = candidate
                        size = prompt + size - shared
                        break
            if at is None:
                size += prompt
                at = next((at for at, left in enumerate(free) if left >= size), len(packed))
            if at == len(packed):
                packed.append({})
                free.append(cells.width)
            packed[at].setdefault(group, []).append(int(index))
            free[at] -= size
        return packed

    return fit(by_prompt) if lengths.tokens is not None else min(fit(by_completion), fit(by_prompt), key=len)


def _write_places(
    cells: Cells, lengths: Lengths, numbers: np.ndarray, fitted: Sequence[list[dict[int, list[int]]]], size: int
) -> Forest:
    """Writes the forest of the rows `numbers` [M, S, n / M S], with `size` packed rows in each cell."""
    count, shards, rows = numbers.shape

    def placed(row: int, of_cell: np.ndarray, before: int | None) -> Placed:
        number = int(of_cell[row])
        prompt = int(lengths.prompts[number])
        length = prompt + int(lengths.completions[number])
        shared = 0 if before is None else lengths.shared(int(of_cell[before]), number)
        return Placed(row, length, prompt, shared)

    units = [
        [
            [
                placed(row, of_cell, of_prompt[place - 1] if place else None)
                for of_prompt in of_prompts.values()
                for place, row in enumerate(of_prompt)
            ]
            for of_prompts in fitted[cell]
        ]
        for cell, of_cell in enumerate(numbers.reshape(-1, rows))
    ]
    written = write_forest(units, rows=size, width=cells.width, sequences=rows, columns=cells.columns)
    # Micro-batches lie along a leading axis.
    split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), written)
    return dataclasses.replace(split, units=shards)
