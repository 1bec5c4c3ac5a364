"""Losses and metrics of the routers of a mixture of experts.

Shapes: L layers with experts, E experts, k of them active.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from train.config.routing import Routing
from train.models import Decoder
from train.models.blocks import layer_stacks
from train.models.config import DecoderConfig
from train.models.experts import CHOICE_BIAS, Routed, has_expert
from train.rl.kl_metrics import AGREEMENT, AGREEMENT_AFTER, AGREEMENT_BEFORE, COMPARED
from train.rl.metrics import Metrics, Summed, single
from train.rl.policy import ScoredPolicy, Sequences, slot_states

Tree = Any
LOAD = "router_load_layer_"
"""Begins the name of the `ExpertLoad` of a layer."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RouterTotals:
    """The counts over all tokens of an update, the denominators of its router losses.

    Attributes:
      tokens: int32, a scalar.
      choices: [L, E] int32, the tokens for which a router chooses each expert; None if no loss needs them.
    """

    tokens: jax.Array
    choices: jax.Array | None

    @classmethod
    def of(cls, counts: jax.Array, routed: Routed | None) -> "RouterTotals":
        """Counts the tokens of a micro-batch.

        Args:
          counts: [...] int32, how often each token counts; 0 at padding.
          routed: arrays [..., L, k].
        """
        if routed is None:
            return cls(jnp.sum(counts), None)
        is_chosen = has_expert(routed.chosen, routed.logits.shape[-1])
        tokens = tuple(range(counts.ndim))
        return cls(jnp.sum(counts), jnp.sum(is_chosen * counts[..., None, None], axis=tokens, dtype=jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertLoad(Summed):
    """The tokens of each expert of a layer; its value is the load of the busiest.

    Attributes:
      tokens: [E] int32, the tokens of each expert.
    """

    tokens: jax.Array

    def value(self) -> jax.Array:
        """Returns the tokens of the busiest expert over the mean: 1 for equal loads, E / k at most; NaN without any."""
        return self.tokens.max() / self.tokens.mean()

    def least(self) -> jax.Array:
        """Returns the tokens of the idlest expert over the mean; NaN without a token."""
        return self.tokens.min() / self.tokens.mean()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCount(Summed):
    """A number of tokens, which parts of a batch add up to."""

    tokens: jax.Array

    def value(self) -> jax.Array:
        """Returns the number."""
        return self.tokens


def balance_loss(
    logits: jax.Array, counts: jax.Array, totals: RouterTotals, *, over: Literal["model", "layer"]
) -> jax.Array:
    """Computes the part of a micro-batch in `E sum_e f_e p_e`, the load-balance loss of Switch Transformers.

    `f_e` is the mean number of times that a token chooses expert e, `p_e` its mean probability: over all tokens and
    layers with `model`, over the tokens of a layer with `layer`, which takes the mean of the layers. Equal loads give
    k. The choices are of the router, also where others are replayed.

    Args:
      logits: [..., L, E] of the routers.
      counts: [...] int32, how often each token counts; 0 at padding.
      totals: of the update, with choices.
      over: the loads that are balanced.

    Returns:
      A scalar; the parts of an update add up to its loss.

    Gradient:
      To the logits through the probabilities: `E / (tokens L) f_e dp_e`. The choices are treated as constants.
    """
    layers, experts = logits.shape[-2:]
    probabilities = jax.nn.softmax(_counted(logits, counts))
    choices = jnp.asarray(totals.choices, probabilities.dtype)
    if over == "model":
        choices = jnp.mean(choices, axis=0, keepdims=True)
    tokens = jnp.maximum(totals.tokens, 1).astype(choices.dtype)
    sums = jnp.sum(probabilities * (choices / tokens), axis=-1)
    return jnp.sum(sums * counts[..., None]) * experts / (tokens * layers)


def z_loss(logits: jax.Array, counts: jax.Array, totals: RouterTotals) -> jax.Array:
    """Computes the part of a micro-batch in the mean of `logsumexp(logits)^2` over tokens and layers (ST-MoE).

    Args:
      logits: [..., L, E] of the routers.
      counts: [...] int32, how often each token counts; 0 at padding.
      totals: of the update.

    Returns:
      A scalar; the parts of an update add up to its loss.

    Gradient:
      To the logits: `2 logsumexp(logits) softmax(logits) / (tokens L)`.
    """
    squares = jnp.square(jax.nn.logsumexp(_counted(logits, counts), axis=-1))
    pairs = jnp.maximum(totals.tokens, 1).astype(squares.dtype) * logits.shape[-2]
    return jnp.sum(squares * counts[..., None]) / pairs


def _counted(logits: jax.Array, counts: jax.Array) -> jax.Array:
    """Returns the logits in float32 at least, 0 at tokens that do not count."""
    counted = jnp.where(counts[..., None, None] > 0, logits, 0)
    return counted.astype(jnp.promote_types(logits.dtype, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Routers:
    """The routers of a model in an update: their losses and metrics, and how their weights change.

    Attributes:
      section: the section of the config.
      model: the decoder, which has experts.
    """

    section: Routing
    model: Decoder

    @classmethod
    def of(cls, section: Routing, model: Decoder) -> "Routers | None":
        """Returns the routers of a model; None without experts."""
        return None if model.config.experts is None else cls(section, model)

    @property
    def need_totals(self) -> bool:
        """Whether a loss divides by counts over all tokens of an update."""
        return self.section.balance_coef > 0 or self.section.z_coef > 0

    def count(self, policy: ScoredPolicy, sequences: Sequences) -> RouterTotals:
        """Counts the tokens of a micro-batch, whose sum over an update the router losses divide by.

        The load-balance loss takes a forward pass more for it: its loads are a product of two means over the update, so
        that no micro-batch has its gradient before the choices of all others are known.
        """
        routed = None
        if self.section.balance_coef > 0:
            routed = slot_states(policy, sequences.for_policy(self.section.replay))[1]
        return RouterTotals.of(sequences.forest.counts, routed)

    def losses(self, routed: Routed, sequences: Sequences, totals: RouterTotals | None) -> dict[str, jax.Array]:
        """Computes the router losses that have a coefficient; without totals the micro-batch is the update."""
        counts = sequences.forest.counts
        losses = dict[str, jax.Array]()
        if totals is None:
            totals = RouterTotals.of(counts, routed)
        if self.section.balance_coef > 0:
            losses["router_balance"] = balance_loss(routed.logits, counts, totals, over=self.section.balance_over)
        if self.section.z_coef > 0:
            losses["router_z"] = z_loss(routed.logits, counts, totals)
        return losses

    def metrics(self, routed: Routed, sequences: Sequences) -> Metrics:
        """Computes `routing_metrics` of a micro-batch."""
        recorded = sequences.recorded_routes()
        counts = sequences.forest.counts
        return routing_metrics(self.model.config, routed, counts, recorded, verify=self.section.verify)

    def choices(self, routed: Routed, sequences: Sequences) -> jax.Array | None:
        """Counts the tokens for which a router chooses each expert, [L, E] int32; None without a bias to move."""
        if self.section.bias_update_rate == 0:
            return None
        return RouterTotals.of(sequences.forest.counts, routed).choices

    def gradients(self, grads: Tree) -> Tree:
        """Returns the gradients of trainable weights, with zeros for routers that are frozen."""
        return _without_routers(grads) if self.section.freeze else grads

    def changes(self, changes: Tree, choices: jax.Array | None) -> Tree:
        """Corrects what an update adds to the routers.

        A frozen router does not change: weight decay would move it without a gradient. A bias of the choice, which has
        no gradient and no weight decay, moves by `rate * sign(mean load - load)`: the load of an expert is the number
        of tokens of the update for which the router chooses it, also where recorded routes are replayed (Wang et al.
        2024, arXiv 2408.15664).
        """
        changes = _without_routers(changes) if self.section.freeze else changes
        if choices is None:
            return changes
        steps = self.section.bias_update_rate * jnp.sign(jnp.mean(choices, axis=-1, keepdims=True) - choices)
        experts = self.model.config.expert_layers
        params = changes["params"]
        for stack in layer_stacks(self.model.config):
            if stack.layers[0] in experts:
                of_stack = steps[np.array([experts.index(layer) for layer in stack.layers])]
                params = _with_leaf(params, (*stack.path, "mlp", CHOICE_BIAS), of_stack)
        return {**changes, "params": params}


def _with_leaf(tree: Tree, path: tuple[str, ...], leaf: jax.Array) -> Tree:
    """Replaces a leaf by a value, cast to the dtype of the leaf."""
    if not path:
        return leaf.astype(tree.dtype)
    return {**tree, path[0]: _with_leaf(tree[path[0]], path[1:], leaf)}


def choice_bias_metrics(trainable: dict[str, Tree]) -> Metrics:
    """Measures the smallest and the largest bias of all routers, if they have one."""
    leaves = jax.tree_util.tree_leaves_with_path(trainable)
    biases = [leaf.ravel() for path, leaf in leaves if getattr(path[-1], "key", None) == CHOICE_BIAS]
    if not biases:
        return {}
    values = jnp.concatenate(biases)
    return {"router_bias_min": single(values.min()), "router_bias_max": single(values.max())}


def _without_routers(tree: Tree) -> Tree:
    """Returns gradients, or changes, of trainable weights with zeros for the routers."""

    def zero(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = [str(getattr(entry, "key", entry)) for entry in path]
        return jnp.zeros_like(leaf) if ["mlp", "gate"] in [names[i : i + 2] for i in range(len(names))] else leaf

    return jax.tree_util.tree_map_with_path(zero, tree)


def routing_metrics(
    config: DecoderConfig, routed: Routed, counts: jax.Array, recorded: jax.Array | None, *, verify: bool = False
) -> Metrics:
    """Measures how the routers chose, and how their choices differ from recorded routes.

    Args:
      config: the decoder.
      routed: arrays [..., L, k], and logits [..., L, E].
      counts: [...] int32, how often each token counts; 0 at padding.
      recorded: [..., L, k] int, in the same layout; -1: unknown. None: there are none.
      verify: adds the metrics that `train.run.routes` reads.

    Returns:
      `router_entropy`, in nats; by layer `router_load`, of the experts that were used; with recorded routes the shares
      of pairs of a token and a layer: `routing_flips`, where the router would choose other experts than the recorded
      ones, also by layer; `routing_lost`, where others were used; and `routing_missing`, which have no recorded routes.

      To verify: `routing_lost` by layer; `routing_agreement`, the share of tokens for which the first router with
      experts, whose input no route has changed, chooses the recorded experts of the token; of the token `_before` it;
      of the token `_after` it; and `routing_compared`, the number of tokens with recorded experts.
    """
    real = (routed.routes[..., 0] >= 0) & (counts[..., None] > 0)

    def mean(values: jax.Array, mask: jax.Array) -> kljax.WeightedSum:
        weights = jnp.where(mask, counts.reshape(*counts.shape, *[1] * (mask.ndim - counts.ndim)), 0)
        kept = jnp.where(mask, jax.lax.stop_gradient(values), 0)
        return kljax.WeightedSum(jnp.sum(kept * weights), jnp.sum(weights, dtype=kept.dtype))

    log_probs = jax.nn.log_softmax(routed.logits.astype(jnp.promote_types(routed.logits.dtype, jnp.float32)))
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    metrics: Metrics = {"router_entropy": mean(entropy, real)}
    uses = has_expert(routed.routes, routed.logits.shape[-1]) * counts[..., None, None]
    loads = jnp.sum(uses.reshape(-1, *uses.shape[-2:]), axis=0, dtype=jnp.int32)
    for index, layer in enumerate(config.expert_layers):
        metrics[f"{LOAD}{layer}"] = ExpertLoad(loads[index])
    if recorded is None:
        return metrics
    ordered = jnp.sort(recorded, axis=-1).astype(routed.routes.dtype)
    known = real & (ordered[..., 0] >= 0)
    flips = jnp.any(ordered != routed.chosen, axis=-1).astype(jnp.float32)
    lost = jnp.any(ordered != routed.routes, axis=-1).astype(jnp.float32)
    metrics["routing_flips"] = mean(flips, known)
    metrics["routing_lost"] = mean(lost, known)
    metrics["routing_missing"] = mean((~known).astype(jnp.float32), real)
    for index, layer in enumerate(config.expert_layers):
        metrics[f"routing_flips_layer_{layer}"] = mean(flips[..., index], known[..., index])
    if verify:
        for index, layer in enumerate(config.expert_layers):
            metrics[f"routing_lost_layer_{layer}"] = mean(lost[..., index], known[..., index])
        first = ordered[..., 0, :]
        chosen = routed.chosen[..., 0, :]
        is_known = known[..., 0]
        metrics[COMPARED] = TokenCount(jnp.sum(is_known * counts, dtype=jnp.int32))
        for name, shift in zip((AGREEMENT, AGREEMENT_BEFORE, AGREEMENT_AFTER), (0, 1, -1), strict=True):
            agrees = jnp.all(jnp.roll(first, shift, axis=-2) == chosen, axis=-1).astype(jnp.float32)
            both_known = is_known & jnp.roll(is_known, shift, axis=-1)
            metrics[name] = mean(agrees, both_known)
    return metrics
