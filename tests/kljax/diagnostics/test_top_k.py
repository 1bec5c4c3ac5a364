import numpy as np
import pytest

import kljax
from tests.masks import MASK


@pytest.mark.parametrize("size", [1, 3, 5])
def test_overlap_is_the_size_of_the_intersection(size: int) -> None:
    rng = np.random.default_rng(size)
    first, second = (np.argsort(rng.random((*MASK.shape, 7)))[..., :size] for _ in range(2))
    expected = np.zeros(MASK.shape)
    for at in np.argwhere(MASK):
        row, t = at
        expected[row, t] = len(set(first[row, t]) & set(second[row, t])) / size
    got = kljax.top_k_overlap(first, second, MASK)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected, 1e-15)
    np.testing.assert_allclose(kljax.top_k_overlap(second, first, MASK), expected, 1e-15)
    np.testing.assert_array_equal(kljax.top_k_overlap(first, first[..., ::-1], MASK), MASK)


def test_errors_name_the_argument() -> None:
    indices = np.zeros((2, 3, 4), int)
    with pytest.raises(ValueError, match=r"mask: got shape \[2\], expected \[2, 3\]"):
        kljax.top_k_overlap(indices, indices, np.ones(2, bool))
    with pytest.raises(ValueError, match="shapes differ: indices"):
        kljax.top_k_overlap(indices, indices[..., :2], np.ones((2, 3), bool))
    with pytest.raises(TypeError, match="teacher_indices: got dtype float64, expected an integer type"):
        kljax.top_k_overlap(indices, indices * 1.0, np.ones((2, 3), bool))
