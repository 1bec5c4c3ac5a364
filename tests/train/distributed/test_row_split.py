"""Rows of global arrays, as a process of several sees them."""

import numpy as np

from train.distributed.global_arrays import RowSplit


def test_own_rows_are_numbered_among_all():
    """This process holds the second half of the rows, and judges two of them."""
    split = RowSplit(8, held=np.array([4, 5, 6, 7]), own=np.array([5, 7]))
    np.testing.assert_array_equal(split.select_own(np.array([40, 50, 60, 70])), [50, 70])
    np.testing.assert_array_equal(split.first(6).select_own(np.array([40, 50, 60, 70])), [50])
