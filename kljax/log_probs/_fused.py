"""The pass of a loss that is fused with the LM head: gradients in the forward pass, a tile of tokens at a time.

Log-probs that are returned to an unknown loss need the logits twice, once for their value and once for the gradient. A
loss that treats tokens alone has the derivatives of a tile as soon as its statistics are known. The logits of the tile
over the whole vocabulary are kept until then, and three products do the work of four.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from kljax._typing import Array
from kljax.log_probs._backward import (
    Cotangents,
    Gradients,
    NeedsGradient,
    RowInputs,
    add_in_tile,
    add_products,
    get_columns,
    needing_gradient,
    on_devices,
    set_columns,
    specs_of,
    sum_over_tokens,
    vary_alike,
    without_flags,
)
from kljax.log_probs._forward import Sums, empty_sums, merge, score_tile, statistics
from kljax.log_probs._head import embed_axis
from kljax.log_probs._inputs import Constants, Spec, Weights, logit_slope
from kljax.log_probs._loss_plan import Leaves, LossPlan, Stats
from kljax.log_probs._tiles import IMPOSSIBLE, Chunk, DeviceView, Logits, MeshAxes, Tokens, pack, unpack, zero_unless

# ---- the differentiable operation ----


class _Requests(NamedTuple):
    """Which gradients are requested; static."""

    weights: NeedsGradient
    leaves: tuple[bool, ...]

    @property
    def any(self) -> bool:
        """Whether any is."""
        return any(self.weights) or any(self.leaves)


def fused_loss(plan: LossPlan, weights: Weights, constants: Constants, leaves: Leaves) -> tuple[Array, Any]:
    return _loss(plan, *vary_alike((weights, constants, leaves)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(plan: LossPlan, weights: Weights, constants: Constants, leaves: Leaves) -> tuple[Array, Any]:
    nothing = _Requests(NeedsGradient(hidden=False, head=False), (False,) * len(leaves))
    return _run(plan, nothing, weights, constants, leaves)[0]


def _loss_fwd(plan: LossPlan, *arguments: Any) -> tuple[tuple[Array, Any], Any]:
    weights, constants, leaves = arguments
    requests = _Requests(NeedsGradient.of(weights), tuple(x.perturbed for x in leaves))
    return _run(plan, requests, *_once_differentiable(without_flags((weights, constants, leaves))))


def _loss_bwd(plan: LossPlan, gradients: Any, cotangents: Any) -> tuple[Any, ...]:
    scale = cotangents[0]
    if isinstance(scale, SymbolicZero):
        return None, None, None

    def scaled(gradient: Array) -> Array:
        return (gradient.astype(scale.dtype) * scale).astype(gradient.dtype)

    to_weights, to_leaves = jax.tree.map(scaled, gradients)
    return Weights(*to_weights), None, to_leaves


_loss.defvjp(_loss_fwd, _loss_bwd, symbolic_zeros=True)


@jax.custom_jvp
def _once_differentiable(tree: Any) -> Any:
    return tree


@_once_differentiable.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "token_loss_from_hidden: got a second derivative, expected one; take log_probs_from_hidden, or a head with "
        'implementation="reference"'
    )


def _run(
    plan: LossPlan, requests: _Requests, weights: Weights, constants: Constants, leaves: Leaves
) -> tuple[tuple[Array, Any], Any]:
    """Returns loss and metrics, and the gradients to weights and leaves, on one device or in a `shard_map`."""
    needed = needing_gradient(weights, requests.weights)

    def specs(tokens: PartitionSpec) -> tuple[tuple[Any, ...], Any]:
        of_leaves = plan.leaf_specs()
        to_leaves = tuple(x if need else None for x, need in zip(of_leaves, requests.leaves, strict=True))
        return (of_leaves,), ((PartitionSpec(), tokens), (specs_of(plan.spec, needed), to_leaves))

    local = functools.partial(_on_device, plan, requests)
    return on_devices(plan.spec, local, specs)(weights, constants, leaves)


# ---- the pass ----


class _Kept(NamedTuple):
    """`[tile, V]` logits of one tile of tokens, of policy and reference."""

    policy: Array
    ref: Array | None


class _Carry(NamedTuple):
    """Everything that the tiles of tokens add to.

    Attributes:
      loss: the sum so far.
      metrics: `[rows, ...]`.
      weights: `[rows, D]` gradients of hidden states, and gradients of heads and biases with all of `D`, all wide.
      leaves: gradients of the inputs of the loss, `[rows, ...]` or scalars; None where not requested.
      logits: of the current tile; here so that the memory is reused.
    """

    loss: Array
    metrics: Any
    weights: Gradients
    leaves: tuple[Array | None, ...]
    logits: _Kept


class _Inputs(NamedTuple):
    """Inputs of the pass on one device: static options, the view, `has_token` of each row, and the packed leaves."""

    plan: LossPlan
    requests: _Requests
    device: DeviceView
    has_token: Array
    leaves: Leaves


def _on_device(
    plan: LossPlan, requests: _Requests, weights: Weights, constants: Constants, leaves: Leaves
) -> tuple[tuple[Array, Any], Any]:
    """Computes loss, metrics and gradients; gradients have the shapes and types of the weights and leaves."""
    axes = MeshAxes.of(plan.spec)
    leading = weights.hidden.shape[:-1]
    spec, gathered = _gather_heads(plan.spec, weights)
    device = _in_step(DeviceView.of(spec, gathered, constants), axes)
    packing = device.packing
    has_token = jnp.arange(packing.rows) < packing.tokens if packing.has_token is None else packing.has_token

    def packed(arrays: Any) -> Any:
        return pack(packing, [x.reshape(packing.tokens, *x.shape[len(leading) :]) for x in arrays])

    inputs = _Inputs(plan, requests, device, has_token, plan.split(leaves, packed))
    start = vary_alike((_empty_carry(inputs), device.tokens))[0]
    end: _Carry = device.loop_tiles(lambda index, carry: _add_tile(inputs, index, carry), start)

    def unpacked(values: Any) -> Any:
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), unpack(packing, values))

    gradients = _finish(plan.spec, needing_gradient(weights, requests.weights), end.weights, unpacked)
    to_leaves = tuple(
        None if x is None else axes.sum_over_tokens(x).astype(leaf.dtype) if scalar else unpacked(x)
        for x, leaf, scalar in zip(end.leaves, leaves, plan.scalars, strict=True)
    )
    return (axes.sum_over_tokens(end.loss), unpacked(end.metrics)), (gradients, to_leaves)


def _gather_heads(spec: Spec, weights: Weights) -> tuple[Spec, Weights]:
    """Gathers all of `D` of the heads, once for all chunks of tokens, and says so in the spec."""
    axes = MeshAxes.of(spec)
    if spec.sharding is None or not axes.embed:
        return spec, weights
    head = axes.gather_embed(weights.head, embed_axis(spec.layout))
    ref_head = weights.ref_head
    if ref_head is not None:
        ref_head = axes.gather_embed(ref_head, embed_axis(spec.ref_layout))
    split = PartitionSpec(None, axes.vocab) if spec.layout == "dv" else PartitionSpec(axes.vocab, None)
    sharding = dataclasses.replace(spec.sharding, head=split)
    return dataclasses.replace(spec, sharding=sharding), weights._replace(head=head, ref_head=ref_head)


def _in_step(device: DeviceView, axes: MeshAxes) -> DeviceView:
    """Lets all devices run the same number of tiles where the devices of the vocabulary exchange sums in each."""
    if not axes.vocab or not axes.tokens or device.packing.has_token is None:
        return device
    packing = dataclasses.replace(device.packing, tiles=lax.pmax(device.packing.tiles, axes.tokens))
    # A device without tokens runs tiles of whatever is under the mask.
    tokens = device.tokens
    has_token = device.packing.has_token
    hidden = zero_unless(has_token, tokens.hidden)
    ref_hidden = None if tokens.ref_hidden is None else zero_unless(has_token, tokens.ref_hidden)
    return device._replace(packing=packing, tokens=tokens._replace(hidden=hidden, ref_hidden=ref_hidden))


def _empty_carry(inputs: _Inputs) -> _Carry:
    device = inputs.device
    packing = inputs.device.packing
    tile = device.get_tile(jnp.int32(0), device.tokens)
    leaves = inputs.plan.split(inputs.leaves, lambda arrays: device.get_tile(jnp.int32(0), arrays))

    def metrics_of(tokens: Tokens, leaves: Leaves) -> Any:
        return inputs.plan(statistics(device.spec, empty_sums(device.spec, tokens, device.dtype))[0], leaves)[1]

    shapes = jax.eval_shape(metrics_of, tile, leaves)
    needed = needing_gradient(device.weights, inputs.requests.weights)._replace(
        hidden=device.tokens.hidden if inputs.requests.weights.hidden else None,
        ref_hidden=device.tokens.ref_hidden if inputs.requests.weights.ref_hidden else None,
    )
    columns = device.weights.head.shape[1 - embed_axis(device.spec.layout)] if device.axes.vocab else None
    logits = jnp.zeros((packing.tile_size, columns or device.spec.vocab_size), device.dtype)
    return _Carry(
        loss=jnp.zeros((), device.dtype),
        metrics=jax.tree.map(lambda x: jnp.zeros((packing.rows, *x.shape[1:]), x.dtype), shapes),
        weights=jax.tree.map(lambda x: jnp.zeros(x.shape, device.dtype), needed),
        leaves=_empty_leaves(inputs),
        logits=_Kept(logits, None if tile.ref_hidden is None else logits),
    )


def _empty_leaves(inputs: _Inputs) -> tuple[Array | None, ...]:
    """Returns zeros for the gradients of the leaves; a scalar accumulates in the type of the statistics."""
    parts = zip(inputs.leaves, inputs.requests.leaves, inputs.plan.scalars, strict=True)
    return tuple(
        jnp.zeros_like(x, dtype=inputs.device.dtype if scalar else None) if need else None for x, need, scalar in parts
    )


def _add_tile(inputs: _Inputs, index: Array, carry: _Carry) -> _Carry:
    """Adds the loss and the gradients of one tile of tokens."""
    device = inputs.device
    plan = inputs.plan
    tokens, valid = device.get_tile(index, (device.tokens, inputs.has_token))
    leaves = plan.split(inputs.leaves, lambda arrays: device.get_tile(index, arrays))
    sums, logits = _keep_logits(device, tokens, carry.logits)
    stats, residuals = statistics(device.spec, merge(device.spec, sums, device.axes)[0])
    if not inputs.requests.any:
        loss, metrics = plan(stats, leaves)
        total = carry.loss + zero_unless(valid, loss).sum()
        return carry._replace(loss=total, metrics=device.set_tile(index, carry.metrics, metrics), logits=logits)
    loss, metrics, cotangents, to_leaves = _differentiate(inputs, stats, leaves, valid)
    row = RowInputs(tokens, residuals, cotangents)
    weights = carry.weights
    if any(inputs.requests.weights):
        weights = add_in_tile(device, index, weights, functools.partial(_add_gradients, device, row, logits))
    return _Carry(
        loss=carry.loss + loss,
        metrics=device.set_tile(index, carry.metrics, metrics),
        weights=weights,
        leaves=_add_leaves(inputs, index, carry.leaves, to_leaves),
        logits=logits,
    )


def _keep_logits(device: DeviceView, tokens: Tokens, logits: _Kept) -> tuple[Sums, _Kept]:
    """Computes the logits of a tile of tokens over the vocabulary, their sums, and keeps them."""

    # The logit of a target is read from the kept ones, which saves a pass over each tile.
    late = tokens.kept is None
    read = tokens._replace(targets=None) if late else tokens

    def body(carry: tuple[Sums, _Kept], chunk: Chunk) -> tuple[Sums, _Kept]:
        sums, stored = carry
        new, values = score_tile(device, sums, chunk, read, keep=True)
        write = functools.partial(lax.dynamic_update_slice_in_dim, start_index=chunk.start, axis=1)
        return new, jax.tree.map(write, stored, _Kept(*values))

    sums, logits = device.scan_chunks(body, (empty_sums(device.spec, read, device.dtype), logits))
    return sums._replace(target=_target_logits(device, tokens, logits.policy)) if late else sums, logits


def _target_logits(device: DeviceView, tokens: Tokens, logits: Array) -> Array:
    """Returns `[tile]`, the logit of each target, or 0 where another device holds its column."""
    assert tokens.targets is not None
    at, inside = device.axes.place_in_vocab(tokens.targets, logits.shape[1])
    at_targets = jnp.take_along_axis(logits, at[:, None], axis=1, mode="clip")[:, 0]
    return at_targets if inside is None else jnp.where(inside, at_targets, 0)


def _differentiate(
    inputs: _Inputs, stats: Stats, leaves: Leaves, valid: Array
) -> tuple[Array, Any, Cotangents, tuple[Array | None, ...]]:
    """Returns loss and metrics of a tile, the cotangents of its statistics, and the gradients to its leaves."""
    needed = inputs.requests.leaves

    def total(stats: Stats, free: list[Array]) -> tuple[Array, Any]:
        rest = iter(free)
        loss, metrics = inputs.plan(
            stats, tuple(next(rest) if need else x for x, need in zip(leaves, needed, strict=True))
        )
        return zero_unless(valid, loss).sum(), metrics

    free = [x for x, need in zip(leaves, needed, strict=True) if need]
    loss, pull, metrics = jax.vjp(total, stats, free, has_aux=True)
    # A row without a token may have a derivative that is not finite, which 0 does not cancel.
    to_stats, to_free = jax.tree.map(functools.partial(zero_unless, valid), pull(jnp.ones_like(loss)))
    if not inputs.device.spec.entropy_gradient:
        to_stats.pop("entropy", None)
    rest = iter(to_free)
    return loss, metrics, Cotangents(**to_stats), tuple(next(rest) if need else None for need in needed)


def _add_leaves(
    inputs: _Inputs, index: Array, sums: tuple[Array | None, ...], more: tuple[Array | None, ...]
) -> tuple[Array | None, ...]:
    """Writes the gradients of a tile's leaves, and adds gradients of scalars."""

    def add(total: Array | None, part: Array | None, scalar: bool) -> Array | None:
        if total is None or part is None:
            return None
        return total + part.astype(total.dtype) if scalar else inputs.device.set_tile(index, total, part)

    return tuple(add(*each) for each in zip(sums, more, inputs.plan.scalars, strict=True))


