"""Sizes, options and arrays of the problem that every form of the head solves. NumPy only, for PyTorch's process."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import cli

DTYPE = cli.option("--dtype", choices=("float32", "bf16"), default="float32", help="of hidden states and head")
CLIP = 0.2
ENTROPY_COEF = 0.01
KL_COEF = 0.05


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
    """Options of a process: "cpu", "gpu" or "tpu"; "float32" or "bf16"; threads on the CPU, 0 for no limit; and tokens
    and vocabulary of kljax's tile, None for the default of the device.
    """

    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 2
    tile: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of one problem, float32 unless stated.

    Attributes:
      hidden: `[N, D]`, standard normal.
      head: `[D, V]`, normal, such that logits have a standard deviation of 2.
      targets: `[N]` int32 ids, uniform.
      advantages: `[N]`, standard normal.
      old_log_probs: `[N]`; two thirds of the importance weights are well within the clip, the others well beyond it. At
        the bound itself the gradient jumps, and rounding would decide.
      mask: `[N]` boolean, a random half.
      ref_hidden: `[N, D]`, the hidden states with noise of 0.1.
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

    def save(self, directory: pathlib.Path) -> None:
        np.savez(directory / "inputs.npz", **vars(self))

    @classmethod
    def load(cls, directory: pathlib.Path) -> "Inputs":
        with np.load(directory / "inputs.npz") as file:
            return cls(**file)


def make_inputs(size: Size, seed: int = 0) -> Inputs:
    """Draws the arrays of a problem."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    hidden, head = normal(size.tokens, size.width), normal(size.width, size.vocab)
    head *= np.float32(2 / np.sqrt(size.width))
    targets = rng.integers(0, size.vocab, size.tokens, np.int32)
    shift = rng.uniform(-0.1, 0.1, size.tokens)
    shift[::3] = rng.choice([-0.4, 0.4], len(shift[::3]))
    mask = np.zeros(size.tokens, bool)
    mask[rng.permutation(size.tokens)[: size.tokens // 2]] = True
    return Inputs(
        hidden=hidden,
        head=head,
        targets=targets,
        advantages=normal(size.tokens),
        old_log_probs=log_probs(hidden, head, targets) - shift.astype(np.float32),
        mask=mask,
        ref_hidden=hidden + np.float32(0.1) * normal(size.tokens, size.width),
    )


def log_probs(hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, chunk: int = 4096) -> np.ndarray:
    """Returns the `[N]` log-probs of the targets, by chunks of the vocabulary."""
    logsumexp = np.full(len(hidden), -np.inf, np.float32)
    for start in range(0, head.shape[1], chunk):
        logits = hidden @ head[:, start : start + chunk]
        top = logits.max(axis=1)
        logsumexp = np.logaddexp(logsumexp, top + np.log(np.exp(logits - top[:, None]).sum(axis=1)))
    return np.einsum("nd,dn->n", hidden, head[:, targets]) - logsumexp
