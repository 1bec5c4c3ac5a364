"""The forward pass: an online softmax over chunks of the vocabulary, its statistics, and residuals for the gradient.

Every sum is over `exp(z - max)` and is rescaled when the maximum grows, so nothing overflows, and sums of several
devices merge. The entropy is summed as `exp(z - max) (z - max)`: where one token has nearly all probability, this sum
and the logarithm of the total are both small, and their difference keeps its digits.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kljax._numerics import bregman, expm1_minus, log_mix
from kljax._typing import Array
from kljax.log_probs._head import embed_axis
from kljax.log_probs._inputs import Constants, Spec, Weights
from kljax.log_probs._kernel import can_sum, sum_blocks
from kljax.log_probs._tiles import IMPOSSIBLE, Chunk, DeviceView, MeshAxes, Tokens, is_kept, is_target, unpack

# A larger KL is infinite: it contains `IMPOSSIBLE` where the first distribution has probability.
INFINITE = 1e6
# The exponential of this, times any vocabulary size, is finite in float32 or becomes an infinity that is noticed.
_LARGEST_EXPONENT = 80.0
# Bounds of the ratio of the two normalisers, less 1, for the formula without cancellation.
_NORMALISERS_CLOSE = (-0.5, 1.0)


# ---- the online softmax ----


class PartialSoftmax(NamedTuple):
    """`[rows]` largest logit so far and `sum exp(z - max)`."""

    max: Array
    total: Array

    def logsumexp(self) -> Array:
        """Returns the log of the normaliser."""
        return self.max + jnp.log(self.total)


class Sums(NamedTuple):
    """`[rows]` sums over the columns so far; None where not requested.

    Attributes:
      policy, ref: the two softmaxes.
      target: logit of the target, 0 until its column is visited.
      kept: the policy's softmax over the kept tokens.
      entropy: `sum exp(z - max) (z - max)` of the policy.
      squares: `sum exp(z - max)^2` of the policy.
      difference: `sum e d`, and `excess`: `sum e (exp(-d) - 1 + d)`, where `e` is the exponential of the distribution
        that the mean is over, and `d` its logits minus the logits of the other distribution.
    """

    policy: PartialSoftmax
    ref: PartialSoftmax | None = None
    target: Array | None = None
    kept: PartialSoftmax | None = None
    entropy: Array | None = None
    squares: Array | None = None
    difference: Array | None = None
    excess: Array | None = None


def empty_sums(spec: Spec, tokens: Tokens, dtype: jnp.dtype) -> Sums:
    """Returns the sums over no columns."""
    zero = jnp.zeros_like(tokens.inverse_temperature, dtype=dtype)
    empty = PartialSoftmax(zero + IMPOSSIBLE, zero)
    kl = spec.divergence is not None
    return Sums(
        policy=empty,
        ref=None if tokens.ref_hidden is None else empty,
        target=None if tokens.targets is None else zero,
        kept=None if tokens.kept is None else empty,
        entropy=zero if spec.entropy else None,
        squares=zero if spec.sum_squared_probs else None,
        difference=zero if kl else None,
        excess=zero if kl else None,
    )


def _add(before: PartialSoftmax, logits: Array) -> tuple[PartialSoftmax, Array, Array]:
    """Returns the softmax with more columns, their exponentials, and the factor that rescales earlier sums."""
    largest = jnp.maximum(before.max, logits.max(-1))
    rescale = jnp.exp(before.max - largest)
    e = jnp.exp(logits - largest[:, None])
    return PartialSoftmax(largest, before.total * rescale + e.sum(-1)), e, rescale


def add_tile(
    spec: Spec, sums: Sums, pair: tuple[Array, Array | None], chunk: Chunk, tokens: Tokens
) -> tuple[Sums, Array, Array]:
    """Adds one tile of logits, of policy and reference, to the sums.

    Returns:
      The sums, the exponentials of the policy, and the factor that rescales its earlier sums.
    """
    logits, ref = pair
    policy, e, rescale = _add(sums.policy, logits)
    new = sums._replace(policy=policy)
    if sums.target is not None:
        new = new._replace(target=sums.target + jnp.where(is_target(chunk, tokens), logits, 0).sum(-1))
    if sums.kept is not None:
        new = new._replace(kept=_add(sums.kept, jnp.where(is_kept(chunk, tokens), logits, IMPOSSIBLE))[0])
    if sums.entropy is not None:
        entropy = sums.entropy + (sums.policy.max - policy.max) * sums.policy.total
        new = new._replace(entropy=entropy * rescale + (e * (logits - policy.max[:, None])).sum(-1))
    if sums.squares is not None:
        new = new._replace(squares=sums.squares * rescale * rescale + (e * e).sum(-1))
    if sums.ref is None or ref is None:
        return new, e, rescale
    reference, e_ref, rescale_ref = _add(sums.ref, ref)
    new = new._replace(ref=reference)
    if sums.difference is not None and sums.excess is not None:
        lower = reference.max - policy.max
        if spec.divergence == "forward":
            first = e_ref
            second = e
            factor = rescale_ref
            difference = ref - logits
            lower = -lower
        else:
            first = e
            second = e_ref
            factor = rescale
            difference = logits - ref
        # Both relative to the largest logit of the first; an overflow shows when the normalisers are compared.
        second = second * jnp.exp(jnp.minimum(lower, _LARGEST_EXPONENT))[:, None]
        new = new._replace(
            difference=sums.difference * factor + (first * difference).sum(-1),
            excess=sums.excess * factor + bregman(first, second, -difference).sum(-1),
        )
    return new, e, rescale


def score_tile(device: DeviceView, sums: Sums, chunk: Chunk, tokens: Tokens, *, keep: bool) -> tuple[Sums, Any]:
    """Adds one tile of logits to the sums, where their exponentials are not needed.

    Returns:
      The sums; and with `keep` the pair of logits, of policy and reference, else None.
    """
    if can_sum(device, chunk, tokens):
        blocks, logits = sum_blocks(device, sums, chunk, tokens, keep=keep)
        return _add_parts(sums, blocks, axis=0), (logits, None) if keep else None
    policy, ref = device.logits(chunk, tokens)
    pair = (policy.values, None if ref is None else ref.values)
    if sums.ref is None and sums.kept is None and device.spec.one_reduction:
        new = _add_parts(sums, _columns(sums, policy.values, chunk, tokens), axis=1)
    else:
        new = add_tile(device.spec, sums, pair, chunk, tokens)[0]
    return new, pair if keep else None


def _columns(sums: Sums, logits: Array, chunk: Chunk, tokens: Tokens) -> dict[str, Array]:
    """Returns the sums of each column, which is a softmax of its own."""
    columns = {"max": logits, "total": jnp.ones_like(logits)}
    if sums.target is not None:
        columns["target"] = jnp.where(is_target(chunk, tokens), logits, 0)
    if sums.entropy is not None:
        columns["entropy"] = jnp.zeros_like(logits)
    if sums.squares is not None:
        columns["squares"] = jnp.ones_like(logits)
    return columns


def _add_parts(sums: Sums, parts: dict[str, Array], axis: int) -> Sums:
    """Adds sums of parts of the columns, which lie along an axis, to those of the policy, in one reduction."""
    before = {"max": sums.policy.max, "total": sums.policy.total}
    before |= {name: getattr(sums, name) for name in parts if name not in before}

    def rescaled(part: dict[str, Array], largest: Array) -> dict[str, Array]:
        lower = part["max"] - largest
        factor = jnp.exp(lower)
        scaled = {"total": part["total"] * factor}
        if "target" in part:
            scaled["target"] = part["target"]
        if "entropy" in part:
            scaled["entropy"] = (part["entropy"] + lower * part["total"]) * factor
        if "squares" in part:
            scaled["squares"] = part["squares"] * factor * factor
        return scaled

    def merged(a: dict[str, Array], b: dict[str, Array]) -> dict[str, Array]:
        largest = jnp.maximum(a["max"], b["max"])
        return {"max": largest} | jax.tree.map(jnp.add, rescaled(a, largest), rescaled(b, largest))

    start = {name: jnp.asarray(IMPOSSIBLE if name == "max" else 0, x.dtype) for name, x in parts.items()}
    new = merged(before, lax.reduce(parts, start, merged, (axis,)))
    policy = PartialSoftmax(new["max"], new["total"])
    return sums._replace(
        policy=policy, target=new.get("target"), entropy=new.get("entropy"), squares=new.get("squares")
    )


def _merge_softmax(part: PartialSoftmax, axes: MeshAxes) -> tuple[PartialSoftmax, Array]:
    """Returns the softmax with the maximum of all devices, whose totals are to be added, and this device's factor."""
    largest = axes.max_over_vocab(part.max)
    factor = jnp.exp(part.max - largest)
    return PartialSoftmax(largest, part.total * factor), factor


