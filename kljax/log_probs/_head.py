"""The LM head as an object, its sharding over a mesh, and the tile sizes of each kind of device."""

import dataclasses
import math
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, get_args

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from kljax._checks import NUMBER, check_at_least, check_choice, check_numbers
from kljax._typing import ArrayLike, HeadImplementation, HeadLayout, Scalar

Axes = tuple[str, ...]

LAYOUTS = get_args(HeadLayout)
SHAPES = {"dv": "[D, V]", "vd": "[V, D]"}
IMPLEMENTATIONS = get_args(HeadImplementation)


def axes_of(entry: object) -> Axes:
    """Returns the mesh axes of one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (str(entry),)


def embed_axis(layout: HeadLayout) -> int:
    """Returns the axis of the weights that is `D`; the other one is `V`."""
    return LAYOUTS.index(layout)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Size of the tiles that the logits are computed in: `tokens x vocab`, in float32.

    Attributes:
      tokens: positions per tile; with more of them the gradient of the head is read and written less often.
      vocab: columns of the head per tile; with more of them that of the hidden states is read and written less often.

    Raises:
      ValueError: for a size below 1.
    """

    tokens: int
    vocab: int

    def __post_init__(self) -> None:
        check_at_least("tile.tokens", self.tokens, 1)
        check_at_least("tile.vocab", self.vocab, 1)


class HeadDefaults(NamedTuple):
    """How a kind of device computes the head.

    Attributes:
      tile: of logits.
      token_chunk: tokens per chunk of a fused loss, whose logits over the whole vocabulary are held.
      one_reduction: whether the statistics of a tile are one reduction of its logits, which then reads them once; else
        the largest logit comes first, the sums after it.
      kernel: whether a kernel takes the sums of a tile in bfloat16 before it writes its logits.
    """

    tile: Tile
    token_chunk: int
    one_reduction: bool = False
    kernel: bool = False


