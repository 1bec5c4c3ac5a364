"""A metric that is the largest of its parts, beside `kljax.WeightedSum`, which is their mean."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest of what was added.

    Example:
        >>> (Largest(jnp.float32(2)) + Largest(jnp.float32(3))).value().item()
        3.0
    """

    amount: jax.Array

    @classmethod
    def of(cls, values: jax.Array, mask: jax.Array) -> "Largest":
        """The largest of the values where the mask is True, which are at least 0; 0 where there are none."""
        return cls(jax.lax.stop_gradient(jnp.max(jnp.where(mask, values, 0))))

    def __add__(self, other: "Largest") -> "Largest":
        return Largest(jnp.maximum(self.amount, other.amount))

    def value(self) -> jax.Array:
        """The largest."""
        return self.amount
