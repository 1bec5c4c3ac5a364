"""The forward pass on one device's tokens and columns: statistics, and what the backward pass will need of them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kljax._typing import Array
from kljax.log_probs import _online as online
from kljax.log_probs._columns import Columns, Mesh, over_columns
from kljax.log_probs._inputs import Data, Weights, statistics_dtype
from kljax.log_probs._options import Spec
from kljax.log_probs._rows import Rows, arrange, pack, put_tile, tile_of, unpack
from kljax.log_probs._tile import Tokens, pair_of_logits, to_hidden


class Saved(NamedTuple):
    """`[...]` per token, for the backward pass; None for what it will not need.

    Attributes:
      logsumexp, ref_logsumexp: normalisers.
      entropy: of the policy.
      mean_gap: the mean of the difference of the logits that the gradient of a KL is about; NaN where the KL is infinite.
      policy_mean, ref_mean: the means of the slopes of a JSD.
      toward, away: `[..., D]` slope of the target's logit and of the logsumexp to the hidden states.
    """

    logsumexp: Array
    ref_logsumexp: Array | None = None
    entropy: Array | None = None
    mean_gap: Array | None = None
    policy_mean: Array | None = None
    ref_mean: Array | None = None
    toward: Array | None = None
    away: Array | None = None


class Pull(NamedTuple):
    """`[rows, D]` sums of columns of the head: weighted by the exponentials so far, and that of the target."""

    mean: Array
    target: Array


def flat_tokens(weights: Weights, data: Data) -> tuple[Tokens, Array | None]:
    """The tokens as rows of `[N, ...]`, and their mask."""

    def rows(x: Array | None, width: int = 0) -> Array | None:
        if x is None:
            return None
        return x.reshape(-1, x.shape[-1]) if width else x.reshape(-1)

    hidden, inverse = rows(weights.hidden, 1), rows(data.inverse_temperature)
    assert hidden is not None and inverse is not None
    return Tokens(hidden, inverse, rows(data.targets), rows(weights.ref_hidden, 1)), rows(data.mask)


def forward(spec: Spec, weights: Weights, data: Data, *, with_pull: bool) -> tuple[dict[str, Array], Saved]:
    """Statistics by the names of `TokenStats`, of the shape of the tokens, and what the backward pass needs.

    Args:
      spec: what to compute.
      weights: this device's tokens and part of the head.
      data: this device's.
      with_pull: whether to compute, in place of a backward pass, the slopes to the hidden states: for a head that needs
        no gradient they are means of its columns under the softmax, and the loss only scales them.
    """
    mesh, dtype, leading = Mesh.of(spec), statistics_dtype(weights), weights.hidden.shape[:-1]
    flat, mask = flat_tokens(weights, data)
    rows = arrange(mask, flat.hidden.shape[0], spec.tile.tokens)
    tokens = pack(rows, flat)
    sums, pull = _sweep(spec, weights, data, tokens, rows, mesh, with_pull, dtype)
    merged, rescale = online.merge(spec, sums, mesh)
    stats, saved = _finish(spec, merged)
    if spec.divergence == "jsd":
        mixture = _mixture(spec, weights, data, tokens, saved, rows, mesh, dtype)
        stats["kl"] = jnp.maximum(mixture.value, 0)
        saved = saved._replace(policy_mean=mixture.policy_mean, ref_mean=mixture.ref_mean)
    if pull is not None:
        mean = pull.mean * (rescale / merged.policy.total)[:, None]
        toward, away = mesh.sum_over_vocab((pull.target, mean))
        kind = weights.hidden.dtype
        saved = saved._replace(toward=toward.astype(kind), away=away.astype(kind))
    stats, saved = unpack(rows, (stats, saved))

    def shaped(x: Array | None) -> Array | None:
        return None if x is None else x.reshape(leading + x.shape[1:])

    return {name: value.reshape(leading) for name, value in stats.items()}, Saved(*map(shaped, saved))


def _sweep(
    spec: Spec, weights: Weights, data: Data, tokens: Tokens, rows: Rows, mesh: Mesh, with_pull: bool, dtype: jnp.dtype
) -> tuple[online.Sums, Pull | None]:
    """One pass over the vocabulary: the online sums and, if asked, the pull of the columns."""
    pull = None
    if with_pull:
        nothing = jnp.zeros_like(tokens.hidden, dtype=dtype)
        pull = Pull(nothing, nothing)

    def body(carry: tuple[online.Sums, Pull | None], columns: Columns) -> tuple[online.Sums, Pull | None]:
        def tile(index: Array, carry: tuple[online.Sums, Pull | None]) -> tuple[online.Sums, Pull | None]:
            part, (sums, mean) = tile_of(rows, index, (tokens, (carry[0], carry[1] and carry[1].mean)))
            policy, ref = pair_of_logits(spec, columns, part, data, dtype)
            new, e, scale = online.update(spec, sums, policy.values, ref and ref.values, columns, part)
            pull = carry[1]
            if pull is not None:
                slope = e * policy.slope * data.logit_scale
                mean = mean * scale[:, None] + to_hidden(spec, slope, columns.head, dtype)
                pull = pull._replace(mean=put_tile(rows, index, pull.mean, mean))
            return put_tile(rows, index, carry[0], new), pull

        sums, pull = lax.fori_loop(0, rows.tiles, tile, carry)
        if pull is not None:
            pull = pull._replace(target=pull.target + _target_columns(spec, columns, tokens, data, dtype))
        return sums, pull

    return over_columns(spec, weights, mesh, body, (online.start(spec, tokens, dtype), pull))


def _target_columns(spec: Spec, columns: Columns, tokens: Tokens, data: Data, dtype: jnp.dtype) -> Array:
    """`[rows, D]` slope of the target's logit to the hidden states, 0 where the target is not in this chunk."""
    assert tokens.targets is not None
    at = tokens.targets - columns.first
    chosen = jnp.take(columns.head, at, axis=spec.vocab_axis, mode="clip")
    chosen = (chosen.T if spec.layout == "dv" else chosen).astype(dtype)
    inside = (at >= 0) & (at < columns.size)
    if data.softcap is None:
        slope = tokens.inverse_temperature
    else:
        raw = (tokens.hidden.astype(dtype) * chosen).sum(-1) * data.logit_scale
        if columns.bias is not None:
            raw = raw + jnp.take(columns.bias, at, mode="clip").astype(dtype)
        slope = tokens.inverse_temperature * (1 - jnp.tanh(raw / data.softcap) ** 2)
    return jnp.where(inside[:, None], chosen * (slope * data.logit_scale)[:, None], 0)


