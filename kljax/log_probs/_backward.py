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
from kljax.log_probs._columns import Columns, Mesh, over_columns
from kljax.log_probs._forward import Saved, flat_tokens
from kljax.log_probs._inputs import Data, Weights, statistics_dtype
from kljax.log_probs._options import Spec
from kljax.log_probs._rows import Rows, arrange, pack, put_tile, tile_of, unpack
from kljax.log_probs._tile import Logits, Tokens, is_target, pair_of_logits, to_head, to_hidden


class Cotangents(NamedTuple):
    """`[...]` per token; None where nothing depends on the statistic."""

    log_prob: Array | None = None
    logsumexp: Array | None = None
    entropy: Array | None = None
    kl: Array | None = None


class Asked(NamedTuple):
    """Which gradients are wanted."""

    hidden: bool
    head: bool
    bias: bool = False
    ref_hidden: bool = False
    ref_head: bool = False


class _Part(NamedTuple):
    """All that is known of the rows of a tile."""

    tokens: Tokens
    saved: Saved
    cotangents: Cotangents


def backward_by_pull(saved: Saved, cotangents: Cotangents, hidden: Array, mask: Array | None) -> Array:
    """The gradient to the hidden states from the slopes that the forward pass has kept."""
    assert saved.toward is not None and saved.away is not None
    dtype = saved.logsumexp.dtype
    toward, away = saved.toward.astype(dtype), saved.away.astype(dtype)
    total = jnp.zeros_like(away)
    if cotangents.log_prob is not None:
        total = total + cotangents.log_prob[..., None] * (toward - away)
    if cotangents.logsumexp is not None:
        total = total + cotangents.logsumexp[..., None] * away
    return (total if mask is None else jnp.where(mask[..., None], total, 0)).astype(hidden.dtype)


def backward(spec: Spec, weights: Weights, data: Data, saved: Saved, cotangents: Cotangents, asked: Asked) -> Weights:
    """Gradients of the shapes and types of the weights; None for those not asked for."""
    mesh, dtype = Mesh.of(spec), statistics_dtype(weights)
    flat, mask = flat_tokens(weights, data)
    rows = arrange(mask, flat.hidden.shape[0], spec.tile.tokens)
    per_token = jax.tree.map(lambda x: x.reshape(-1), (saved, cotangents))
    part = _Part(*pack(rows, (flat, *per_token)))
    start = _Gradients.zeros(weights, part.tokens, asked, dtype)

    def body(carry: _Gradients, columns: Columns) -> _Gradients:
        return _chunk(spec, data, columns, part, rows, mesh, asked, carry, dtype)

    end = over_columns(spec, weights, mesh, body, start)
    hidden, ref_hidden = mesh.sum_over_vocab(unpack(rows, (end.hidden, end.ref_hidden)))

    def like(gradient: Array | None, primal: Array | None) -> Array | None:
        return None if gradient is None or primal is None else gradient.reshape(primal.shape).astype(primal.dtype)

    return Weights(like(hidden, weights.hidden), end.head, end.bias, like(ref_hidden, weights.ref_hidden), end.ref_head)  # type: ignore[arg-type]


class _Gradients(NamedTuple):
    """Those of the hidden states `[padded, D]` in the type of the statistics, the rest like what they are of."""

    hidden: Array | None
    head: Array | None
    bias: Array | None
    ref_hidden: Array | None
    ref_head: Array | None

    @classmethod
    def zeros(cls, weights: Weights, tokens: Tokens, asked: Asked, dtype: jnp.dtype) -> "_Gradients":
        def like(wanted: bool, x: Array | None, kind: jnp.dtype | None = None) -> Array | None:
            return jnp.zeros_like(x, dtype=kind) if wanted and x is not None else None

        return cls(
            like(asked.hidden, tokens.hidden, dtype),
            like(asked.head, weights.head),
            like(asked.bias, weights.bias),
            like(asked.ref_hidden, tokens.ref_hidden, dtype),
            like(asked.ref_head, weights.ref_head),
        )


class _Chunk(NamedTuple):
    """Gradients of one chunk of columns while its tokens are gone through."""

    hidden: Array | None
    ref_hidden: Array | None
    head: Array | None
    bias: Array | None
    ref_head: Array | None


