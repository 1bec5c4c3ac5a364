"""The programs that are compiled for other machines compute what they say: on the CPU they agree with each other."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import kljax
from benchmarks.head_aot import TITLES
from benchmarks.suites.compiler import AXES, HeadSizes, build
from benchmarks.suites.head.jax_forms import TokenConstants

PROBLEM = HeadSizes(tokens=24, rows=2, width=16, vocab=44, chunk=8)
MESHES = {"one": (1, 1, 1), "sharded": (1, 2, 2)}


def mesh_of(layout: str) -> Mesh:
    shape = MESHES[layout]
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), AXES)


def arguments_like(shapes: tuple) -> tuple:
    """Random arrays of the shapes, types and shardings that a program takes; half of the tokens count."""
    rng = np.random.default_rng(0)
    hidden, head, data = shapes

    def put(shape: jax.ShapeDtypeStruct, values: np.ndarray) -> jax.Array:
        return jax.device_put(values.astype(shape.dtype), shape.sharding)

    drawn = TokenConstants(
        targets=rng.integers(0, PROBLEM.vocab, data.targets.shape),
        advantages=rng.standard_normal(data.advantages.shape),
        old_log_probs=-rng.random(data.old_log_probs.shape),
        mask=rng.random(data.mask.shape) < 0.5,
        ref_hidden=rng.standard_normal(data.ref_hidden.shape),
    )
    return (
        put(hidden, rng.standard_normal(hidden.shape)),
        put(head, rng.standard_normal(head.shape)),
        jax.tree.map(put, data, drawn),
    )


@functools.cache
def run(name: str, layout: str) -> list[np.ndarray]:
    program = build(name, mesh_of(layout), PROBLEM, kljax.Tile(8, 16))
    outputs = program.lower().compile()(*arguments_like(program.arguments))
    return [np.asarray(output, np.float32) for output in outputs]


@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize("name", [name for name in TITLES if not name.startswith("naive")])
def test_agrees_with_the_naive_form(name, layout):
    _, _, kind = name.partition("_")
    expected = run(f"naive_{kind}" if kind else "naive", layout)
    got = run(name, layout)
    assert [item.shape for item in got] == [item.shape for item in expected]
    for actual, other_result in zip(got, expected, strict=True):
        # Logits rounded to bfloat16 in Tunix's form, gradients in all.
        np.testing.assert_allclose(actual, other_result, atol=3e-2 * np.abs(other_result).max(), rtol=0)


def test_chunks_of_tokens_do_not_materialise_all_logits():
    program = build("tunix", mesh_of("one"), PROBLEM)
    assert f"{PROBLEM.chunk // PROBLEM.rows},{PROBLEM.vocab}]" in str(program.lower().as_text("hlo"))
    assert f"[{PROBLEM.tokens},{PROBLEM.vocab}]" not in str(program.lower().as_text("hlo"))
