"""The dense MLP. B rows, T tokens, D model width."""

import jax
from flax import nnx

from train.models.config import DecoderConfig
from train.models.layers import InitKey, projection, residual_scale


class DenseMlp(nnx.Module):
    """`down(act(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, key: InitKey):
        self.config = config
        sizes, axes, bias = (config.width, config.mlp_width), ("embed", "mlp"), config.mlp_bias
        self.gate_proj = projection(config, "gate_proj", sizes, axes, key, bias=bias)
        self.up_proj = projection(config, "up_proj", sizes, axes, key, bias=bias)
        self.down_proj = projection(
            config, "down_proj", sizes[::-1], axes[::-1], key, bias=bias, init_scale=residual_scale(config)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = self.gate_proj(x), self.up_proj(x)
        activated = jax.nn.silu(gate) if self.config.activation == "silu" else jax.nn.gelu(gate, approximate=True)
        return self.down_proj(activated * up)
