"""The options of the operation as static data: tile sizes, the layout on a mesh, and what is to be computed."""

import dataclasses
import math

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from kljax._checks import check_at_least

Axes = tuple[str, ...]

LAYOUTS = ("dv", "vd")


@dataclasses.dataclass(frozen=True)
class Tile:
    """How much of the logits exists at a time: `tokens x vocab`, in float32.

    Attributes:
      tokens: positions of one tile; a larger one reads and writes the gradient of the head less often.
      vocab: columns of the head in one tile; a larger one does the same for the gradient of the hidden states.

    Raises:
      ValueError: for a size below 1.
    """

    tokens: int
    vocab: int

    def __post_init__(self) -> None:
        check_at_least("tile.tokens", self.tokens, 1)
        check_at_least("tile.vocab", self.vocab, 1)


def axes_of(entry: object) -> Axes:
    """The mesh axes of one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (str(entry),)


@dataclasses.dataclass(frozen=True)
class HeadSharding:
    """Where the tokens and the LM head live on a mesh.

    Every device scores its own tokens against its own part of the vocabulary. A column of the head is gathered over the
    axes that split `D` once per pass, and its gradient is scattered back over them once.

    Attributes:
      tokens: spec of the leading axes of the hidden states, without `D`, which is whole on every device; also of
        targets, mask and results. `PartitionSpec(("data", "fsdp"), "context")` for `[B, T, D]`.
      head: spec of the head as it is given, `PartitionSpec("fsdp", "tensor")` for `[D, V]`. The axes that split `D`
        split tokens too; those that split `V` do not.
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
        """The axes that split tokens."""
        return tuple(axis for entry in self.tokens for axis in axes_of(entry))

    def head_axes(self, layout: str) -> tuple[Axes, Axes]:
        """The axes that split `D` and those that split `V`."""
        first, second = (axes_of(entry) for entry in (*self.head, None, None)[:2])
        return (first, second) if layout == "dv" else (second, first)

    def resolved_mesh(self) -> Mesh | AbstractMesh:
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        if mesh.empty:
            raise ValueError("sharding.mesh: got None and no mesh is set, expected a mesh or `jax.set_mesh`")
        return mesh

    def check(self, layout: str, leading: tuple[int, ...], head: tuple[int, ...]) -> None:
        """Raises `ValueError` unless the specs fit each other, the mesh and these shapes."""
        mesh, tokens = self.resolved_mesh(), self.token_axes()
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
                        f"{axes_of(entry)}"
                    )


@dataclasses.dataclass(frozen=True)
class Spec:
    """All that a program is compiled for.

    Attributes:
      layout: "dv" for a head `[D, V]`, "vd" for `[V, D]`.
      vocab_size: columns that are tokens; those after are padding.
      tile: sizes of a tile.
      sharding: the layout on a mesh, or None.
      entropy: whether entropies are computed; `entropy_gradient`: whether they can be differentiated.
      divergence: None, "reverse", "forward" or "jsd".
    """

    layout: str
    vocab_size: int
    tile: Tile
    sharding: HeadSharding | None
    entropy: bool
    entropy_gradient: bool
    divergence: str | None

    @property
    def embed_axis(self) -> int:
        """The axis of the head that is `D`."""
        return 0 if self.layout == "dv" else 1

    @property
    def vocab_axis(self) -> int:
        """The axis of the head that is `V`."""
        return 1 - self.embed_axis
