"""Low-rank adapters: `y = x W + (alpha / rank) (x A) B`, with A and B in the variable collection "lora"."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def kaiming_uniform(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """U(-1/sqrt(in), 1/sqrt(in)) for a matrix [in, rank]: what PEFT draws `lora_A` from (Kaiming with a = sqrt(5))."""
    bound = shape[-2] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Rank, scale numerator and the projections that get an adapter.

    Raises:
      ValueError: rank below 1, no target, or a target that is not a projection of the decoder.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank: got {self.rank}, expected at least 1")
        unknown = sorted(set(self.targets) - set(PROJECTIONS))
        if unknown or not self.targets:
            raise ValueError(f"lora.targets: got {unknown or 'none'}, expected some of {', '.join(PROJECTIONS)}")


def add_update(module: nn.Module, x: jax.Array, y: jax.Array, axes: tuple[str, str], config: LoraConfig) -> jax.Array:
    """Add the adapter's update to `y = x W`; `y` itself, with nothing traced, when no adapter is given.

    Args:
      module: the projection that owns `lora_A` [in, rank] and `lora_B` [rank, out] (B starts at zero).
      x: [..., in]; y: [..., out].
      axes: logical axes of the projection's kernel.
      config: rank and alpha.
    """
    if not (module.is_mutable_collection("lora") or module.has_variable("lora", "lora_A")):
        return y
    shape_a, shape_b = (x.shape[-1], config.rank), (config.rank, y.shape[-1])
    init_a = nn.with_logical_partitioning(kaiming_uniform, (axes[0], "lora_rank"))
    init_b = nn.with_logical_partitioning(nn.initializers.zeros_init(), ("lora_rank", axes[1]))
    lora_a = module.variable("lora", "lora_A", lambda: init_a(module.make_rng("lora"), shape_a, jnp.float32))
    lora_b = module.variable("lora", "lora_B", lambda: init_b(module.make_rng("lora"), shape_b, jnp.float32))
    update = (x @ lora_a.value) @ lora_b.value
    return y + (config.alpha / config.rank * update).astype(y.dtype)
