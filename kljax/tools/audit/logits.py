"""Audits a pair of policies by their logits, a few positions at a time."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import check_at_least, check_choice, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike
from kljax.tools.audit._metrics import (
    Level,
    Summary,
    check_cap,
    check_intervals,
    gradient_labels,
    gradient_metrics,
    label_results,
    sequence_level,
    summarize,
    token_level,
    value_labels,
    value_metrics,
)
from kljax.tools.audit._moments import Moments, exact_moments, sampled_moments
from kljax.tools.audit.report import Audit
from kljax.tools.audit.results import Interval, Result

__all__ = ["audit_logits"]

# Elements of one array of a chunk; about fifty such arrays live at a time.
_CHUNK_ELEMENTS = 2**18
_LEAST_CHUNK = 64
# The least number of positions whose logits are computed at once, by one product with the LM head.
_GROUP = 64
# With fewer rows than this, the bootstrap resamples positions.
_FEW_ROWS = 8

PER_ROW = (
    "the tokens of a row are taken as independent given the prefixes that its logits were computed at: sums over a row "
    "have exact variances, and the effect of a token on later logits is not in them"
)
STALE = "tokens come from the behaviour policy; the yardstick is KL(policy || reference) at the same prefixes"


def audit_logits(
    logits: ArrayLike,
    ref_logits: ArrayLike,
    sampling_logits: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    draws: int = 0,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    max_ratio: float | None = 2.0,
    resample: str | None = None,
    chunk_size: int | None = None,
    key: Array | None = None,
) -> Audit:
    """Measures bias, variance and signal-to-noise of every estimator, value and gradient, against the exact KL.

    At each position the policy pi, the reference and the behaviour policy q (by default pi) are softmaxes of the
    logits, and one token is drawn from q. Values are compared with `KL = sum_v pi_v x_v`, `x = log pi - log ref`.
    Gradients are with respect to the logits of the policy and are compared with `pi * (x - KL)`; the places are

        loss             the derivative of the estimate
        straight_through `gradient="k2"` (or "weighted_k2") of `estimate_kl`, the same for every estimator
        reward           the policy gradient with the estimate as its (negative) reward; in a sequence every token also
                         gets the sum of the estimates after it
        reward_baseline  the reward less its expectation, as with a perfect critic
        advantage        the estimate less its mean over all tokens, with no credit for later tokens, as
                         `centered_kl_advantages`

    Off-policy, each is measured uncorrected, times the importance ratio, and times that ratio capped at `max_ratio`.
    The audit computes in float64 with 64-bit JAX, and else in float32, whose rounding shows as relative biases near
    1e-6. Only a few positions are on the device at a time, so arrays may be `np.memmap`; the loop over them on the host
    does not work under `jit` or `vmap`.

    Metrics of a value: mean, bias, relative_bias (bias / KL), variance of one estimate, snr (`|mean| / sd`), rmse.
    Metrics of a gradient, positions taken as one long vector: bias_norm (root mean square per unit), relative_bias
    (norm of the bias over that of the exact gradient), cosine, gain (inner product with the exact gradient over its
    squared norm; 1 is right), variance (trace of the covariance), snr (norm of the mean over the root of that trace).

    Args:
      logits: `[N, T, V]` logits of the policy, any float type; -inf forbids a token.
      ref_logits: same shape, logits of the reference at the same prefixes.
      sampling_logits: same shape, logits of the policy that draws the tokens; None draws them from the policy.
      mask: `[N, T]` booleans aligned with the logits, the positions to audit; None audits all.
      draws: tokens drawn at each position to measure everything a second time by sampling; 0 draws none.
      bootstrap: replicates of the bootstrap; 0 has no intervals.
      confidence: coverage of the percentile intervals.
      max_ratio: cap of the capped correction, a finite number above 0; None leaves that correction out.
      resample: "rows" or "positions", the units that the bootstrap resamples for results per token; None resamples
        rows if there are at least 8. Results per sequence always resample rows.
      chunk_size: positions on the device at a time; None chooses by the size of the vocabulary.
      key: PRNG key of the draws and of the bootstrap; None is `jax.random.key(0)`.

    Returns:
      An `Audit`, on the host.

    Raises:
      ValueError: if shapes differ, nothing is unmasked, logits are NaN, the KL is infinite, or an option is out
        of range.
      TypeError: if the mask has a floating type.

    References:
      Schulman, "Approximating KL divergence" (2020); Tang and Munos, "On a few pitfalls in KL divergence gradient
      estimation for RL" (2025); Efron, "Bootstrap methods" (1979).

    Example:
      >>> import jax, kljax
      >>> policy, ref = jax.random.normal(jax.random.key(0), (2, 8, 3, 5))
      >>> audit = kljax.audit.audit_logits(policy, ref, bootstrap=50)
      >>> for place, estimator in (("loss", "k1"), ("loss", "k2"), ("reward", "k1")):
      ...     result = audit.find(kind="gradient", level="token", place=place, estimator=estimator)
      ...     print(place, estimator, f"{result.metrics['relative_bias'].value:.2f}")
      loss k1 1.00
      loss k2 0.00
      reward k1 0.00
    """
    options = AuditOptions(draws, bootstrap, confidence, max_ratio, resample, chunk_size, key)
    shape = check_same_shape(logits=logits, ref_logits=ref_logits, sampling_logits=sampling_logits)
    if len(shape) != 3 or not all(shape):
        raise ValueError(f"logits: got shape {list(shape)}, expected [N, T, V] with none of them 0")
    arrays = (logits, ref_logits) if sampling_logits is None else (logits, ref_logits, sampling_logits)
    return measure([Block.of(*map(_indexable, arrays))], host_mask(mask, shape[:2]), options, "logits")


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """The options that the audits of logits and of checkpoints share; see `audit_logits`."""

    draws: int
    replicates: int
    confidence: float
    max_ratio: float | None
    resample: str | None
    chunk_size: int | None
    key: Array | None

    @property
    def caps(self) -> list[float]:
        """The bounds of the importance ratio, one per correction after "none"."""
        return [math.inf] if self.max_ratio is None else [math.inf, self.max_ratio]

    def __post_init__(self) -> None:
        check_at_least("draws", self.draws, 0)
        if self.draws == 1:
            raise ValueError("draws: got 1, expected 0 or at least 2; one draw has no variance")
        check_intervals(self.replicates, self.confidence)
        check_cap(self.max_ratio)
        check_at_least("chunk_size", self.chunk_size, 1)
        check_choice("resample", self.resample or "rows", ("rows", "positions"))


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of rows that computes its logits a few positions at a time.

    Attributes:
      shape: `(rows, T, V)`.
      stale: whether a policy other than the audited one draws the tokens.
      logits: maps `[C]` flat positions to the logits `[C, V]` of the policy, of the reference and, if `stale`, of the
        policy that draws.
      kl: maps the same positions to the exact KL `[C]`; None computes it from the logits.
    """

    shape: tuple[int, ...]
    stale: bool
    logits: Callable[[np.ndarray], list[Any]]
    kl: Callable[[np.ndarray], Array] | None = None

    @classmethod
    def of(cls, *logits: Any) -> "Block":
        """Makes a block from arrays of logits.

        Args:
          logits: arrays `[rows, T, V]`, on the host or on devices: of the policy, of the reference and, if it is
            another, of the policy that draws.

        Returns:
          A `Block` that reads its logits from the arrays and computes the exact KL from them.
        """
        flat = [array.reshape(-1, array.shape[-1]) for array in logits]
        return cls(logits[0].shape, len(logits) == 3, lambda positions: [array[positions] for array in flat])


