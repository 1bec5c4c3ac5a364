"""Operations that a decoder in bfloat16 computes in float32, read from its program.

Numbers do not show it: XLA's CPU backend fuses, and what is fused keeps the digits that a cast in between would lose.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Literal, jaxprs_in_params

from train.models import Decoder, DecoderConfig, DecoderState, KeyValues, LayerKind
from train.models.config import Rope

SHAPE = {"vocab_size": 20, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 24, "qk_norm": True}
# SiLU in both: the activation's tanh, which is in bfloat16, would be counted among those of the attention.
GEMMA = {
    "layers": 2,
    "pattern": (LayerKind("sliding"), LayerKind("full")),
    "sliding_window": 3,
    "local_rope": Rope(100.0),
    "norm_offset": True,
    "post_norms": True,
    "attention_softcap": 2.0,
}
CONFIGS = {
    "qwen": DecoderConfig(layers=2, dtype="bfloat16", **SHAPE),
    "gemma": DecoderConfig(dtype="bfloat16", **SHAPE, **GEMMA),
}
# Scores against 3 and 5 columns have sizes of their own.
ROWS, LENGTH, PROMPT = 3, 5, 3
# Both layers are one loop, so what is in a layer is there once: the norms of both blocks, of queries and of keys, and
# the one after the last layer.
NORMS = {"qwen": 5, "gemma": 7}
ROTATIONS = {"qwen": 1, "gemma": 2}


def all_of(jaxpr: Any) -> Iterator[Any]:
    """Every equation, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from all_of(inner)


@pytest.fixture(scope="module", params=[(name, way) for name in CONFIGS for way in ("whole", "decode")], ids="-".join)
def traced(request):
    """The name of a config and the program of its forward pass: of whole sequences, or of a token after a cache."""
    name, way = request.param
    model = Decoder(CONFIGS[name])
    tokens, mask = jnp.zeros((ROWS, LENGTH), jnp.int32), jnp.ones((ROWS, LENGTH), bool)
    params = model.structure().params
    if way == "whole":
        return name, jax.make_jaxpr(lambda params: model.bind(params)(tokens, mask))(params).jaxpr
    prompts = jnp.zeros((2, ROWS, PROMPT, 1, 8), jnp.bfloat16)
    position, seen = jnp.full(ROWS, PROMPT + LENGTH - 1), jnp.ones((ROWS, PROMPT + LENGTH), bool)

    def decode(params: Any) -> jax.Array:
        cache = DecoderState.of([KeyValues(prompts, prompts)], 1, LENGTH)
        return model.bind(params).decode(tokens[:, 0], position, cache, seen, jnp.int32(PROMPT + LENGTH - 1))[0]

    return name, jax.make_jaxpr(decode)(params).jaxpr


def operands(jaxpr: Any, primitive: str) -> list[str]:
    """The type of the first operand of every equation of a primitive; slots and lengths are not meant."""
    types = [eqn.invars[0].aval.dtype for eqn in all_of(jaxpr) if eqn.primitive.name == primitive]
    return [str(dtype) for dtype in types if jnp.issubdtype(dtype, jnp.floating)]


def of_size(equation: Any, size: int) -> bool:
    """Whether it makes numbers of this size; masks are not meant."""
    made, (read, *_) = equation.outvars[0].aval, equation.invars
    return made.size == size and jnp.issubdtype(read.aval.dtype, jnp.floating)


def test_program_computes_in_bfloat16(traced):
    _, program = traced
    assert [str(out.aval.dtype) for out in program.outvars] == ["bfloat16"]
    assert {"bfloat16"} == set(operands(program, "logistic")) == set(operands(program, "dot_general"))


def test_norms_are_in_float32(traced):
    """Squares, their sums and the roots: what is rounded is what comes in, and what goes out."""
    name, program = traced
    assert operands(program, "rsqrt") == ["float32"] * NORMS[name]
    assert operands(program, "square") == ["float32"] * NORMS[name]
    assert set(operands(program, "reduce_sum")) == {"float32"}


def test_scores_and_their_softmax_are_in_float32(traced):
    """From the sums of products on: they are never rounded before the exponential."""
    name, program = traced
    # A token is decoded against two arrays, of prompts and of completions: one softmax over both.
    parts = 2 if program.outvars[0].aval.ndim == 2 else 1
    wide = [eqn for eqn in all_of(program) if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.dtype == "f4"]
    scores = [eqn.outvars[0].aval for eqn in wide if eqn.outvars[0].aval.shape[-1] != SHAPE["head_dim"]]
    assert len(scores) == parts, "queries times keys"
    for size in {aval.size for aval in scores}:  # which no other array has
        rounded = [
            eqn for eqn in all_of(program) if eqn.primitive.name == "convert_element_type" and of_size(eqn, size)
        ]
        assert [str(eqn.outvars[0].aval.dtype) for eqn in rounded] == ["bfloat16"], "the weights, after the softmax"
    assert operands(program, "exp") == operands(program, "reduce_max") == ["float32"] * parts
    assert operands(program, "tanh") == ["float32"] * (parts if name == "gemma" else 0)


def test_angles_are_in_float32_and_so_are_rotations(traced):
    name, program = traced
    for primitive in ("sin", "cos"):
        assert operands(program, primitive) == ["float32"] * ROTATIONS[name]
    assert set(operands(program, "split")) == {"float32"}, "queries and keys as they are rotated"
    rotations = [equation for equation in program.eqns if equation.primitive.name in ("sin", "cos")]
    assert len(rotations) == 2 * ROTATIONS[name], "outside of the layers, once for all"
    for equation in rotations:
        assert "bfloat16" not in types_before(program, equation), "which rounds positions above 256"


def types_before(jaxpr: Any, last: Any) -> set[str]:
    """The types of everything that an equation's operands are computed from."""
    made = {out: eqn for eqn in jaxpr.eqns for out in eqn.outvars}
    collected, todo = set(), [last]
    while todo:
        for value in todo.pop().invars:
            collected.add(str(value.aval.dtype))
            if not isinstance(value, Literal) and value in made:
                todo.append(made[value])
    return collected
