"""The one way from logits, in blocks of rows, to the results of an audit."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kljax._checks import check_at_least, check_choice
from kljax._typing import Array
from kljax.audit._moments import Moments, exact_moments, sampled_moments
from kljax.audit._quality import (
    Labels,
    Level,
    Sums,
    bootstrap,
    gradient_labels,
    gradient_metrics,
    sequence_level,
    token_level,
    value_labels,
    value_metrics,
    weighted,
)
from kljax.audit.report import Audit, Interval, Result

# Numbers of one array of a chunk: some fifty of that size live at a time.
_CHUNK_ELEMENTS = 2**18
_LEAST_CHUNK = 64
# Positions whose logits are asked for at once, at least: those of a head come from one product.
_GROUP = 64
# With fewer rows than this, intervals come from resampled positions.
_FEW_ROWS = 8

PER_ROW = (
    "the tokens of a row are taken as independent given the prefixes that its logits were computed at: sums over a row "
    "have exact variances, and the effect of a token on later logits is not in them"
)
STALE = "tokens come from the behaviour policy; the yardstick is KL(policy || reference) at the same prefixes"


@dataclasses.dataclass(frozen=True)
class Options:
    """What the audits of logits and of checkpoints have in common; see `audit_logits`."""

    draws: int
    replicates: int
    confidence: float
    max_ratio: float | None
    resample: str | None
    chunk_size: int | None
    key: Array | None

    @property
    def caps(self) -> list[float]:
        """The bounds of the importance ratio in the corrections after "none"."""
        return [math.inf] if self.max_ratio is None else [math.inf, self.max_ratio]

    def __post_init__(self) -> None:
        check_at_least("draws", self.draws, 0)
        if self.draws == 1:
            raise ValueError("draws: got 1, expected 0 or at least 2; one draw has no variance")
        check_intervals(self.replicates, self.confidence)
        check_at_least("max_ratio", self.max_ratio, 0, strict=True)
        check_at_least("chunk_size", self.chunk_size, 1)
        check_choice("resample", self.resample or "rows", ("rows", "positions"))


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of rows whose logits are asked for a few positions at a time.

    Attributes:
      shape: `(rows, T, V)`.
      stale: whether another policy than the one audited draws the tokens.
      logits: from `[C]` positions, counted over the rows, to the logits `[C, V]` of the policy, of the reference and,
        if `stale`, of the policy that draws.
      kl: from the same positions to the exact KL `[C]`; None takes it from the logits.
    """

    shape: tuple[int, ...]
    stale: bool
    logits: Callable[[np.ndarray], list[Any]]
    kl: Callable[[np.ndarray], Array] | None = None

    @classmethod
    def of(cls, *logits: Any) -> "Block":
        """Arrays `[rows, T, V]`: of the policy, of the reference, and of the policy that draws if it is another."""
        flat = [one.reshape(-1, one.shape[-1]) for one in logits]
        return cls(logits[0].shape, len(logits) == 3, lambda positions: [one[positions] for one in flat])


def check_intervals(replicates: int, confidence: float) -> None:
    """Raises `ValueError` for arguments of the bootstrap that have no meaning."""
    check_at_least("bootstrap", replicates, 0)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence!r}, expected a number between 0 and 1")


def measure(blocks: Iterable[Block], mask: np.ndarray, options: Options, source: str) -> Audit:
    """Audits the unmasked positions of blocks of rows that together are the rows of the mask."""
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
            summary = functools.partial(summarise, level_key, options.replicates, options.confidence)
            values = summary(level.value, value_metrics)
            gradients = summary(level.gradient, functools.partial(gradient_metrics, eps=eps))
            results += labelled(values, value_labels(corrections), "value", name, how)
            results += labelled(gradients, gradient_labels(corrections), "gradient", name, how)
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


Summary = Callable[[Sums, Callable[[Sums], Sums]], dict[str, list[Interval]]]


def summarise(
    key: Array, replicates: int, confidence: float, sums: Sums, metrics: Callable[[Sums], Sums]
) -> dict[str, list[Interval]]:
    """Each metric of each result with its bootstrap interval."""
    values = metrics(weighted(sums, np.ones(len(sums["count"]))))
    if replicates:
        ends = bootstrap(key, sums, metrics, replicates=replicates, confidence=confidence)
    else:
        ends = {name: np.full((2, *np.shape(value)), np.nan) for name, value in values.items()}
    return {
        name: [Interval(*map(float, trio)) for trio in zip(value, *ends[name], strict=True)]
        for name, value in values.items()
    }


def labelled(
    found: dict[str, list[Interval]], labels: Iterable[Labels], kind: str, level: str, how: str
) -> list[Result]:
    """Results from columns and what each is about."""
    return [
        Result(kind, level, how, *label, {name: column[i] for name, column in found.items()})
        for i, label in enumerate(labels)
    ]


def _kl(summary: Summary, level: Level) -> Interval:
    first = {"exact": level.value["exact"][:, :1], "count": level.value["count"]}
    return summary(first, lambda sums: {"kl": sums["exact"] / sums["count"]})["kl"][0]


