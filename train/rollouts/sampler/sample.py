"""Sampling in one compiled program: the prompts at once, then one cached step per token until every row is done."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

import kljax
from train.models import Decoder, KeyValues, Transformer
from train.models.sharding import axis_size
from train.rl.policy import bind, head
from train.rollouts.sampler.decode import Decoding, Pick
from train.rollouts.sampler.draw import Sampling, draw, token_uniforms
from train.rollouts.sampler.queue import Rows, empty, refill, whole
from train.rollouts.sampler.samples import Samples
from train.rollouts.sampler.slots import Done, Slots
from train.rollouts.sampler.stops import StopTable


def _prefill(
    transformer: Transformer, prompts: jax.Array, prompt_mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, KeyValues]:
    """Prompts, mask, last hidden states [N, D] and cache; N is filled up to what the mesh divides."""
    fill = -len(prompts) % axis_size("rows")
    prompts = jnp.pad(prompts.astype(jnp.int32), ((0, fill), (0, 0)))
    prompt_mask = jnp.pad(prompt_mask, ((0, fill), (0, 0)))
    # The name shows in profiles, and tells a test which transfers belong to the prefill.
    with jax.named_scope("prefill"):
        hidden, cache = transformer.prefill(prompts, prompt_mask)
    return prompts, prompt_mask, hidden[:, -1], cache


def _picker(prompts: int, group: int, prompt_ids: jax.Array | None) -> Pick:
    """Makes the function that gives each row its prompt. Repeated prompts stay on their devices; chosen may move."""
    if prompt_ids is None:
        if group < 1:
            raise ValueError(f"group: got {group}, expected at least 1")
        return lambda x, axis: jnp.repeat(lax.slice_in_dim(x, 0, prompts, axis=axis), group, axis=axis)
    if group != 1:
        raise ValueError(f"prompt_ids: got some and group = {group}, expected one of them")
    ids = jnp.asarray(prompt_ids)
    return lambda x, axis: jnp.take(x, ids, axis=axis)


def _check(rows: int, slots: int, max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected at least 1")
    if slots < 1:
        raise ValueError(f"slots: got {slots}, expected at least 1")
    if slots % axis_size("rows"):
        name = "slots" if slots < rows else "rows"
        raise ValueError(f"{name}: got {slots}, expected a multiple of mesh.data x mesh.fsdp = {axis_size('rows')}")


def _run(rows: Rows, decoding: Decoding, first: Slots, draw_all: Callable[[Slots], Slots]) -> tuple[Slots, Done | None]:
    """All rows to their ends. Without a queue the slots are the rows."""

    def decode(state: Slots) -> Slots:
        column = state.last_column()
        tokens = lax.dynamic_index_in_dim(state.tokens, column, axis=1, keepdims=False)
        length = rows.length[state.row]
        hidden, cache = decoding.step(
            state.cache,
            tokens,
            length + state.drawn - 1,
            state.token_mask,
            column=column,
            key_positions=state.key_positions(length),
        )
        return dataclasses.replace(state, hidden=hidden, cache=cache)

    if len(first.row) == len(rows.order):
        last = lax.while_loop(lambda state: jnp.any(state.live), lambda state: draw_all(decode(state)), draw_all(first))
        return last, None

    Carry = tuple[Slots, Done, jax.Array]

    def unfinished(carry: Carry) -> jax.Array:
        return jnp.any(carry[0].live) | (carry[2] < rows.count)

    def advance(carry: Carry) -> Carry:
        state, done, taken = refill(rows, decoding, decode(carry[0]), *carry[1:])
        return draw_all(state), done, taken

    state, done, taken = refill(rows, decoding, first, Done.none(len(rows.order), first), jnp.int32(0))
    last, done, _ = lax.while_loop(unfinished, advance, (draw_all(state), done, taken))
    return last, done.put_all(last)


def _drawer(
    model: Decoder,
    policy: kljax.Policy,
    rows: Rows,
    *,
    uniforms: jax.Array,
    sampling: Sampling,
    ends: jax.Array,
    stop: StopTable | None,
) -> Callable[[Slots], Slots]:
    """The function that draws a token for every live slot; `uniforms` [B, C, 2]."""
    weights, softcap = head(model, policy.params), model.config.final_softcap

    def draw_all(state: Slots) -> Slots:
        wide = state.log_probs.dtype
        logits = jnp.dot(state.hidden, weights, preferred_element_type=wide).astype(wide)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        chosen = uniforms[state.row, state.drawn]
        tokens, log_probs = draw(logits / sampling.temperature, chosen, sampling)
        finished = jnp.any(tokens[:, None] == ends, axis=1)
        search = state.search
        if stop is not None:
            search = stop.advance(search, tokens)
            finished |= search == stop.matched
        state = state.append(tokens, log_probs, search, ended=finished)
        return dataclasses.replace(state, live=state.live & (state.drawn < rows.limit[state.row]))

    return draw_all


def _samples(
    rows: Rows, last: Slots, done: Done | None, ends: jax.Array, prompts: tuple[jax.Array, jax.Array]
) -> Samples:
    if done is None:
        tokens, log_probs = last.tokens[:, last.width :], last.log_probs
        done = Done(tokens, log_probs, last.drawn, last.ended)
    own = jnp.arange(last.room) < done.lengths[:, None]
    blank = ends[0] if len(ends) else 0

    def after(left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.concatenate([left, right.astype(left.dtype)], axis=1)

    tokens, mask = prompts
    total = jnp.sum(done.lengths, dtype=jnp.float32)
    return Samples(
        tokens=after(tokens, jnp.where(own, done.tokens, blank)),
        token_mask=after(mask, own),
        completion_mask=after(jnp.zeros_like(mask), own),
        log_probs=after(jnp.zeros(mask.shape, done.log_probs.dtype), jnp.where(own, done.log_probs, 0)),
        finished=done.ended,
        steps=last.round - 1,
        occupancy=total / (last.round * len(last.row)),
    )


def sample(
    model: Decoder,
    policy: kljax.Policy,
    prompts: jax.Array,
    prompt_mask: jax.Array,
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling,
    eos_ids: Sequence[int] | jax.Array,
    stop: StopTable | None = None,
    slots: int | None = None,
    group: int = 1,
    prompt_ids: jax.Array | None = None,
    row_ids: jax.Array | None = None,
    limits: jax.Array | None = None,
    unroll: bool | None = None,
) -> Samples:
    """Complete left-padded prompts; jittable with `model` and all numbers and `sampling` static.

    Every prompt goes through the model once, whatever the number of its completions, and its keys and values are kept
    until the end; every slot has P + C columns of them, or C where the rows of a prompt share its (`Decoding.whole`).
    Where there are fewer slots than rows, a slot whose row is done takes the next one within the program.

    Args:
      model: the decoder.
      policy: its weights.
      prompts: [N, P] int32, left-padded; prompt_mask: [N, P] bool. A row without a prompt is padding and draws nothing.
      key: token n of row r is drawn with `fold_in(fold_in(key, r), n)`, whatever else is asked for, in whatever order
        and in however many slots.
      max_new_tokens: C, the most tokens drawn per row.
      sampling: temperature and cuts.
      eos_ids: [E], each of which ends a row.
      stop: strings that end a row, of `stop_table`.
      slots: rows decoded at once; None: all of them.
      group: rows of each prompt, one after the other: B = N * group.
      prompt_ids: [B] int32, the prompt that each row completes, in place of `group`.
      row_ids: [B] int32, the rows' numbers for the keys (0 .. B-1 unless given), so that a split or permuted batch
        draws the same tokens.
      limits: [B] int32, the most tokens of each row where that is less than `max_new_tokens`.
      unroll: whether decoding goes through the layers one after the other instead of in a loop, which saves copies and
        takes longer to compile; None: on a CPU, whose compiler copies a layer out of a stack before it reads it.

    Returns:
      `Samples` of the B rows.

    Raises:
      ValueError: no room for a token; slots or rows that the mesh does not divide; `group` and `prompt_ids` at once.
    """
    prompts, prompt_mask = jnp.asarray(prompts, jnp.int32), jnp.asarray(prompt_mask)
    pick = _picker(len(prompts), group, prompt_ids)
    chosen = pick(jnp.arange(len(prompts)), 0)
    count = len(chosen)
    slots = count if slots is None else min(slots, count)
    _check(count, slots, max_new_tokens)
    transformer = bind(model, policy)
    lengths = pick(jnp.sum(prompt_mask, axis=1, dtype=jnp.int32), 0)
    limit = jnp.full(count, max_new_tokens) if limits is None else jnp.minimum(limits, max_new_tokens)
    limit = jnp.where(lengths > 0, limit, 0)
    filled, filled_mask, hidden, cache = _prefill(transformer, prompts, prompt_mask)
    rows = Rows(
        order=jnp.argsort(limit <= 0, stable=True).astype(jnp.int32),
        count=jnp.sum(limit > 0, dtype=jnp.int32),
        prompt=chosen,
        length=lengths,
        limit=limit,
        ids=jnp.arange(count) if row_ids is None else jnp.asarray(row_ids),
        prompts=filled,
        prompt_mask=filled_mask,
        hidden=hidden,
        cache=cache,
    )
    ends = jnp.asarray(eos_ids, jnp.int32).reshape(-1)
    unroll = jax.default_backend() == "cpu" if unroll is None else unroll
    decoding = Decoding.of(transformer, prompts.shape[1] + max_new_tokens, hidden.dtype, unroll=unroll)
    if slots == count:
        start = whole(rows, decoding, pick, group, max_new_tokens)
    else:
        start = empty(rows, decoding, slots, max_new_tokens)
    uniforms = token_uniforms(key, rows.ids, max_new_tokens, start.log_probs.dtype)
    draw_all = _drawer(model, policy, rows, uniforms=uniforms, sampling=sampling, ends=ends, stop=stop)
    last, done = _run(rows, decoding, start, draw_all)
    return _samples(rows, last, done, ends, (pick(prompts, 0), pick(prompt_mask, 0)))
