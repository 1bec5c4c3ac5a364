"""The backward pass on one device's tokens and columns: every tile of logits once more, and its slopes in closed form.

With `g` the cotangent of a token's log-prob, `G` that of its logsumexp, `H'` of its entropy `H` and `K'` of its KL,

    d loss / d z = g 1[target] + p (G - g - H' (log p + H)) + d KL,    d KL = K' p (d - mean of d) where p is the first
    distribution and d the difference of the logits to the other's, and K' (q - p) for the other's logits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kljax._typing import Array
from kljax.log_probs import _online as online
from kljax.log_probs._columns import Columns
from kljax.log_probs._forward import Saved
from kljax.log_probs._inputs import Data, Weights
from kljax.log_probs._options import Spec
from kljax.log_probs._rows import pack, unpack
from kljax.log_probs._shard import Logits, Shard, Tokens, is_target


class Cotangents(NamedTuple):
    """`[...]` per token; None where nothing depends on the statistic."""

    log_prob: Array | None = None
    logsumexp: Array | None = None
    entropy: Array | None = None
    kl: Array | None = None


@jax.tree_util.register_static
class Asked(NamedTuple):
    """Which gradients are wanted; part of a program, not of its data."""

    hidden: bool
    head: bool
    bias: bool = False
    ref_hidden: bool = False
    ref_head: bool = False


class Gradients(NamedTuple):
    """Those asked for: of the hidden states `[padded, D]` in the type of the statistics, the others like the weights.

    While the tokens of a chunk are gone through, `head`, `bias` and `ref_head` are those of its columns.
    """

    hidden: Array | None
    head: Array | None
    bias: Array | None
    ref_hidden: Array | None
    ref_head: Array | None


class Part(NamedTuple):
    """What is known of the rows: the tokens, what the forward pass has saved, and what the loss says of each."""

    tokens: Tokens
    saved: Saved
    cotangents: Cotangents


def backward_by_pull(saved: Saved, cotangents: Cotangents, hidden: Array, mask: Array | None) -> Array:
    """The gradient to the hidden states from the slopes that the forward pass has kept."""
    assert saved.toward is not None
    assert saved.away is not None
    dtype = saved.logsumexp.dtype
    toward, away = saved.toward.astype(dtype), saved.away.astype(dtype)
    total = jnp.zeros_like(away)
    if cotangents.log_prob is not None:
        total = total + cotangents.log_prob[..., None] * (toward - away)
    if cotangents.logsumexp is not None:
        total = total + cotangents.logsumexp[..., None] * away
    return (total if mask is None else jnp.where(mask[..., None], total, 0)).astype(hidden.dtype)


def backward(
    spec: Spec, asked: Asked, weights: Weights, data: Data, saved_and_cotangents: tuple[Saved, Cotangents]
) -> Gradients:
    """Gradients of the shapes and types of the weights; None for those not asked for."""
    shard = Shard.of(spec, weights, data)
    saved, cotangents = jax.tree.map(lambda x: x.reshape(-1), saved_and_cotangents)
    part = Part(shard.tokens, pack(shard.rows, saved), pack(shard.rows, cotangents, empty=True))
    wanted = Gradients(*(x if ask else None for x, ask in zip(weights, asked, strict=True)))
    start = wanted._replace(
        hidden=shard.tokens.hidden if asked.hidden else None,
        ref_hidden=shard.tokens.ref_hidden if asked.ref_hidden else None,
    )
    wide = {"hidden": shard.dtype, "ref_hidden": shard.dtype}
    carry = Gradients(*(_zeros(x, wide.get(name)) for name, x in start._asdict().items()))
    end: Gradients = shard.over_columns(lambda carry, columns: _add_chunk(shard, columns, part, carry), carry)
    hidden, ref_hidden = shard.mesh.sum_over_vocab(unpack(shard.rows, (end.hidden, end.ref_hidden)))

    def like(gradient: Array | None, primal: Array | None) -> Array | None:
        return None if gradient is None or primal is None else gradient.reshape(primal.shape).astype(primal.dtype)

    return end._replace(hidden=like(hidden, wanted.hidden), ref_hidden=like(ref_hidden, wanted.ref_hidden))


def _zeros(x: Array | None, dtype: jnp.dtype | None = None) -> Array | None:
    return None if x is None else jnp.zeros_like(x, dtype=dtype)


def _add_chunk(shard: Shard, columns: Columns, part: Part, carry: Gradients) -> Gradients:
    """The gradients with one more chunk: after all its tokens, those of its columns are complete."""

    def of_columns(whole: Array | None, columns: Array | None) -> Array | None:
        return None if whole is None else _zeros(columns, shard.dtype)

    chunk: Gradients = shard.over_tiles(
        lambda index, sums: _add_tile(shard, columns, part, index, sums),
        carry._replace(
            head=of_columns(carry.head, columns.head),
            bias=of_columns(carry.bias, columns.bias),
            ref_head=of_columns(carry.ref_head, columns.ref_head),
        ),
    )

    def place(whole: Array | None, piece: Array | None) -> Array | None:
        if whole is None or piece is None:
            return None
        if piece.ndim == 1:
            piece, axis = shard.mesh.sum_over_tokens(piece), 0
        else:
            piece, axis = shard.mesh.scatter(piece, shard.spec.embed_axis), shard.spec.vocab_axis
        return lax.dynamic_update_slice_in_dim(whole, piece.astype(whole.dtype), columns.start, axis=axis)

    return chunk._replace(
        head=place(carry.head, chunk.head),
        bias=place(carry.bias, chunk.bias),
        ref_head=place(carry.ref_head, chunk.ref_head),
    )


def _add_tile(shard: Shard, columns: Columns, parts: Part, index: Array, sums: Gradients) -> Gradients:
    part = shard.tile_of(index, parts)
    policy, ref = shard.logits(columns, part.tokens)
    of_policy, of_ref = _slopes(shard, columns, part, policy, ref)
    biased = of_policy * policy.slope
    if sums.bias is not None:
        sums = sums._replace(bias=sums.bias + biased.sum(0))
    # Made once, in the type that it is multiplied in: unasked, some compilers make it anew inside either product.
    products = lax.optimization_barrier((biased * shard.data.logit_scale).astype(columns.head.dtype))
    if sums.hidden is not None:
        sums = sums._replace(hidden=_add_hidden(shard, index, sums.hidden, products, columns.head))
    if sums.head is not None:
        sums = sums._replace(head=sums.head + shard.to_head(products, part.tokens.hidden, columns.head))
    if ref is None or of_ref is None:
        return sums
    products = of_ref * (ref.slope * shard.data.logit_scale)
    assert columns.ref_head is not None
    if sums.ref_hidden is not None:
        sums = sums._replace(ref_hidden=_add_hidden(shard, index, sums.ref_hidden, products, columns.ref_head))
    if sums.ref_head is not None and part.tokens.ref_hidden is not None:
        more = shard.to_head(products, part.tokens.ref_hidden, columns.ref_head)
        sums = sums._replace(ref_head=sums.ref_head + more)
    return sums


def _add_hidden(shard: Shard, index: Array, whole: Array, products: Array, head: Array) -> Array:
    return shard.put_tile(index, whole, shard.tile_of(index, whole) + shard.to_hidden(products, head))


def _slopes(
    shard: Shard, columns: Columns, part: Part, policy: Logits, ref: Logits | None
) -> tuple[Array, Array | None]:
    """`[rows, columns]` slopes of the loss to the logits of the policy and of the reference."""
    cotangents, saved = part.cotangents, part.saved
    log_p = policy.values - saved.logsumexp[:, None]
    p = jnp.exp(log_p)
    of_p = jnp.zeros_like(saved.logsumexp)
    if cotangents.log_prob is not None:
        of_p = of_p - cotangents.log_prob
    if cotangents.logsumexp is not None:
        of_p = of_p + cotangents.logsumexp
    weight = of_p[:, None]
    if cotangents.entropy is not None and saved.entropy is not None:
        weight = weight - cotangents.entropy[:, None] * (log_p + saved.entropy[:, None])
    slopes = p * weight
    if cotangents.log_prob is not None:
        slopes = slopes + jnp.where(is_target(columns, part.tokens), cotangents.log_prob[:, None], 0)
    if cotangents.kl is None or ref is None:
        return slopes, None
    assert saved.ref_logsumexp is not None
    q, gap = jnp.exp(ref.values - saved.ref_logsumexp[:, None]), policy.values - ref.values
    if shard.spec.divergence == "jsd":
        of_policy, of_ref = _jsd_slopes(p, q, gap, saved, shard.data)
    else:
        of_policy, of_ref = _kl_slopes(p, q, gap, saved, reverse=shard.spec.divergence == "reverse")
    kl = cotangents.kl
    if saved.mean_gap is not None:
        # Where it is infinite its gradient is 0.
        kl = jnp.where(jnp.isnan(saved.mean_gap), 0, kl)
    return slopes + kl[:, None] * of_policy, kl[:, None] * of_ref


def _kl_slopes(p: Array, q: Array, gap: Array, saved: Saved, *, reverse: bool) -> tuple[Array, Array]:
    assert saved.mean_gap is not None
    mean_gap = jnp.nan_to_num(saved.mean_gap, nan=0.0)[:, None]
    if reverse:
        return p * (gap - mean_gap), q - p
    return p - q, q * (-gap - mean_gap)


def _jsd_slopes(p: Array, q: Array, gap: Array, saved: Saved, data: Data) -> tuple[Array, Array]:
    assert saved.shift is not None
    assert saved.policy_mean is not None
    assert saved.ref_mean is not None
    assert data.beta is not None
    to_policy, to_ref = online.mixture_slopes(-gap - saved.shift[:, None], data.beta)
    of_policy = p * (-(1 - data.beta) * to_policy - saved.policy_mean[:, None])
    return of_policy, q * (-data.beta * to_ref - saved.ref_mean[:, None])
