"""Attention by cuDNN on NVIDIA GPUs: of rows that are one sequence, and of prompts that completions share.

Shapes: R rows, W slots, N query heads, K key-value heads, H head width; P slots of a prompt, G completions of C slots.
"""

from collections.abc import Callable

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


def cudnn_groups(query: Array, key: Array, value: Array, spans: Spans, sliding: bool | Array, *, scale: float) -> Array:
    """Computes attention [R, W, N, H] of rows `[prompt | completion | ... | completion]` in two calls.

    The prompts attend to themselves, each completion to its prompt and to itself: rectangles, whose masks are small.
    """
    assert spans.group is not None
    prompt, length = spans.group
    rows, width = query.shape[:2]
    count = (width - prompt) // length
    end = spans.end
    start = spans.for_layer(sliding)

    def completions(x: Array) -> Array:
        return x[:, prompt:].reshape(rows * count, length, *x.shape[2:])

    def with_prompts(x: Array) -> Array:
        prompts = jnp.broadcast_to(x[:, None, :prompt], (rows, count, prompt, *x.shape[2:]))
        return jnp.concatenate([prompts.reshape(rows * count, prompt, *x.shape[2:]), completions(x)], axis=1)

    slots = jnp.broadcast_to(jnp.arange(width), (rows, width))

    def mask(queries: Array, keys: Array, end: Array, start: Array) -> Array:
        return is_key(queries[:, :, None], keys[:, None, :], end[:, None, :], start[:, :, None])[:, None]

    def local(query: Array, key: Array, value: Array, mask: Array) -> Array:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale, implementation="cudnn")

    run = split_by_hand(local, (_QUERIES, _KEYS, _KEYS, _ROWS), _QUERIES)
    of_prompts = mask(*(x[:, :prompt] for x in (slots, slots, end, start)))
    first = run(query[:, :prompt], key[:, :prompt], value[:, :prompt], of_prompts)
    of_completions = mask(completions(slots), with_prompts(slots), with_prompts(end), completions(start))
    later = run(completions(query), with_prompts(key), with_prompts(value), of_completions)
    return jnp.concatenate([first, later.reshape(rows, -1, *later.shape[2:])], axis=1)
