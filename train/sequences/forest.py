"""The slots in which the tokens of a batch go through a model, each once.

A row of slots holds sequences in depth-first order: after a token come all sequences that continue it, one after the
other, before any other sequence. Rows of one sequence, packed rows, prompts with all of their completions, and trees of
sequences are forests of this one kind; `end` and `start` of a slot say what it attends to (`Spans`), and its depth is
its position.

Shapes: B sequences of T columns, R rows of W slots, N branches a row, K sequences that share a trained token. Rows and
sequences are split into U units, numbered within: a token is `sequence * T + column`, a slot `row * W + slot`. Devices
hold whole units, so that no gather leaves a device but where the tokens of a sequence are split.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from train.models.attention.spans import Spans
from train.models.sharding import axis_size, split_tokens

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Forest:
    """A forest of the tokens of a batch.

    Attributes:
      readers: [R, W, K] int32, the tokens that a slot stands for: of all sequences in which it may be trained, else of
        one; -1: none. The first is read.
      places: [B, T] int32, the slot of each token; -1: none.
      depth: [R, W] int32, tokens before it in its sequence; 0 without a token.
      end: [R, W] int32, one past the last slot that continues it; slot + 1 without a token.
      start: [R, W] int32, the slot of its first token; the slot itself without a token.
      branches: [R, N] int32, the first slots of runs that continue an earlier token than the one in the slot before; W:
        none.
      parents: [R, N] int32, the slot that each of them continues; any slot for none.
      counts: [R, W] int32, the sequences with a completion that have the token; 0 without a token.
      lengths: [R] int32, if every row is one sequence from slot 0 on; None for any other row.
      group: (P, C), if every row is a prompt of P slots and then completions of C slots, padded; None for any other.
      first_trained: [R] int32, of rows of one sequence the slot from which on S slots have all tokens that may be
        trained; None: any slot may, but for the prompts of a group.
      trained_width: S of these.
      units: U.
    """

    readers: Array
    places: Array
    depth: Array
    end: Array
    start: Array
    branches: Array
    parents: Array
    counts: Array
    lengths: Array | None = None
    group: tuple[int, int] | None = dataclasses.field(default=None, metadata={"static": True})
    first_trained: Array | None = None
    trained_width: int | None = dataclasses.field(default=None, metadata={"static": True})
    units: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def joins(self) -> bool:
        """Whether a row may hold several sequences, which takes layers whose `rows_may_join`."""
        return self.lengths is None

    def take(self, x: Array, fill: float = 0, *, reader: int = 0) -> Array:
        """Puts values of tokens into their slots, [B, T, ...] to [R, W, ...], with `fill` in slots without a token."""
        return split_tokens(_take(x, self.readers[..., reader], self.units, fill))

    def gather(self, x: Array, fill: float = 0) -> Array:
        """Gathers values of slots for every sequence, [R, W, ...] to [B, T, ...], with `fill` at tokens without a slot.

        Gradient:
          To the slots of trained tokens: the sum over the sequences that share one, in their order.
        """
        return split_tokens(_gather(x, self, fill))

    def before(self, x: Array) -> Array:
        """Gives each slot the value [R, W, ...] of the token before it in its sequence; a first token has any value.

        Gradient:
          To that slot: the sum over the tokens that follow it, in their order.
        """
        return _before(x, self.branches, self.parents)

    def cut(self, x: Array) -> Array:
        """Cuts the slots that may have a trained token, [R, W, ...] to [R, S, ...]; all of them if any may."""
        if axis_size("tokens") > 1:  # part of a row is not split over devices as the row is
            return x
        if self.group is not None:
            return x[:, self.group[0] :]
        if self.first_trained is None or self.trained_width is None:
            return x
        return _cut(x, self.first_trained, self.trained_width)

    def uncut(self, x: Array) -> Array:
        """Puts values of cut slots back, [R, S, ...] to [R, W, ...], with 0 in the others."""
        missing = self.end.shape[1] - x.shape[1]
        if not missing:
            return x
        if self.first_trained is None:
            return jnp.pad(x, [(0, 0), (missing, 0), *[(0, 0)] * (x.ndim - 2)])
        return _uncut(x, self.first_trained, self.end.shape[1])

    def spans(self, window: int | None) -> Spans:
        """Returns what the slots attend to, with the `window` of sliding layers; None: the model has none."""
        width = self.end.shape[1]
        slots = jnp.arange(width, dtype=jnp.int32)
        if window is None:
            window_start = None
        elif self.lengths is None:
            real = self.readers[..., 0] >= 0
            above = jnp.maximum(self.depth - (window - 1), 0)
            # Slots without a token come last: nobody has them as an ancestor.
            window_start = jnp.where(real, _ancestors(jnp.where(real, self.depth, width), above), slots)
        else:
            window_start = jnp.maximum(self.start, slots - (window - 1))
        return Spans(self.end, self.start, window_start, self.lengths, window, self.group)


def row_forest(token_mask: Array, prompt_lengths: Array | None = None, completion: int | None = None) -> Forest:
    """Makes rows of one sequence each, from slot 0 on.

    Args:
      token_mask: [B, T] bool, True at real tokens, which come first.
      prompt_lengths: [B] int32, tokens before the first that may be trained; a row with no more is not counted. None:
        any token may be.
      completion: C, the most tokens after a prompt; None: as many as there are.
    """
    rows, width = token_mask.shape
    slots = jnp.arange(width, dtype=jnp.int32)
    lengths = jnp.sum(token_mask, axis=-1, dtype=jnp.int32)
    prompts = jnp.zeros_like(lengths) if prompt_lengths is None else prompt_lengths
    trained = None if completion is None else min(completion, width)
    real = slots < lengths[:, None]
    none = jnp.zeros((rows, 0), jnp.int32)
    return Forest(
        readers=jnp.where(real, slots, -1)[..., None],
        places=jnp.where(real, slots, -1),
        depth=jnp.where(real, slots, 0),
        end=jnp.where(real, lengths[:, None], slots + 1),
        start=jnp.where(real, 0, slots),
        branches=none,
        parents=none,
        counts=(real & (lengths > prompts)[:, None]).astype(jnp.int32),
        lengths=jnp.maximum(lengths, 1),
        first_trained=None if trained is None else jnp.minimum(prompts, width - trained),
        trained_width=trained,
        units=rows,
    )


def group_forest(token_mask: Array, prompt_lengths: Array, shape: tuple[int, int], group: int) -> Forest:
    """Makes rows of a prompt with its completions, [prompt | completion | ... | completion], each from its slot 0 on.

    Args:
      token_mask: [B, T] bool, True at real tokens, which come first.
      prompt_lengths: [B] int32, tokens of the prompt, which are equal in a group.
      shape: P and C, the slots of a prompt and of a completion.
      group: G consecutive sequences that share a prompt.
    """
    prompt, length = shape
    rows = len(token_mask) // group
    columns = jnp.arange(token_mask.shape[1], dtype=jnp.int32)
    width = prompt + group * length
    sizes = prompt_lengths[::group, None]
    counts = jnp.sum(token_mask, axis=-1, dtype=jnp.int32).reshape(rows, group) - sizes
    completed = counts > 0
    slots = jnp.arange(width, dtype=jnp.int32)
    begins = prompt + jnp.arange(group, dtype=jnp.int32) * length
    begin = jnp.pad(jnp.repeat(begins, length), (prompt, 0))
    in_prompt = slots < prompt
    size = jnp.concatenate([jnp.broadcast_to(sizes, (rows, prompt)), jnp.repeat(counts, length, axis=-1)], axis=-1)
    real = slots - begin < size
    depth = slots - begin + jnp.where(in_prompt, 0, sizes)
    # A row without a completion has no experts for the last token of its prompt.
    first = jnp.argmax(completed, axis=-1, keepdims=True).astype(jnp.int32)
    reader = jnp.where(in_prompt, first, (slots - prompt) // length)
    in_rows = jnp.repeat(sizes, group, axis=0)
    places = jnp.where(columns < in_rows, columns, columns - in_rows + jnp.tile(begins, rows)[:, None])
    last = jnp.max(jnp.where(completed, begins + counts, sizes), axis=-1, keepdims=True)
    sharing = jnp.sum(completed, axis=-1, keepdims=True, dtype=jnp.int32)
    return Forest(
        readers=jnp.where(real, reader * len(columns) + depth, -1)[..., None],
        places=jnp.where(token_mask, places, -1),
        depth=jnp.where(real, depth, 0),
        end=jnp.where(real, jnp.where(in_prompt, last, begin + size), slots + 1),
        start=jnp.where(real, 0, slots),
        branches=jnp.broadcast_to(begins, (rows, group)),
        parents=jnp.broadcast_to(jnp.maximum(sizes - 1, 0), (rows, group)),
        counts=jnp.where(real, jnp.where(in_prompt, sharing, 1), 0),
        group=shape,
        units=rows,
    )


def _take(x: Array, index: Array, units: int, fill: float) -> Array:
    """Takes entries within each unit, [A, C, ...] by [E, F] to [E, F, ...], and `fill` at indices below 0."""
    trailing = x.shape[2:]
    flat = x.reshape(units, -1, *trailing)
    at = index.reshape(units, -1)
    taken = jax.vmap(lambda values, at: values.at[jnp.maximum(at, 0)].get(mode="promise_in_bounds"))(flat, at)
    exists = (index >= 0).reshape(*index.shape, *[1] * len(trailing))
    return jnp.where(exists, taken.reshape(*index.shape, *trailing), jnp.asarray(fill, x.dtype))


@jax.custom_vjp
def _gather(x: Array, forest: Forest, fill: float) -> Array:
    return _take(x, forest.places, forest.units, fill)


def _gather_backward(forest: Forest, cotangent: Array) -> tuple[Array, None, None]:
    """Takes for each slot the values of its readers, and adds them: a scatter would add in no fixed order on a GPU."""
    parts = [_take(cotangent, forest.readers[..., k], forest.units, 0) for k in range(forest.readers.shape[-1])]
    return sum(parts[1:], parts[0]), None, None


_gather.defvjp(lambda x, forest, fill: (_gather(x, forest, fill), forest), _gather_backward)


@jax.custom_vjp
def _before(x: Array, branches: Array, parents: Array) -> Array:
    shifted = _shift(x, 1)
    if not branches.shape[1]:
        return shifted
    return jax.vmap(lambda x, at, of_parents: x.at[at].set(of_parents, mode="drop"))(
        shifted, branches, _rows_take(x, parents)
    )


def _before_forward(x: Array, branches: Array, parents: Array) -> tuple[Array, tuple[Array, Array]]:
    return _before(x, branches, parents), (branches, parents)


def _before_backward(kept: tuple[Array, Array], cotangent: Array) -> tuple[Array, None, None]:
    """Adds the cotangents of the next slot, and those of branches: one sum a parent, written once."""
    branches, parents = kept
    width = cotangent.shape[1]
    count = branches.shape[1]
    if not count:
        return _shift(cotangent, -1), None, None
    exists = branches < width
    of_branches = _rows_take(cotangent, jnp.minimum(branches, width - 1))
    wide = jnp.promote_types(cotangent.dtype, jnp.float32)
    of_branches = jnp.where(exists.reshape(*exists.shape, *[1] * (cotangent.ndim - 2)), of_branches, 0).astype(wide)
    siblings = (parents[:, :, None] == parents[:, None]) & exists[:, None]
    sums = jnp.einsum("rnm,rm...->rn...", siblings.astype(wide), of_branches, precision="highest")
    is_first = exists & (jnp.argmax(siblings, axis=-1) == jnp.arange(count))

    def add(cotangent: Array, branches: Array, at: Array, sums: Array) -> Array:
        of_next = _shift(cotangent.at[branches].set(0, mode="drop")[None], -1)[0]
        return of_next.at[at].add(sums.astype(of_next.dtype), mode="drop")

    return jax.vmap(add)(cotangent, branches, jnp.where(is_first, parents, width), sums), None, None


_before.defvjp(_before_forward, _before_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _cut(x: Array, first: Array, width: int) -> Array:
    return _rows_take(x, first[:, None] + jnp.arange(width, dtype=jnp.int32))


def _cut_forward(x: Array, first: Array, width: int) -> tuple[Array, tuple[Array, int]]:
    return _cut(x, first, width), (first, x.shape[1])


def _cut_backward(width: int, kept: tuple[Array, int], cotangent: Array) -> tuple[Array, None]:
    del width
    return _uncut(cotangent, *kept), None


_cut.defvjp(_cut_forward, _cut_backward)


def _uncut(x: Array, first: Array, width: int) -> Array:
    at = jnp.arange(width, dtype=jnp.int32) - first[:, None]
    inside = (at >= 0) & (at < x.shape[1])
    values = _rows_take(x, jnp.clip(at, 0, x.shape[1] - 1))
    return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), values, jnp.zeros((), x.dtype))


def _shift(x: Array, by: int) -> Array:
    """Moves slots by 1 or -1, with 0 where none is."""
    padding = [(0, 0), (1, 0) if by > 0 else (0, 1), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x[:, :-1] if by > 0 else x[:, 1:], padding)


def _rows_take(x: Array, index: Array) -> Array:
    """Takes slots of each row, [R, W, ...] by [R, F] to [R, F, ...]."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="promise_in_bounds"))(x, index)


def _ancestors(depth: Array, above: Array) -> Array:
    """Finds the ancestor of each slot at a depth that it has, [R, W] int32: the last slot of that depth up to itself.

    Slots sorted by depth, and within by number, are searched by halves.
    """

    def find(depth: Array, above: Array) -> Array:
        width = len(depth)
        order = jnp.argsort(depth, stable=True).astype(jnp.int32)
        slots = jnp.arange(width, dtype=jnp.int32)

        def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low, high = bounds
            middle = (low + high) // 2
            slot = order[middle]
            fits = (depth[slot] < above) | ((depth[slot] == above) & (slot <= slots))
            return jnp.where(fits, middle, low), jnp.where(fits, high, middle)

        # `low` always fits: no slot comes before the first one of depth 0.
        bounds = jnp.zeros(width, jnp.int32), jnp.full(width, width, jnp.int32)
        return order[jax.lax.fori_loop(0, width.bit_length(), halve, bounds)[0]]

    return jax.vmap(find)(depth, above)
