"""Independent oracles: enumeration over a tiny vocabulary, `np.ma` for masks, formulas in float64, masks to draw."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

# One row of each kind: empty, full, a single token, holes, padding on the right, padding on the left.
MASK_KINDS = np.array(
    [
        [0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1],
        [0, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],
    ],
    dtype=bool,
)


def mask_rows(length: int) -> st.SearchStrategy[list[bool]]:
    """A row of a mask: empty, full, a single token, or any pattern with holes."""
    single = st.integers(0, length - 1).map(lambda at: [t == at for t in range(length)])
    holes = st.lists(st.booleans(), min_size=length, max_size=length)
    return st.one_of(st.just([False] * length), st.just([True] * length), single, holes)


def masks(rows: int, length: int) -> st.SearchStrategy[np.ndarray]:
    """A `[rows, length]` mask whose rows are of the kinds of `mask_rows`."""
    return st.lists(mask_rows(length), min_size=rows, max_size=rows).map(lambda drawn: np.array(drawn, dtype=bool))


def masked_array(values: np.ndarray, mask: np.ndarray) -> np.ma.MaskedArray:
    """The values as `np.ma` has them: its mask marks what is left out."""
    return np.ma.masked_array(np.asarray(values, np.float64), mask=~np.asarray(mask, bool))


def expectation(weights: jax.Array, values: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """`sum_v weights_v values(v)` over a whole vocabulary, with `weights` held constant."""
    vocabulary = jnp.arange(weights.shape[-1])
    return (jax.lax.stop_gradient(weights) * values(vocabulary)).sum(-1)


def exact_kl(logits: jax.Array, other: jax.Array) -> jax.Array:
    """`KL(softmax(logits) || softmax(other))` over the last axis, in nats."""
    log_p, log_q = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1)


def k3(log_ratio: np.ndarray) -> np.ndarray:
    """`exp(-x) - 1 + x`, in extended precision, rounded to float64 at the end."""
    x = np.asarray(log_ratio, np.longdouble)
    return np.asarray(np.expm1(-x) + x, np.float64)


def token_weights(mask: np.ndarray, mode: str, *, max_length: float, group_ids: np.ndarray, count: bool) -> np.ndarray:
    """The weight of each token, by loops over rows and prompts instead of array arithmetic."""
    weights = np.zeros(mask.shape)
    rows = [i for i in range(len(mask)) if count or mask[i].any()]
    for i, t in zip(*np.nonzero(mask), strict=True):
        same = [j for j in range(len(mask)) if group_ids[j] == group_ids[i]]
        prompts = {group_ids[j] for j in rows}
        weights[i, t] = {
            "token_mean": 1 / mask.sum(),
            "token_sum": 1.0,
            "seq_mean_token_sum": 1 / len(rows),
            "seq_mean_token_mean": 1 / (len(rows) * mask[i].sum()),
            "seq_mean_token_sum_norm": 1 / (len(rows) * max_length),
            "prompt_mean": 1 / (len(prompts) * mask[same].sum()),
        }[mode]
    return weights
