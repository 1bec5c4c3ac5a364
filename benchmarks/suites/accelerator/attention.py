"""Attention of whole rows, value and gradient: the implementations that these devices have, against each other."""

import dataclasses
import functools
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness.measure import relative_distance
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import ratio
from train.models.attention import AttentionOptions, Implementation, attend, choose_implementation
from train.models.attention.spans import Spans
from train.models.sharding import device_kind

ROUNDS = 5
# Rounding of scores and weights to bfloat16 leaves 1e-2.
TOLERANCE = 3e-2
REFERENCE: Implementation = "blocks"


class Shape(NamedTuple):
    """Rows, their runs, query heads, key-value heads, head width, and the window of a sliding layer or None.

    `runs` has a pair for each level of a row's sequences: children of each run of the level above, and their length.
    """

    rows: int
    runs: tuple[tuple[int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None


SHAPES = {
    "Qwen3-0.6B, 16 x 1,024": Shape(16, ((1, 1024),), 16, 8, 128),
    "Qwen3-8B, 4 x 4,096": Shape(4, ((1, 4096),), 32, 8, 128),
    "Qwen3-8B, 4 x 4,096, window of 1,024": Shape(4, ((1, 4096),), 32, 8, 128, 1024),
    "Qwen3-8B, 1 x 32,768": Shape(1, ((1, 32_768),), 32, 8, 128),
    "Qwen3-8B, 4 x 8 x 512 packed": Shape(4, ((8, 512),), 32, 8, 128),
    "Qwen3-8B, 4 x (512 + 8 x 448)": Shape(4, ((1, 512), (8, 448)), 32, 8, 128),
    "Qwen3-8B, 4 trees of 16 x 1,024": Shape(4, ((1, 512), (4, 384), (4, 128)), 32, 8, 128),
}
TINY = {"tiny": Shape(2, ((1, 32), (3, 32)), 4, 2, 16)}


class AttentionContender:
    """Times attention of one shape after the other."""

    def __init__(self, shapes: dict[str, Shape]) -> None:
        self.shapes = shapes

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Times value and gradients of a shape in bfloat16, in interleaved rounds; a row for each implementation."""
        shape = self.shapes[of]
        spans = _spans(shape)
        keys = jax.random.split(jax.random.key(0), 4)
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads, shape.heads]
        arrays = [
            jax.random.normal(key, (*spans.end.shape, heads, shape.head_dim), jnp.bfloat16)
            for key, heads in zip(keys, sizes, strict=True)
        ]
        chosen = choose_implementation(arrays[0], arrays[1], spans)
        results, compiled = race_programs(
            {
                name: (functools.partial(_attention, name, shape.window is not None), (*arrays, of_name))
                for name, of_name in _contenders(shape, spans).items()
            },
            ROUNDS,
        )
        dense, expected = results["dense"].best("wall"), compiled[REFERENCE]()
        rows = []
        for name, result in results.items():
            best = result.best("wall")
            row: dict[str, Any] = {"name": f"{of}: {name}", "chosen": "yes" if name == chosen else None}
            row |= {"ms": best and 1e3 * best, "of_dense": ratio(best, dense), "bytes": result.temp_bytes}
            if result.problem is not None:
                # All scores need not fit into the memory.
                row["absent" if name == "dense" else "problem"] = result.problem
            elif name != REFERENCE:
                row["differs"] = _distance(compiled[name](), expected)
                if not row["differs"] <= TOLERANCE:
                    row["problem"] = f"differs from {REFERENCE} by {row['differs']:.0e}, expected at most {TOLERANCE}"
            rows.append(row)
        return rows


def _contenders(shape: Shape, spans: Spans) -> dict[Implementation, Spans]:
    """Returns the implementations that these devices have for a shape, and the spans that each reads."""
    kind = device_kind()
    kernels: dict[Implementation, Spans] = {"tpu": spans} if kind.startswith("TPU") else {}
    if kind.startswith("NVIDIA"):
        kernels["triton"] = spans
        if spans.group is not None:
            kernels["cudnn"] = spans
        elif shape.runs[0][0] == len(shape.runs) == 1:
            lengths = jnp.full(shape.rows, spans.end.shape[1], jnp.int32)
            kernels["cudnn"] = dataclasses.replace(spans, lengths=lengths)
    kernels |= {"blocks": spans, "dense": spans}
    return {name: kernels[name] for name in get_args(Implementation) if name in kernels}


def _spans(shape: Shape) -> Spans:
    """Builds the spans of a shape, as the decoder has them for rows without padding."""
    end, start, window_start = list[int](), list[int](), list[int]()

    def write(levels: tuple[tuple[int, int], ...], path: list[int]) -> None:
        (count, length), *deeper = levels
        for _ in range(count):
            first = len(end)
            own = [*path, *range(first, first + length)]
            start.extend([own[0]] * length)
            end.extend([0] * length)
            for depth in range(len(path), len(own)):
                window_start.append(own[max(0, depth + 1 - (shape.window or depth + 1))])
            if deeper:
                write(tuple(deeper), own)
            end[first : first + length] = [len(end)] * length

    write(shape.runs, [])
    of_rows = [jnp.tile(jnp.asarray(x, jnp.int32), (shape.rows, 1)) for x in (end, start, window_start)]
    is_group = len(shape.runs) == 2 and shape.runs[0][0] == 1
    group = (shape.runs[0][1], shape.runs[1][1]) if is_group else None
    return Spans(of_rows[0], of_rows[1], of_rows[2], window=shape.window, group=group)


def _attention(implementation: Implementation, sliding: bool, *arguments: Any) -> Any:
    """Returns output and gradients for query, key, value, cotangent and spans."""
    *arrays, cotangent, spans = arguments
    options = AttentionOptions(sliding, implementation=implementation)
    output, pull = jax.vjp(lambda q, k, v: attend(q, k, v, spans, options), *arrays)
    return output, *pull(cotangent)


def _distance(actual: Any, expected: Any) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(relative_distance(np.asarray(a, np.float32), np.asarray(b, np.float32)) for a, b in pairs)


def load(tiny: bool) -> AttentionContender:
    """Returns the contender."""
    return AttentionContender(TINY if tiny else SHAPES)
