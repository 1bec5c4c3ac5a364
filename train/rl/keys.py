"""Random keys, each folded from the seed, a purpose and a step: a resumed run draws what it would have drawn."""

import jax

PURPOSES = ("params", "adapter", "value_head", "sample", "rows", "held_out", "loss")


def purpose_key(seed: int, purpose: str, step: int = 0) -> jax.Array:
    """The key of one purpose at one step; raises ValueError for a purpose that is not in the list."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), PURPOSES.index(purpose)), step)