ALL_COLUMNS = 2**20
"""Columns of a tile that has the whole vocabulary."""
# By the start of `Device.device_kind`. The row of the CPU is the fastest that was timed; that of other GPUs by
# `python -m benchmarks.accelerator --parts tiles`. Those of TPUs come from the memory plans of their compiler,
# `python -m benchmarks.head_aot --tiles`; that of Hopper GPUs from the bytes and launches of its plans.
DEFAULTS = {
    "TPU v5 lite": HeadDefaults(Tile(4096, 3456), 4096),
    "TPU v5": HeadDefaults(Tile(16384, 896), 4096),
    "TPU v6": HeadDefaults(Tile(4096, 2304), 4096),
    "TPU": HeadDefaults(Tile(4096, 2048), 4096),
    "NVIDIA H": HeadDefaults(Tile(4096, ALL_COLUMNS), 4096, one_reduction=True, kernel=True),
    "NVIDIA": HeadDefaults(Tile(4096, 2048), 2048),
    "AMD": HeadDefaults(Tile(4096, 2048), 2048),
    "cpu": HeadDefaults(Tile(512, 4096), 512),
}


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """Sharding of the tokens and of the LM head over a mesh.

    Every device scores its own tokens against its own part of the vocabulary. A column of the head is gathered over the
    axes that split `D` once per pass, and its gradient is scattered back over them once.

    Attributes:
      tokens: spec of the leading axes of the hidden states, without `D`, which every device holds whole; also the spec
        of targets, mask and results. `PartitionSpec(("data", "fsdp"), "context")` for `[B, T, D]`.
      head: spec of the weights in their layout, `PartitionSpec("fsdp", "tensor")` for `[D, V]`. Axes that split `D`
        must split the tokens too; axes that split `V` must not.
      mesh: the mesh; None takes the one that `jax.set_mesh` has set.

    Raises:
      ValueError: if the two specs use the axes in another way.

    Example:
      >>> import kljax
      >>> from jax.sharding import PartitionSpec as P
      >>> kljax.HeadSharding(tokens=P(("data", "fsdp")), head=P("fsdp", "tensor")).token_axes()
      ('data', 'fsdp')
    """

    tokens: PartitionSpec
    head: PartitionSpec
    mesh: Mesh | AbstractMesh | None = None

    def token_axes(self) -> Axes:
        """Returns the mesh axes that split the tokens.

        Returns:
          Names of axes in the order of the spec; empty if every device holds all tokens.
        """
        return tuple(axis for entry in self.tokens for axis in axes_of(entry))

    def head_axes(self, layout: HeadLayout) -> tuple[Axes, Axes]:
        """Returns the mesh axes that split `D` and the axes that split `V`.

        Args:
          layout: "dv" if the spec `head` is that of `[D, V]`, "vd" if it is that of `[V, D]`.

        Returns:
          Names of axes along `D`, then along `V`; empty where the dimension is not split.
        """
        first, second = (axes_of(entry) for entry in (*self.head, None, None)[:2])
        return (first, second) if layout == "dv" else (second, first)

    def resolved_mesh(self) -> Mesh | AbstractMesh:
        """Returns the mesh, or the one that `jax.set_mesh` has set if the field is None.

        Returns:
          The mesh; the abstract one if it comes from the context.

        Raises:
          ValueError: if the field is None and no mesh is set.
        """
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        if mesh.empty:
            raise ValueError("sharding.mesh: got None and no mesh is set, expected a mesh or `jax.set_mesh`")
        return mesh

    def check(self, layout: HeadLayout, leading: tuple[int, ...], head: tuple[int, ...]) -> None:
        """Checks that the specs fit each other, the mesh and the shapes of hidden states and head.

        Args:
          layout: "dv" or "vd", as in `head_axes`.
          leading: shape of the hidden states without `D`.
          head: shape of the weights in that layout.

        Raises:
          ValueError: if an axis is not in the mesh, the axes along `D` do not split the tokens, or along `V` do, a
            spec has too many entries, a size is not a multiple of its devices, or there is no mesh.
        """
        mesh = self.resolved_mesh()
        tokens = self.token_axes()
        embed, vocab = self.head_axes(layout)
        unknown = sorted({*tokens, *embed, *vocab} - set(mesh.axis_names))
        if unknown:
            raise ValueError(f"sharding: got the axes {unknown}, expected some of {list(mesh.axis_names)}")
        if not set(embed) <= set(tokens) or set(vocab) & set(tokens):
            raise ValueError(
                f"sharding: got tokens over {tokens} and a head over {embed} along D and {vocab} along V, expected "
                "axes along D that split the tokens too, and axes along V that do not"
            )
        for name, shape, spec in (("hidden", leading, self.tokens), ("head", head, self.head)):
            if len(spec) > len(shape):
                raise ValueError(f"sharding: got {spec} for {name} with {len(shape)} axes to split")
            for size, entry in zip(shape, spec, strict=False):
                parts = math.prod(mesh.shape[axis] for axis in axes_of(entry))
                if size % parts:
                    raise ValueError(
                        f"{name}: got an axis of size {size}, expected a multiple of {parts}, the devices along "
                        f"{axes_of(entry)}{_padding_hint(name, size, parts)}"
                    )


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """The LM head: maps hidden states `[..., D]` to logits `[..., V]`.

    With the weights `W` as `[D, V]`, the logits before the temperature are `z = logit_scale * hidden @ W + bias`, and
    `softcap * tanh(z / softcap)` with a cap. A head is a pytree: its leaves are the weights, the bias, and a cap or
    scale that is a JAX array. Python numbers and all other fields are static.

    Attributes:
      weights: `[D, V]`, or `[V, D]` with `layout="vd"`; any float type.
      bias: `[V]`, added to the logits; None adds nothing.
      softcap: bound of the logits, > 0; None does not cap. A Python number or a scalar array, treated as a constant.
      logit_scale: multiplies the products, before the bias. A Python number or a scalar array, treated as a constant.
      vocab_size: number of tokens where the weights are padded to more columns; padding has probability 0. None: all
        columns are tokens.
      layout: "dv" for weights `[D, V]`, "vd" for `[V, D]`, as a tied embedding table has them.
      sharding: sharding of tokens and weights over a mesh; None leaves it to the compiler.
      tile: size of the tiles of logits; None takes the size of the table for this kind of device.
      implementation: "tile"; "xla", which is "tile" without the kernel that NVIDIA H100 and H200 have in bfloat16; or
        "reference", which builds the logits of all positions and has every derivative.

    Raises:
      ValueError: for an unknown layout or implementation, or a bound that is not positive.

    Example:
      >>> import jax.numpy as jnp, kljax
      >>> head = kljax.Head(jnp.ones((4, 3)), softcap=30.0, layout="vd")
      >>> print(kljax.log_probs_from_hidden(jnp.zeros((2, 3)), head, jnp.array([0, 1])).log_prob)
      [-1.3862944 -1.3862944]
    """

    weights: ArrayLike
    bias: ArrayLike | None = None
    softcap: Scalar | None = None
    logit_scale: Scalar = 1.0
    vocab_size: int | None = None
    layout: HeadLayout = "dv"
    sharding: HeadSharding | None = None
    tile: Tile | None = None
    implementation: HeadImplementation = "tile"

    def __post_init__(self) -> None:
        check_choice("head.layout", self.layout, LAYOUTS)
        check_choice("head.implementation", self.implementation, IMPLEMENTATIONS)
        check_at_least("head.softcap", self.softcap, 0, strict=True)
        check_numbers(**{"head.logit_scale": self.logit_scale})
        check_at_least("head.vocab_size", self.vocab_size, 1)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Hashable, ...]]:
        """Splits the fields into leaves and static data, as JAX asks of a pytree."""
        numbers = {name: isinstance(getattr(self, name), NUMBER) for name in _NUMBERS}
        leaves = {name: None if numbers.get(name) else getattr(self, name) for name in _LEAVES}
        static = (*(getattr(self, name) if numbers[name] else None for name in _NUMBERS),)
        static += (*(getattr(self, name) for name in _STATIC),)
        return [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in leaves.items()], static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any, ...]) -> "Head":
        """Builds a head without a check: JAX and its users put masks, specs and other objects into the leaves."""
        fields = dict(zip(_LEAVES, leaves, strict=True)) | dict(zip(_STATIC, static[len(_NUMBERS) :], strict=True))
        numbers = zip(_NUMBERS, static, strict=False)
        head = object.__new__(cls)
        vars(head).update(fields | {name: number for name, number in numbers if number is not None})
        return head


