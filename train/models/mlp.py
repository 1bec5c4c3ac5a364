"""The dense MLP. B rows, T tokens, D model width."""

import jax
from flax import nnx

from train.models.config import DecoderConfig
from train.models.layers import InitKey, projection, residual_scale
from train.models.self_attention import LayerContext


class DenseMlp(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, key: InitKey, *, width: int | None = None):
        self.config = config
        sizes = (config.width, width or config.mlp_width)
        axes = ("embed", "mlp")
        bias = config.mlp_bias
        self.gate_proj = projection(config, "gate_proj", sizes, axes, key, bias=bias)
        self.up_proj = projection(config, "up_proj", sizes, axes, key, bias=bias)
        self.down_proj = projection(
            config, "down_proj", sizes[::-1], axes[::-1], key, bias=bias, init_scale=residual_scale(config)
        )

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, None]:
        return self.run(x), None

    def run(self, x: jax.Array) -> jax.Array:
        """Computes [B, T, D] of [B, T, D]."""
        return self.down_proj(activate(self.config, self.gate_proj(x)) * self.up_proj(x))


def activate(config: DecoderConfig, x: jax.Array) -> jax.Array:
    """Computes the activation of a decoder."""
    return jax.nn.silu(x) if config.activation == "silu" else jax.nn.gelu(x, approximate=True)
