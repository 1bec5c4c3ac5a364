"""A decoder without its weights: draws them, knows their shapes, and binds them to the modules of `transformer`."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from flax import nnx

from train.models.config import DecoderConfig
from train.models.transformer import Transformer

Tree = Any


class Structure(NamedTuple):
    """The static half of a `Transformer`, as `nnx.split` gives it.

    Attributes:
      graphdef: the modules.
      params: `ShapeDtypeStruct`s of the base parameters, nested dicts.
      adapter: `ShapeDtypeStruct`s of the adapter; empty without lora.
      param_axes: PartitionSpecs of logical axes, for `params`.
      adapter_axes: PartitionSpecs of logical axes, for `adapter`.
    """

    graphdef: nnx.GraphDef[Transformer]
    params: Tree
    adapter: Tree
    param_axes: Tree
    adapter_axes: Tree


@functools.cache
def structure(config: DecoderConfig) -> Structure:
    """Describes the parameters of a decoder without drawing any."""
    # nnx.eval_shape would look for the logical axes in the mesh.
    abstract = jax.eval_shape(lambda: Transformer(config, jax.random.key(0)))
    graphdef, adapter, params = nnx.split(abstract, nnx.LoRAParam, nnx.Param)
    states = (params, adapter, nnx.get_partition_spec(params), nnx.get_partition_spec(adapter))
    return Structure(graphdef, *map(nnx.to_pure_dict, states))


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The static half of a model: hashable, cheap to make, and safe to close over in jitted code.

    The trainer carries weights as nested dicts; `bind` merges them with the modules inside jit.
    """

    config: DecoderConfig

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        """Draws base parameters and adapter (empty without lora); under jit, unused ones are dead code."""
        _, adapter, params = nnx.split(Transformer(self.config, key), nnx.LoRAParam, nnx.Param)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(adapter)

    def structure(self) -> Structure:
        """Returns the shapes and logical axes of the parameters, cached per config."""
        return structure(self.config)

    def bind(self, params: Tree, adapter: Tree | None = None) -> Transformer:
        """Merges weights with the modules; without an adapter there is no trace of one in the program.

        Args:
          params: base parameters.
          adapter: of the structure that the config's lora section gives; None: off.
        """
        if adapter is None:
            return nnx.merge(structure(dataclasses.replace(self.config, lora=None)).graphdef, params)
        return nnx.merge(structure(self.config).graphdef, params, adapter)
