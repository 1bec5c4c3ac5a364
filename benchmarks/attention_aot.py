"""What attention over long rows needs on hardware that is not here, by the plans of its compilers.

    .venv-aot/bin/python -m benchmarks.attention_aot

Compiles attention and its gradients for the heads of Qwen3-0.6B: 16 of queries and 8 of keys, of 128 numbers in
bfloat16. Temporaries are those of the whole program; pairs are those of a query and a key that its loops or its kernel
compute, over the pairs of a causal row of the same width. `python -m tests.train.plan.table attention --write` puts the
table into docs/accelerators.md.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from train.models.attention import AttentionOptions, attend, choose_implementation
from train.models.attention.spans import Spans, needed_blocks
from train.models.attention.tpu import tpu_block
from train.models.attention.triton import BLOCK as TRITON_BLOCK
from train.models.sharding import make_mesh
from train.plan.compiler import hlo
from train.plan.compiler.flops import count_flops
from train.plan.compiler.lowering import compile_program
from train.plan.compiler.topology import load_compilers, parse_topology, topology_devices

Array = jax.Array
HEADS, KEY_HEADS, HEAD_DIM = 16, 8, 128
PRODUCTS = 7
"""Products of a pair of heads, forward and backward: the scores twice, and five more."""
TOPOLOGIES = {"H100": "h100:1", "v5p": "v5p:2x2x1"}


@dataclasses.dataclass(frozen=True)
class LongRow:
    """A row of sequences of one length.

    Attributes:
      width: slots.
      sequences: in the row.
      window: tokens that a query attends to, itself included; None: all before it.
    """

    width: int
    sequences: int = 1
    window: int | None = None

    def spans(self) -> Spans:
        """Makes the keys of each slot; one sequence has its length, which cuDNN reads."""
        slots = jnp.arange(self.width, dtype=jnp.int32)
        length = self.width // self.sequences
        first = slots // length * length
        return Spans(
            end=(first + length)[None],
            start=first[None],
            window_start=None if self.window is None else jnp.maximum(first, slots - (self.window - 1))[None],
            lengths=jnp.full((1,), self.width, jnp.int32) if self.sequences == 1 else None,
            window=self.window,
        )

    def __str__(self) -> str:
        """Shows the row in the table."""
        window = "" if self.window is None else f", window of {self.window:,}"
        return f"{self.sequences} x {self.width // self.sequences:,}{window}"


ROWS = (
    LongRow(32_768),
    LongRow(32_768, sequences=4),
    LongRow(16_384),
    LongRow(16_384, window=1024),
    LongRow(16_384, 4, window=1024),
)


@dataclasses.dataclass(frozen=True)
class AttentionPlan:
    """The plan of a compiler for attention and its gradients.

    Attributes:
      implementation: what computes it.
      temporary: bytes.
      pairs: of a query and a key that are computed, over those of a causal row.
      dense: whether an array has two axes of slots.
    """

    implementation: str
    temporary: int
    pairs: float
    dense: bool


def plan(device: str, row: LongRow) -> AttentionPlan:
    """Compiles attention of a row for "H100" or "v5p"; `load_compilers` was called."""
    mesh = make_mesh(devices=topology_devices(parse_topology(TOPOLOGIES[device]))[:1])
    spans = row.spans()
    options = AttentionOptions(sliding=row.window is not None)

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P()))

    def gradient(query: Array, key: Array, value: Array, spans: Spans, g: Array) -> tuple[Array, ...]:
        return jax.vjp(lambda query, key, value: attend(query, key, value, spans, options), query, key, value)[1](g)

    query = shape(1, row.width, HEADS, HEAD_DIM)
    key = shape(1, row.width, KEY_HEADS, HEAD_DIM)
    abstract = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), spans)
    with jax.set_mesh(mesh):
        implementation = choose_implementation(query, key, abstract, options)
        compiled = compile_program(jax.jit(gradient).lower(query, key, key, abstract, query))
    module = hlo.parse(compiled.text)
    arrays = [sizes for body in module.computations.values() for x in body for _, sizes in hlo.array_sizes(x.shape)]
    causal = row.width * (row.width + 1) / 2
    if implementation == "cudnn":
        pairs = count_flops(module, {}) / (2 * PRODUCTS * HEADS * HEAD_DIM)
    else:
        block = TRITON_BLOCK if implementation == "triton" else tpu_block(row.width, row.width)
        pairs = block**2 * float(jnp.sum(needed_blocks(spans.end, spans.for_layer(options.sliding), block)))
    return AttentionPlan(
        implementation=implementation,
        temporary=compiled.temporary,
        pairs=pairs / causal,
        dense=any(math.prod(sizes) >= row.width**2 for sizes in arrays),
    )


TITLE = """\
| row of sequences | device | by | temporaries MiB | pairs over causal ones |
|---|---|---|--:|--:|"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table as its rows are known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention_aot", description=__doc__)
    parser.parse_args(arguments)
    load_compilers()
    print(TITLE, flush=True)
    for row in ROWS:
        for device in TOPOLOGIES:
            planned = plan(device, row)
            cells = [str(row), device, f"`{planned.implementation}`", f"{planned.temporary / 2**20:,.0f}"]
            cells += [f"{planned.pairs:.2f}{', an array of all pairs' if planned.dense else ''}"]
            print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
