"""Attention by cuDNN on NVIDIA GPUs: of rows that are one sequence, and of prompts that completions share.

Shapes: R rows, W slots, N query heads, K key-value heads, H head width; P slots of a prompt, G completions of C slots.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from train.models.attention.spans import Spans, is_key
from train.models.sharding import split_by_hand

Array = jax.Array
_ROWS = ("rows",)
_QUERIES = ("rows", None, "heads", None)
_KEYS = ("rows", None, "kv_heads", None)


def cudnn_rows(query: Array, key: Array, value: Array, spans: Spans, sliding: bool | Array, *, scale: float) -> Array:
    """Computes attention [R, W, N, H] of rows of one sequence by their lengths, without a mask; bfloat16 or float16."""
    assert spans.lengths is not None

    def windowed(window: int | None) -> Callable[..., Array]:
        def local(query: Array, key: Array, value: Array, lengths: Array) -> Array:
            return jax.nn.dot_product_attention(
                query,
                key,
                value,
                scale=scale,
                is_causal=True,
                query_seq_lengths=lengths,
                key_value_seq_lengths=lengths,
                local_window_size=None if window is None else (window - 1, 0),
                implementation="cudnn",
            )

        return split_by_hand(local, (_QUERIES, _KEYS, _KEYS, _ROWS), _QUERIES)

    operands = query, key, value, spans.lengths
    if isinstance(sliding, bool):
        return windowed(spans.window if sliding else None)(*operands)
    return lax.cond(sliding, windowed(spans.window), windowed(None), *operands)


class HeadsOfRows(NamedTuple):
    """Queries [R, W, N, H], keys and values [R, W, K, H] of rows as they are."""

    query: Array
    key: Array
    value: Array


class HeadsOfGroups(NamedTuple):
    """The parts of rows `[prompt | completion | ... | completion]` that attend to rectangles of slots.

    Attributes:
      prompts: of the prompts alone, with W = P.
      completions: queries [R G, C, N, H], keys and values [R G, P + C, K, H] with those of their prompts.
    """

    prompts: HeadsOfRows
    completions: HeadsOfRows


def split_groups(query: Array, key: Array, value: Array, group: tuple[int, int]) -> HeadsOfGroups:
    """Splits the heads of whole rows, [R, W, N, H] and [R, W, K, H]."""
    prompt, length = group

    def completions(x: Array) -> Array:
        return x[:, prompt:].reshape(-1, length, *x.shape[2:])

    def with_prompts(x: Array) -> Array:
        own = completions(x)
        prompts = jnp.repeat(x[:, :prompt], len(own) // len(x), axis=0)
        return jnp.concatenate([prompts, own], axis=1)

    prompts = HeadsOfRows(query[:, :prompt], key[:, :prompt], value[:, :prompt])
    return HeadsOfGroups(prompts, HeadsOfRows(completions(query), with_prompts(key), with_prompts(value)))


def join_groups(groups: HeadsOfGroups) -> HeadsOfRows:
    """Joins what `split_groups` splits."""
    prompts, completions = groups
    prompt = prompts.query.shape[1]
    of_completions = completions.query, completions.key[:, prompt:], completions.value[:, prompt:]

    def join(first: Array, later: Array) -> Array:
        return jnp.concatenate([first, later.reshape(len(first), -1, *later.shape[2:])], axis=1)

    return HeadsOfRows(*map(join, prompts, of_completions))


def cudnn_groups(groups: HeadsOfGroups, spans: Spans, sliding: bool | Array, *, scale: float) -> tuple[Array, Array]:
    """Computes attention of prompts [R, P, N, H] and of completions [R G, C, N, H].

    The prompts attend to themselves, each completion to its prompt and to itself: rectangles, whose masks are small.
    """
    assert spans.group is not None
    width = spans.end.shape[1]
    start = spans.for_layer(sliding)
    slots = jnp.broadcast_to(jnp.arange(width), spans.end.shape)
    of_slots = split_groups(slots, slots, spans.end, spans.group)
    starts = split_groups(start, start, start, spans.group)

    def run(rows: HeadsOfRows, slots: HeadsOfRows, start: Array) -> Array:
        seen = is_key(slots.query[:, :, None], slots.key[:, None, :], slots.value[:, None, :], start[:, :, None])

        def local(query: Array, key: Array, value: Array, mask: Array) -> Array:
            return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="cudnn")

        return split_by_hand(local, (_QUERIES, _KEYS, _KEYS, _ROWS), _QUERIES)(*rows, seen[:, None])

    return (
        run(groups.prompts, of_slots.prompts, starts.prompts.query),
        run(groups.completions, of_slots.completions, starts.completions.query),
    )
