"""The rows of the table: which contenders there are, what each computes, and what its result is compared with."""

import dataclasses
from collections.abc import Collection

# Of float32 results, relative: rounding and another order of sums leave 1e-6.
TOLERANCE = {"float32": 1e-4, "bf16": 3e-2}

GROUPS = {
    "loss": "PPO clip + 0.01 entropy, gradients to hidden states and head",
    "plain": "PPO clip without entropy, gradients to hidden states and head",
    "half": "half of the tokens masked; PPO clip + 0.01 entropy, gradients to hidden states and head",
    "frozen": "frozen head; PPO clip without entropy, gradient to the hidden states only",
    "kl": "exact KL to a reference; PPO clip + 0.01 entropy + 0.05 KL, gradients to hidden states and head",
    "forward": "log-probs and entropies, no gradient",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
      name: on the command line.
      title: in the table.
      group: what it computes, a key of `GROUPS`.
      framework: whose process runs it, "jax" or "torch".
      baseline: the row that its loss and gradients are compared with.
      matmuls: how many matmuls of `2NDV` operations it does, those that are repeated in the backward counted.
      devices: where it is run.
    """

    name: str
    title: str
    group: str
    framework: str
    baseline: str
    matmuls: float
    devices: tuple[str, ...] = ("cpu", "gpu")


ROWS = (
    Row("naive", "naive JAX", "loss", "jax", "naive", 3),
    Row("tile", "kljax", "loss", "jax", "naive", 4),
    Row("tunix_full", "Tunix, full logits", "loss", "jax", "naive", 3),
    Row("tunix_chunk", "Tunix, chunks of 256 tokens", "loss", "jax", "naive", 4),
    Row("trl", "TRL chunked (its chunk, 32,768)", "loss", "torch", "naive", 4),
    Row("trl_4096", "TRL chunked (chunk of 4,096)", "loss", "torch", "naive", 4),
    Row("verl", "verl `FusedLinearForPPO`", "loss", "torch", "naive", 4),
    Row("torch_chunk", "PyTorch, compiled chunks of 1,024 tokens", "loss", "torch", "naive", 4, devices=("gpu",)),
    Row("naive_plain", "naive JAX", "plain", "jax", "naive_plain", 3),
    Row("liger", "Liger GRPO", "plain", "torch", "naive_plain", 4),
    Row("naive_half", "naive JAX", "half", "jax", "naive_half", 3),
    Row("tile_half", "kljax", "half", "jax", "naive_half", 2),
    Row("naive_frozen", "naive JAX", "frozen", "jax", "naive_frozen", 2),
    Row("tile_frozen", "kljax", "frozen", "jax", "naive_frozen", 2),
    Row("naive_kl", "naive JAX", "kl", "jax", "naive_kl", 4),
    Row("tile_kl", "kljax", "kl", "jax", "naive_kl", 6),
    Row("naive_forward", "naive JAX", "forward", "jax", "naive_forward", 1),
    Row("tile_forward", "kljax", "forward", "jax", "naive_forward", 1),
)
NAMES = tuple(row.name for row in ROWS)


def choose_rows(device: str, names: Collection[str] | None = None) -> list[Row]:
    """The rows of a device, or those of them that are named, with what they are compared with."""
    here = [row for row in ROWS if device in row.devices]
    if names is None:
        return here
    known = {row.name for row in here}
    unknown = sorted(set(names) - known)
    if unknown:
        raise ValueError(f"contenders: got {unknown}, expected some of {sorted(known)} on this device")
    wanted = {row.name for row in here if row.name in names} | {row.baseline for row in here if row.name in names}
    return [row for row in here if row.name in wanted]
