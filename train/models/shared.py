"""Completions that share a prompt, which goes through the layers once for all of them.

A packed row is a prompt and the completions that continue it, `[prompt | completion | ... | completion]`; completions
do not attend to each other. B rows of P + C tokens with G completions per prompt become R = B / G packed rows of
L = P + G C tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

from train.models.attention import AttentionMask, AttentionOptions, attend, causal_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedPromptMask:
    """The attention masks of packed rows.

    Attributes:
      prompt: R rows of P queries and P keys.
      completion: B rows of C queries and P + C keys.
    """

    prompt: AttentionMask
    completion: AttentionMask


def shared_prompt_mask(token_mask: jax.Array, prompt: int, group: int, window: int | None) -> SharedPromptMask:
    """Builds the masks of packed rows.

    Args:
      token_mask: [B, P + C] bool of the rows before packing, True at real tokens.
      prompt: P.
      group: G.
      window: tokens that a sliding layer attends to; None: the model has no such layer.
    """
    return SharedPromptMask(
        causal_mask(token_mask[::group, :prompt], None, window),
        causal_mask(token_mask, None, window, first=prompt),
    )


def pack(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """Packs [B, P + C, ...] to [R, L, ...], with the prompt of the first row of each group."""
    rows = x.reshape(-1, group, *x.shape[1:])
    completions = rows[:, :, prompt:].reshape(len(rows), -1, *x.shape[2:])
    return jnp.concatenate([rows[:, 0, :prompt], completions], axis=1)


def unpack(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """Unpacks [R, L, ...] to [B, P + C, ...]; every row of a group gets the values of its prompt."""
    return jnp.concatenate([_repeat_rows(x[:, :prompt], group), _completions(x, prompt, group)], axis=1)


def attend_shared(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: SharedPromptMask, options: AttentionOptions
) -> jax.Array:
    """Computes `attend` of packed rows: [R, L, N, H] from queries [R, L, N, H], keys and values [R, L, K, H]."""
    rows, prompt, group = len(query), mask.prompt.full.shape[-1], len(mask.completion.full) // len(query)
    first = attend(query[:, :prompt], key[:, :prompt], value[:, :prompt], mask.prompt, options)
    queries, keys, values = _completions(query, prompt, group), unpack(key, prompt, group), unpack(value, prompt, group)
    later = attend(queries, keys, values, mask.completion, options)
    return jnp.concatenate([first, later.reshape(rows, -1, *later.shape[2:])], axis=1)


def _completions(x: jax.Array, prompt: int, group: int) -> jax.Array:
    """Splits the completions off packed rows: [R, L, ...] to [B, C, ...]."""
    return x[:, prompt:].reshape(len(x) * group, -1, *x.shape[2:])


def _repeat_rows(x: jax.Array, group: int) -> jax.Array:
    """Repeats rows, [R, ...] to [B, ...]; the gradient is a sum over an axis of its own, not a scatter."""
    return jnp.broadcast_to(x[:, None], (len(x), group, *x.shape[1:])).reshape(-1, *x.shape[1:])
