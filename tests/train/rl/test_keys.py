"""Random keys: a function of seed, purpose and step, and of nothing else."""

import itertools

import jax
import numpy as np
import pytest

from train.rl.keys import PURPOSES, purpose_key


def test_every_seed_purpose_and_step_has_another_key():
    places = list(itertools.product((0, 1, 7), PURPOSES, (0, 1, 2)))
    keys = [tuple(np.asarray(jax.random.key_data(purpose_key(*position))).tolist()) for position in places]
    assert len(set(keys)) == len(places)


def test_key_is_the_same_in_any_order():
    first = [purpose_key(3, "sample", step) for step in (0, 1, 2)]
    jax.random.normal(purpose_key(3, "rows", 1), (5,))
    again = [purpose_key(3, "sample", step) for step in (2, 1, 0)][::-1]
    assert [jax.random.key_data(key).tolist() for key in first] == [jax.random.key_data(key).tolist() for key in again]


def test_an_unknown_purpose_is_an_error():
    with pytest.raises(ValueError, match="tuple"):
        purpose_key(0, "samples")
