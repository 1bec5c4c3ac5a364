"""Messages about arrays that do not match a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

SHOWN = 5


def shape_and_dtype(leaf: Any) -> str:
    """Formats the dtype and shape of an array or its metadata, as `float32[8, 4]`."""
    return f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"


def first_five(problems: Sequence[str], separator: str = "; ") -> str:
    """Joins the first five problems, and counts the others.

    Example:
        >>> first_five("abcdefg", ", ")
        'a, b, c, d, e, and 2 more'
    """
    others = f"{separator}and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return separator.join(problems[:SHOWN]) + others
