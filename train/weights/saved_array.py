"""A weight on disk that is read on demand."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class SavedArray:
    """Shape and dtype of a saved array, and `read`, which loads it to the host."""

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]
