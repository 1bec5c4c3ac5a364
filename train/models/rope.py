"""Rotary position embeddings, plain and scaled. Shapes: B rows, T tokens, H head width."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from train.models.config import LinearScaling, Llama3Scaling, Rope, YarnScaling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles of every token, [B, T, 1, H / 2]; computed once for all layers."""

    cos: jax.Array
    sin: jax.Array


def frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """Radians per position of each rotary pair, [H / 2] float64, on the host."""
    plain = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = rope.scaling
    if scaling is None:
        return plain
    stretched = plain / scaling.factor
    if isinstance(scaling, LinearScaling):
        return stretched
    share = _kept_llama3(plain, scaling) if isinstance(scaling, Llama3Scaling) else _kept_yarn(rope, scaling, head_dim)
    return share * plain + (1 - share) * stretched


def _kept_llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """How much of each frequency stays: 1 for short wavelengths, 0 for long ones, between them linear in turns."""
    turns = scaling.original_length * plain / (2 * np.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return np.clip((turns - low) / (high - low), 0, 1)


def _kept_yarn(rope: Rope, scaling: YarnScaling, head_dim: int) -> np.ndarray:
    """As for Llama 3, but linear in the number of the pair."""

    def pair(turns: float) -> float:
        wavelength = scaling.original_length / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    # Two equal ends are a step, as in the programs that trained such models.
    width = last - first if last != first else 0.001
    return 1 - np.clip((np.arange(head_dim // 2) - first) / width, 0, 1)


def rotation(rope: Rope, head_dim: int, positions: jax.Array, dtype: jnp.dtype) -> Rotation:
    """The rotation of tokens at `positions` [B, T], in float32 at least whatever `dtype` they are computed in."""
    wide = jnp.promote_types(dtype, jnp.float32)
    angle = positions[..., None, None].astype(wide) * jnp.asarray(frequencies(rope, head_dim), wide)
    length = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return Rotation(jnp.cos(angle) * length, jnp.sin(angle) * length)


def rotate(x: jax.Array, turn: Rotation) -> jax.Array:
    """Rotate heads [B, T, heads, H] in the half-rotation layout of Hugging Face: (x[i], x[i + H/2]) form a pair."""
    first, second = jnp.split(x.astype(turn.cos.dtype), 2, axis=-1)
    turned = (first * turn.cos - second * turn.sin, second * turn.cos + first * turn.sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
