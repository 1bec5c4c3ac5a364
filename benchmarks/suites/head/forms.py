"""The problem and the forms of the head that are measured, and what the contender of each framework answers.

NumPy is all that it needs, for PyTorch's process.
"""

import abc
import dataclasses
import gc
import pathlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import cli, measure
from benchmarks.harness.measure import Seconds

DTYPE = cli.option("--dtype", choices=("float32", "bf16"), default="float32", help="of hidden states and head")
CLIP = 0.2
ENTROPY_COEF = 0.01
KL_COEF = 0.05
# Relative; rounding and another order of sums leave 1e-6 in float32.
TOLERANCE = {"float32": 1e-4, "bf16": 3e-2}

GROUPS = {
    "loss": "PPO clip + 0.01 entropy, gradients to hidden states and head",
    "plain": "PPO clip without entropy, gradients to hidden states and head",
    "half": "half of the tokens masked; PPO clip + 0.01 entropy, gradients to hidden states and head",
    "frozen": "frozen head; PPO clip without entropy, gradient to the hidden states only",
    "lora": "frozen head; PPO clip + 0.01 entropy, gradient to the hidden states only",
    "kl": "exact KL to a reference; PPO clip + 0.01 entropy + 0.05 KL, gradients to hidden states and head",
    "forward": "log-probs and entropies, no gradient",
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Tokens `N`, model width `D`, vocabulary `V`."""

    tokens: int
    width: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.width}x{self.vocab}"

    @property
    def flops(self) -> int:
        """Counts the operations of one matmul between hidden states and head."""
        return 2 * self.tokens * self.width * self.vocab


SIZES = (Size(2048, 1024, 32_768), Size(1024, 1024, 131_072))
# Not divisible by the tile, nor by a power of two.
QUICK = Size(72, 48, 1000)
QUICK_TILE = (32, 256)


@dataclasses.dataclass(frozen=True)
class HeadOptions:
    """Options of a process: "cpu", "gpu" or "tpu"; dtype; threads on the CPU, 0 for no limit; kljax's tile or None."""

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 2
    tile: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of one problem, float32 but for int32 targets and a boolean mask; hidden states `[N, D]`, a head `[D, V]`.

    Two thirds of the importance weights are well within the clip, the others well beyond it: at the bound itself the
    gradient jumps, and rounding would decide.
    """

    hidden: np.ndarray
    head: np.ndarray
    targets: np.ndarray
    advantages: np.ndarray
    old_log_probs: np.ndarray
    mask: np.ndarray
    ref_hidden: np.ndarray

    @property
    def size(self) -> Size:
        return Size(len(self.hidden), *self.head.shape)

    def part(self, tokens: int, vocab: int) -> "Inputs":
        """Returns the problem of the first tokens and columns of the vocabulary."""
        rows = {name: array[:tokens] for name, array in vars(self).items()}
        return Inputs(**rows | {"head": self.head[:, :vocab], "targets": rows["targets"] % vocab})

    def save(self, directory: pathlib.Path) -> None:
        np.savez(directory / "inputs.npz", **vars(self))

    @classmethod
    def load(cls, directory: pathlib.Path) -> "Inputs":
        with np.load(directory / "inputs.npz") as file:
            return cls(**file)


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to compute log-probs, loss and gradients, in the process of "jax" or "torch".

    It takes so many matmuls of `2NDV` operations, the recomputed ones of the backward pass included.
    """

    name: str
    title: str
    group: str
    framework: str
    matmuls: float
    devices: tuple[str, ...] = ("cpu", "gpu", "tpu")

    @property
    def baseline(self) -> str:
        """Returns the form that its loss and gradients are compared with."""
        return "naive" if self.group == "loss" else f"naive_{self.group}"


FORMS = (
    Form("naive", "naive JAX", "loss", "jax", 3),
    Form("tile", "kljax", "loss", "jax", 4),
    Form("fused", "kljax, loss fused", "loss", "jax", 3),
    Form("tunix_full", "Tunix, full logits", "loss", "jax", 3),
    Form("tunix_chunk", "Tunix, chunks of 256 tokens", "loss", "jax", 4),
    Form("trl", "TRL chunked (its chunk, 32,768)", "loss", "torch", 4),
    Form("trl_4096", "TRL chunked (chunk of 4,096)", "loss", "torch", 4),
    Form("verl", "verl `FusedLinearForPPO`", "loss", "torch", 4),
    Form("torch_chunk", "PyTorch, compiled chunks of 1,024 tokens", "loss", "torch", 4, devices=("gpu",)),
    Form("naive_plain", "naive JAX", "plain", "jax", 3),
    Form("fused_plain", "kljax, loss fused", "plain", "jax", 3),
    Form("liger", "Liger GRPO", "plain", "torch", 4),
    Form("naive_half", "naive JAX", "half", "jax", 3),
    Form("tile_half", "kljax", "half", "jax", 2),
    Form("fused_half", "kljax, loss fused", "half", "jax", 1.5),
    Form("naive_frozen", "naive JAX", "frozen", "jax", 2),
    Form("tile_frozen", "kljax", "frozen", "jax", 2),
    Form("fused_frozen", "kljax, loss fused", "frozen", "jax", 2),
    Form("naive_lora", "naive JAX", "lora", "jax", 2),
    Form("tile_lora", "kljax", "lora", "jax", 3),
    Form("fused_lora", "kljax, loss fused", "lora", "jax", 2),
    Form("fused_lora_xla", "kljax, loss fused, without a kernel", "lora", "jax", 2, devices=("gpu",)),
    Form("naive_kl", "naive JAX", "kl", "jax", 4),
    Form("tile_kl", "kljax", "kl", "jax", 6),
    Form("fused_kl", "kljax, loss fused", "kl", "jax", 4),
    Form("naive_forward", "naive JAX", "forward", "jax", 1),
    Form("tile_forward", "kljax", "forward", "jax", 1),
    Form("tile_forward_xla", "kljax without a kernel", "forward", "jax", 1, devices=("gpu",)),
)
TITLES = {form.name: form.title for form in FORMS}


def choose(device: str, names: Collection[str] | None = None) -> dict[str, Form]:
    """Returns the forms of a device by name: all, or the named ones with their baselines."""
    # PyTorch runs on no TPU here.
    here = [form for form in FORMS if device in form.devices and (device, form.framework) != ("tpu", "torch")]
    known = {form.name: form for form in here}
    wanted = set(known if names is None else names)
    if unknown := sorted(wanted - set(known)):
        raise cli.OptionError(f"argument --contenders: got {unknown}, expected some of {sorted(known)} on this device")
    wanted |= {known[name].baseline for name in wanted}
    return {name: form for name, form in known.items() if name in wanted}


class FormsContender(abc.ABC):
    """Answers the requests about the forms of one framework, which a subclass computes on its device."""

    def __init__(self, inputs: Inputs, options: HeadOptions, releases: pathlib.Path | None = None) -> None:
        self.inputs, self.options, self.releases = inputs, options, releases

    @abc.abstractmethod
    def outputs(self, name: str) -> Sequence[Any]:
        """Returns the finished loss and gradients of a form, or the values of a forward pass."""

    def arrays(self, outputs: Sequence[Any]) -> list[np.ndarray]:
        """Converts outputs to float32 arrays; the gradient of the head is `[D, V]`."""
        return [np.asarray(output, np.float32) for output in outputs]

    def prepare(self, name: str) -> None:
        """Compiles a form, if that can be done apart from its first run."""
        return

    def temporary(self, name: str) -> int | None:
        """Returns the temporary memory that the compiler assigned; None if unknown."""
        return None

    def device_peak(self, name: str) -> int | None:
        """Returns the largest memory of the GPU during a run, less its results; JAX has none without trial runs."""
        return None

    def run(self, name: str) -> dict[str, Seconds]:
        """Times one run, without the release of its results."""
        self.prepare(name)
        gc.collect()
        clock = measure.Clock()
        with clock.part("run"):
            outputs = self.outputs(name)
        del outputs
        return clock.parts

    def save(self, name: str, directory: str) -> None:
        """Writes the outputs of a form, to compare others with."""
        for index, array in enumerate(self.arrays(self.outputs(name))):
            np.save(pathlib.Path(directory, f"{name}.{index}.npy"), array)

    def compare(self, name: str, directory: str, baseline: str) -> dict[str, Any]:
        """Returns the loss, and the relative differences of loss and gradients from the saved ones of a baseline."""
        arrays = self.arrays(self.outputs(name))
        saved = (np.load(f"{directory}/{baseline}.{index}.npy", mmap_mode="r") for index in range(len(arrays)))
        loss, *gradients = (
            measure.relative_distance(*map(np.atleast_1d, pair)) for pair in zip(arrays, saved, strict=True)
        )
        return {"loss": float(arrays[0]), "differences": {"loss": loss, "gradients": max(gradients)}}

    def peak(self, name: str) -> int | None:
        """Returns the bytes that a run adds to a fresh process at its peak, less its results; None if unknown."""
        self.prepare(name)
        # On a small problem first, so that libraries, threads and compiled code do not count.
        type(self)(self.inputs.part(QUICK.tokens, QUICK.vocab), self.options, self.releases).outputs(name)
        if self.options.device == "gpu":
            return self.device_peak(name)
        memory = measure.Memory()
        with memory.part("run"):
            outputs = self.outputs(name)
        return memory.parts["run"] - sum(output.nbytes for output in outputs) if memory.parts else None


def loader(contender: type[FormsContender]) -> Callable[..., FormsContender]:
    """Returns the function `load` of a worker, which reads the arrays of a directory."""

    def load(inputs: str, options: dict[str, Any], releases: str | None = None) -> FormsContender:
        directory = None if releases is None else pathlib.Path(releases)
        return contender(Inputs.load(pathlib.Path(inputs)), HeadOptions(**options), directory)

    return load