def measure(blocks: Iterable[Block], mask: np.ndarray, options: AuditOptions, source: str) -> Audit:
    """Audits the unmasked positions of blocks of rows.

    Args:
      blocks: the rows in order; together the blocks have the rows of the mask.
      mask: `[B, T]` booleans.

    Raises:
      ValueError: if no position is unmasked.
    """
    key = jax.random.key(0) if options.key is None else options.key
    draw_key, *level_keys = jax.random.split(key, 5)
    if not mask.any():
        raise ValueError("mask: no position is unmasked, so there is nothing to audit")
    exact, sampled, corrections, vocabulary = _all_moments(blocks, mask, options, draw_key)
    eps = float(jnp.finfo(jnp.asarray(0, float).dtype).eps)
    rows = int(mask.any(-1).sum())
    resample = options.resample or ("rows" if rows >= _FEW_ROWS else "positions")
    results: list[Result] = []
    kl: dict[str, Interval] = {}
    for how, moments in (("exact", exact), ("sampled", sampled)):
        if moments is None:
            continue
        draws = options.draws if how == "sampled" else 0
        levels = {
            "token": token_level(moments, mask, by_row=resample == "rows"),
            "sequence": sequence_level(moments, mask, draws=draws),
        }
        for (name, level), level_key in zip(levels.items(), level_keys[:2], strict=True):
            summary = functools.partial(summarize, level_key, options.replicates, options.confidence)
            values = summary(level.value, value_metrics)
            gradients = summary(level.gradient, functools.partial(gradient_metrics, eps=eps))
            results += label_results(values, value_labels(corrections), "value", name, how)
            results += label_results(gradients, gradient_labels(corrections), "gradient", name, how)
            if how == "exact":
                kl[name] = _kl(summary, level)
    settings = {
        "source": source,
        "rows": rows,
        "positions": int(mask.sum()),
        "vocabulary": vocabulary,
        "policy": "off-policy" if len(corrections) > 1 else "on-policy",
        "draws": options.draws,
        "bootstrap": options.replicates,
        "confidence": options.confidence,
        "resampled": resample,
        "max_ratio": options.max_ratio if len(corrections) > 1 else None,
        "precision": str(jnp.asarray(0, float).dtype),
    }
    notes = (PER_ROW, STALE) if len(corrections) > 1 else (PER_ROW,)
    yardstick = "the exact KL(policy || reference) over the vocabulary and its exact gradient"
    return Audit(yardstick, notes, settings, kl, tuple(results))


