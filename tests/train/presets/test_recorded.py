"""The presets against the systems: the loss and the weight gradients of a whole optimizer step, as each computed them.

The recordings are those of `tests/goldens/presets`: a Qwen 2 of transformers, one batch, float64.
"""

import pytest

from tests.train.presets import proof

pytestmark = pytest.mark.one_jax
TOLERANCE = {"float64": 1e-7, "float32": 1e-5}


@pytest.mark.parametrize("name", proof.proven_presets())
def test_preset_equals_its_system(name):
    found = proof.prove(name)
    tolerance = TOLERANCE[found.dtype]
    assert found.gradient < tolerance
    assert found.loss < tolerance
