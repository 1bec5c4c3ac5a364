"""Parameters of a decoder: their description for restoring, their first values, and their place in its modules."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

import kljax
from kljax.checkpoint import named_leaves
from train.models.decoder import Decoder
from train.models.layers import ValueHead
from train.models.sharding import RULES, Rules, param_shardings
from train.models.transformer import Transformer

Tree = Any


def _with_shardings(shapes: Tree, axes: Tree, mesh: Mesh, rules: Rules = RULES) -> Tree:
    """Adds to `ShapeDtypeStruct`s the shardings that their logical axes get on a mesh."""
    shardings = param_shardings(mesh, axes, shapes, rules)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _compile_draw(init: Callable[[jax.Array], Tree], abstract: Tree) -> Callable[[jax.Array], Tree]:
    """Compiles a draw on the devices that will hold it; the values are equal on any (partitionable threefry)."""
    return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))


def _check_has_lora(model: Decoder) -> None:
    if model.config.lora is None:
        raise ValueError("adapter: the model has no lora section; set `model.lora`")


def abstract_params(model: Decoder, mesh: Mesh, rules: Rules = RULES) -> Tree:
    """Describes the base parameters, for restoring them: shapes, dtypes and shardings."""
    return _with_shardings(model.structure().params, model.structure().param_axes, mesh, rules)


def abstract_adapter(model: Decoder, mesh: Mesh, rules: Rules = RULES) -> Tree:
    """Describes the adapter, for restoring it. Raises ValueError for a model without lora."""
    _check_has_lora(model)
    return _with_shardings(model.structure().adapter, model.structure().adapter_axes, mesh, rules)


def init_params(model: Decoder, key: jax.Array, mesh: Mesh) -> Tree:
    """Draws base parameters, sharded over the mesh; the same values with and without a lora section."""
    return _params_draw(model, mesh)(key)


def init_adapter(model: Decoder, key: jax.Array, mesh: Mesh) -> Tree:
    """Draws an adapter, sharded over the mesh. B is zero, so that it changes nothing yet.

    Raises:
      ValueError: a model without lora.
    """
    return _adapter_draw(model, mesh)(key)


@functools.cache
def _params_draw(model: Decoder, mesh: Mesh) -> Callable[[jax.Array], Tree]:
    return _compile_draw(lambda key: model.init(key)[0], abstract_params(model, mesh))


@functools.cache
def _adapter_draw(model: Decoder, mesh: Mesh) -> Callable[[jax.Array], Tree]:
    return _compile_draw(lambda key: model.init(key)[1], abstract_adapter(model, mesh))


def abstract_value_head(model: Decoder, mesh: Mesh) -> Tree:
    """Describes a value head: shapes, dtypes and shardings."""
    _, shapes, axes = value_head_structure(model.config.width)
    return _with_shardings(shapes, axes, mesh)


def init_value_head(model: Decoder, key: jax.Array, mesh: Mesh) -> Tree:
    """Draws a value head, `{"kernel": [D], "bias": []}`."""

    def init(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(ValueHead(model.config.width, key=key)))

    return _compile_draw(init, abstract_value_head(model, mesh))(key)


def value_head_structure(width: int) -> tuple[nnx.GraphDef[ValueHead], Tree, Tree]:
    """Returns the modules, shapes and logical axes of a value head, in the type of numbers that JAX has now."""
    graphdef, state = nnx.split(jax.eval_shape(lambda: ValueHead(width, key=jax.random.key(0))))
    return graphdef, nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.get_partition_spec(state))


def bind(model: Decoder, policy: kljax.Policy) -> Transformer:
    """Merges the weights of a policy with the modules of the decoder.

    Raises:
      ValueError: an adapter whose names or shapes differ from the ones that the model's lora section gives.
    """
    if policy.adapter is not None:
        _check_has_lora(model)
        expected = _shapes(model.structure().adapter)
        got = _shapes(policy.adapter)
        if expected != got:
            wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
            listed = "; ".join(f"{name}: got {got.get(name)}, expected {expected.get(name)}" for name in wrong)
            raise ValueError(f"adapter does not fit the model: {listed}")
    return model.bind(policy.params, policy.adapter)


def _shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {name: leaf.shape for name, leaf in named_leaves(tree).items()}