def host_mask(mask: ArrayLike | None, shape: tuple[int, ...]) -> np.ndarray:
    """Moves a mask to the host.

    Args:
      mask: booleans or 0/1 integers; None keeps every position.
      shape: leading axes of the logits.

    Returns:
      Booleans of the given shape; without a mask all True.

    Raises:
      ValueError: if the mask has another shape.
    """
    if mask is None:
        return np.ones(shape, bool)
    if np.shape(mask) != shape:
        raise ValueError(f"mask: got shape {list(np.shape(mask))}, expected {list(shape)}, the positions of the logits")
    return np.asarray(check_mask(mask))


def _indexable(array: ArrayLike) -> Any:
    """Returns NumPy (also on disk) and JAX arrays unchanged, and anything else as an array."""
    return array if isinstance(array, np.ndarray | jax.Array) else np.asarray(array)


def _kl(summary: Summary, level: Level) -> Interval:
    first_column = {"exact": level.value["exact"][:, :1], "count": level.value["count"]}
    return summary(first_column, lambda sums: {"kl": sums["exact"] / sums["count"]})["kl"][0]


def _all_moments(
    blocks: Iterable[Block], mask: np.ndarray, options: AuditOptions, key: Array
) -> tuple[Moments, Moments | None, tuple[str, ...], int]:
    exact = []
    sampled = []
    corrections: tuple[str, ...] = ("none",)
    vocabulary = 0
    first_row = 0
    size = 0
    for block in blocks:
        vocabulary = block.shape[-1]
        rows = mask[first_row : first_row + block.shape[0]]
        if block.stale:
            corrections = ("none", "ratio", "capped")[: 1 + len(options.caps)]
        # No block is larger than the first: every chunk of every block has one shape, and compiles once.
        size = size or _chunk_size(options, max(vocabulary, options.draws), rows.size)
        # Each position has its own key, so the draws do not depend on the grouping of positions.
        keys = functools.partial(_keys, key, first_row * mask.shape[-1])
        for chunk in _chunks(block, rows, size, options, keys):
            exact.append(chunk[0])
            sampled.append(chunk[1])
        first_row += block.shape[0]
    _check_finite(np.concatenate([moments.kl for moments in exact]))
    if np.isnan(np.concatenate([moments.score_second[0] for moments in exact])).any():
        raise ValueError("sampling_logits: NaN or nothing but -inf at some position")
    from_draws = _unchunk(sampled, mask) if options.draws else None
    return _unchunk(exact, mask), from_draws, corrections, vocabulary


