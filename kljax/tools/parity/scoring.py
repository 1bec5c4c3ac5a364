"""Log-probs of tokens from recorded logits or hidden states, read in parts, with the bound of their rounding."""

import numpy as np

from kljax.tools.parity.dump import Dump, Stored
from kljax.tools.parity.recipe import LogProbRecipe
from kljax.tools.parity.replay import Replay
from kljax.tools.parity.rounding import EXP, UNITS, narrowest_dtype, round_to, tree_height

# Numbers of logits that are in memory at a time.
PART = 1 << 22
# How far a forward pass of other shapes may move a logit, in units of its roundoff and of the largest logit.
FORWARD = 8.0


def score(
    replay: Replay, side: str, settings: LogProbRecipe, mask: np.ndarray, unit: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the log-probs of one policy on the recorded rows and positions.

    Returns `[B, T]` log-probs in nats and their bounds, and the positions that were scored, booleans.
    """
    dump = replay.dump
    tokens = replay.arrays["tokens"]
    value = np.zeros(mask.shape)
    bound = np.zeros(mask.shape)
    at = np.zeros(mask.shape, bool)
    width = dump.stored(f"{side}logits").shape[-1] if f"{side}logits" in dump else _head(dump, side).shape[-1]
    layout = replay.layout
    position = np.arange(mask.shape[1])
    columns = replay.arrays["columns"] if "columns" in dump else position
    column_of = np.full(mask.shape[1] + 2, -1)
    column_of[columns] = np.arange(len(columns))
    step = max(1, PART // width)
    for number, row in enumerate(dump.read("rows")):
        for local in np.flatnonzero(replay.rows == row):
            # Without padding, what a model makes of it is unknown.
            inside = (
                (position > layout.starts[local]) & (position < layout.lengths[local])
                if settings.forward
                else position > 0
            )
            positions = np.flatnonzero(mask[local] & inside)
            positions = positions[column_of[positions - 1 + settings.shift] >= 0]
            for start in range(0, len(positions), step):
                chunk = positions[start : start + step]
                logits, errors = _logits(dump, side, number, column_of[chunk - 1 + settings.shift])
                if settings.forward is not None:
                    largest = np.abs(logits).max(-1, keepdims=True)
                    errors = errors + FORWARD * UNITS[settings.forward] * largest
                scored = log_softmax_at(logits, errors, tokens[local, chunk], settings, unit)
                value[local, chunk], bound[local, chunk] = scored
                at[local, chunk] = True
    return value, bound, at


def log_softmax_at(
    logits: np.ndarray, errors: np.ndarray, ids: np.ndarray, settings: LogProbRecipe, unit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probs of some ids and the bounds that the errors of the logits and the softmax's own add to.

    Returns `[P]` log-probs in nats, NaN for ids outside the vocabulary, and `[P]` bounds.
    """
    z = settings.logit_scale * logits
    e = abs(settings.logit_scale) * errors
    if settings.logits_dtype is not None:
        z = round_to(z, settings.logits_dtype)
    if settings.softcap is not None:
        z = settings.softcap * np.tanh(z / settings.softcap)
        e = e + unit * EXP * np.abs(z)
    z, e = z / settings.temperature, e / settings.temperature
    e = e + unit * np.abs(z) * (1 + (settings.logit_scale != 1) + (settings.temperature != 1))
    z, e = z[:, : settings.vocab_size], e[:, : settings.vocab_size]
    if settings.top_p is not None:
        z = np.where(top_p_set(z, settings.top_p, ids), z, -np.inf)
    positions = np.arange(len(ids))
    inside = ids < z.shape[1]
    chosen = np.where(inside, ids, 0)
    distance = z - z.max(-1, keepdims=True)
    powers = np.exp(distance)
    total = powers.sum(-1)
    probs = powers / total[:, None]
    value = distance[positions, chosen] - np.log(total)
    spread = np.sum(probs * np.abs(np.where(probs > 0, distance, 0)), -1)
    rounding = unit * (spread + EXP + tree_height(z.shape[1]) + EXP * np.abs(np.log(total)))
    rounding += unit * (np.abs(distance[positions, chosen]) + np.abs(value))
    carried = e[positions, chosen] + np.sum(probs * e, -1)
    return np.where(inside, value, np.nan), carried + rounding


def top_p_set(logits: np.ndarray, top_p: float, ids: np.ndarray) -> np.ndarray:
    """Returns the smallest set of likely tokens whose mass reaches `top_p`; the sampled token belongs to it.

    Returns `[P, V]` bool.
    """
    order = np.argsort(-logits, -1, kind="stable")
    ordered = np.take_along_axis(logits, order, -1)
    probs = np.exp(ordered - ordered[:, :1])
    probs /= probs.sum(-1, keepdims=True)
    keep = np.zeros(probs.shape, bool)
    np.put_along_axis(keep, order, np.cumsum(probs, -1) - probs < top_p, -1)
    keep[np.arange(len(ids)), np.minimum(ids, logits.shape[1] - 1)] = True
    return keep


def _logits(dump: Dump, side: str, number: int, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads logits, which are exact as recorded, or multiplies hidden states by the head, with the product's error."""
    if f"{side}logits" in dump:
        logits = dump.stored(f"{side}logits").part(number, source).astype(np.float64)
        return logits, np.zeros_like(logits)
    stored = dump.stored(f"{side}hidden")
    head = _head(dump, side)
    hidden = stored.part(number, source).astype(np.float64)
    logits = np.empty((len(hidden), head.shape[1]))
    magnitude = np.empty_like(logits)
    width = max(1, PART // head.shape[0])
    for start in range(0, head.shape[1], width):
        weights = head.part(slice(None), slice(start, start + width)).astype(np.float64)
        logits[:, start : start + width] = hidden @ weights
        magnitude[:, start : start + width] = np.abs(hidden) @ np.abs(weights)
    # Products accumulate in float32 at least; the result has the dtype of the hidden states.
    kind = narrowest_dtype(hidden) if stored.kind == "float32" else stored.kind
    output = UNITS.get(kind, UNITS["float32"])
    accumulated = min(output, UNITS["float32"]) * tree_height(head.shape[0])
    return logits, output * np.abs(logits) + accumulated * magnitude


def _head(dump: Dump, side: str) -> Stored:
    return dump.stored(f"{side}head" if f"{side}head" in dump else "head")
