"""The LM head of kljax with tiles and chunks of several sizes, against naive JAX: which of them a device should get."""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness.race import race_programs
from benchmarks.harness.report import ratio
from benchmarks.suites.accelerator.head import LARGE
from benchmarks.suites.head.forms import QUICK
from benchmarks.suites.head.jax_forms import TokenConstants, build, draw_arrays
from train.models.devices import find_device

ROUNDS = 3
# Products of the head, the recomputed one of tiles included.
PRODUCTS = {"naive": 3, "tile": 4, "fused": 3}


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
        results, _ = race_programs({of: (build(name, tile), self.arguments)}, ROUNDS)
        result, device = results[of], find_device(jax.devices()[0].device_kind)
        best = result.best("wall")
        self.naive = best if name == "naive" else self.naive
        rate = ratio(PRODUCTS[name] * self.size.flops, best)
        return [
            {
                "name": of,
                "ms": best and 1e3 * best,
                "of_naive": ratio(best, self.naive),
                "rate": rate and rate / 1e12,
                "share": device and ratio(rate, device.flops),
                "bytes": result.temp_bytes,
                **({"problem": result.problem} if result.problem else {}),
            }
        ]


load = TilesContender