def merge(spec: Spec, sums: Sums, axes: MeshAxes) -> tuple[Sums, Array]:
    """Merges the sums of the devices that split the vocabulary.

    Returns:
      The sums over the whole vocabulary, and the factor that rescales this device's sums of the policy.
    """
    if not axes.vocab:
        return sums, jnp.ones_like(sums.policy.max)
    policy, factor = _merge_softmax(sums.policy, axes)
    rescale = factor
    ref = None
    kept_softmax = None
    if sums.ref is not None:
        ref, ref_factor = _merge_softmax(sums.ref, axes)
        rescale = ref_factor if spec.divergence == "forward" else factor
    if sums.kept is not None:
        kept_softmax = _merge_softmax(sums.kept, axes)[0]
    lower = sums.policy.max - policy.max
    parts = {
        "policy": policy.total,
        "ref": None if ref is None else ref.total,
        "kept": None if kept_softmax is None else kept_softmax.total,
        "target": sums.target,
        "entropy": None if sums.entropy is None else (sums.entropy + lower * sums.policy.total) * factor,
        "squares": None if sums.squares is None else sums.squares * factor * factor,
        "difference": None if sums.difference is None else sums.difference * rescale,
        "excess": None if sums.excess is None else sums.excess * rescale,
    }
    totals = axes.sum_over_vocab(parts)
    totals["policy"] = PartialSoftmax(policy.max, totals["policy"])
    totals["ref"] = None if ref is None else PartialSoftmax(ref.max, totals["ref"])
    totals["kept"] = None if kept_softmax is None else PartialSoftmax(kept_softmax.max, totals["kept"])
    return Sums(**totals), factor


