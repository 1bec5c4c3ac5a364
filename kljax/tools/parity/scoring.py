"""Log-probs of tokens from recorded logits or hidden states, read in parts, with the bound of their rounding."""

import math

import numpy as np

from kljax.tools.parity.dump import Dump, Stored
from kljax.tools.parity.recipe import LogProbRecipe
from kljax.tools.parity.rounding import EXP, UNITS, narrowest_dtype, round_to, tree_height

# Numbers of logits that are in memory at a time.
PART = 1 << 22
# Tokens that show the logits of a sum, how near it has to be, relative to that of all, and top-p sets that are tried.
PROBED, CLOSE, MASSES = 16, 1e-5, 4


def score(
    dump: Dump, side: str, settings: LogProbRecipe, mask: np.ndarray, unit: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes the log-probs of one policy on the recorded rows.

    Args:
      dump: the dump, whose logits are read a few positions at a time.
      side: "" for the policy, "ref_" for the reference.
      settings: temperature, cap, scale, vocabulary and alignment.
      mask: `[B, T]` booleans; only these tokens are scored.

    Returns:
      `[B, T]` log-probs in nats and their bounds, and the positions that were scored, booleans.
    """
    rows, tokens = dump.read("rows"), dump.read("tokens")
    value, bound = np.zeros(mask.shape), np.zeros(mask.shape)
    at = np.zeros(mask.shape, bool)
    width = dump.stored(f"{side}logits").shape[-1] if f"{side}logits" in dump else _head(dump, side).shape[-1]
    step = max(1, PART // width)
    for number, row in enumerate(rows):
        positions = np.flatnonzero(mask[row] & (np.arange(mask.shape[1]) > 0))
        for start in range(0, len(positions), step):
            chunk = positions[start : start + step]
            source = chunk - 1 + settings.shift
            keep = (source >= 0) & (source < mask.shape[1])
            chunk, source = chunk[keep], source[keep]
            if not len(chunk):
                continue
            logits, errors = _logits(dump, side, number, source)
            ids = tokens[row, chunk]
            value[row, chunk], bound[row, chunk] = log_softmax_at(logits, errors, ids, settings, unit)
            at[row, chunk] = True
    return value, bound, at


def log_softmax_at(
    logits: np.ndarray, errors: np.ndarray, ids: np.ndarray, settings: LogProbRecipe, unit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the log-probs of some ids and the bounds that the errors of the logits and the softmax's own add to.

    Args:
      logits: `[P, V]` float64, one row a position.
      errors: `[P, V]` bounds of the errors of the logits.
      ids: `[P]` token ids.
      settings: temperature, cap, scale, vocabulary and set of likely tokens.

    Returns:
      `[P]` log-probs in nats, NaN for ids outside the vocabulary, and `[P]` bounds.
    """
    z, e = _scaled(logits, errors, settings, unit)
    if settings.top_p is not None:
        z = np.where(top_p_set(z, settings.top_p, ids), z, -np.inf)
    sampled = np.arange(z.shape[1]) == ids[:, None]
    if settings.top_k is not None:
        z = np.where(sampled | (z >= np.sort(z, axis=-1)[:, -settings.top_k, None]), z, -np.inf)
    if settings.without is not None:
        z = np.where(sampled | (np.arange(z.shape[1]) != settings.without), z, -np.inf)
    positions = np.arange(len(ids))
    inside = ids < z.shape[1]
    chosen = np.where(inside, ids, 0)
    top = z.max(-1, keepdims=True)
    distance = z - top
    powers = np.exp(distance)
    total = powers.sum(-1)
    probs = powers / total[:, None]
    value = distance[positions, chosen] - np.log(total)
    spread = np.sum(probs * np.abs(np.where(probs > 0, distance, 0)), -1)
    rounding = unit * (spread + EXP + tree_height(z.shape[1]) + EXP * np.abs(np.log(total)))
    rounding += unit * (np.abs(distance[positions, chosen]) + np.abs(value))
    carried = e[positions, chosen] + np.sum(probs * e, -1)
    return np.where(inside, value, np.nan), carried + rounding


def _scaled(
    logits: np.ndarray, errors: np.ndarray, settings: LogProbRecipe, unit: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the logits of the softmax and the bounds of their errors."""
    z, e = settings.logit_scale * logits, abs(settings.logit_scale) * errors
    if settings.logits_dtype is not None:
        z = round_to(z, settings.logits_dtype)
    if settings.softcap is not None:
        z = settings.softcap * np.tanh(z / settings.softcap)
        e = e + unit * EXP * np.abs(z)
    z, e = z / settings.temperature, e / settings.temperature
    e = e + unit * np.abs(z) * (1 + (settings.logit_scale != 1) + (settings.temperature != 1))
    size = settings.vocab_size
    return z[:, :size], e[:, :size]


def partial_sums(
    dump: Dump, side: str, settings: LogProbRecipe, mask: np.ndarray, unit: float
) -> tuple[set[int], set[int], tuple[float, float]]:
    """Finds the sums over fewer logits that the log-probs of a few tokens show.

    Returns:
      Numbers of largest logits that are summed over besides the token's own; ids that are left out alone; and the
      masses above and up to which a top-p set has these sums.
    """
    row, tokens, recorded = int(dump.read("rows")[0]), dump.read("tokens"), dump.read(f"{side}log_probs")
    positions = np.flatnonzero(mask[row] & (np.arange(mask.shape[1]) > 0))[:PROBED]
    sizes: set[int] | None = None
    left_out: set[int] | None = None
    above, up_to = 0.0, 1.0
    for position in positions:
        token = int(tokens[row, position])
        logits, errors = _logits(dump, side, 0, np.array([position - 1]))
        z = _scaled(logits, errors, settings, unit)[0][0]
        if not 0 <= token < len(z):
            continue
        powers = np.exp(z - z.max())
        target = powers[token] / np.exp(recorded[row, position])
        near = CLOSE * powers.sum()
        if abs(target - powers.sum()) <= near:
            continue
        order = np.argsort(-powers, kind="stable")
        masses = np.cumsum(powers[order])
        sums = masses + np.where(np.arange(len(order)) < np.flatnonzero(order == token)[0], powers[token], 0)
        at = np.flatnonzero(np.abs(sums - target) <= near)
        fitting = {int(i) + 1 for i in at}
        # Where no set fits, no mass does.
        last, first = (at[-1], at[0]) if len(at) else (0, len(order))
        above = max(above, (masses[first - 1] if first else 0) / powers.sum())
        up_to = min(up_to, masses[last] / powers.sum())
        ids = {int(i) for i in np.flatnonzero(np.abs(powers.sum() - powers - target) <= near)} - {token}
        sizes, left_out = (old if new is None else old & new for old, new in ((fitting, sizes), (ids, left_out)))
    return sizes or set(), left_out or set(), (above, up_to)


def decimals_between(above: float, up_to: float) -> list[float]:
    """Lists the first numbers of the fewest decimals, at most four, that are above one number and at most the other."""
    for unit in (10, 100, 1000, 10_000):
        first, last = math.floor(above * unit) + 1, math.floor(up_to * unit)
        if first <= last:
            return [number / unit for number in range(first, last + 1)][:MASSES]
    return []


def top_p_set(logits: np.ndarray, top_p: float, ids: np.ndarray) -> np.ndarray:
    """Returns the smallest set of likely tokens whose mass reaches `top_p`; the sampled token belongs to it.

    Args:
      logits: `[P, V]`.
      top_p: mass in (0, 1].
      ids: `[P]` sampled tokens.

    Returns:
      `[P, V]` bool.
    """
    order = np.argsort(-logits, -1, kind="stable")
    ordered = np.take_along_axis(logits, order, -1)
    probs = np.exp(ordered - ordered[:, :1])
    probs /= probs.sum(-1, keepdims=True)
    keep_ordered = np.cumsum(probs, -1) - probs < top_p
    keep = np.zeros_like(keep_ordered)
    np.put_along_axis(keep, order, keep_ordered, -1)
    keep[np.arange(len(ids)), np.minimum(ids, logits.shape[1] - 1)] = True
    return keep


def _logits(dump: Dump, side: str, number: int, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads logits, which are exact as recorded, or multiplies hidden states by the head, with the product's error."""
    if f"{side}logits" in dump:
        logits = dump.stored(f"{side}logits").part(number, source).astype(np.float64)
        return logits, np.zeros_like(logits)
    stored = dump.stored(f"{side}hidden")
    hidden = stored.part(number, source).astype(np.float64)
    head = _head(dump, side)
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
