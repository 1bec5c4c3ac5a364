"""Attention of whole sequences, value and gradient: the kernel that the decoder chooses here, against XLA."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.measure import relative_distance
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import ratio
from train.models.attention import AttentionOptions, attend, causal_mask
from train.models.kernels import choose_kernel

ROUNDS = 5
# Rounding of scores and weights to bfloat16 leaves 1e-2.
TOLERANCE = 3e-2


class Shape(NamedTuple):
    """Rows, tokens, query heads, key-value heads, head width, and the window of a sliding layer or None."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None


SHAPES = {
    "Qwen3-0.6B, 16 x 1,024": Shape(16, 1024, 16, 8, 128),
    "Qwen3-8B, 4 x 4,096": Shape(4, 4096, 32, 8, 128),
    "Qwen3-8B, 4 x 4,096, window of 1,024": Shape(4, 4096, 32, 8, 128, 1024),
}
TINY = {"tiny": Shape(2, 128, 4, 2, 16)}


class AttentionContender:
    """Times attention of one shape after the other."""

    def __init__(self, shapes: dict[str, Shape]) -> None:
        self.shapes = shapes

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Times value and gradients of a shape in bfloat16, in interleaved rounds."""
        shape = self.shapes[of]
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads, shape.heads]
        arrays = [
            jax.random.normal(key, (shape.rows, shape.tokens, heads, shape.head_dim), jnp.bfloat16)
            for key, heads in zip(keys, sizes, strict=True)
        ]
        mask = causal_mask(jnp.ones((shape.rows, shape.tokens), bool), shape.window)
        kernel = choose_kernel(arrays[0], arrays[1], None)
        masks = {"XLA": dataclasses.replace(mask, segments=None)} | ({kernel: mask} if kernel else {})
        function = functools.partial(_attention, shape.window is not None)
        results, compiled = race_programs(
            {name: (function, (*arrays, chosen)) for name, chosen in masks.items()}, ROUNDS
        )
        row: dict[str, Any] = {"name": of, "kernel": kernel or "none here"}
        for column, name in (("xla", "XLA"), ("own", kernel)):
            if name is not None:
                if results[name].problem is not None:
                    row["problem"] = f"{name}: {results[name].problem}"
                best = results[name].best("wall")
                row |= {f"{column}_ms": best and 1e3 * best, f"{column}_bytes": results[name].temp_bytes}
        row["speed"] = ratio(row.get("xla_ms"), row.get("own_ms"))
        if row["speed"] is not None and kernel is not None:
            row["differs"] = _distance(compiled[kernel](), compiled["XLA"]())
            if not row["differs"] <= TOLERANCE:
                row["problem"] = f"{kernel} differs from XLA by {row['differs']:.0e}, expected at most {TOLERANCE:.0e}"
        return [row]


def _attention(sliding: bool, *arguments: Any) -> Any:
    """Returns output and gradients for query, key, value, cotangent and mask."""
    *arrays, cotangent, mask = arguments
    output, pull = jax.vjp(lambda q, k, v: attend(q, k, v, mask, AttentionOptions(sliding)), *arrays)
    return output, *pull(cotangent)


def _distance(actual: Any, expected: Any) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(relative_distance(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in pairs)


def load(tiny: bool) -> AttentionContender:
    """Returns the contender."""
    return AttentionContender(TINY if tiny else SHAPES)
