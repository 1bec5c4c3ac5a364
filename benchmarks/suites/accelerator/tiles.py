"""The LM head of kljax with tiles and chunks of several sizes, against naive JAX: which of them a device should get."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.race import race_programs
from benchmarks.suites.accelerator.head import LARGE, ROUNDS, speed
from benchmarks.suites.head.forms import FORMS, QUICK
from benchmarks.suites.head.jax_forms import TokenConstants, build, draw_arrays

MATMULS = {form.name: form.matmuls for form in FORMS}


class TilesContender:
    """Times PPO's clipped loss with an entropy and its gradients, in bfloat16, one size after the other."""

    def __init__(self, tiny: bool) -> None:
        self.size = QUICK if tiny else LARGE
        arrays = draw_arrays(self.size.tokens, self.size.width, self.size.vocab, jnp.bfloat16)
        hidden, head, mask = (arrays.pop(name) for name in ("hidden", "head", "mask"))
        self.arguments = hidden, head, TokenConstants(**arrays, mask=jnp.ones_like(mask))
        self.naive: float | None = None

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Times "naive", "tile TOKENSxCOLUMNS", "fused TOKENSxCOLUMNS", or the last two with the device's sizes."""
        name, _, sizes = of.partition(" ")
        tile = [int(size) for size in sizes.split("x")] if sizes else None
        result = race_programs({of: (build(name, tile), self.arguments)}, ROUNDS)[0][of]
        self.naive = result.best("wall") if name == "naive" else self.naive
        problem = {"problem": result.problem} if result.problem else {}
        operations = MATMULS[name] * self.size.flops
        return [{"name": of, **speed(result, self.naive, operations), "bytes": result.temp_bytes, **problem}]


load = TilesContender
