"""The common beginning of two lists of ids."""

from collections.abc import Sequence


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Counts the ids with which both begin.

    Example:
      >>> common_length([1, 2, 3], [1, 2, 4, 5]), common_length([1], [1, 2])
      (2, 1)
    """
    # A turn mostly goes on with all that is there.
    if left == right[: len(left)]:
        return len(left)
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
