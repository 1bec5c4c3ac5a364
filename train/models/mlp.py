"""The dense MLP. B rows, T tokens, D model width."""

import jax
from flax import nnx

from train.models.config import DecoderConfig
from train.models.fused import gated
from train.models.layers import InitKey, Linear, projection, residual_scale
from train.models.projections import project, project_together
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

    def projection_groups(self) -> tuple[tuple[Linear, ...], ...]:
        """Lists the projections by their input."""
        return (self.gate_proj, self.up_proj), (self.down_proj,)

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, None]:
        return self.run(x), None

    def run(self, x: jax.Array) -> jax.Array:
        """Computes [B, T, D] of [B, T, D]."""
        if self.config.attention != "xla" and gated.can_fuse(self.down_proj, x.dtype):
            hidden = project_together(x, self.gate_proj, self.up_proj)
            return gated.project_gated(self.config.activation, hidden, self.down_proj)
        gate, up = project(x, self.gate_proj, self.up_proj)
        return project(activate(self.config, gate) * up, self.down_proj)[0]


def activate(config: DecoderConfig, x: jax.Array) -> jax.Array:
    """Computes the activation of a decoder."""
    return jax.nn.silu(x) if config.activation == "silu" else jax.nn.gelu(x, approximate=True)