def _finish(spec: Spec, sums: online.Sums) -> tuple[dict[str, Array], Saved]:
    logsumexp, log_total = sums.policy.logsumexp(), jnp.log(sums.policy.total)
    stats, saved = {"logsumexp": logsumexp}, Saved(logsumexp)
    if sums.target is not None:
        # Relative to the largest logit both parts are small where the target is likely.
        stats["log_prob"] = (online.impossible_to_infinite(sums.target) - sums.policy.top) - log_total
    if sums.moment is not None:
        stats["entropy"] = log_total - sums.moment / sums.policy.total
        saved = saved._replace(entropy=stats["entropy"])
    if sums.ref is not None:
        saved = saved._replace(ref_logsumexp=sums.ref.logsumexp())
    if sums.gap is not None:
        stats["kl"], mean_gap = online.kl_of(spec, sums)
        saved = saved._replace(mean_gap=jnp.where(jnp.isinf(stats["kl"]), jnp.nan, mean_gap))
    return stats, saved


def _mixture(
    spec: Spec, weights: Weights, data: Data, tokens: Tokens, saved: Saved, rows: Rows, mesh: Mesh, dtype: jnp.dtype
) -> online.Mixture:
    """The second pass over the vocabulary, which knows both normalisers."""
    nothing = jnp.zeros_like(saved.logsumexp)
    beta = data.beta
    assert beta is not None

    def body(sums: online.Mixture, columns: Columns) -> online.Mixture:
        def tile(index: Array, sums: online.Mixture) -> online.Mixture:
            part, own = tile_of(rows, index, ((tokens, saved.logsumexp, saved.ref_logsumexp), sums))
            policy, ref = pair_of_logits(spec, columns, part[0], data, dtype)
            assert ref is not None
            new = online.add_mixture(own, policy.values - part[1][:, None], ref.values - part[2][:, None], beta)
            return put_tile(rows, index, sums, new)

        return lax.fori_loop(0, rows.tiles, tile, sums)

    whole: online.Mixture = over_columns(spec, weights, mesh, body, online.Mixture(nothing, nothing, nothing))
    return mesh.sum_over_vocab(whole)
