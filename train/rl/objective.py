"""The one place that composes a loss: its terms from the LM head, of the values and of the routers, and its metrics.

No formula is written here: every term is a call of kljax.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

import kljax
from train.config.kl import LossKL
from train.config.plan import Plan
from train.config.schema import Config, LogProbs
from train.models import Decoder
from train.rl.loss_metrics import LossMetrics, make_measure, per_token_values
from train.rl.policy import ScoredPolicy, Sequences, fused_loss, slot_states, token_stats, token_values
from train.rl.preparation import Controllers
from train.rl.routing import Routers, RouterTotals
from train.rl.state import policy_of
from train.rl.terms import Coefficients, loss_mask, make_terms
from train.sequences.batch import Batch, per_token_fields, required
from train.sequences.forest import Forest

Array = jax.Array
Tree = Any
Objective = Callable[..., tuple[Array, LossMetrics]]


class HeadTerms(NamedTuple):
    """The terms of a micro-batch that the LM head computes.

    Attributes:
      stats: statistics of the tokens.
      weighted: each term, times its token weights.
      kl: the KL to the reference, if the coefficient of its term moves.
    """

    stats: kljax.TokenStats
    weighted: dict[str, Array]
    kl: Array | None


def tile(section: LogProbs) -> kljax.Tile | None:
    """Returns the tile size of the chunked LM head; None leaves it to the library."""
    return None if section.tile is None else kljax.Tile(section.tile.tokens, section.tile.vocab)


def coefficients(config: Config, controllers: Controllers | None = None) -> Coefficients:
    """Returns the coefficients of the loss terms as arrays, so that changing one does not recompile.

    The set of terms is static: a term whose coefficient is 0 in the config is not computed.

    Args:
      config: the config.
      controllers: states of the controllers; a term without one has the coefficient of the config.
    """
    values = {
        "kl_loss": config.kl.loss.coef,
        "rollout_kl": config.kl.rollout.coef,
        "entropy": config.loss.entropy_coef,
        "value": config.loss.value_coef,
        "router_balance": config.routing.balance_coef,
        "router_z": config.routing.z_coef,
    }
    terms = {"loss": "kl_loss", "entropy": "entropy"}
    steered = {terms[name]: state.coef for name, state in (controllers or {}).items() if name in terms}
    return {name: jnp.asarray(value, float) for name, value in values.items()} | steered


def make_objective(plan: Plan, model: Decoder) -> Objective:
    """Makes the loss of one micro-batch, `sum_t weight_t * (w_t * policy + sum_k coef_k * term_k)_t`, with its metrics.

    The sum is over the tokens that no correction rejects, and `w_t` are the weights of the corrections. A loss that
    treats tokens alone is fused with the LM head, unless sequences share trained tokens.

    The signature is `objective(trainable, base, batch, coefficients, ref_head, *, packed, totals)`; `ref_head` comes
    from `reference_head`, for the exact KL; `packed` are slots of the sequences, if those of the layout are not meant;
    `totals` of the update are for router losses, None if the micro-batch is all of it. Gradient: to `trainable` only.
    Metrics are treated as constants.
    """
    config = plan.config
    section = config.loss
    layout = plan.layout
    terms = make_terms(plan)
    measure = make_measure(plan, model.config.vocab_size)
    routers = Routers.of(config.routing, model)
    entropy: Literal[True, "constant"] = True if plan.entropies else "constant"
    head: dict[str, Any] = {"temperature": config.temperature, "tile": tile(config.log_probs), "entropy": entropy}

    def head_terms(stats: kljax.TokenStats, batch: Batch, coefs: Coefficients) -> HeadTerms:
        masked = dataclasses.replace(_with_old_log_probs(batch, stats), completion_mask=loss_mask(section, batch))
        values = {name: term.values(stats, masked, coefs) for name, term in terms.items()}
        weights = {name: batch.term_weights.get(name, batch.token_weights) for name in terms}
        weighted = {name: kljax.masked(x, batch.kept()) * required(weights[name]) for name, x in values.items()}
        return HeadTerms(stats, weighted, values["kl"] if plan.steers_loss else None)

    def add_up(weighted: dict[str, Array], coefs: Coefficients, start: Array) -> Array:
        for name, x in weighted.items():
            coef = terms[name].coef
            start = start + (x if coef is None else coefs[coef] * x)
        return start

    def token_loss(stats: kljax.TokenStats, inputs: tuple[Batch, Coefficients]) -> tuple[Array, HeadTerms]:
        found = head_terms(stats, *inputs)
        return add_up(found.weighted, inputs[1], jnp.zeros_like(stats.log_prob)), found

    def objective(
        trainable: dict[str, Tree],
        base: Tree,
        batch: Batch,
        coefs: Coefficients,
        ref_head: kljax.Head | None = None,
        *,
        packed: Forest | None = None,
        totals: RouterTotals | None = None,
    ) -> tuple[Array, LossMetrics]:
        policy = ScoredPolicy(model, policy_of(trainable, base))
        sequences = Sequences.of(batch, layout, packed)
        options = head | {"reference": _exact_reference(plan, config.kl.loss, batch, ref_head)}
        routed = None
        if routers is not None:
            options["hidden"], routed = slot_states(policy, sequences.for_policy(config.routing.replay))

        # The terms of the head, a chunk of tokens at a time if no term needs more.
        if plan.treats_tokens_alone and sequences.forest.readers.shape[-1] == 1:
            options["token_chunk"] = config.log_probs.token_chunk
            inputs = per_token_fields(batch), coefs
            loss, found, hidden = fused_loss(policy, sequences, token_loss=token_loss, per_token=inputs, **options)
            parts = {name: x.sum() for name, x in found.weighted.items()}
        else:
            stats, hidden = token_stats(policy, sequences, **options)
            found = head_terms(stats, batch, coefs)
            parts = {name: x.sum() for name, x in found.weighted.items()}
            loss = add_up(parts, coefs, jnp.float32(0))
        stats = found.stats
        batch = _with_old_log_probs(batch, stats)
        masked = dataclasses.replace(batch, completion_mask=loss_mask(section, batch))
        metrics = measure(stats, batch, masked, coefs.get("key"))
        if plan.steers_loss:
            metrics["kl_loss_per_token"] = kljax.WeightedSum.of(jax.lax.stop_gradient(required(found.kl)), batch.kept())

        # The terms of the hidden states.
        if plan.value_head:
            values = token_values(trainable["value_head"], hidden, sequences.forest)
            mask = masked.completion_mask
            returns = required(batch.returns)
            errors = kljax.value_loss(values, required(batch.values), returns, mask, clip=section.value_clip)
            parts["value"] = (kljax.masked(errors, batch.kept()) * required(batch.token_weights)).sum()
            loss = loss + coefs["value"] * parts["value"]

        # The terms of the routers.
        choices = None
        if routers is not None and routed is not None:
            losses = routers.losses(routed, sequences, totals)
            loss = loss + sum(coefs[name] * value for name, value in losses.items())
            parts |= losses
            metrics |= routers.metrics(routed, sequences)
            choices = routers.choices(routed, sequences)

        logged = {"loss": loss, **{f"{name}_loss": value for name, value in parts.items() if name != "entropy"}}
        per_token = per_token_values(stats, batch)
        return loss, LossMetrics(jax.lax.stop_gradient(logged), metrics, jax.lax.stop_gradient(per_token), choices)

    return objective


def _with_old_log_probs(batch: Batch, stats: kljax.TokenStats) -> Batch:
    """Fills in old log-probs that were not scored: this update is the first, so they are its own."""
    if batch.old_log_probs is not None:
        return batch
    return dataclasses.replace(batch, old_log_probs=jax.lax.stop_gradient(stats.log_prob))


def _exact_reference(
    plan: Plan, section: LossKL, batch: Batch, ref_head: kljax.Head | None
) -> kljax.ReferenceStates | None:
    """Returns the reference of an update's exact KL, or None without one."""
    if not plan.exact_kl:
        return None
    if ref_head is None and not plan.shares_head:
        raise ValueError("ref_head: got None, expected the head of the reference, which is not the policy's")
    return kljax.ReferenceStates(required(batch.ref_hidden), ref_head, section.direction)
