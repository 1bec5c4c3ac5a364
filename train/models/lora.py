"""Low-rank adapters: `y = x W + scale (x A) B`, with A and B a tree of their own, float32 on any base."""

import dataclasses
import math

import jax
import jax.numpy as jnp

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def kaiming_uniform(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Draws a matrix [in, rank] from U(-1/sqrt(in), 1/sqrt(in)), as PEFT draws `lora_A` (Kaiming with a = sqrt(5))."""
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """The shape of an adapter.

    Attributes:
      rank: inner size of `A B`.
      alpha: numerator of the scale.
      targets: projections that get an adapter.
      rslora: divide by sqrt(rank) in place of rank (rank-stabilised LoRA, `use_rslora` of PEFT).

    Raises:
      ValueError: rank below 1, no target, or a target that is not a projection of the decoder.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank: got {self.rank}, expected at least 1")
        unknown = sorted(set(self.targets) - set(PROJECTIONS))
        if unknown or not self.targets:
            raise ValueError(f"lora.targets: got {unknown or 'none'}, expected some of {', '.join(PROJECTIONS)}")

    @property
    def scale(self) -> float:
        """The factor of `A B`."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def add_low_rank(x: jax.Array, y: jax.Array, lora_a: jax.Array, lora_b: jax.Array, scale: float) -> jax.Array:
    """Computes `y + scale (x A) B`.

    Args:
      x: [..., I], input of the projection.
      y: [..., O], output of the projection.
      lora_a: [I, rank].
      lora_b: [rank, O].
      scale: `LoraConfig.scale`.
    """
    tokens = x.reshape(-1, x.shape[-1])
    update = jnp.einsum("TR,RO->TO", jnp.einsum("TI,IR->TR", tokens, lora_a), lora_b).reshape(y.shape)
    # Rounds once, after the sum, if the base computes in bfloat16.
    return (y + scale * update).astype(y.dtype)