def impossible_to_infinite(logits: Array) -> Array:
    """Returns the logits, with -infinity for logits that `IMPOSSIBLE` replaced."""
    return jnp.where(logits <= IMPOSSIBLE, -jnp.inf, logits)


# ---- divergences from the sums ----


class Normalisers(NamedTuple):
    """`[rows]` comparison of the two distributions' normalisers.

    Attributes:
      log_ratio: log of the normaliser of the other distribution over that of the first.
      mean_difference: mean over the first of its logits minus the logits of the other.
      close: whether `log_ratio` has the relative accuracy of the logits' differences.
    """

    log_ratio: Array
    mean_difference: Array
    close: Array


def compare_normalisers(spec: Spec, sums: Sums) -> Normalisers:
    """Compares the normalisers: where they are close, as the log of a mean ratio, which does not cancel."""
    assert sums.ref is not None
    assert sums.difference is not None
    assert sums.excess is not None
    first, other = (sums.ref, sums.policy) if spec.divergence == "forward" else (sums.policy, sums.ref)
    mean = sums.difference / first.total
    ratio = sums.excess / first.total - mean
    low, high = _NORMALISERS_CLOSE
    # With a large mean difference they are far apart, or a token is impossible for one of them.
    close = (ratio > low) & (ratio < high) & (jnp.abs(mean) < 1)
    near = jnp.log1p(jnp.where(close, ratio, 0))
    return Normalisers(jnp.where(close, near, other.logsumexp() - first.logsumexp()), mean, close)


def kl_from_sums(spec: Spec, sums: Sums) -> tuple[Array, Normalisers]:
    """Returns the KL and the comparison of the normalisers."""
    assert sums.ref is not None
    assert sums.excess is not None
    compared = compare_normalisers(spec, sums)
    first = sums.ref if spec.divergence == "forward" else sums.policy
    # kl = mean_difference + log_ratio cancels; the excess and exp(log_ratio) - 1 - log_ratio have the order of the KL.
    precise = sums.excess / first.total - expm1_minus(compared.log_ratio)
    kl = jnp.where(compared.close, precise, compared.mean_difference + compared.log_ratio)
    return jnp.where(kl > INFINITE, jnp.inf, jnp.maximum(kl, 0)), compared


class MixtureSums(NamedTuple):
    """`[rows]` sums of the second pass of the JSD: its value, and the means that its gradient is centred by."""

    value: Array
    policy_mean: Array
    ref_mean: Array


def log_mixture_ratios(y: Array, beta: Array) -> tuple[Array, Array]:
    """Returns `log(M / P)` and `log(M / Q)` from `y = log(Q / P)`, with the mixture `M = (1 - beta) P + beta Q`."""
    return log_mix(beta, y), log_mix(1 - beta, -y)