def _add_gradients(device: DeviceView, row: RowInputs, kept: _Kept, sums: Gradients) -> Gradients:
    """Adds the gradients of a tile of tokens, from its logits, to the gradients of its rows and of the heads."""
    if sums.head is not None and device.spec.layout == "dv":
        row = row._replace(turned=device.turn(row.tokens.hidden, device.weights.head))

    def body(sums: Gradients, chunk: Chunk) -> Gradients:
        logits = _kept_logits(device, chunk, row.tokens, kept)
        new = add_products(device, chunk, row, logits, get_columns(device.spec, chunk, sums))
        return set_columns(device.spec, chunk, sums, new)

    return device.scan_chunks(body, sums)


def _kept_logits(device: DeviceView, chunk: Chunk, tokens: Tokens, kept: _Kept) -> tuple[Logits, Logits | None]:
    """Returns the kept logits of a chunk of columns, as `DeviceView.logits` computes them."""

    def of(values: Array, softcap: Array | None) -> Logits:
        values = lax.dynamic_slice_in_dim(values, chunk.start, chunk.size, 1)
        # Columns that count in the next chunk have been overwritten with their logits.
        values = values if chunk.valid is None else jnp.where(chunk.valid[None], values, IMPOSSIBLE)
        return Logits(values, logit_slope(values, tokens.inverse_temperature[:, None], softcap))

    policy = of(kept.policy, device.constants.softcap)
    return policy, None if kept.ref is None else of(kept.ref, device.constants.ref_softcap)


def _finish(spec: Spec, weights: Gradients, sums: Gradients, unpacked: Callable[[Any], Any]) -> Gradients:
    """Returns the gradients on this device, in the shapes and types of the weights that need them."""
    hidden, ref_hidden = MeshAxes.of(spec).sum_over_vocab(unpacked((sums.hidden, sums.ref_hidden)))
    done = sum_over_tokens(spec, sums)._replace(hidden=hidden, ref_hidden=ref_hidden)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), done, weights)
