"""The forward pass on one device's tokens and columns: statistics, and what the backward pass will need of them."""

from typing import NamedTuple

import jax.numpy as jnp

from kljax._typing import Array
from kljax.log_probs import _online as online
from kljax.log_probs._columns import Columns
from kljax.log_probs._inputs import Data, Weights
from kljax.log_probs._options import Spec
from kljax.log_probs._rows import unpack
from kljax.log_probs._shard import Shard


class Saved(NamedTuple):
    """`[...]` per token, for the backward pass; None for what it will not need.

    Attributes:
      logsumexp, ref_logsumexp: normalisers.
      entropy: of the policy.
      mean_gap: mean of the difference of the logits that the gradient of a KL is about; NaN where the KL is infinite.
      shift: log of the reference's normaliser over the policy's, for a JSD.
      policy_mean, ref_mean: the means of the slopes of a JSD.
      toward, away: `[..., D]` slope of the target's logit and of the logsumexp to the hidden states.
    """

    logsumexp: Array
    ref_logsumexp: Array | None = None
    entropy: Array | None = None
    mean_gap: Array | None = None
    shift: Array | None = None
    policy_mean: Array | None = None
    ref_mean: Array | None = None
    toward: Array | None = None
    away: Array | None = None


class Pull(NamedTuple):
    """`[rows, D]` sums of columns of the head: weighted by the exponentials so far, and that of the target."""

    mean: Array
    target: Array


def forward(spec: Spec, weights: Weights, data: Data, *, with_pull: bool) -> tuple[dict[str, Array], Saved]:
    """Statistics by the names of `TokenStats`, of the shape of the tokens, and what the backward pass needs.

    Args:
      spec: what to compute.
      weights: this device's tokens and part of the head.
      data: this device's.
      with_pull: whether to compute, in place of a backward pass, the slopes to the hidden states: for a head that needs
        no gradient they are means of its columns under the softmax, and the loss only scales them.
    """
    shard, leading = Shard.of(spec, weights, data), weights.hidden.shape[:-1]
    sums, pull = _sweep(shard, with_pull=with_pull)
    merged, rescale = online.merge(spec, sums, shard.mesh)
    stats, saved = _finish(spec, merged)
    if spec.divergence == "jsd":
        mixture = _mixture(shard, saved)
        stats["kl"] = jnp.maximum(mixture.value, 0)
        saved = saved._replace(policy_mean=mixture.policy_mean, ref_mean=mixture.ref_mean)
    if pull is not None:
        mean = pull.mean * (rescale / merged.policy.total)[:, None]
        toward, away = shard.mesh.sum_over_vocab((pull.target, mean))
        kind = weights.hidden.dtype
        saved = saved._replace(toward=toward.astype(kind), away=away.astype(kind))
    stats, saved = unpack(shard.rows, (stats, saved))

    def shaped(x: Array | None) -> Array | None:
        return None if x is None else x.reshape(leading + x.shape[1:])

    return {name: value.reshape(leading) for name, value in stats.items()}, Saved(*map(shaped, saved))  # type: ignore[arg-type]


def _sweep(shard: Shard, *, with_pull: bool) -> tuple[online.Sums, Pull | None]:
    """One pass over the vocabulary: the online sums and, if asked, the pull of the columns."""
    pull = None
    if with_pull:
        nothing = jnp.zeros_like(shard.tokens.hidden, dtype=shard.dtype)
        pull = Pull(nothing, nothing)

    def body(carry: tuple[online.Sums, Pull | None], columns: Columns) -> tuple[online.Sums, Pull | None]:
        def tile(index: Array, carry: tuple[online.Sums, Pull | None]) -> tuple[online.Sums, Pull | None]:
            sums, pull = carry
            part, before = shard.tile_of(index, (shard.tokens, sums))
            policy, ref = shard.logits(columns, part)
            pair = (policy.values, None if ref is None else ref.values)
            new, e, scale = online.update(shard.spec, before, pair, columns, part)
            if pull is not None:
                more = shard.to_hidden(e * (policy.slope * shard.data.logit_scale), columns.head)
                mean = shard.tile_of(index, pull.mean) * scale[:, None] + more
                pull = pull._replace(mean=shard.put_tile(index, pull.mean, mean))
            return shard.put_tile(index, sums, new), pull

        sums, pull = shard.over_tiles(tile, carry)
        if pull is not None:
            pull = pull._replace(target=pull.target + _target_columns(shard, columns))
        return sums, pull

    sums, pull = shard.over_columns(body, (online.start(shard.spec, shard.tokens, shard.dtype), pull))
    return sums, pull


def _target_columns(shard: Shard, columns: Columns) -> Array:
    """`[rows, D]` slope of the target's logit to the hidden states, 0 where the target is not in this chunk."""
    tokens, data, dtype = shard.tokens, shard.data, shard.dtype
    assert tokens.targets is not None
    at = tokens.targets - columns.first
    chosen = jnp.take(columns.head, at, axis=shard.spec.vocab_axis, mode="clip")
    chosen = (chosen.T if shard.spec.layout == "dv" else chosen).astype(dtype)
    slope = tokens.inverse_temperature
    if data.softcap is not None:
        raw = (tokens.hidden.astype(dtype) * chosen).sum(-1) * data.logit_scale
        if columns.bias is not None:
            raw = raw + jnp.take(columns.bias, at, mode="clip").astype(dtype)
        slope = slope * (1 - jnp.tanh(raw / data.softcap) ** 2)
    inside = (at >= columns.skip) & (at < columns.size)
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
    if spec.divergence == "jsd":
        saved = saved._replace(shift=online.gap_of(spec, sums).shift)
    elif sums.gap is not None:
        stats["kl"], gap = online.kl_of(spec, sums)
        saved = saved._replace(mean_gap=jnp.where(jnp.isinf(stats["kl"]), jnp.nan, gap.mean))
    return stats, saved


def _mixture(shard: Shard, saved: Saved) -> online.Mixture:
    """The second pass over the vocabulary, which knows both normalisers."""
    nothing = jnp.zeros_like(saved.logsumexp)
    beta = shard.data.beta
    assert beta is not None

    def body(sums: online.Mixture, columns: Columns) -> online.Mixture:
        def tile(index: Array, sums: online.Mixture) -> online.Mixture:
            part, own, before = shard.tile_of(index, (shard.tokens, saved, sums))
            policy, ref = shard.logits(columns, part)
            assert ref is not None
            p = jnp.exp(policy.values - own.logsumexp[:, None])
            q = jnp.exp(ref.values - own.ref_logsumexp[:, None])
            y = (ref.values - policy.values) - own.shift[:, None]
            return shard.put_tile(index, sums, online.add_mixture(before, p, q, y, beta))

        return shard.over_tiles(tile, sums)

    whole: online.Mixture = shard.over_columns(body, online.Mixture(nothing, nothing, nothing))
    return shard.mesh.sum_over_vocab(whole)