def add_mixture(sums: MixtureSums, p: Array, q: Array, y: Array, beta: Array) -> MixtureSums:
    """Adds one tile of probabilities to the sums, with `y = log(q / p)`."""
    to_policy, to_ref = log_mixture_ratios(y, beta)
    mixed = (1 - beta) * p + beta * q
    value = (1 - beta) * bregman(p, mixed, to_policy) + beta * bregman(q, mixed, to_ref)
    return MixtureSums(
        sums.value + value.sum(-1),
        sums.policy_mean - (1 - beta) * (p * to_policy).sum(-1),
        sums.ref_mean - beta * (q * to_ref).sum(-1),
    )


# ---- the pass ----


class Residuals(NamedTuple):
    """`[...]` per token, saved for the backward pass; None where it needs none.

    Attributes:
      logsumexp, ref_logsumexp: logs of the normalisers.
      kept_logsumexp: log of the normaliser over the kept tokens.
      entropy, sum_squared_probs: of the policy.
      mean_difference: as in `Normalisers`; NaN where the KL is infinite.
      log_ratio: log of the reference's normaliser over the policy's, for a JSD.
      policy_mean, ref_mean: means that the gradient of a JSD is centred by.
      grad_target, grad_logsumexp: `[..., D]` gradients of the target's logit and of the logsumexp to the hidden states.
    """

    logsumexp: Array
    ref_logsumexp: Array | None = None
    kept_logsumexp: Array | None = None
    entropy: Array | None = None
    sum_squared_probs: Array | None = None
    mean_difference: Array | None = None
    log_ratio: Array | None = None
    policy_mean: Array | None = None
    ref_mean: Array | None = None
    grad_target: Array | None = None
    grad_logsumexp: Array | None = None


class HeadSums(NamedTuple):
    """`[rows, D]` sums of columns of the head: weighted by the exponentials so far, and the column of the target."""

    weighted: Array
    target: Array


def forward(
    spec: Spec, weights: Weights, constants: Constants, *, with_hidden_grads: bool
) -> tuple[dict[str, Array], Residuals]:
    """Computes the statistics, by the names of `TokenStats`, and the residuals, in the shape of the tokens.

    Args:
      spec: static options.
      weights: this device's tokens and part of the head.
      constants: this device's part.
      with_hidden_grads: whether to compute the gradients to the hidden states here, in place of a backward pass. For a
        head that needs no gradient they are means of its columns under the softmax, and the cotangents scale them.
    """
    device = DeviceView.of(spec, weights, constants)
    leading = weights.hidden.shape[:-1]
    sums, columns = _scan_vocabulary(device, with_hidden_grads=with_hidden_grads)
    merged, rescale = merge(spec, sums, device.axes)
    stats, residuals = statistics(spec, merged)
    if spec.divergence == "jsd":
        mixture = _scan_mixture(device, residuals)
        stats["kl"] = jnp.maximum(mixture.value, 0)
        residuals = residuals._replace(policy_mean=mixture.policy_mean, ref_mean=mixture.ref_mean)
    if columns is not None:
        mean = columns.weighted * (rescale / merged.policy.total)[:, None]
        grads = device.axes.sum_over_vocab((columns.target, mean))
        target, logsumexp = (grad.astype(weights.hidden.dtype) for grad in grads)
        residuals = residuals._replace(grad_target=target, grad_logsumexp=logsumexp)
    stats, residuals = unpack(device.packing, (stats, residuals))

    def shaped(x: Array | None) -> Array | None:
        return None if x is None else x.reshape(leading + x.shape[1:])

    return {name: value.reshape(leading) for name, value in stats.items()}, Residuals(*map(shaped, residuals))  # type: ignore[arg-type]


def _scan_vocabulary(device: DeviceView, *, with_hidden_grads: bool) -> tuple[Sums, HeadSums | None]:
    """Makes one pass over the vocabulary: the online sums and, if requested, the sums of columns."""
    zero = jnp.zeros_like(device.tokens.hidden, dtype=device.dtype) if with_hidden_grads else None
    Carry = tuple[Sums, Array | None]

    def body(carry: Carry, chunk: Chunk) -> Carry:
        def tile(index: Array, carry: Carry) -> Carry:
            sums, weighted = carry
            tokens, before = device.get_tile(index, (device.tokens, sums))
            if weighted is None:
                new = score_tile(device, before, chunk, tokens, keep=False)[0]
            else:
                policy, ref = device.logits(chunk, tokens)
                pair = (policy.values, None if ref is None else ref.values)
                new, e, rescale = add_tile(device.spec, before, pair, chunk, tokens)
                grads = e * (policy.slope * device.constants.logit_scale)
                more = device.grad_hidden(grads, chunk.head, device.spec.layout)
                more = device.get_tile(index, weighted) * rescale[:, None] + more
                weighted = device.set_tile(index, weighted, more)
            return device.set_tile(index, sums, new), weighted

        return device.loop_tiles(tile, carry)

    sums, weighted = device.scan_chunks(body, (empty_sums(device.spec, device.tokens, device.dtype), zero))
    return sums, None if weighted is None else HeadSums(weighted, _target_columns(device))


