"""The rows that are asked for, and how they come into slots."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from train.models import KeyValues
from train.models.sharding import constrain
from train.rollouts.sampler.decode import Decoding, Pick
from train.rollouts.sampler.slots import Done, Slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The requested completions: B rows of N prompts.

    Attributes:
      order: [B], the rows in the order they are taken, those without a prompt last; count: how many have one.
      prompt: [B], the prompt of each row; length: [B], its tokens; limit: [B], the most tokens of its completion.
      ids: [B], the number of each row for its keys.
      prompts, prompt_mask: [N, P]; hidden: [N, D], what the first token is drawn from; cache: keys and values.
    """

    order: jax.Array
    count: jax.Array
    prompt: jax.Array
    length: jax.Array
    limit: jax.Array
    ids: jax.Array
    prompts: jax.Array
    prompt_mask: jax.Array
    hidden: jax.Array
    cache: KeyValues


def _start(
    row: jax.Array, live: jax.Array, room: int, *, tokens: jax.Array, token_mask: jax.Array, **state: Any
) -> Slots:
    """Slots before their first draw, of prompts [S, P]; `state` is their last hidden states and their cache."""
    zero = jnp.zeros(len(row), jnp.int32)
    return Slots(
        round=jnp.int32(0),
        row=row.astype(jnp.int32),
        began=zero,
        drawn=zero,
        live=live,
        ended=zero > 0,
        search=zero,
        tokens=jnp.pad(tokens, ((0, 0), (0, room))),
        token_mask=jnp.pad(token_mask, ((0, 0), (0, room))),
        log_probs=jnp.zeros((len(row), room), jnp.promote_types(state["hidden"].dtype, jnp.float32)),
        **state,
    )


def whole(rows: Rows, decoding: Decoding, pick: Pick, group: int, room: int) -> Slots:
    """A slot for every row."""
    return _start(
        jnp.arange(len(rows.order)),
        rows.limit > 0,
        room,
        tokens=pick(rows.prompts, 0),
        token_mask=pick(rows.prompt_mask, 0),
        hidden=constrain(pick(rows.hidden, 0), "rows", None),
        cache=decoding.whole(rows.cache, pick, group, room),
    )


def empty(rows: Rows, decoding: Decoding, slots: int, room: int) -> Slots:
    """Slots without a row yet."""

    def zeros(x: jax.Array, axis: int = 0) -> jax.Array:
        return jnp.zeros((*x.shape[:axis], slots, *x.shape[axis + 1 :]), x.dtype)

    return _start(
        jnp.full(slots, len(rows.order)),
        jnp.zeros(slots, bool),
        room,
        tokens=zeros(rows.prompts),
        token_mask=zeros(rows.prompt_mask),
        hidden=constrain(zeros(rows.hidden), "rows", None),
        cache=decoding.first(jax.tree.map(lambda x: zeros(x, 1), rows.cache), room),
    )


def refill(rows: Rows, decoding: Decoding, slots: Slots, done: Done, taken: jax.Array) -> tuple[Slots, Done, jax.Array]:
    """Hands over the rows that are done and puts others in their slots, one after the other, while there are any."""

    def waiting(carry: tuple[Slots, Done, jax.Array]) -> jax.Array:
        return (carry[2] < rows.count) & ~jnp.all(carry[0].live)

    def swap(carry: tuple[Slots, Done, jax.Array]) -> tuple[Slots, Done, jax.Array]:
        slots, done, taken = carry
        slot = jnp.argmin(slots.live)
        done = done.put(slots, slot)
        row = rows.order[taken]
        prompt = rows.prompt[row]
        changes = {
            "row": row,
            "began": slots.round,
            "drawn": 0,
            "live": True,
            "ended": False,
            "search": 0,
            "tokens": jnp.pad(rows.prompts[prompt], (0, slots.room)),
            "token_mask": jnp.pad(rows.prompt_mask[prompt], (0, slots.room)),
            "hidden": rows.hidden[prompt],
        }
        new = {name: getattr(slots, name).at[slot].set(value) for name, value in changes.items()}
        cache = decoding.load(slots.cache, slot, rows.cache, prompt)
        return dataclasses.replace(slots, **new, cache=cache), done, taken + 1

    return lax.while_loop(waiting, swap, (slots, done, taken))
