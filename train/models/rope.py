"""Rotary position embeddings, plain and scaled. Shapes: B rows, T tokens, N heads, H head width."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from train.models.config import DecoderConfig, LinearScaling, Llama3Scaling, Rope, YarnScaling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CosSin:
    """Cosine and sine of the angle of every rotary pair, [B, T, 1, H / 2]."""

    cos: jax.Array
    sin: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RopeTables:
    """The rope of every layer, computed once for all of them.

    Attributes:
      full: for full layers, and for sliding layers if `sliding` is None.
      sliding: for sliding layers of a decoder with a local rope.
    """

    full: CosSin
    sliding: CosSin | None = None

    def for_layer(self, sliding: bool | jax.Array) -> CosSin:
        """Selects the rope of a sliding or a full layer; `sliding` may be traced."""
        if self.sliding is None:
            return self.full
        return jax.tree.map(lambda local, full: jnp.where(sliding, local, full), self.sliding, self.full)


def rope_tables(config: DecoderConfig, positions: jax.Array, dtype: jnp.dtype) -> RopeTables:
    """Computes the rope of tokens at `positions` [B, T] for the layers of a decoder."""
    local = None if config.local_rope is None else rope_cos_sin(config.local_rope, config.head_dim, positions, dtype)
    return RopeTables(rope_cos_sin(config.rope, config.head_dim, positions, dtype), local)


def rope_cos_sin(rope: Rope, head_dim: int, positions: jax.Array, dtype: jnp.dtype) -> CosSin:
    """Computes cosines and sines at `positions` [B, T], in the wider of `dtype` and float32."""
    wide = jnp.promote_types(dtype, jnp.float32)
    angle = positions[..., None, None].astype(wide) * jnp.asarray(frequencies(rope, head_dim), wide)
    length = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return CosSin(jnp.cos(angle) * length, jnp.sin(angle) * length)


def apply_rope(x: jax.Array, rope: CosSin) -> jax.Array:
    """Rotates heads [B, T, N, H] in the half-rotation layout of Hugging Face: (x[i], x[i + H/2]) form a pair."""
    first, second = jnp.split(x.astype(rope.cos.dtype), 2, axis=-1)
    rotated = (first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Computes the radians per position of each rotary pair, [H / 2] float64, on the host."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = rope.scaling
    if scaling is None:
        return plain
    stretched = plain / scaling.factor
    if isinstance(scaling, LinearScaling):
        return stretched
    if isinstance(scaling, Llama3Scaling):
        share = _llama3_unscaled_share(plain, scaling)
    else:
        share = _yarn_unscaled_share(rope, scaling, head_dim)
    return share * plain + (1 - share) * stretched


def _llama3_unscaled_share(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Returns the unscaled share of each frequency: 1 for short wavelengths, 0 for long ones, linear in between."""
    periods = scaling.original_length * plain / (2 * np.pi)
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    return np.clip((periods - low) / (high - low), 0, 1)


def _yarn_unscaled_share(rope: Rope, scaling: YarnScaling, head_dim: int) -> np.ndarray:
    """Returns the unscaled share of each frequency, linear in the index of the rotary pair."""

    def pair(periods: float) -> float:
        wavelength = scaling.original_length / periods
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    first = pair(scaling.beta_fast)
    last = pair(scaling.beta_slow)
    if scaling.truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, head_dim - 1)
    # Equal ends give a step, as in the programs that trained such models.
    span = last - first if last != first else 0.001
    return 1 - np.clip((np.arange(head_dim // 2) - first) / span, 0, 1)