def _chunk_size(options: AuditOptions, width: int, positions: int) -> int:
    """Returns the positions per chunk: a power of two if few, so that audits of similar size share a program."""
    limit = options.chunk_size or max(1, _CHUNK_ELEMENTS // width)
    return min(limit, max(_LEAST_CHUNK, 1 << (positions - 1).bit_length()))


def _chunks(
    block: Block, mask: np.ndarray, size: int, options: AuditOptions, keys: Callable[[np.ndarray], Array]
) -> Iterator[tuple[Any, Any]]:
    """Yields moments of `size` unmasked positions at a time, on the host; padding fills the last chunk."""
    caps = [jnp.asarray(options.caps, float)] if block.stale else []
    chosen = np.flatnonzero(mask)
    group = size * max(1, min(_GROUP, mask.size) // size)
    for start in range(0, len(chosen), group):
        positions = np.resize(chosen[start : start + group], group)
        logits = block.logits(positions)
        kl = None if block.kl is None else block.kl(positions)
        for first in range(0, min(group, len(chosen) - start), size):
            part = slice(first, first + size)
            arrays = [jnp.asarray(array[part], float) for array in logits]
            part_keys = keys(positions[part])
            part_kl = None if kl is None else kl[part]
            pairs = [_moments(arrays, options, cap, part_kl, part_keys) for cap in (None, *caps)]
            exact, from_draws = zip(*pairs, strict=True)
            count = min(size, len(chosen) - start - first)
            yield _stack_corrections(exact, count), _stack_corrections(from_draws, count) if options.draws else None


def _moments(
    logits: list[Array], options: AuditOptions, cap: Array | None, kl: Array | None, keys: Array
) -> tuple[Moments, Moments | None]:
    """Computes the moments summed over the vocabulary, and the moments of drawn tokens if `options.draws` is not 0."""
    # The policy itself draws the tokens unless there is a third one.
    three = (logits[0], logits[1], logits[-1] if len(logits) == 3 else logits[0])
    sampled = sampled_moments(*three, cap, kl, keys=keys, draws=options.draws) if options.draws else None
    return exact_moments(*three, cap, kl), sampled


@jax.jit
def _keys(key: Array, first: int, positions: np.ndarray) -> Array:
    return jax.vmap(jax.random.fold_in, (None, 0))(key, first + positions)


def _stack_corrections(parts: tuple[Any, ...], count: int) -> Moments:
    """Stacks the moments of all corrections on the host, without the padding; moments `[C]` are the same in each."""

    def join(*leaves: Array) -> np.ndarray:
        first = np.asarray(leaves[0], np.float64)[..., :count]
        return first if first.ndim == 1 else np.concatenate([np.asarray(x, np.float64)[..., :count] for x in leaves])

    return jax.tree.map(join, *parts)


def _unchunk(chunks: list[Any], mask: np.ndarray) -> Moments:
    """Puts chunks of unmasked positions into one `[..., N, T]` tree, 0 under the mask."""

    def scatter(*parts: np.ndarray) -> np.ndarray:
        values = np.zeros((*parts[0].shape[:-1], *mask.shape))
        values[..., mask] = np.concatenate(parts, axis=-1)
        return values

    return jax.tree.map(scatter, *chunks)


def _check_finite(kl: np.ndarray) -> None:
    if np.isnan(kl).any():
        raise ValueError(f"logits: NaN or nothing but -inf at {int(np.isnan(kl).sum())} of {len(kl)} positions")
    if np.isinf(kl).any():
        raise ValueError(
            f"ref_logits: KL(policy || reference) is infinite at {int(np.isinf(kl).sum())} of {len(kl)} positions: "
            "the reference gives no probability to a token that the policy can draw"
        )
