"""The head on an accelerator: agreement on arrays of the host, time on large arrays that the device draws."""

import dataclasses
import importlib.util
from contextlib import AbstractContextManager
from typing import Any

import jax

from benchmarks.harness.environments import MissingError
from benchmarks.harness.process import Remote
from benchmarks.harness.report import ContenderResult, Measured, ratio
from benchmarks.head import race_forms, started, tolerances_of
from benchmarks.suites.head.forms import FORMS, GROUPS, QUICK, QUICK_TILE, Form, HeadOptions, Size, choose
from train.models.devices import find_device

LARGE = Size(16_384, 4096, 151_936)
# Loss and gradients are compared at a size whose arrays the host draws in a second.
COMPARED = Size(1024, 512, 16_384)
NAMES = (
    *("naive", "tile", "fused", "torch_chunk", "naive_plain", "fused_plain", "liger"),
    *("naive_lora", "tile_lora", "fused_lora", "fused_lora_xla"),
    *("naive_forward", "tile_forward", "tile_forward_xla"),
)
TINY = ("naive_plain", "fused_plain", "liger")
ROUNDS = 3


class HeadContender:
    """Measures all forms at once, so that their rounds are interleaved."""

    def __init__(self, tiny: bool) -> None:
        platform = jax.default_backend()
        device = platform if platform in ("cpu", "tpu") else "gpu"
        self.tiny = tiny
        self._versions = dict[str, str]()
        self.shared = HeadOptions(device, "bf16", threads=0, tile=QUICK_TILE if tiny else None)

    def versions(self) -> dict[str, str]:
        return self._versions

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Returns a row for each form."""
        size, compared, wanted, rounds = (QUICK, QUICK, TINY, 1) if self.tiny else (LARGE, COMPARED, NAMES, ROUNDS)
        names = [name for name in wanted if name in choose(self.shared.device)]
        chosen = (self.shared, size, names, rounds, self._torch)
        measured, self._versions = race_forms(*chosen, compared=compared, fresh=False)
        return [self._row(form, measured) for form in FORMS if form.name in measured.results]

    def _torch(self, directory: str) -> AbstractContextManager[Remote]:
        """Starts the forms of PyTorch in the environment of this process, if it has PyTorch."""
        if importlib.util.find_spec("torch") is None:
            raise MissingError("PyTorch is not installed here")
        return started("torch", {"inputs": directory, "options": dataclasses.asdict(self.shared)})

    def _row(self, form: Form, measured: Measured) -> dict[str, Any]:
        result, naive = measured.results[form.name], measured.results[form.baseline]
        tolerances = tolerances_of(self.shared)
        differences = result.differences.items()
        wrong = [f"{name} differs by {by:.0e}" for name, by in differences if not by <= tolerances[name]]
        return {
            "name": form.title,
            "of": GROUPS[form.group],
            **speed(result, naive.best("wall"), form.matmuls * measured.size.flops),
            "bytes": result.temp_bytes if form.framework == "jax" else result.peak_bytes.get("run"),
            "differs": result.differences.get("gradients"),
            **({"absent": result.problem} if result.problem and not result.failed else {}),
            **({"problem": result.problem or ", ".join(wrong)} if result.failed or wrong else {}),
        }


def speed(result: ContenderResult, naive: float | None, operations: float) -> dict[str, float | None]:
    """Returns the columns of the fastest round, given the seconds of naive JAX and the operations of this form."""
    seconds = result.best("wall")
    device = find_device(jax.devices()[0].device_kind)
    reached = ratio(operations, seconds)
    return {
        "ms": seconds and 1e3 * seconds,
        "of_naive": ratio(seconds, naive),
        "rate": reached and reached / 1e12,
        "share": None if device is None else ratio(reached, device.flops),
    }


load = HeadContender