def _target_columns(device: DeviceView) -> Array:
    """Returns `[rows, D]`, the gradient of the target's logit to the hidden states; 0 where others hold its column."""
    spec = device.spec
    tokens = device.tokens
    constants = device.constants
    dtype = device.dtype
    assert tokens.targets is not None
    columns = device.weights.head.shape[1 - embed_axis(spec.layout)]
    at, inside = device.axes.place_in_vocab(tokens.targets, columns)
    column = device.axes.take_columns(device.weights.head, at, embed_axis(spec.layout)).astype(dtype)
    slope = tokens.inverse_temperature
    if constants.softcap is not None:
        raw = (tokens.hidden.astype(dtype) * column).sum(-1) * constants.logit_scale
        if device.weights.bias is not None:
            raw = raw + jnp.take(device.weights.bias, at, mode="clip").astype(dtype)
        slope = slope * (1 - jnp.tanh(raw / constants.softcap) ** 2)
    column = column * (slope * constants.logit_scale)[:, None]
    return column if inside is None else jnp.where(inside[:, None], column, 0)


def statistics(spec: Spec, sums: Sums) -> tuple[dict[str, Array], Residuals]:
    """Computes the statistics and the residuals of one pass from its sums."""
    logsumexp = sums.policy.logsumexp()
    log_total = jnp.log(sums.policy.total)
    stats = {"logsumexp": logsumexp}
    residuals = Residuals(logsumexp)
    if sums.kept is not None and sums.target is not None:
        stats["log_prob"] = (impossible_to_infinite(sums.target) - sums.kept.max) - jnp.log(sums.kept.total)
        kept_logsumexp = sums.kept.logsumexp()
        stats["log_kept_mass"] = jnp.where(sums.kept.max <= IMPOSSIBLE, -jnp.inf, kept_logsumexp - logsumexp)
        residuals = residuals._replace(kept_logsumexp=kept_logsumexp)
    elif sums.target is not None:
        # Relative to the largest logit both parts are small where the target is likely.
        stats["log_prob"] = (impossible_to_infinite(sums.target) - sums.policy.max) - log_total
    if sums.entropy is not None:
        stats["entropy"] = log_total - sums.entropy / sums.policy.total
        residuals = residuals._replace(entropy=stats["entropy"])
    if sums.squares is not None:
        stats["sum_squared_probs"] = sums.squares / (sums.policy.total * sums.policy.total)
        residuals = residuals._replace(sum_squared_probs=stats["sum_squared_probs"])
    if sums.ref is not None:
        residuals = residuals._replace(ref_logsumexp=sums.ref.logsumexp())
    if spec.divergence == "jsd":
        residuals = residuals._replace(log_ratio=compare_normalisers(spec, sums).log_ratio)
    elif sums.difference is not None:
        stats["kl"], compared = kl_from_sums(spec, sums)
        mean = jnp.where(jnp.isinf(stats["kl"]), jnp.nan, compared.mean_difference)
        residuals = residuals._replace(mean_difference=mean)
    return stats, residuals


def _scan_mixture(device: DeviceView, residuals: Residuals) -> MixtureSums:
    """Makes the second pass over the vocabulary, with both normalisers known."""
    zero = jnp.zeros_like(residuals.logsumexp)
    beta = device.constants.beta
    assert beta is not None

    def body(sums: MixtureSums, chunk: Chunk) -> MixtureSums:
        def tile(index: Array, sums: MixtureSums) -> MixtureSums:
            tokens, of_rows, before = device.get_tile(index, (device.tokens, residuals, sums))
            policy, ref = device.logits(chunk, tokens)
            assert ref is not None
            p = jnp.exp(policy.values - of_rows.logsumexp[:, None])
            q = jnp.exp(ref.values - of_rows.ref_logsumexp[:, None])
            y = (ref.values - policy.values) - of_rows.log_ratio[:, None]
            return device.set_tile(index, sums, add_mixture(before, p, q, y, beta))

        return device.loop_tiles(tile, sums)

    sums: MixtureSums = device.scan_chunks(body, MixtureSums(zero, zero, zero))
    return device.axes.sum_over_vocab(sums)
