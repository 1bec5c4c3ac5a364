"""The engine: prompts are prefilled once, then slots decode in a compiled loop until all rows end.

`sample` is one program. Its phases `start`, `decode` and `finish` are programs of their own in
`train.rollouts.sampler.windows`, where the KV cache grows with the longest row.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

import kljax
from train.models import Decoder, RopeTables, Transformer, rope_tables
from train.models.cache import PromptState
from train.models.experts import NO_EXPERT
from train.models.head import make_logits
from train.models.layers import copies_layers
from train.models.parameters import bind
from train.models.sharding import axis_parts, axis_size, batch_sharding, device_kind, replicated
from train.rollouts.sampler.draw import Sampling, describe_draws, draw, token_uniforms
from train.rollouts.sampler.slots import Outputs, PromptQueue, PromptsToRows, Slots, empty_slots, fill_slots
from train.rollouts.sampler.stops import StopTable, row_ends
from train.sequences.batch import move_columns
from train.sequences.token_fields import ROUTES, TOKEN_FIELDS, TokenFields


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
    row_ids: jax.Array | None = None,
    limits: jax.Array | None = None,
    length: int | None = None,
    unroll: bool | None = None,
) -> "Samples":
    """Completes left-padded prompts; jittable with `model`, `sampling` and all Python numbers static.

    Every prompt is prefilled once, for any number of completions, and its keys and values stay until the end. Every
    slot has P + C columns of KV cache, or C if the rows of a prompt share its columns (`GroupCache`), and every decode
    step reads all of them: where C is much more than the usual length, `WindowedSampler` takes less time and memory.
    With fewer slots than rows, a slot whose row has ended takes the next row within the program.

    Args:
      model: the decoder.
      policy: its weights.
      prompts: [N, P] int32, left-padded.
      prompt_mask: [N, P] bool. A row without real tokens is padding and draws nothing.
      key: token n of row r is drawn with `fold_in(fold_in(key, r), n)`, for any batch, order and number of slots.
      max_new_tokens: C, the most tokens drawn per row.
      sampling: temperature and filters.
      eos_ids: [E], the tokens that end a row.
      stop: the table of strings that end a row, from `stop_table`.
      slots: the number of rows decoded at once; None: all of them.
      group: the number of rows of each prompt, which are consecutive: B = N * group.
      row_ids: [B] int32, the numbers of the rows for `key`, so that a split or permuted batch draws the same tokens;
        None: 0 .. B - 1.
      limits: [B] int32, the max new tokens of each row, at most `max_new_tokens`; None: `max_new_tokens`.
      length: T, the most tokens of a row with its prompt; None: P + C.
      unroll: whether decoding unrolls the layers, which takes longer to compile, and memory for a copy of their
        weights; None: where the compiler would copy each layer out of the stack in each step.

    Returns:
      `Samples` of the B rows.

    Raises:
      ValueError: `max_new_tokens`, `slots` or `group` below 1; slots or rows that the mesh does not divide.
    """
    state = start(
        model,
        policy,
        prompts,
        prompt_mask,
        key=key,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        slots=slots,
        group=group,
        row_ids=row_ids,
        limits=limits,
        length=length,
        unroll=unroll,
    )
    state = decode(model, policy, state, sampling=sampling, eos_ids=eos_ids, stop=stop)
    return finish(state, prompts, prompt_mask, eos_ids=eos_ids, group=group, length=length)


def start(
    model: Decoder,
    policy: kljax.Policy,
    prompts: jax.Array,
    prompt_mask: jax.Array,
    *,
    key: jax.Array,
    max_new_tokens: int,
    sampling: Sampling,
    unroll: bool | None = None,
    slots: int | None = None,
    group: int = 1,
    row_ids: jax.Array | None = None,
    limits: jax.Array | None = None,
    length: int | None = None,
    window: int | None = None,
) -> "State":
    """Prefills the prompts and makes the slots, before their first draw.

    Args:
      model, policy, prompts, prompt_mask, key, max_new_tokens, sampling, unroll, slots, group, row_ids, limits, length:
        see `sample`.
      window: columns of KV cache for completions; None: `max_new_tokens`.

    Raises:
      ValueError: see `sample`.
    """
    prompts = jnp.asarray(prompts, jnp.int32)
    prompt_mask = jnp.asarray(prompt_mask)
    to_rows = _prompts_to_rows(len(prompts), group)
    ids_of_rows = to_rows(jnp.arange(len(prompts)), 0)
    count = len(ids_of_rows)
    slots = count if slots is None else min(slots, count)
    _check_sizes(count, slots, max_new_tokens)
    lengths = to_rows(jnp.sum(prompt_mask, axis=1, dtype=jnp.int32), 0)
    limits = jnp.full(count, max_new_tokens) if limits is None else jnp.minimum(limits, max_new_tokens)
    if length is not None:
        limits = jnp.minimum(limits, length - lengths)
    limits = jnp.where(lengths > 0, limits, 0)
    padded_mask, hidden, states, routes = _prefill(bind(model, policy), prompts, prompt_mask)
    queue = PromptQueue(
        order=jnp.argsort(limits <= 0, stable=True).astype(jnp.int32),
        count=jnp.sum(limits > 0, dtype=jnp.int32),
        prompt_ids=ids_of_rows,
        lengths=lengths,
        limits=limits,
        row_ids=jnp.arange(count) if row_ids is None else jnp.asarray(row_ids),
        key=key,
        prompt_mask=padded_mask,
        hidden=hidden,
        states=states,
        max_new_tokens=max_new_tokens,
        fields={ROUTES: routes[: len(prompts)]} if sampling.record_routes and routes is not None else {},
    )
    # Log-probs are in float32 at least.
    draws = describe_draws(sampling, model.config.vocab_size, jnp.promote_types(hidden.dtype, jnp.float32))
    if queue.fields:
        draws[ROUTES] = jax.ShapeDtypeStruct((1, *model.config.route_shape), jnp.int16)
    options: dict[str, Any] = {"window": window or max_new_tokens, "draws": draws}
    options["unroll"] = copies_layers(device_kind()) if unroll is None else unroll
    if slots < count:
        return State(queue, empty_slots(queue, slots, **options))
    filled = fill_slots(queue, to_rows, group, **options)
    return State(dataclasses.replace(queue, states=()), filled)


def decode(
    model: Decoder,
    policy: kljax.Policy,
    state: "State",
    *,
    sampling: Sampling,
    eos_ids: Sequence[int] | jax.Array,
    stop: StopTable | None = None,
    after: int = 0,
    begun: bool = False,
    steps: int | None = None,
) -> "State":
    """Decodes until all rows have ended, or the longest of them fills the window of the KV cache.

    Args:
      model, policy, sampling, eos_ids, stop: see `sample`.
      state: of `start`, of a narrower window, doubled, or of this window.
      after: the narrower window; 0 in the first one.
      begun: whether the first token is drawn.
      steps: decode steps at most; None: as many as it takes.
    """
    queue = state.queue
    slots = state.slots
    transformer = bind(model, policy)
    unroll = slots.state.unrolled
    # Without a queue all rows are as long as the window before; a row of the queue starts with its first token.
    first_token = 0 if slots.outputs is not None else after
    columns = jnp.arange(slots.prompt_length + slots.window)
    engine = Engine(
        transformer=transformer.unrolled() if unroll else transformer,
        rope=rope_tables(transformer.config, columns[None], slots.hidden.dtype) if unroll else None,
        logits=make_logits(model, policy.params),
        sampling=sampling,
        eos_ids=jnp.asarray(eos_ids, jnp.int32).reshape(-1),
        stop=stop,
        queue=queue,
        uniforms=token_uniforms(
            queue.key, queue.row_ids, first_token, slots.window - first_token, slots.draws["rollout_log_probs"].dtype
        ),
        first_token=first_token,
    )
    return State(queue, engine.run(slots if begun else engine.draw_tokens(engine.refill(slots)), steps))


def finish(
    state: "State",
    prompts: jax.Array,
    prompt_mask: jax.Array,
    *,
    eos_ids: Sequence[int] | jax.Array,
    group: int = 1,
    length: int | None = None,
) -> "Samples":
    """Collects the completions of all rows, after the last token.

    Args:
      state: of `decode`.
      prompts, prompt_mask, eos_ids, group, length: see `sample`.
    """
    slots = state.slots
    # Every row that has a slot from the start began in the first step, so no completion wraps around.
    outputs = Outputs(slots.draws, slots.length, slots.finished) if slots.outputs is None else slots.write_outputs()
    to_rows = _prompts_to_rows(len(prompts), group)
    of_prompts = {**state.queue.fields, "tokens": jnp.asarray(prompts, jnp.int32)}
    begins = to_rows(jnp.sum(prompt_mask, axis=1, dtype=jnp.int32), 0)
    longest = prompts.shape[1]
    columns = jnp.arange(length or longest + slots.max_new_tokens)
    token_mask = columns < (begins + outputs.lengths)[:, None]
    in_prompt = columns < begins[:, None]

    def on_rows(name: str, fill: jax.Array | float) -> jax.Array:
        """Moves the draws of completions [B, C, ...] behind the values of their prompts, [B, T, ...]."""
        x = move_columns(outputs.draws[name], -begins, len(columns), fill)
        axes = (...,) + (None,) * (x.ndim - 2)
        if name in of_prompts:
            left = move_columns(to_rows(of_prompts[name], 0), longest - begins, len(columns))
            x = jnp.where(in_prompt[axes], left, x.astype(left.dtype))
        return jnp.where(token_mask[axes], x, jnp.asarray(fill, x.dtype))

    eos_ids = jnp.asarray(eos_ids, jnp.int32).reshape(-1)
    return Samples(
        tokens=on_rows("tokens", eos_ids[0] if len(eos_ids) else 0),
        token_mask=token_mask,
        completion_mask=token_mask & ~in_prompt,
        prompt_lengths=begins,
        finished=outputs.finished,
        fields={name: on_rows(name, TOKEN_FIELDS[name].fill) for name in outputs.draws if name != "tokens"},
        steps=slots.step - 1,
        occupancy=jnp.sum(outputs.lengths, dtype=jnp.float32) / (slots.step * len(slots.row)),
    )


def samples_sharding(mesh: Mesh) -> "Samples":
    """Returns the shardings of the results of `sample`, for `out_shardings`: rows over the mesh, scalars replicated."""
    arrays: dict[str, Any] = {field.name: batch_sharding(mesh) for field in dataclasses.fields(Samples)}
    return Samples(**arrays | dict.fromkeys(("steps", "occupancy"), replicated(mesh)))


def _prompts_to_rows(prompts: int, group: int) -> PromptsToRows:
    """Makes the function that copies prompts to rows; repeated prompts stay on their devices."""
    if group < 1:
        raise ValueError(f"group: got {group}, expected at least 1")
    return lambda x, axis: jnp.repeat(lax.slice_in_dim(x, 0, prompts, axis=axis), group, axis=axis)


def _check_sizes(rows: int, slots: int, max_new_tokens: int) -> None:
    """Raises ValueError for sizes below 1, and for slots that the mesh does not divide."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected at least 1")
    if slots < 1:
        raise ValueError(f"slots: got {slots}, expected at least 1")
    if slots % axis_size("rows"):
        name = "slots" if slots < rows else "rows"
        raise ValueError(f"{name}: got {slots}, expected a multiple of {axis_parts('rows')}")


