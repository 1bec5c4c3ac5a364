"""The loss of a caller on a chunk of tokens: its inputs as leaves, and checks of its results."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from kljax._typing import Array
from kljax.log_probs._api import TokenStats
from kljax.log_probs._inputs import Spec

TokenLoss = Callable[[TokenStats, Any], tuple[Array, Any]]
Leaves = tuple[Array, ...]
Stats = dict[str, Array]


@dataclasses.dataclass(frozen=True, eq=False)
class LossPlan:
    """Static options: the head's, whose tile has the tokens of a chunk, the loss, and the structure of its inputs.

    Attributes:
      spec: of the head.
      token_loss: of the caller.
      tree: structure of `per_token`.
      scalars: which of its leaves are scalars.
    """

    spec: Spec
    token_loss: TokenLoss
    tree: Any
    scalars: tuple[bool, ...]

    def __call__(self, stats: Stats, leaves: Leaves) -> tuple[Array, Any]:
        """Returns the loss `[tokens]`, in the type of the statistics, and the metrics as constants."""
        if not self.spec.entropy_gradient and "entropy" in stats:
            stats = stats | {"entropy": lax.stop_gradient(stats["entropy"])}
        loss, metrics = self.token_loss(TokenStats(**stats), jax.tree.unflatten(self.tree, leaves))
        loss = jnp.asarray(loss)
        metrics = jax.tree.map(jnp.asarray, metrics)
        expected = stats["log_prob"].shape
        if loss.shape != expected:
            raise ValueError(
                f"token_loss: got a loss of shape {list(loss.shape)}, expected {list(expected)}, one for each token"
            )
        for path, x in jax.tree.leaves_with_path(metrics):
            if x.shape[:1] != expected:
                raise ValueError(
                    f"token_loss: got the metric {jax.tree_util.keystr(path)} of shape {list(x.shape)}, expected "
                    f"[{expected[0]}, ...], one for each token"
                )
        return loss.astype(stats["log_prob"].dtype), lax.stop_gradient(metrics)

    def split(self, leaves: Leaves, function: Callable[[Any], Any]) -> Leaves:
        """Applies a function to the leaves that have a value per token; scalars stay."""
        arrays = function([x for x, scalar in zip(leaves, self.scalars, strict=True) if not scalar])
        arrays = iter(arrays)
        return tuple(x if scalar else next(arrays) for x, scalar in zip(leaves, self.scalars, strict=True))

    def leaf_specs(self) -> tuple[PartitionSpec, ...]:
        """Returns the spec of each leaf on the mesh."""
        assert self.spec.sharding is not None
        return tuple(PartitionSpec() if scalar else self.spec.sharding.tokens for scalar in self.scalars)
