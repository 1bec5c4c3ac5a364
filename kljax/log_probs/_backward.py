"""The backward pass: every tile of logits once more, its gradient in closed form, and the rule that JAX calls.

With `g` the cotangent of a token's log-prob, `G` that of its logsumexp, `H'` of its entropy `H`, `S'` of the sum of its
squared probabilities `S`, and `K'` of its KL,

    d loss / d z = g 1[target] + p (G - g - H' (log p + H) + 2 S' (p - S)) + d KL,

    d KL = K' p (d - mean of d) for the first distribution, with d the difference of its logits to the other's, and
    K' (q - p) for the other's logits.

With a set of kept tokens, over which `p~` is the softmax, and `M'` the cotangent of the log of their mass, the terms in
`g` are `g (1[target] - p~) + M' (p~ - p)` instead.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from kljax._typing import Array
from kljax.log_probs._forward import Residuals, forward, log_mixture_ratios
from kljax.log_probs._head import embed_axis
from kljax.log_probs._inputs import Constants, Spec, Weights
from kljax.log_probs._tiles import Chunk, DeviceView, Logits, MeshAxes, Tokens, is_kept, is_target, pack, unpack

Stats = dict[str, Array]


class Cotangents(NamedTuple):
    """`[...]` per token; None where nothing depends on the statistic."""

    log_prob: Array | None = None
    logsumexp: Array | None = None
    entropy: Array | None = None
    kl: Array | None = None
    sum_squared_probs: Array | None = None
    log_kept_mass: Array | None = None


@jax.tree_util.register_static
class NeedsGradient(NamedTuple):
    """Which fields of `Weights` need a gradient; static."""

    hidden: bool
    head: bool
    bias: bool = False
    ref_hidden: bool = False
    ref_head: bool = False
    ref_bias: bool = False

    @classmethod
    def of(cls, weights: Any) -> "NeedsGradient":
        """Reads it from weights as a forward rule with symbolic zeros gets them."""
        return cls(*(x is not None and x.perturbed for x in weights))


class Gradients(NamedTuple):
    """Gradients by the fields of `Weights`, None where not needed; `[rows, D]` and wide for the hidden states.

    Inside the loop over tiles, gradients of heads and biases cover the columns of the chunk.
    """

    hidden: Array | None
    head: Array | None
    bias: Array | None
    ref_hidden: Array | None
    ref_head: Array | None
    ref_bias: Array | None


# The fields of `Gradients` with a value per column of the vocabulary.
_OF_COLUMNS = ("head", "bias", "ref_head", "ref_bias")


class RowInputs(NamedTuple):
    """Per-row inputs of the backward pass: tokens, residuals, cotangents; and hidden states as `[D, rows]`, or None."""

    tokens: Tokens
    residuals: Residuals
    cotangents: Cotangents
    turned: Array | None = None


# ---- the differentiable operation ----


def tiled_stats(spec: Spec, weights: Weights, constants: Constants) -> Stats:
    """Computes the requested statistics tile by tile; 0 where the mask is 0."""
    return _stats(spec, *vary_alike((weights, constants)))


def vary_alike(tree: Any) -> Any:
    """Makes all arrays vary over the same axes of a caller's `shard_map`, so that loops carry one type."""
    axes = {axis for x in jax.tree.leaves(tree) for axis in jax.typeof(x).manual_axis_type.varying}

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def specs_of(spec: Spec, fields: Any) -> Any:
    """Returns the `PartitionSpec` of every array of a named tuple."""
    known = spec.specs()
    return type(fields)(
        *(None if x is None else known.get(name, PartitionSpec()) for name, x in fields._asdict().items())
    )


