"""Groups of rows, shared by the group advantages. Padding rows are 0 everywhere and count in nothing."""

from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp

from kljax._checks import as_array, as_float, as_groups, check_mask, check_same_shape
from kljax._devices import all_rows, greatest, least, over_devices
from kljax._typing import Array, ArrayLike, AxisName, Mask, Singleton
from kljax.batches import Groups, Segments

SINGLETONS = get_args(Singleton)


class GroupedRewards(NamedTuple):
    """Rewards with 0 on padding rows, ids that are safe to index with, which rows are real, and rows per group.

    With an `axis_name` the rows belong to one device, and a statistic of a group covers its rows on all devices.
    """

    rewards: Array
    ids: Array
    real: Array
    unknown: Array
    size: Array
    axis_name: AxisName = None

    def total(self, values: Array) -> Array:
        """Sums `[B]` values, 0 on padding rows, into `[G]`."""
        sums = jax.ops.segment_sum(values, self.ids, num_segments=self.size.shape[0])
        return over_devices(sums, self.axis_name)

    def lowest(self) -> Array:
        """`[G]`: the lowest reward of each group, a constant."""
        rewards = jnp.where(self.real, self.rewards, jnp.inf)
        return least(jax.ops.segment_min(rewards, self.ids, num_segments=self.size.shape[0]), self.axis_name)

    def highest(self) -> Array:
        """`[G]`: the highest reward of each group, a constant."""
        rewards = jnp.where(self.real, self.rewards, -jnp.inf)
        return greatest(jax.ops.segment_max(rewards, self.ids, num_segments=self.size.shape[0]), self.axis_name)

    def as_one(self) -> "GroupedRewards":
        """All real rows in one group."""
        return self._replace(ids=jnp.zeros_like(self.ids), size=self.size.sum(keepdims=True))

    def gathered(self) -> "GroupedRewards":
        """Gathers the rows of all devices."""
        rows = all_rows((self.rewards, self.ids, self.real, self.unknown), self.axis_name)
        return GroupedRewards(*rows, self.size)

    def weights(self) -> Array:
        """1 on real rows."""
        return self.real.astype(self.rewards.dtype)


def make_groups(rewards: ArrayLike, members: Groups) -> GroupedRewards:
    """Puts the rows that are real into their groups, as made by `as_groups`.

    Raises:
      ValueError: if shapes do not fit.
    """
    (rewards,) = as_float(rewards)
    if rewards.ndim != 1:
        raise ValueError(f"rewards: got shape {list(rewards.shape)}, expected [B], one reward per row")
    check_same_shape(rewards=rewards, group_ids=members.ids)
    ids, real, unknown = safe_ids(members)
    none = jnp.zeros(members.count, rewards.dtype)
    groups = GroupedRewards(jnp.where(real, rewards, 0), ids, real, unknown, none, members.axis_name)
    return groups._replace(size=groups.total(groups.weights()))


def groups_of_rows(mask: Mask, group_ids: ArrayLike | Groups, num_groups: int | None) -> tuple[Groups, Array]:
    """Returns the groups, and their ids `[B, 1]` of rows, with `Segments` `[B, T]` of tokens.

    Raises:
      ValueError: as `as_groups`, and if the ids do not have that shape.
    """
    packed = isinstance(mask, Segments)
    # At padding between segments may lie any id.
    members = as_groups(group_ids, num_groups, unknown=packed)
    ids = as_array(members.ids)
    if packed:
        check_same_shape(group_ids=ids, mask=mask)
        return members, ids
    check_same_shape(group_ids=ids, rows=check_mask(mask)[..., 0])
    return members, ids[..., None]


def make_part_groups(values: Array, ids: Array, members: Groups) -> GroupedRewards:
    """Puts parts of rows into groups: values and ids `[B, S]` of sequences, or `[B, T]` of tokens, flattened."""
    parts = Groups(ids.ravel(), members.count, axis_name=members.axis_name)
    return make_groups(values.ravel(), as_groups(parts, None, unknown=True))


def safe_ids(groups: Groups) -> tuple[Array, Array, Array]:
    """Ids to index with, which rows have one, and which name a group that does not exist, seen under `jit` alone."""
    ids = as_array(groups.ids)
    real = (ids >= 0) & (ids < groups.count)
    unknown = ids >= groups.count
    return jnp.where(real, ids, 0), real, unknown


def centered(groups: GroupedRewards, weights: Array) -> Array:
    """`r_i - sum_g w_j r_j / sum_g w_j`, 0 on padding rows and in a group of weight 0.

    The mean is taken of the distances to the lowest reward of the group: equal rewards then centre to exactly 0, where
    the rounding of their mean, divided by a standard deviation of the same size, would become an advantage.
    """
    real = groups.real
    ids = groups.ids
    above = jnp.where(real, groups.rewards - jnp.where(real, groups.lowest()[ids], 0), 0)
    total = groups.total(weights)
    mean = groups.total(weights * above) / jnp.where(total > 0, total, 1)
    return jnp.where(real & (total > 0)[ids], above - mean[ids], 0)


def deviations(groups: GroupedRewards, distances: Array, ddof: int) -> tuple[Array, Array]:
    """The standard deviation of each group from the distances to its mean, 1 where nothing varies; and which vary.

    Raises:
      ValueError: for a `ddof` other than 0 and 1.
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof: got {ddof!r}, expected 0 or 1")
    var = groups.total(jnp.square(distances)) / jnp.maximum(groups.size - ddof, 1)
    # A constant group: the square root of 0 has an infinite slope, and with eps 0 the quotient would be 0 / 0.
    varies = var != 0
    return jnp.where(varies, jnp.sqrt(jnp.where(varies, var, 1)), 1), varies


def finish(groups: GroupedRewards, result: Array, alone: Array, singleton: Singleton) -> Array:
    """Applies the rule for groups of one, and the values of rows that belong to no group."""
    only = groups.size[groups.ids] == 1
    result = jnp.where(only, alone if singleton == "reward" else 0, result)
    return jnp.where(groups.unknown, jnp.nan, jnp.where(groups.real, result, 0))
