"""Weights in mxfp4, the form of the experts of GPT-OSS on the hub: 4-bit floats that share a scale in blocks of 32."""

import jax.numpy as jnp
import numpy as np

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the lower three of four bits; the fourth is the sign."""
VALUES = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
BLOCK_BYTES = 16
"""Bytes of a block, of two values each."""
SCALE_BIAS = 127


def dequantise_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Computes the values of blocks, `VALUES[bits] * 2 ** (scale - 127)`, as transformers does.

    Args:
      blocks: [..., blocks, 16] uint8. The lower half of a byte is the value before that of the upper half.
      scales: [..., blocks] uint8.

    Returns:
      [..., 32 * blocks] bfloat16, which holds all of them exactly; a value above its range is infinite.
    """
    bits = np.stack([blocks & 0x0F, blocks >> 4], axis=-1)
    values = VALUES[bits].reshape(*blocks.shape[:-1], 2 * BLOCK_BYTES)
    with np.errstate(over="ignore"):
        # No factor of 2 ** 128, which is infinite in float32.
        values = np.ldexp(values, scales.astype(np.int32)[..., None] - SCALE_BIAS)
    return values.astype(jnp.bfloat16).reshape(*blocks.shape[:-2], -1)
