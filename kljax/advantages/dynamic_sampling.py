"""The groups whose rewards differ. A group of equal rewards has no advantage to learn from."""

from kljax._checks import as_groups, check_at_least, check_numbers
from kljax._devices import auto_sharded
from kljax._typing import Array, ArrayLike, Bool, Integer, Real, Scalar
from kljax.advantages._groups import centered, deviations, make_groups
from kljax.batches import Groups

__all__ = ["groups_with_spread"]


@auto_sharded
def groups_with_spread(
    rewards: Real[ArrayLike, " B"],
    group_ids: Integer[ArrayLike, " B"] | Groups,
    *,
    num_groups: int | None = None,
    threshold: Scalar = 0.0,
    ddof: int = 1,
) -> Bool[Array, " G"]:
    """Finds the groups whose rewards differ: `std_g > threshold`.

    Dynamic sampling draws the other groups anew. `groups_with_spread(...)[group_ids]` is the `valid` of `Groups` with
    which the advantage functions leave them out.

    Args:
      rewards: `[B]`, one reward per row.
      group_ids: `[B]` integers below `num_groups`, the prompt of each row, negative on padding rows; or `Groups`.
      num_groups: static number of groups, unless they are `Groups`.
      threshold: the largest standard deviation that counts as none, in the unit of the rewards, at least 0.
      ddof: of the standard deviation: 1 as `torch.std` has it, or 0.

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
    check_numbers(ddof=ddof)
    check_at_least("threshold", threshold, 0)
    groups = make_groups(rewards, as_groups(group_ids, num_groups))
    std, varies = deviations(groups, centered(groups, groups.weights()), ddof)
    return varies & (std > threshold)