def _all_moments(
    blocks: Iterable[Block], mask: np.ndarray, options: Options, key: Array
) -> tuple[Moments, Moments | None, tuple[str, ...], int]:
    exact, sampled = [], []
    corrections: tuple[str, ...] = ("none",)
    vocabulary, first_row, size = 0, 0, 0
    for block in blocks:
        vocabulary = block.shape[-1]
        rows = mask[first_row : first_row + block.shape[0]]
        if block.stale:
            corrections = ("none", "ratio", "capped")[: 1 + len(options.caps)]
        # The first block is as large as any: every chunk of every block has one shape, and compiles once.
        size = size or _chunk_size(options, max(vocabulary, options.draws), rows.size)
        # Each position has a key of its own: the draws do not depend on how positions are grouped.
        keys = functools.partial(_keys, key, first_row * mask.shape[-1])
        for one in _chunks(block, rows, size, options, keys):
            exact.append(one[0])
            sampled.append(one[1])
        first_row += block.shape[0]
    _check_finite(np.concatenate([moments.kl for moments in exact]))
    if np.isnan(np.concatenate([moments.score_second[0] for moments in exact])).any():
        raise ValueError("behaviour_logits: NaN or nothing but -inf at some position")
    drawn = _placed(sampled, mask) if options.draws else None
    return _placed(exact, mask), drawn, corrections, vocabulary


def _chunk_size(options: Options, width: int, positions: int) -> int:
    """Positions at a time; a power of two where they are few, so that audits of about one size share a compilation."""
    limit = options.chunk_size or max(1, _CHUNK_ELEMENTS // width)
    return min(limit, max(_LEAST_CHUNK, 1 << (positions - 1).bit_length()))


def _chunks(
    block: Block, mask: np.ndarray, size: int, options: Options, keys: Callable[[np.ndarray], Array]
) -> Iterator[tuple[Any, Any]]:
    """Moments on the host of `size` unmasked positions at a time, the last ones filled up."""
    caps = [jnp.asarray(options.caps, float)] if block.stale else []
    chosen = np.flatnonzero(mask)
    group = size * max(1, min(_GROUP, mask.size) // size)
    for start in range(0, len(chosen), group):
        positions = np.resize(chosen[start : start + group], group)
        logits = block.logits(positions)
        kl = None if block.kl is None else block.kl(positions)
        for first in range(0, min(group, len(chosen) - start), size):
            part = slice(first, first + size)
            arrays = [jnp.asarray(one[part], float) for one in logits]
            own, known = keys(positions[part]), None if kl is None else kl[part]
            both = [_both_moments(arrays, options, cap, known, own) for cap in (None, *caps)]
            exact, drawn = ([one for one in found if one is not None] for found in zip(*both, strict=True))
            count = min(size, len(chosen) - start - first)
            yield _together(exact, count), _together(drawn, count) if drawn else None


def _both_moments(
    logits: list[Array], options: Options, cap: Array | None, kl: Array | None, keys: Array
) -> tuple[Moments, Moments | None]:
    """Summed over the vocabulary, and of drawn tokens if any are; the policy draws unless there is a third one."""
    three = (logits[0], logits[1], logits[-1] if len(logits) == 3 else logits[0])
    sampled = sampled_moments(*three, cap, kl, keys=keys, draws=options.draws) if options.draws else None
    return exact_moments(*three, cap, kl), sampled


@jax.jit
def _keys(key: Array, first: int, positions: np.ndarray) -> Array:
    return jax.vmap(jax.random.fold_in, (None, 0))(key, first + positions)


def _together(parts: list[Moments], count: int) -> Moments:
    """On the host: corrections one after the other, without the padding; what no correction changes is in the first."""

    def join(*leaves: Array) -> np.ndarray:
        first = np.asarray(leaves[0], np.float64)[..., :count]
        return first if first.ndim == 1 else np.concatenate([np.asarray(x, np.float64)[..., :count] for x in leaves])

    return jax.tree.map(join, *parts)


def _placed(chunks: list[Any], mask: np.ndarray) -> Moments:
    """Chunks of unmasked positions as one `[..., N, T]` tree, 0 under the mask."""

    def place(*parts: np.ndarray) -> np.ndarray:
        whole = np.zeros((*parts[0].shape[:-1], *mask.shape))
        whole[..., mask] = np.concatenate(parts, axis=-1)
        return whole

    return jax.tree.map(place, *chunks)


def _check_finite(kl: np.ndarray) -> None:
    if np.isnan(kl).any():
        raise ValueError(f"logits: NaN or nothing but -inf at {int(np.isnan(kl).sum())} of {len(kl)} positions")
    if np.isinf(kl).any():
        raise ValueError(
            f"ref_logits: KL(policy || reference) is infinite at {int(np.isinf(kl).sum())} of {len(kl)} positions: "
            "the reference gives no probability to a token that the policy can draw"
        )
