"""A policy (base parameters, optional adapter) on sequences: hidden states, token statistics and values."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import kljax
from train.config.plan import Layout
from train.config.routing import Replay
from train.models import Decoder
from train.models.blocks import check_rows_may_join
from train.models.experts import NO_EXPERT, Routed
from train.models.head import stored_head
from train.models.parameters import bind, value_head_structure
from train.models.sharding import axis_size, divides, mesh_is_set, partition_spec
from train.sequences.batch import Batch, prompt_lengths
from train.sequences.forest import Forest, group_forest, row_forest
from train.sequences.token_fields import ROUTES, TOKEN_FIELDS, TokenFields

Tree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ScoredPolicy:
    """A policy and the decoder that runs it: the trained policy, or the reference.

    Attributes:
      model: the policy's decoder, or a teacher's, which has the same vocabulary. Static: part of a compiled program.
      policy: weights and adapter. `params` of None stand for the frozen base under the trained adapter, which is then
        one argument of a program; XLA would allocate two.
    """

    model: Decoder = dataclasses.field(metadata={"static": True})
    policy: kljax.Policy

    @property
    def shares_base(self) -> bool:
        """Whether the weights are the frozen base under the trained adapter."""
        return self.policy.params is None

    def on_base(self, base: Tree) -> "ScoredPolicy":
        """Returns the policy with all of its weights: with `base` if it shares that."""
        return ScoredPolicy(self.model, kljax.Policy(base, self.policy.adapter)) if self.shares_base else self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sequences:
    """Sequences of tokens, and the slots in which they go through the layers and the LM head.

    Attributes:
      tokens: [B, T] int32.
      token_mask: [B, T] bool, True at real tokens, which come first.
      completion_mask: [B, T] bool, the tokens to score; others cost nothing. None scores all real tokens.
      fields: [B, T, ...] by name, as in `Batch`. With `kept_ids`, log-probs are renormalised over these tokens;
        entropies and the exact KL are over the whole vocabulary.
      forest: the slots.
    """

    tokens: jax.Array
    token_mask: jax.Array
    forest: Forest
    completion_mask: jax.Array | None = None
    fields: TokenFields = dataclasses.field(default_factory=dict)

    @classmethod
    def rows(
        cls,
        tokens: jax.Array,
        token_mask: jax.Array,
        completion_mask: jax.Array | None = None,
        fields: TokenFields | None = None,
    ) -> "Sequences":
        """Returns sequences in a row of slots each.

        Raises:
          ValueError: padding before a token, where the mask is no array of a program under way, which has no values.
        """
        if not isinstance(token_mask, jax.core.Tracer):
            with jax.ensure_compile_time_eval():
                is_padded = bool(jnp.any(token_mask[:, 1:] > token_mask[:, :-1]))
            if is_padded:
                raise ValueError("token_mask: got tokens after padding, expected rows from column 0 on, padded behind")
        return cls(tokens, token_mask, row_forest(jnp.asarray(token_mask)), completion_mask, fields or {})

    @classmethod
    def of(cls, batch: Batch, layout: Layout, packed: Forest | None = None) -> "Sequences":
        """Returns the sequences of a batch, whose completions are scored, in packed slots or in those of the layout."""
        if packed is not None:
            forest = packed
        elif layout.group > 1 and divides(len(batch.tokens) // layout.group, "rows"):
            shape = layout.prompt, layout.completion or 0
            forest = group_forest(batch.token_mask, prompt_lengths(batch), shape, layout.group)
        else:
            forest = row_forest(batch.token_mask, prompt_lengths(batch), layout.completion)
        return cls(batch.tokens, batch.token_mask, forest, batch.completion_mask, batch.fields)

    @property
    def scored(self) -> jax.Array:
        """The tokens [B, T] to score."""
        return self.token_mask if self.completion_mask is None else self.completion_mask

    @property
    def scored_slots(self) -> jax.Array:
        """The slots [R, W] whose tokens are scored, in any of their sequences."""
        readers = range(self.forest.readers.shape[-1])
        return functools.reduce(jnp.logical_or, (self.forest.take(self.scored, reader=reader) for reader in readers))

    def for_policy(self, replay: Replay, *, scoring: bool = False) -> "Sequences":
        """Returns the sequences as the trained policy runs them: with their routes, or for routers that choose.

        Args:
          replay: `routing.replay`; with "old_policy" updates use the choice of the scoring pass.
          scoring: whether this pass scores the policy before its updates.
        """
        replayed = replay == "rollout" or (replay == "old_policy" and not scoring)
        return self if replayed else self.without_routes()

    def without_routes(self) -> "Sequences":
        """Returns the sequences for a policy whose routers choose, such as the reference."""
        fields = {name: x for name, x in self.fields.items() if name != ROUTES}
        return dataclasses.replace(self, fields=fields)

    def recorded_routes(self) -> jax.Array | None:
        """Returns the recorded routes of the slots, [R, W, L, k] as in `Routed`; None without any."""
        routes = self.fields.get(ROUTES)
        return None if routes is None else self.forest.take(routes, NO_EXPERT)


def hidden_states(scored: ScoredPolicy, sequences: Sequences) -> jax.Array:
    """Computes the hidden states of the tokens of sequences, [B, T, D]; 0 at padding."""
    return sequences.forest.gather(slot_states(scored, sequences)[0])


def slot_states(scored: ScoredPolicy, sequences: Sequences) -> tuple[jax.Array, Routed | None]:
    """Computes the hidden states of the slots, with the routes that the sequences have, and the choices of all routers.

    Returns:
      [R, W, D], finite but meaningless at slots without a token, and `Routed` with arrays [R, W, L, ...]; None without
      experts.

    Raises:
      ValueError: rows that hold several sequences, for layers that cannot run them.
    """
    forest = sequences.forest
    if forest.joins:
        check_rows_may_join(scored.model.config)
    tokens = forest.take(sequences.tokens)
    real = forest.take(sequences.token_mask)
    spans = forest.spans(scored.model.config.sliding_window)
    routes = None if scored.model.config.experts is None else sequences.recorded_routes()
    return bind(scored.model, scored.policy).run(tokens, real, forest.depth, spans, routes=routes)


def paired_slot_states(scored: ScoredPolicy, adapter: Tree, sequences: Sequences) -> tuple[jax.Array, jax.Array]:
    """Computes `slot_states` of a policy and of its base with another adapter, in one pass over the layers.

    The base weights are read, and on a mesh gathered, once for both; activations take twice the memory.

    Args:
      scored: base parameters and an adapter.
      adapter: the other adapter, of the same structure; None: off.
      sequences: the sequences.

    Returns:
      [R, W, D] of each.
    """
    params = scored.policy.params
    first = scored.policy.adapter
    second = jax.tree.map(jnp.zeros_like, first) if adapter is None else adapter
    pair = jax.tree.map(lambda *halves: jnp.stack(halves), first, second)

    def run(lora: Tree) -> jax.Array:
        return slot_states(ScoredPolicy(scored.model, kljax.Policy(params, lora)), sequences)[0]

    # Rows stay the leading axis, which the mesh splits.
    both = jax.vmap(run, out_axes=1)(pair)
    return both[:, 0], both[:, 1]


def _lm_head(scored: ScoredPolicy, width: int, tile: kljax.Tile | None) -> kljax.Head:
    """Returns the LM head as the parameters store it, with the cap of the model and the sharding of rows of W slots."""
    model = scored.model
    return kljax.Head(
        stored_head(model, scored.policy.params),
        softcap=model.config.final_softcap,
        layout="vd" if model.config.tie_embeddings else "dv",
        sharding=_head_sharding(model, width),
        tile=tile,
        implementation="xla" if model.config.attention == "xla" else "tile",
    )


def _head_sharding(model: Decoder, width: int) -> kljax.HeadSharding | None:
    """Returns the sharding of rows, slots and head on the mesh; None if no mesh is set."""
    if not mesh_is_set():
        return None
    axes = ("vocab", "embed") if model.config.tie_embeddings else ("embed", "vocab")
    split = axis_size("tokens") > 1 and divides(width, "tokens")
    return kljax.HeadSharding(
        tokens=partition_spec(("rows", "tokens") if split else ("rows",)), head=partition_spec(axes)
    )


def token_stats(
    scored: ScoredPolicy,
    sequences: Sequences,
    *,
    temperature: float | jax.Array,
    entropy: Literal[False, True, "constant"] = False,
    sum_squared_probs: bool = False,
    reference: kljax.ReferenceStates | None = None,
    tile: kljax.Tile | None = None,
    hidden: jax.Array | None = None,
) -> tuple[kljax.TokenStats, jax.Array]:
    """Computes statistics of each token given the tokens before it, and the hidden states they come from.

    No array has the size of tokens x vocabulary. A frozen LM head (LoRA) gets no gradient and is not read a second
    time for one.

    Args:
      scored: the policy.
      sequences: the sequences, and the tokens of them to score.
      temperature: the sampling temperature.
      entropy: True also computes entropies; "constant" computes them without a gradient.
      sum_squared_probs: True also computes the sums over the vocabulary of the squared probabilities.
      reference: hidden states [B, T, D] of the reference, as `hidden_states` returns them, and its head, for the exact
        KL; a head of None is the policy's, treated as a constant.
      tile: tile size of the chunked LM head; None takes the library's for this kind of device.
      hidden: the policy's hidden states [R, W, D], if they exist already.

    Returns:
      `TokenStats` of [B, T] (position t is token t; 0 at tokens that are not scored) and hidden states [R, W, D].

    Raises:
      ValueError: both `kept_ids` and `sum_squared_probs`.
    """
    score: Callable[..., kljax.TokenStats]
    kept_ids = _kept_ids(sequences)
    if kept_ids is None:
        score = functools.partial(kljax.log_probs_from_hidden, sum_squared_probs=sum_squared_probs)
    elif sum_squared_probs:
        raise ValueError("sum_squared_probs: got True and kept_ids, expected one of them")
    else:
        score = functools.partial(kljax.renormalized_log_probs, kept_ids=kept_ids)
    if hidden is None:
        hidden, _ = slot_states(scored, sequences)
    inputs = _head_inputs(scored, hidden, sequences, reference, tile)
    stats = score(temperature=temperature, entropy=entropy, **inputs)
    return _gather_scored(stats, sequences), hidden


def _gather_scored(per_slot: Tree, sequences: Sequences) -> Tree:
    """Gathers arrays [R, S] for the sequences, [B, T], 0 at tokens that are not scored, though another sequence may."""
    forest = sequences.forest
    return jax.tree.map(lambda x: jnp.where(sequences.scored, forest.gather(forest.uncut(x)), 0), per_slot)


def _head_inputs(
    scored: ScoredPolicy,
    hidden: jax.Array,
    sequences: Sequences,
    reference: kljax.ReferenceStates | None,
    tile: kljax.Tile | None,
) -> dict[str, Any]:
    """Returns the head, and for each slot that may be scored its token and the state before it.

    The others are cut off, [R, S]: tiles of the head are as even as the number of slots allows.
    """
    forest = sequences.forest
    if reference is not None:
        of_slots = forest.take(jnp.asarray(reference.hidden))
        reference = dataclasses.replace(reference, hidden=forest.cut(forest.before(of_slots)))
    before = forest.cut(forest.before(hidden))
    return {
        "hidden": before,
        "head": _lm_head(scored, before.shape[1], tile),
        "targets": forest.cut(forest.take(sequences.tokens)),
        "mask": forest.cut(sequences.scored_slots & (forest.depth > 0)),
        "reference": reference,
    }


def _kept_ids(sequences: Sequences) -> jax.Array | None:
    """Returns the tokens that the sampler kept at each slot; None: log-probs are over the whole vocabulary."""
    kept_ids = sequences.fields.get("kept_ids")
    forest = sequences.forest
    return None if kept_ids is None else forest.cut(forest.take(kept_ids, TOKEN_FIELDS["kept_ids"].fill))


def fused_loss(
    scored: ScoredPolicy,
    sequences: Sequences,
    *,
    token_loss: Callable[[kljax.TokenStats, Any], tuple[jax.Array, Tree]],
    per_token: Tree,
    temperature: float | jax.Array,
    entropy: Literal[False, True, "constant"] = False,
    reference: kljax.ReferenceStates | None = None,
    tile: kljax.Tile | None = None,
    token_chunk: int | None = None,
    hidden: jax.Array | None = None,
) -> tuple[jax.Array, Tree, jax.Array]:
    """Computes a loss that treats tokens alone, with three products with the LM head instead of four.

    Each scored token belongs to one sequence: `forest.readers` has K = 1.

    Args:
      scored: the policy.
      sequences: the sequences; the loss is a sum over their scored tokens.
      token_loss: as in `kljax.token_loss_from_hidden`.
      per_token: its inputs, arrays [B, T] and scalars.
      temperature: the sampling temperature.
      entropy: see `token_stats`.
      reference: see `token_stats`.
      tile: see `token_stats`.
      token_chunk: tokens whose logits are held at once; None takes the library's for this kind of device.
      hidden: the policy's hidden states [R, W, D], if they exist already.

    Returns:
      The loss, its metrics [B, T], and hidden states [R, W, D].
    """
    hidden = slot_states(scored, sequences)[0] if hidden is None else hidden
    forest = sequences.forest
    loss, metrics = kljax.token_loss_from_hidden(
        **_head_inputs(scored, hidden, sequences, reference, tile),
        token_loss=token_loss,
        per_token=jax.tree.map(lambda x: forest.cut(forest.take(x)) if x.ndim else x, per_token),
        temperature=temperature,
        entropy=entropy,
        kept_ids=_kept_ids(sequences),
        token_chunk=token_chunk,
    )
    return loss, _gather_scored(metrics, sequences), hidden


def token_values(value_head: Tree, hidden: jax.Array, forest: Forest) -> jax.Array:
    """Computes the value [B, T] of the state before each token, from the hidden states [R, W, D]; 0 at first tokens."""
    graphdef, *_ = value_head_structure(hidden.shape[-1])
    values = forest.before(nnx.merge(graphdef, value_head)(hidden))
    return forest.gather(jnp.where(forest.depth > 0, values, 0))