def _chunk(
    spec: Spec,
    data: Data,
    columns: Columns,
    part: _Part,
    rows: Rows,
    mesh: Mesh,
    asked: Asked,
    carry: _Gradients,
    dtype: jnp.dtype,
) -> _Gradients:
    """The gradients with one more chunk: all its tokens, then its columns of the head are complete."""

    def zeros(x: Array | None, wanted: bool) -> Array | None:
        return jnp.zeros_like(x, dtype=dtype) if wanted and x is not None else None

    def tile(index: Array, sums: _Chunk) -> _Chunk:
        own = tile_of(rows, index, part)
        return _add_tile(spec, data, columns, own, rows, index, sums, dtype)

    ref_head = columns.head if columns.ref_head is None else columns.ref_head
    chunk = lax.fori_loop(
        0,
        rows.tiles,
        tile,
        _Chunk(
            carry.hidden,
            carry.ref_hidden,
            zeros(columns.head, asked.head),
            zeros(columns.bias, asked.bias),
            zeros(ref_head, asked.ref_head),
        ),
    )

    def place(whole: Array | None, piece: Array | None) -> Array | None:
        if whole is None or piece is None:
            return None
        piece = mesh.scatter(piece, spec.embed_axis).astype(whole.dtype)
        return lax.dynamic_update_slice_in_dim(whole, piece, columns.start, axis=spec.vocab_axis)

    bias = carry.bias
    if bias is not None and chunk.bias is not None:
        piece = mesh.sum_over_tokens(chunk.bias).astype(bias.dtype)
        bias = lax.dynamic_update_slice_in_dim(bias, piece, columns.start, axis=0)
    return _Gradients(
        chunk.hidden, place(carry.head, chunk.head), bias, chunk.ref_hidden, place(carry.ref_head, chunk.ref_head)
    )


def _add_tile(
    spec: Spec,
    data: Data,
    columns: Columns,
    part: _Part,
    rows: Rows,
    index: Array,
    sums: _Chunk,
    dtype: jnp.dtype,
) -> _Chunk:
    policy, ref = pair_of_logits(spec, columns, part.tokens, data, dtype)
    of_policy, of_ref = _slopes(spec, policy, ref, columns, part, data)
    if sums.hidden is not None or sums.head is not None or sums.bias is not None:
        before_scale = of_policy * policy.slope
        products = before_scale * data.logit_scale
        if sums.bias is not None:
            sums = sums._replace(bias=sums.bias + before_scale.sum(0))
        if sums.hidden is not None:
            more = tile_of(rows, index, sums.hidden) + to_hidden(spec, products, columns.head, dtype)
            sums = sums._replace(hidden=put_tile(rows, index, sums.hidden, more))
        if sums.head is not None:
            more = to_head(spec, products, part.tokens.hidden, columns.head, dtype)
            sums = sums._replace(head=sums.head + more)
    if ref is None or of_ref is None or part.tokens.ref_hidden is None:
        return sums
    products = of_ref * ref.slope * data.logit_scale
    head = columns.head if columns.ref_head is None else columns.ref_head
    if sums.ref_hidden is not None:
        more = tile_of(rows, index, sums.ref_hidden) + to_hidden(spec, products, head, dtype)
        sums = sums._replace(ref_hidden=put_tile(rows, index, sums.ref_hidden, more))
    if sums.ref_head is not None:
        sums = sums._replace(ref_head=sums.ref_head + to_head(spec, products, part.tokens.ref_hidden, head, dtype))
    return sums


def _slopes(
    spec: Spec, policy: Logits, ref: Logits | None, columns: Columns, part: _Part, data: Data
) -> tuple[Array, Array | None]:
    """`[rows, columns]` slopes of the loss to the logits of the policy and of the reference."""
    cotangents, saved = part.cotangents, part.saved
    log_p = policy.values - saved.logsumexp[:, None]
    p = jnp.exp(log_p)
    at_p = jnp.zeros_like(saved.logsumexp)
    if cotangents.log_prob is not None:
        at_p = at_p - cotangents.log_prob
    if cotangents.logsumexp is not None:
        at_p = at_p + cotangents.logsumexp
    weight = at_p[:, None]
    if cotangents.entropy is not None and saved.entropy is not None:
        weight = weight - cotangents.entropy[:, None] * (log_p + saved.entropy[:, None])
    slopes = p * weight
    if cotangents.log_prob is not None:
        slopes = slopes + jnp.where(is_target(columns, part.tokens), cotangents.log_prob[:, None], 0)
    if cotangents.kl is None or ref is None:
        return slopes, None
    of_policy, of_ref = _divergence_slopes(spec, policy.values, ref.values, log_p, p, saved, data)
    # Where it is infinite its gradient is 0; a row without a token has a cotangent of 0.
    kl = cotangents.kl
    if saved.mean_gap is not None:
        kl = jnp.where(jnp.isnan(saved.mean_gap), 0, kl)
    return slopes + kl[:, None] * of_policy, kl[:, None] * of_ref


def _divergence_slopes(
    spec: Spec, policy: Array, ref: Array, log_p: Array, p: Array, saved: Saved, data: Data
) -> tuple[Array, Array]:
    assert saved.ref_logsumexp is not None
    log_q = ref - saved.ref_logsumexp[:, None]
    q = jnp.exp(log_q)
    if spec.divergence == "jsd":
        assert data.beta is not None and saved.policy_mean is not None and saved.ref_mean is not None
        to_policy, to_ref = online.mixture_slopes(log_p, log_q, data.beta)
        return (
            p * (-(1 - data.beta) * to_policy - saved.policy_mean[:, None]),
            q * (-data.beta * to_ref - saved.ref_mean[:, None]),
        )
    assert saved.mean_gap is not None
    mean_gap = jnp.nan_to_num(saved.mean_gap, nan=0.0)[:, None]
    if spec.divergence == "reverse":
        return p * ((policy - ref) - mean_gap), q - p
    return p - q, q * ((ref - policy) - mean_gap)