def _prefill(
    transformer: Transformer, prompts: jax.Array, prompt_mask: jax.Array
) -> tuple[jax.Array, jax.Array, tuple[PromptState, ...], jax.Array | None]:
    """Returns the mask, last hidden states [N, D], layers' states and routes of the prompts; the mesh divides N."""
    padding = -len(prompts) % axis_size("rows")
    prompts = jnp.pad(prompts, ((0, padding), (0, 0)))
    prompt_mask = jnp.pad(prompt_mask, ((0, padding), (0, 0)))
    # The name shows in profiles, and tells a test which transfers belong to the prefill.
    with jax.named_scope("prefill"):
        hidden, states, routed = transformer.prefill(prompts, prompt_mask)
    return prompt_mask, hidden[:, -1], states, None if routed is None else routed.routes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Samples:
    """Prompts with their completions, from column 0 on, in the order of the rows.

    Attributes:
      tokens: [B, T] int32; after the end of a row the first EOS id.
      token_mask: [B, T] bool, the real tokens of prompt and completion.
      completion_mask: [B, T] bool, the completions, each with the EOS or the stop string that ended it.
      prompt_lengths: [B] int32, the tokens of each prompt.
      finished: [B] bool, the rows that EOS or a stop string ended.
      fields: [B, T, ...] by name, the results of `draw` for each sampled token, and of the prefill for prompts;
        elsewhere the fill of `TOKEN_FIELDS`.
      steps: [] int32, the number of decode steps; each advances all slots.
      occupancy: [] float32, the mean share of slots that drew a token.
    """

    tokens: jax.Array
    token_mask: jax.Array
    completion_mask: jax.Array
    prompt_lengths: jax.Array
    finished: jax.Array
    fields: TokenFields
    steps: jax.Array | int = 0
    occupancy: jax.Array | float = 1.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Sampling between two programs: the queue, which is constant, and the slots."""

    queue: PromptQueue
    slots: Slots

    def is_running(self) -> jax.Array:
        """Whether a row goes on or waits, [] bool."""
        active = jnp.any(self.slots.active)
        return active if self.slots.taken is None else active | (self.slots.taken < self.queue.count)

    def is_full(self) -> jax.Array:
        """Whether the longest row fills the window, [] bool; the last window has a column for every token."""
        slots = self.slots
        return jnp.array(False) if slots.window >= slots.max_new_tokens else slots.longest() >= slots.window


@dataclasses.dataclass(frozen=True)
class Engine:
    """The model, the queue and the sampling options: constants of the decode loop.

    Attributes:
      transformer: the decoder and its weights. Stacked layers run in one loop, whose program does not grow with depth,
        but which copies weights out of the stack. Unrolled layers have separate caches.
      rope: `rope_tables` of all positions [1, P + W] if the layers are unrolled, each of which would otherwise compute
        sines and cosines again. None for stacked layers, which share one computation.
      logits: from `make_logits`.
      sampling: temperature and filters.
      eos_ids: [E] int32.
      stop: the table of stop strings, or None.
      queue: the prompts and rows.
      uniforms: [B, W - first_token, 2], the random numbers of each token.
      first_token: the index of the first token that `uniforms` has.
    """

    transformer: Transformer
    rope: RopeTables | None
    logits: Callable[[jax.Array, jnp.dtype], jax.Array]
    sampling: Sampling
    eos_ids: jax.Array
    stop: StopTable | None
    queue: PromptQueue
    uniforms: jax.Array
    first_token: int

    def run(self, slots: Slots, steps: int | None = None) -> Slots:
        """Decodes until all rows have ended, the longest of them fills the window, or so many steps are done."""
        last = None if steps is None else slots.step + steps

        def can_advance(slots: Slots) -> jax.Array:
            state = State(self.queue, slots)
            going_on = state.is_running() & ~state.is_full()
            return going_on if last is None else going_on & (slots.step < last)

        def advance(slots: Slots) -> Slots:
            return self.draw_tokens(self.refill(self.decode(slots)))

        # The names tell a plan of the program which loop depends on the data.
        with jax.named_scope("decode"):
            return lax.while_loop(can_advance, advance, slots)

    def decode(self, slots: Slots) -> Slots:
        """Runs the model on the latest token of every slot; updates `hidden` and `state`."""
        prompt_lengths = self.queue.lengths[slots.row]
        positions = prompt_lengths + slots.length - 1
        token_mask, key_positions = slots.columns(prompt_lengths)
        hidden, state, routed = self.transformer.decode(
            slots.last_tokens(),
            positions,
            slots.state,
            token_mask,
            slots.last_column(),
            key_positions=key_positions,
            rope=jax.tree.map(lambda x: jnp.take(x[0], positions, axis=0, mode="clip")[:, None], self.rope),
        )
        slots = dataclasses.replace(slots, hidden=hidden, state=state)
        return slots.record(ROUTES, routed.routes) if routed is not None and ROUTES in slots.draws else slots

    def draw_tokens(self, slots: Slots) -> Slots:
        """Draws the next token of every active slot from its hidden state."""
        dtype = slots.draws["rollout_log_probs"].dtype
        logits = self.logits(slots.hidden, dtype)
        uniforms = self.uniforms[slots.row, slots.length - self.first_token]
        draws = draw(logits / self.sampling.temperature, uniforms, self.sampling)
        if ROUTES in slots.draws:
            # Known when the token is computed, which the last one of a row is not.
            routes = slots.draws[ROUTES]
            draws[ROUTES] = jnp.full((len(routes), *routes.shape[2:]), NO_EXPERT, routes.dtype)
        ended, stop_state = row_ends(draws["tokens"], self.eos_ids, self.stop, slots.stop_state)
        slots = slots.append(draws, stop_state, ended=ended)
        return dataclasses.replace(slots, active=slots.active & (slots.length < self.queue.limits[slots.row]))

    def refill(self, slots: Slots) -> Slots:
        """Replaces the rows of inactive slots by rows of the queue, one slot at a time; a no-op without a queue."""
        if slots.outputs is None:
            return slots

        def can_refill(slots: Slots) -> jax.Array:
            return (cast(jax.Array, slots.taken) < self.queue.count) & ~jnp.all(slots.active)

        def refill_slot(slots: Slots) -> Slots:
            slot = jnp.argmin(slots.active)
            taken = cast(jax.Array, slots.taken)
            slots = dataclasses.replace(slots, outputs=slots.evict(slot), taken=taken + 1)
            return slots.load(slot, self.queue, self.queue.order[taken])

        with jax.named_scope("refill"):
            return lax.while_loop(can_refill, refill_slot, slots)