_NUMBERS = ("softcap", "logit_scale")
_LEAVES = ("weights", "bias", *_NUMBERS)
_STATIC = ("vocab_size", "layout", "sharding", "tile", "implementation")


# Where modules of flax and equinox, and their trees of parameters, have the weights of a linear layer or an embedding.
_WEIGHTS: Mapping[str, HeadLayout] = {"kernel": "dv", "weight": "vd", "embedding": "vd"}


def as_head(head: ArrayLike | Head, name: str = "head") -> Head:
    """Returns a head; an array becomes the weights `[D, V]` of a plain one.

    Raises:
      TypeError: for None, a module or a tree of parameters, with the array in it to pass.
    """
    if isinstance(head, Head):
        _check_weights(head.weights, f"{name}.weights")
        return head
    _check_weights(head, name)
    return Head(head)


def _check_weights(weights: object, name: str) -> None:
    if isinstance(weights, Mapping):
        parts = {key: f"[{key!r}]" for key in _WEIGHTS if key in weights}
        kind = f"a {type(weights).__name__} of {', '.join(map(repr, weights)) or 'nothing'}"
    elif weights is None or isinstance(weights, (str, bytes)):
        parts = {}
        kind = repr(weights)
    elif hasattr(weights, "shape") or isinstance(weights, (list, tuple)) or hasattr(weights, "__jax_array__"):
        return
    else:
        parts = {key: f".{key}" for key in _WEIGHTS if hasattr(weights, key)}
        kind = f"a {type(weights).__module__.partition('.')[0]} {type(weights).__name__}"
    advice = "kljax.Head or its weights [D, V]"
    for key, access in parts.items():
        layout = "" if _WEIGHTS[key] == "dv" else ', layout="vd"'
        has_bias = "bias" in weights if isinstance(weights, Mapping) else getattr(weights, "bias", None) is not None
        bias = f", bias={name}{access.replace(key, 'bias')}" if has_bias else ""
        advice = f"an array; pass kljax.Head({name}{access}{bias}{layout})"
        break
    raise TypeError(f"{name}: got {kind}, expected {advice}")


def _padding_hint(name: str, size: int, parts: int) -> str:
    """Returns the end of an error for a head that does not divide, which zeros can fill up."""
    padded = math.ceil(size / parts) * parts
    return f"; for V, pad the weights to {padded} and set kljax.Head(vocab_size={size})" if name == "head" else ""


def device_kind(sharding: HeadSharding | None) -> str:
    """Returns the device kind of the mesh, whose devices this process need not have, or of the default device."""
    mesh = sharding and sharding.resolved_mesh()
    if isinstance(mesh, Mesh):
        return str(mesh.devices.flat[0].device_kind)
    abstract = getattr(mesh, "abstract_device", None)
    if abstract is not None:
        return str(abstract.device_kind)
    return str(jax.devices()[0].device_kind)


def head_defaults(kind: str) -> HeadDefaults:
    """Returns the row of `DEFAULTS` with the longest name that `kind` starts with, or the row of the CPU."""
    matches = [name for name in DEFAULTS if kind.startswith(name)]
    return DEFAULTS[max(matches, key=len, default="cpu")]