def on_devices(
    spec: Spec, local: Callable[..., Any], specs: Callable[[PartitionSpec], tuple[tuple[Any, ...], Any]]
) -> Callable[..., Any]:
    """Returns `local(weights, constants, *more)` as it is on one device, or in a `shard_map` for a sharded head.

    `specs` maps the spec of the tokens to the specs of `more` and of the results.
    """
    if spec.sharding is None:
        return local
    sharding = spec.sharding

    def mapped(weights: Weights, constants: Constants, *more: Any) -> Any:
        of_more, out_specs = specs(sharding.tokens)
        in_specs = (specs_of(spec, weights), specs_of(spec, constants), *of_more)
        program = jax.shard_map(
            local, mesh=sharding.resolved_mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return program(weights, constants, *more)

    return mapped


def _run_forward(
    spec: Spec, weights: Weights, constants: Constants, *, with_hidden_grads: bool
) -> tuple[Stats, Residuals]:
    """Runs the forward pass, on one device or in a `shard_map`."""
    local = functools.partial(forward, spec, with_hidden_grads=with_hidden_grads)
    return on_devices(spec, local, lambda tokens: ((), tokens))(weights, constants)


def _run_backward(
    spec: Spec,
    needs: NeedsGradient,
    weights: Weights,
    constants: Constants,
    per_token: tuple[Residuals, Cotangents],
) -> Gradients:
    """Runs the backward pass, on one device or in a `shard_map`."""
    local = functools.partial(backward, spec, needs)
    to_weights = needing_gradient(weights, needs)
    return on_devices(spec, local, lambda tokens: ((tokens,), specs_of(spec, to_weights)))(
        weights, constants, per_token
    )


def needing_gradient(weights: Weights, needs: NeedsGradient) -> Gradients:
    """Returns the weights that need a gradient."""
    return Gradients(*(x if need else None for x, need in zip(weights, needs, strict=True)))


def without_flags(tree: Any) -> Any:
    """Returns the values of arguments as a forward rule with symbolic zeros gets them."""
    return jax.tree.map(lambda x: x.value, tree, is_leaf=lambda x: hasattr(x, "perturbed"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(spec: Spec, weights: Weights, constants: Constants) -> Stats:
    return _run_forward(spec, weights, constants, with_hidden_grads=False)[0]


def _stats_fwd(spec: Spec, weights: Any, constants: Any) -> tuple[Stats, Any]:
    needs = NeedsGradient.of(weights)
    weights, constants = without_flags((weights, constants))
    # LoRA: only the hidden states need a gradient, and only of the target's logit and the logsumexp.
    with_hidden_grads = (
        needs == NeedsGradient(hidden=True, head=False)
        and constants.targets is not None
        and constants.kept is None
        and spec.divergence is None
        and not spec.entropy_gradient
        and not spec.sum_squared_probs
    )
    stats, residuals = _run_forward(spec, weights, constants, with_hidden_grads=with_hidden_grads)
    return stats, (needs, weights, constants, residuals)


def _stats_bwd(spec: Spec, saved: Any, cotangents: Any) -> tuple[Weights, None]:
    needs, weights, constants, residuals = saved
    requested = Cotangents(**{name: None if isinstance(x, SymbolicZero) else x for name, x in cotangents.items()})
    if not spec.entropy_gradient:
        requested = requested._replace(entropy=None)
    if residuals.grad_target is not None:
        hidden = scale_hidden_grads(residuals, requested, weights.hidden, constants.mask)
        return Weights(hidden, *(None,) * 5), None  # type: ignore[arg-type]
    return Weights(*_run_backward(spec, needs, weights, constants, (residuals, requested))), None  # type: ignore[arg-type]


_stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)


def scale_hidden_grads(residuals: Residuals, cotangents: Cotangents, hidden: Array, mask: Array | None) -> Array:
    """Returns the gradient to the hidden states from the gradients that the forward pass has saved."""
    assert residuals.grad_target is not None
    assert residuals.grad_logsumexp is not None
    dtype = residuals.logsumexp.dtype
    target = residuals.grad_target.astype(dtype)
    logsumexp = residuals.grad_logsumexp.astype(dtype)
    total = jnp.zeros_like(logsumexp)
    if cotangents.log_prob is not None:
        total = total + cotangents.log_prob[..., None] * (target - logsumexp)
    if cotangents.logsumexp is not None:
        total = total + cotangents.logsumexp[..., None] * logsumexp
    return (total if mask is None else jnp.where(mask[..., None], total, 0)).astype(hidden.dtype)


# ---- the pass ----


def backward(
    spec: Spec,
    needs: NeedsGradient,
    weights: Weights,
    constants: Constants,
    per_token: tuple[Residuals, Cotangents],
) -> Gradients:
    """Returns gradients of the shapes and types of the weights; None where not needed."""
    device = DeviceView.of(spec, weights, constants)
    residuals, cotangents = jax.tree.map(lambda x: x.reshape(-1), per_token)
    rows = RowInputs(
        device.tokens, pack(device.packing, residuals), pack(device.packing, cotangents, zero_padding=True)
    )
    needed = needing_gradient(weights, needs)
    like = needed._replace(
        hidden=device.tokens.hidden if needs.hidden else None,
        ref_hidden=device.tokens.ref_hidden if needs.ref_hidden else None,
    )
    wide = {"hidden": device.dtype, "ref_hidden": device.dtype}
    carry = Gradients(*(_zeros(x, wide.get(name)) for name, x in like._asdict().items()))
    end: Gradients = device.scan_chunks(lambda carry, chunk: _add_chunk(device, chunk, rows, carry), carry)
    hidden, ref_hidden = device.axes.sum_over_vocab(unpack(device.packing, (end.hidden, end.ref_hidden)))

    def shaped(gradient: Array | None, primal: Array | None) -> Array | None:
        return None if gradient is None or primal is None else gradient.reshape(primal.shape).astype(primal.dtype)

    return end._replace(hidden=shaped(hidden, needed.hidden), ref_hidden=shaped(ref_hidden, needed.ref_hidden))


def _zeros(x: Array | None, dtype: jnp.dtype | None = None) -> Array | None:
    return None if x is None else jnp.zeros_like(x, dtype=dtype)


def _add_chunk(device: DeviceView, chunk: Chunk, rows: RowInputs, carry: Gradients) -> Gradients:
    """Adds the gradients of one chunk; after all tiles of tokens, gradients of its columns are complete."""
    start = _map_columns(lambda name, x: jnp.zeros_like(getattr(chunk, name), dtype=device.dtype), carry)
    sums: Gradients = device.loop_tiles(lambda index, sums: _add_tile(device, chunk, rows, index, sums), start)
    return set_columns(device.spec, chunk, carry, sum_over_tokens(device.spec, sums))


def get_columns(spec: Spec, chunk: Chunk, gradients: Gradients) -> Gradients:
    """Returns the gradients with only the columns of the chunk in heads and biases."""
    return _map_columns(
        lambda name, x: lax.dynamic_slice_in_dim(x, chunk.start, chunk.size, _column_axis(spec, name)), gradients
    )


def set_columns(spec: Spec, chunk: Chunk, gradients: Gradients, of_chunk: Gradients) -> Gradients:
    """Returns the gradients of a chunk with its columns written into the gradients of the heads and biases."""

    def write(name: str, columns: Array) -> Array:
        gradient = getattr(gradients, name)
        columns = columns.astype(gradient.dtype)
        return lax.dynamic_update_slice_in_dim(gradient, columns, chunk.start, _column_axis(spec, name))

    return _map_columns(write, of_chunk)


def sum_over_tokens(spec: Spec, gradients: Gradients) -> Gradients:
    """Sums gradients of heads and biases over the tokens of all devices; each device keeps its part of `D`."""
    axes = MeshAxes.of(spec)

    def total(name: str, x: Array) -> Array:
        return axes.sum_over_tokens(x) if x.ndim == 1 else axes.scatter_embed(x, 1 - _column_axis(spec, name))

    return _map_columns(total, gradients)


def _map_columns(function: Callable[[str, Array], Array], gradients: Gradients) -> Gradients:
    """Applies `function(name, gradient)` to the gradients of heads and biases."""
    parts = {name: getattr(gradients, name) for name in _OF_COLUMNS}
    return gradients._replace(**{name: None if x is None else function(name, x) for name, x in parts.items()})


def _column_axis(spec: Spec, name: str) -> int:
    if name in ("bias", "ref_bias"):
        return 0
    return 1 - embed_axis(spec.layout if name == "head" else spec.ref_layout)


def _add_tile(device: DeviceView, chunk: Chunk, rows: RowInputs, index: Array, sums: Gradients) -> Gradients:
    tile = device.get_tile(index, rows)
    logits = device.logits(chunk, tile.tokens)
    return add_in_tile(device, index, sums, functools.partial(add_products, device, chunk, tile, logits))


def add_in_tile(device: DeviceView, index: Array, sums: Gradients, add: Callable[[Gradients], Gradients]) -> Gradients:
    """Adds to the gradients of one tile of rows: `add` gets and returns the sums with the hidden states of the tile."""
    hidden, ref_hidden = device.get_tile(index, (sums.hidden, sums.ref_hidden))
    new = add(sums._replace(hidden=hidden, ref_hidden=ref_hidden))
    hidden, ref_hidden = device.set_tile(index, (sums.hidden, sums.ref_hidden), (new.hidden, new.ref_hidden))
    return new._replace(hidden=hidden, ref_hidden=ref_hidden)


def add_products(
    device: DeviceView, chunk: Chunk, tile: RowInputs, logits: tuple[Logits, Logits | None], sums: Gradients
) -> Gradients:
    """Adds the gradients of one tile of logits to the gradients of its rows and of the columns of its chunk."""
    spec = device.spec
    policy, ref = logits
    to_policy, to_ref = _logit_grads(device, chunk, tile, policy, ref)
    raw = to_policy * policy.slope
    if sums.bias is not None:
        sums = sums._replace(bias=sums.bias + raw.sum(0))
    # The barrier keeps compilers from computing this anew inside either product.
    products = lax.optimization_barrier((raw * device.constants.logit_scale).astype(chunk.head.dtype))
    if sums.hidden is not None:
        sums = sums._replace(hidden=sums.hidden + device.grad_hidden(products, chunk.head, spec.layout))
    if sums.head is not None:
        if tile.turned is None:
            more = device.grad_head(products, tile.tokens.hidden, chunk.head, spec.layout)
        else:
            more = device.grad_head_of_turned(products, tile.turned)
        sums = sums._replace(head=sums.head + more)
    if ref is None or to_ref is None:
        return sums
    raw = to_ref * ref.slope
    if sums.ref_bias is not None:
        sums = sums._replace(ref_bias=sums.ref_bias + raw.sum(0))
    products = to_ref * (ref.slope * device.ref_scale)
    assert chunk.ref_head is not None
    if sums.ref_hidden is not None:
        more = device.grad_hidden(products, chunk.ref_head, spec.ref_layout)
        sums = sums._replace(ref_hidden=sums.ref_hidden + more)
    if sums.ref_head is not None and tile.tokens.ref_hidden is not None:
        more = device.grad_head(products, tile.tokens.ref_hidden, chunk.ref_head, spec.ref_layout)
        sums = sums._replace(ref_head=sums.ref_head + more)
    return sums


# ---- gradients to the logits ----


def _logit_grads(
    device: DeviceView, chunk: Chunk, tile: RowInputs, policy: Logits, ref: Logits | None
) -> tuple[Array, Array | None]:
    """Returns `[rows, columns]` gradients of the loss to the logits of the policy and of the reference."""
    cotangents = tile.cotangents
    residuals = tile.residuals
    log_p = policy.values - residuals.logsumexp[:, None]
    p = jnp.exp(log_p)
    grads = p * _weight_of_p(cotangents, residuals, p, log_p)
    if residuals.kept_logsumexp is not None:
        grads = grads + _kept_grads(chunk, tile, policy.values)
    if cotangents.log_prob is not None:
        grads = grads + jnp.where(is_target(chunk, tile.tokens), cotangents.log_prob[:, None], 0)
    if cotangents.kl is None or ref is None:
        return grads, None
    assert residuals.ref_logsumexp is not None
    q = jnp.exp(ref.values - residuals.ref_logsumexp[:, None])
    difference = policy.values - ref.values
    if device.spec.divergence == "jsd":
        to_policy, to_ref = _jsd_grads(p, q, difference, residuals, device.constants)
    else:
        to_policy, to_ref = _kl_grads(p, q, difference, residuals, reverse=device.spec.divergence == "reverse")
    kl = cotangents.kl
    if residuals.mean_difference is not None:
        # The gradient of an infinite KL is 0.
        kl = jnp.where(jnp.isnan(residuals.mean_difference), 0, kl)
    return grads + kl[:, None] * to_policy, kl[:, None] * to_ref


def _weight_of_p(cotangents: Cotangents, residuals: Residuals, p: Array, log_p: Array) -> Array:
    """Returns the factor of `p` in the gradient to the policy's logits, `[rows, 1]` or `[rows, columns]`."""
    of_row = jnp.zeros_like(residuals.logsumexp)
    if cotangents.log_prob is not None and residuals.kept_logsumexp is None:
        of_row = of_row - cotangents.log_prob
    if cotangents.log_kept_mass is not None:
        of_row = of_row - cotangents.log_kept_mass
    if cotangents.logsumexp is not None:
        of_row = of_row + cotangents.logsumexp
    weight = of_row[:, None]
    if cotangents.entropy is not None and residuals.entropy is not None:
        weight = weight - cotangents.entropy[:, None] * (log_p + residuals.entropy[:, None])
    if cotangents.sum_squared_probs is not None and residuals.sum_squared_probs is not None:
        centred = p - residuals.sum_squared_probs[:, None]
        weight = weight + 2 * cotangents.sum_squared_probs[:, None] * centred
    return weight


def _kept_grads(chunk: Chunk, tile: RowInputs, logits: Array) -> Array:
    """Returns the terms of the softmax over the kept tokens."""
    assert tile.residuals.kept_logsumexp is not None
    weight = jnp.zeros_like(tile.residuals.logsumexp)
    if tile.cotangents.log_prob is not None:
        weight = weight - tile.cotangents.log_prob
    if tile.cotangents.log_kept_mass is not None:
        weight = weight + tile.cotangents.log_kept_mass
    in_kept_set = is_kept(chunk, tile.tokens)
    log_probs = jnp.where(in_kept_set, logits - tile.residuals.kept_logsumexp[:, None], 0)
    return jnp.where(in_kept_set, jnp.exp(log_probs) * weight[:, None], 0)


def _kl_grads(p: Array, q: Array, difference: Array, residuals: Residuals, *, reverse: bool) -> tuple[Array, Array]:
    assert residuals.mean_difference is not None
    mean = jnp.nan_to_num(residuals.mean_difference, nan=0.0)[:, None]
    if reverse:
        return p * (difference - mean), q - p
    return p - q, q * (-difference - mean)


def _jsd_grads(
    p: Array, q: Array, difference: Array, residuals: Residuals, constants: Constants
) -> tuple[Array, Array]:
    assert residuals.log_ratio is not None
    assert residuals.policy_mean is not None
    assert residuals.ref_mean is not None
    assert constants.beta is not None
    beta = constants.beta
    to_policy, to_ref = log_mixture_ratios(-difference - residuals.log_ratio[:, None], beta)
    policy = p * (-(1 - beta) * to_policy - residuals.policy_mean[:, None])
    return policy, q * (-beta * to_ref - residuals.ref_mean[:, None])
