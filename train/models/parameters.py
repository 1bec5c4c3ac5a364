"""Parameters: the random key of each, its logical axes."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
from flax import nnx


@dataclasses.dataclass(frozen=True)
class InitKey:
    """The random key of a module.

    Attributes:
      key: the key of the whole tree, or of one layer of the stack.
      path: the names that lead to the module in the parameter tree.
      stacked: whether the module is inside the stack of layers.
    """

    key: jax.Array
    path: tuple[str, ...] = ()
    stacked: bool = False

    def child(self, name: str) -> "InitKey":
        """Returns the key of a submodule."""
        return dataclasses.replace(self, path=(*self.path, name))

    def draw(self, index: int, count: int) -> jax.Array:
        """Derives the key of parameter `index` (from 0) of the `count` parameters of this module.

        These are the keys of flax Linen, which hashed the path and a counter, so that a seed keeps its weights. Linen
        traced the stacked layer twice, and its counter went on: hence the second `count`.
        """
        number = index + 1 + (count if self.stacked else 0)
        hashed = hashlib.sha1("".join(self.path).encode() + bytes([number]), usedforsecurity=False).digest()
        return jax.random.fold_in(self.key, jnp.uint32(int.from_bytes(hashed[:4], "big")))


def param(value: jax.Array, axes: tuple[str, ...], kind: type[nnx.Param] = nnx.Param) -> nnx.Param:
    """Makes a parameter with its logical axes, which `train.models.sharding` maps to mesh axes."""
    # nnx would place the value at once, and knows no logical axes.
    return kind(value, out_sharding=axes, eager_sharding=False)
