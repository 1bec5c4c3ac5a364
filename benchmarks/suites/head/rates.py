"""Rates of the machine, of the matmuls of a tile alone and of a copy, and the rates that kljax reaches."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.suites.head.forms import HeadOptions, Size
from kljax.log_probs._head import default_tile

# The matmuls of a tile, by their results.
MATMULS = {"matmul_logits": "logits", "matmul_hidden": "gradient of the hidden states", "matmul_head": "of the head"}
RATES = (*MATMULS, "copy")
# Matmuls in one program, so that its start costs nothing.
REPEATS = 4
COPIED_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Rates:
    """Operations per second of the matmuls of a tile, and bytes per second of a copy; None: kljax was not timed.

    `mixed` weighs the four matmuls as kljax needs them, `reached` is kljax, with the recomputed ones; `moved` is a
    lower bound of what kljax moves.
    """

    tile: tuple[int, int]
    matmuls: dict[str, float]
    mixed: float
    reached: float | None
    copied: float
    moved: float | None


def rates_of(size: Size, options: HeadOptions, kind: str, seconds: Mapping[str, float], ours: float | None) -> Rates:
    """Computes the rates from the seconds of each of `RATES`, and of kljax's value and gradients or None."""
    tile = tile_of(size, options, kind)
    flops, itemsize = 2 * REPEATS * tile[0] * tile[1] * size.width, 2 if options.dtype == "bf16" else 4
    return Rates(
        tile=tile,
        matmuls={name: flops / seconds[name] for name in MATMULS},
        mixed=matmul_rate(flops, seconds),
        reached=None if ours is None else 4 * size.flops / ours,
        copied=copy_bytes(size) / seconds["copy"],
        moved=None if ours is None else traffic(size, tile, itemsize) / ours,
    )


def describe(rates: Rates) -> str:
    """Describes rates in a paragraph."""
    shapes = ", ".join(f"{MATMULS[name]} {rate / 1e9:,.0f}" for name, rate in rates.matmuls.items())
    text = (
        f"Matmuls of a tile of {rates.tile[0]:,} tokens and {rates.tile[1]:,} columns alone, GFLOP/s: {shapes}; as "
        f"kljax needs them {rates.mixed / 1e9:,.0f}."
    )
    if rates.reached is not None:
        best = max(rates.matmuls.values())
        text += (
            f" kljax, recomputed matmuls included: {rates.reached / 1e9:,.0f}, {rates.reached / rates.mixed:.0%} of "
            f"that and {rates.reached / best:.0%} of the fastest shape."
        )
    text += f" A copy reads and writes {rates.copied / 1e9:,.1f} GB/s"
    if rates.moved is not None:
        text += f"; kljax moves at least {rates.moved / 1e9:,.1f}, {rates.moved / rates.copied:.0%} of that"
    return f"{text}."


def tile_of(size: Size, options: HeadOptions, kind: str) -> tuple[int, int]:
    """Returns tokens and vocabulary of the tile that kljax uses."""
    tile = default_tile(kind)
    tokens, vocab = options.tile or (tile.tokens, tile.vocab)
    return min(tokens, size.tokens), min(vocab, size.vocab)


def copy_bytes(size: Size) -> int:
    """Returns the bytes that the copy reads and writes; fewer for a small problem."""
    return 2 * 4 * (min(COPIED_BYTES, size.vocab * size.width * 4) // 4)


def build_rate(
    name: str, size: Size, options: HeadOptions, device: jax.Device
) -> tuple[Callable[..., tuple[jax.Array, ...]], tuple[Any, ...]]:
    """Returns the function of a rate, and its arguments."""
    tokens, vocab = tile_of(size, options, device.device_kind)
    dtype = jnp.bfloat16 if options.dtype == "bf16" else jnp.float32

    def normal(*shape: int) -> jax.Array:
        drawn = np.random.default_rng(0).standard_normal(shape, np.float32)
        return jnp.asarray(drawn, dtype, device=device)

    if name == "copy":
        return lambda x: (x + 1,), (jnp.zeros(copy_bytes(size) // 8, jnp.float32, device=device),)
    # Contracted axes, shape of the operand that changes from one matmul to the next, shape of the fixed one.
    axes, varying, fixed = {
        "matmul_logits": ((1, 0), (tokens, size.width), (size.width, vocab)),
        "matmul_hidden": ((1, 1), (tokens, vocab), (size.width, vocab)),
        "matmul_head": ((0, 0), (tokens, size.width), (tokens, vocab)),
    }[name]

    def matmuls(several: jax.Array, fixed: jax.Array) -> tuple[jax.Array, ...]:
        def step(carry: jax.Array, varying: jax.Array) -> tuple[jax.Array, None]:
            return multiply(varying, fixed), None

        return (jax.lax.scan(step, jnp.zeros_like(multiply(several[0], fixed)), several)[0],)

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        contracted = (((axes[0],), (axes[1],)), ((), ()))
        return jax.lax.dot_general(a, b, contracted, preferred_element_type=jnp.float32)

    return matmuls, (normal(REPEATS, *varying), normal(*fixed))


def matmul_rate(flops: int, seconds: Mapping[str, float]) -> float:
    """Returns the operations per second of the four matmuls of kljax alone; it computes the logits twice."""
    return 4 * flops / (2 * seconds["matmul_logits"] + seconds["matmul_hidden"] + seconds["matmul_head"])


def traffic(size: Size, tile: tuple[int, int], itemsize: int) -> int:
    """Returns a lower bound of the bytes that value and gradient move if no tile stays in a cache."""
    chunks, tiles = -(-size.vocab // tile[1]), -(-size.tokens // tile[0])
    logits, head, hidden = size.tokens * size.vocab, size.width * size.vocab, size.tokens * size.width
    # The head once, the hidden states once for each chunk of the vocabulary, the float32 logits written and read.
    each_pass = itemsize * (head + chunks * hidden) + 2 * 4 * logits
    # Backward also the float32 gradients, of the hidden states for each chunk and of the head for each tile of tokens.
    return 2 * each_pass + 2 * 4 * (chunks * hidden + tiles * head) + itemsize * (head + hidden)
