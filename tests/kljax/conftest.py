"""The library is tested in float64, with no silent type promotion and no silent broadcasting between ranks."""

from collections.abc import Iterator

import jax
import pytest

STRICT = {"jax_enable_x64": True, "jax_numpy_dtype_promotion": "strict", "jax_numpy_rank_promotion": "raise"}


@pytest.fixture(autouse=True, scope="module")
def _strict() -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in STRICT}
    for name, value in STRICT.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
