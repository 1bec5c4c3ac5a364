"""Batches whose rows are not one sequence each, and rows that are compared with others of their group.

`Segments` takes the place of a mask where rows are packed, `Groups` that of group ids where rows are padding or spread
over devices.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from kljax._typing import ArrayLike, AxisName

__all__ = ["Groups", "Segments"]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """The mask of packed rows, which hold several sequences each; accepted wherever a mask is.

    A statistic of a row is then one of a segment. A number per row, as an argument or as a result, is an array
    `[..., T]` that holds the number of its sequence at each token; `broadcast_to_tokens` makes one. A pytree of two
    leaves. Functions that treat every token alone read the mask and where padding is.

    Attributes:
      mask: `[..., T]`, boolean.
      ids: `[..., T]` integers below T, the sequence of each token. A sequence is one run of positions; a negative id
        marks padding, which is masked. Under jit an id of T or more cannot be seen and makes a number of its sequence
        NaN.

    Raises:
      ValueError: for ids of another shape than the mask, of T or more, or of several runs.
      TypeError: for ids that are not integers.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> packed = kljax.Segments(jnp.array([[True, True, True, False]]), jnp.array([[0, 0, 1, -1]]))
      >>> print(kljax.token_weights(packed, mode="seq_mean_token_mean"))
      [[0.25 0.25 0.5  0.  ]]
    """

    mask: ArrayLike
    ids: ArrayLike

    def __post_init__(self) -> None:
        # Trees of specs or axes have the same type.
        if isinstance(self.ids, (jax.Array, np.ndarray)):
            _check_segment_ids(self.ids, np.shape(self.mask))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the mask."""
        return np.shape(self.mask)

    @property
    def dtype(self) -> np.dtype:
        """The type of the mask."""
        return np.dtype(getattr(self.mask, "dtype", bool))

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], None]:
        """Splits the fields into leaves, as JAX asks of a pytree."""
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in ("mask", "ids")], None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: tuple[Any, ...]) -> "Segments":
        """Builds segments without a check: JAX puts cotangents and other objects into the leaves."""
        segments = object.__new__(cls)
        vars(segments).update(zip(("mask", "ids"), leaves, strict=True))
        return segments


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The group of each row, usually its prompt; accepted wherever group ids are, in place of `num_groups` too.

    A padding row is one whose `valid` is False or whose id is negative: it enters no statistic of a group. A pytree
    whose leaves are `ids` and `valid`.

    Attributes:
      ids: `[B]` integers below `count`, the group of each row.
      count: static number of groups, at least 1.
      valid: `[B]` booleans, False on padding rows; None takes every row with an id of at least 0.
      axis_name: mapped axes, as of `shard_map`, over whose parts the rows are spread; a group may have rows in several.

    Raises:
      ValueError: for a `count` below 1.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, last = jnp.array([1.0, 0.0, 9.0]), jnp.array([True, True, False])
      >>> groups = kljax.Groups(jnp.array([0, 0, 0]), 1, valid=last)
      >>> print(kljax.rloo_advantages(rewards, groups))
      [ 1. -1.  0.]
    """

    ids: ArrayLike
    count: int = dataclasses.field(metadata={"static": True})
    valid: ArrayLike | None = None
    axis_name: AxisName = dataclasses.field(default=None, metadata={"static": True})

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"groups.count: got {self.count}, expected a number >= 1")


def has_known_values(array: jax.Array | np.ndarray) -> bool:
    """Whether the values can be read: they are neither traced nor partly on devices of other processes."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)


def _check_segment_ids(ids: jax.Array | np.ndarray, shape: tuple[int, ...]) -> None:
    """Checks all that is known; under jit shape and type."""
    if ids.shape != shape:
        raise ValueError(f"segments.ids: got shape {list(ids.shape)}, expected {list(shape)} as segments.mask has")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"segments.ids: got dtype {ids.dtype}, expected an integer type")
    if not has_known_values(ids) or not ids.size:
        return
    ids = np.asarray(ids)
    if ids.max() >= ids.shape[-1]:
        raise ValueError(
            f"segments.ids: got {ids.max()}, expected ids below T = {ids.shape[-1]}; number the segments of every row "
            "from 0, and mark padding by a negative id"
        )
    rows = ids.reshape(-1, ids.shape[-1])
    row, first = np.nonzero((rows >= 0) & (np.diff(rows, prepend=-1) != 0))
    runs, count = np.unique(np.stack([row, rows[row, first]]), axis=1, return_counts=True)
    if np.max(count, initial=0) > 1:
        wrong = rows[runs[0, np.argmax(count > 1)]]
        raise ValueError(f"segments.ids: got {wrong.tolist()}, expected each id in one run of consecutive positions")
