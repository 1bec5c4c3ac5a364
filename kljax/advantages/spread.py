"""The groups whose rewards differ. A group of equal rewards has no advantage to learn from."""

from kljax._checks import check_at_least
from kljax._devices import auto_sharded
from kljax._typing import (
    Array,
    ArrayLike,
    AxisName,
    Bool,
    Integer,
    MaskLike,
    Real,
    Scalar,
)
from kljax.advantages._groups import centered, deviations, make_groups

__all__ = ["groups_with_spread"]


@auto_sharded
def groups_with_spread(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"],
    *,
    num_groups: int,
    threshold: Scalar = 0.0,
    ddof: int = 1,
    valid: MaskLike[ArrayLike, " B"] | None = None,
    axis_name: AxisName = None,
) -> Bool[Array, " G"]:
    """Finds the groups whose rewards differ: `std_g > threshold`.

    Dynamic sampling draws the other groups anew. `groups_with_spread(...)[group_ids]` is the `valid` of the advantage
    functions that leaves them out.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row; negative marks a padding row.
      num_groups: static number of groups.
      threshold: the largest standard deviation that counts as none, in the unit of the rewards, at least 0.
      ddof: of the standard deviation: 1 as `torch.std` has it, or 0.
      valid: `[B]` booleans, False on padding rows; None takes every row with a group id of at least 0.
      axis_name: mapped axes, as of `shard_map`, over whose parts the rows are spread; a group may have rows in several.

    Returns:
      `[G]` booleans; False for a group of equal rewards, of a single row, or of none.

    Raises:
      ValueError: for differing shapes, a negative `threshold`, or a group id of `num_groups` or more.

    References:
      Yu et al., "DAPO" (2025), section 3.2; Trinity-RFT 0.6.0, `grpo` with `std_threshold`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> rewards, groups = jnp.array([1.0, 0.0, 3.0, 3.0]), jnp.array([0, 0, 1, 1])
      >>> print(kljax.groups_with_spread(rewards, groups, num_groups=2))
      [ True False]
    """
    check_at_least("threshold", threshold, 0)
    groups = make_groups(rewards, group_ids, num_groups, valid, axis_name)
    std, varies = deviations(groups, centered(groups, groups.weights()), ddof)
    return varies & (std > threshold)
