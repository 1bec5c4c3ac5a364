"""From the arguments of a caller to a checked call: shapes, names, types, and the choice of what computes it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from kljax._checks import check_at_least, check_choice, check_mask
from kljax._typing import Array, ArrayLike, Scalar
from kljax.log_probs._inputs import Data, Weights, statistics_dtype
from kljax.log_probs._options import LAYOUTS, HeadSharding, Spec, Tile
from kljax.log_probs._reference import reference_stats
from kljax.log_probs._tiled import tiled_stats
from kljax.log_probs._tiles import default_tile, device_kind

IMPLEMENTATIONS = {"tile": tiled_stats, "reference": reference_stats}


class Call(NamedTuple):
    """What is computed, from what, by which implementation."""

    spec: Spec
    weights: Weights
    data: Data
    implementation: str


def run(call: Call) -> dict[str, Array]:
    """The fields asked for, by the names of `TokenStats`."""
    return IMPLEMENTATIONS[call.implementation](call.spec, call.weights, call.data)


def prepare(
    hidden: ArrayLike,
    head: ArrayLike,
    *,
    targets: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    temperature: Scalar = 1.0,
    softcap: Scalar | None = None,
    logit_scale: Scalar = 1.0,
    bias: ArrayLike | None = None,
    vocab_size: int | None = None,
    entropy: bool = False,
    entropy_gradient: bool = True,
    reference: tuple[ArrayLike, ArrayLike | None] | None = None,
    divergence: tuple[str, str, Iterable[str]] | None = None,
    beta: Scalar | None = None,
    head_layout: str = "dv",
    sharding: HeadSharding | None = None,
    tile: Tile | None = None,
    implementation: str | None = None,
) -> Call:
    """Checks every argument and gathers them; the arguments are those of the public functions."""
    implementation = "tile" if implementation is None else implementation
    check_choice("implementation", implementation, IMPLEMENTATIONS)
    check_choice("head_layout", head_layout, LAYOUTS)
    if divergence is not None:
        check_choice(*divergence)
    check_at_least("temperature", temperature, 0, strict=True)
    check_at_least("softcap", softcap, 0, strict=True)
    check_at_least("vocab_size", vocab_size, 1)
    if isinstance(beta, (int, float)) and not 0 < beta < 1:
        raise ValueError(f"beta: got {beta!r}, expected a number between 0 and 1; at the ends see `kl_from_hidden`")
    weights = _weights(hidden, head, bias, reference, head_layout)
    columns = weights.head.shape[LAYOUTS.index(head_layout) ^ 1]
    vocab_size = columns if vocab_size is None else vocab_size
    if vocab_size > columns:
        raise ValueError(f"vocab_size: got {vocab_size}, expected at most the {columns} columns of the head")
    leading = weights.hidden.shape[:-1]
    if sharding is not None:
        sharding.check(head_layout, leading, weights.head.shape)
    spec = Spec(
        layout=head_layout,
        vocab_size=vocab_size,
        tile=default_tile(device_kind(sharding)) if tile is None else tile,
        sharding=sharding,
        entropy=entropy,
        entropy_gradient=entropy and entropy_gradient,
        divergence=None if divergence is None or reference is None else divergence[1],
    )
    scalars = {"softcap": softcap, "logit_scale": logit_scale, "beta": beta}
    data = _data(weights, vocab_size, (targets, mask, temperature), scalars)
    return Call(spec, *_placed(spec, weights, data), implementation)


def _weights(
    hidden: ArrayLike,
    head: ArrayLike,
    bias: ArrayLike | None,
    reference: tuple[ArrayLike, ArrayLike | None] | None,
    layout: str,
) -> Weights:
    hidden, head = jnp.asarray(hidden), jnp.asarray(head)
    embed = LAYOUTS.index(layout)
    named = "[D, V]" if layout == "dv" else "[V, D]"
    if head.ndim != 2 or hidden.shape[-1:] != (head.shape[embed],):
        raise ValueError(
            f"head: got shape {list(head.shape)}, expected {named} with hidden {list(hidden.shape)} [..., D]"
        )
    if bias is not None:
        bias = jnp.asarray(bias)
        if bias.shape != (head.shape[1 - embed],):
            raise ValueError(f"bias: got shape {list(bias.shape)}, expected {[head.shape[1 - embed]]}, one per column")
    if reference is None:
        return Weights(hidden, head, bias)
    ref_hidden = jnp.asarray(reference[0])
    ref_head = None if reference[1] is None else jnp.asarray(reference[1])
    if ref_hidden.shape[:-1] != hidden.shape[:-1]:
        raise ValueError(
            f"ref_hidden: got shape {list(ref_hidden.shape)}, expected the leading axes of hidden {list(hidden.shape)}"
        )
    other = head if ref_head is None else ref_head
    if other.ndim != 2 or other.shape[1 - embed] != head.shape[1 - embed]:
        raise ValueError(f"ref_head: got shape {list(other.shape)}, expected {named} with the V of {list(head.shape)}")
    if ref_hidden.shape[-1] != other.shape[embed]:
        raise ValueError(
            f"ref_hidden: got shape {list(ref_hidden.shape)}, expected [..., D] with the D of {list(other.shape)}"
        )
    return Weights(hidden, head, bias, ref_hidden, ref_head)


def _data(
    weights: Weights,
    vocab_size: int,
    per_token: tuple[ArrayLike | None, ArrayLike | None, Scalar],
    scalars: dict[str, Scalar | None],
) -> Data:
    targets, mask, temperature = per_token
    wide, leading = statistics_dtype(weights), weights.hidden.shape[:-1]
    if targets is not None:
        targets = jnp.asarray(targets)
        if targets.shape != leading:
            raise ValueError(f"targets: got shape {list(targets.shape)}, expected {list(leading)} as hidden has")
        targets = jnp.clip(targets, 0, vocab_size - 1).astype(jnp.int32)
    if mask is not None:
        mask = check_mask(mask)
        if mask.shape != leading:
            raise ValueError(f"mask: got shape {list(mask.shape)}, expected {list(leading)} as hidden has")
    temperatures = jnp.asarray(temperature, wide)
    if temperatures.shape not in ((), leading):
        raise ValueError(
            f"temperature: got shape {list(temperatures.shape)}, expected a scalar or {list(leading)} as hidden has"
        )

    inverse = jax.lax.stop_gradient(1 / temperatures)
    if mask is not None:
        inverse = jnp.where(mask, inverse, 1)
    given = {name: jax.lax.stop_gradient(jnp.asarray(x, wide)) for name, x in scalars.items() if x is not None}
    return Data(jnp.broadcast_to(inverse, leading), targets=targets, mask=mask, **given)


def _placed(spec: Spec, weights: Weights, data: Data) -> tuple[Weights, Data]:
    """The same arrays where `sharding` says they are, if the mesh has axes that must be said explicitly."""
    if spec.sharding is None:
        return weights, data
    mesh = spec.sharding.resolved_mesh()
    if not any("Explicit" in str(kind) for kind in mesh.axis_types):
        return weights, data
    rows, head = spec.sharding.tokens, spec.sharding.head
    bias = PartitionSpec(spec.sharding.head_axes(spec.layout)[1] or None)

    def place(x: Any, where: PartitionSpec) -> Any:
        return None if x is None else jax.reshard(x, NamedSharding(mesh, where))

    hidden, ref_hidden = place(weights.hidden, rows), place(weights.ref_hidden, rows)
    weights = Weights(
        hidden, place(weights.head, head), place(weights.bias, bias), ref_hidden, place(weights.ref_head, head)
    )
    per_token = {name: place(getattr(data, name), rows) for name in ("inverse_temperature", "targets", "mask")}
    return weights, data._replace(**per_token)
