"""How much the most probable tokens of two policies have in common."""

import jax.numpy as jnp
import numpy as np

from kljax._checks import as_float, check_mask, check_same_shape
from kljax._typing import Array, ArrayLike, Float, Integer, Mask, MaskLike

__all__ = ["top_k_overlap"]


def top_k_overlap(
    indices: Integer[ArrayLike, "*b T K"],
    teacher_indices: Integer[ArrayLike, "*b T K"],
    mask: MaskLike[Mask, "*b T"],
) -> Float[Array, "*b T"]:
    """Compares two sets of `K` tokens at each position: the share that they have in common, `|A_t & B_t| / K`.

    Args:
      indices: `[..., T, K]` integers, distinct at each position: the most probable tokens of the policy.
      teacher_indices: indices of the teacher.
      mask: `[..., T]`, boolean.

    Returns:
      `[..., T]`, float32 or float64, between 0 and 1; masked positions hold 0. `mean_metric` takes its mean.

    Raises:
      ValueError: for shapes that do not fit.
      TypeError: if the indices are not integers.

    References:
      verl, the overlap metrics of the distillation loss `forward_kl_topk`.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> print(kljax.top_k_overlap(jnp.array([[7, 3], [1, 2]]), jnp.array([[3, 5], [2, 1]]), jnp.array([1, 1])))
      [0.5 1. ]
    """
    shape = check_same_shape(indices=indices, teacher_indices=teacher_indices)
    if len(shape) == 0 or np.shape(mask) != shape[:-1]:
        raise ValueError(
            f"mask: got shape {list(np.shape(mask))}, expected {list(shape[:-1])}, indices without its last"
        )
    first = jnp.asarray(indices)
    second = jnp.asarray(teacher_indices)
    for name, array in (("indices", first), ("teacher_indices", second)):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise TypeError(f"{name}: got dtype {array.dtype}, expected an integer type")
    (shared,) = as_float((first[..., :, None] == second[..., None, :]).any(-1))
    return jnp.where(check_mask(mask), shared.sum(-1) / max(shape[-1], 1), 0)
