"""Completions that share a prompt: it goes through the layers once for all of them.

A packed row is a prompt with the completions that continue it, `[prompt | completion | ... | completion]`; none of them
sees another. B rows of P + C tokens, G completions of each prompt, are R = B / G packed rows of L = P + G C tokens.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from train.models.attention import Sight, attend, token_sight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedSight:
    """Which keys the tokens of packed rows see.

    Attributes:
      prompt: of the prompts [R, P], each among its own tokens.
      completion: of the completions, B rows of C queries and P + C keys.
    """

    prompt: Sight
    completion: Sight


def shared_sight(token_mask: jax.Array, prompt: int, group: int, window: int | None) -> SharedSight:
    """What tokens see of the rows [B, P + C] that `pack` packs; `prompt` is P, `group` G, `window` as `token_sight`."""
    return SharedSight(
        token_sight(token_mask[::group, :prompt], None, window),
        token_sight(token_mask, None, window, first=prompt),
    )


def pack(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """[B, P + C, ...] to [R, L, ...], with the prompt of the first of each `group` rows."""
    rows = x.reshape(-1, group, *x.shape[1:])
    completions = rows[:, :, prompt:].reshape(len(rows), -1, *x.shape[2:])
    return jnp.concatenate([rows[:, 0, :prompt], completions], axis=1)


def unpack(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """[R, L, ...] to [B, P + C, ...], each row with what its prompt has."""
    return jnp.concatenate([_repeated(x[:, :prompt], group), _completions(x, prompt, group)], axis=1)


def attend_shared(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sight: SharedSight,
    *,
    sliding: bool | jax.Array,
    scale: float | None,
    softcap: float | None,
) -> jax.Array:
    """`attend` of packed rows: [R, L, N, H] from queries [R, L, N, H], keys and values [R, L, K, H]."""
    rows, prompt, group = len(query), sight.prompt.full.shape[-1], len(sight.completion.full) // len(query)
    options: Any = {"sliding": sliding, "scale": scale, "softcap": softcap}
    first = attend(query[:, :prompt], key[:, :prompt], value[:, :prompt], sight.prompt, **options)
    asked, keys, values = _completions(query, prompt, group), unpack(key, prompt, group), unpack(value, prompt, group)
    later = attend(asked, keys, values, sight.completion, **options)
    return jnp.concatenate([first, later.reshape(rows, -1, *later.shape[2:])], axis=1)


def _completions(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """[R, L, ...] to [B, C, ...]."""
    return x[:, prompt:].reshape(len(x) * group, -1, *x.shape[2:])


def _repeated(x: jax.Array, group: int) -> jax.Array:
    """[R, ...] to [B, ...]; its gradient is a sum over an axis of its own, not a scatter."""
    return jnp.broadcast_to(x[:, None], (len(x), group, *x.shape[1:])).reshape(-1, *x.shape[1:])
