"""Programs of the audit run a few times on tiny arrays in tests, so they compile without LLVM's optimisations."""

from collections.abc import Iterator

import jax
import pytest

from kljax.tools.audit import _moments, batch, example, logits
from tests.kljax.calls import QUICK


@pytest.fixture(autouse=True, scope="session")
def _quick_programs() -> Iterator[None]:
    exact = jax.jit(_moments.exact_moments.__wrapped__, compiler_options=QUICK)
    sampled = jax.jit(_moments.sampled_moments.__wrapped__, static_argnames="draws", compiler_options=QUICK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits, "exact_moments", exact)
        patch.setattr(logits, "sampled_moments", sampled)
        patch.setattr(batch, "_compiled", jax.jit(batch._compiled.__wrapped__, compiler_options=QUICK))
        patch.setattr(example, "_perturbed", jax.jit(example._perturbed.__wrapped__, compiler_options=QUICK))
        yield
