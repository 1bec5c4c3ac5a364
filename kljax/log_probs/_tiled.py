"""Value and gradient of the operation tile by tile, on one device or as two `shard_map`s."""

import functools
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from kljax._typing import Array
from kljax.log_probs._backward import Asked, Cotangents, Gradients, backward, backward_by_pull
from kljax.log_probs._forward import Saved, forward
from kljax.log_probs._inputs import Data, Weights
from kljax.log_probs._options import Spec

Stats = dict[str, Array]


def tiled_stats(spec: Spec, weights: Weights, data: Data) -> Stats:
    """Log-prob of each target, logsumexp and, if asked, entropy and divergence; 0 where the mask is 0."""
    return _stats(spec, *_varying_alike((weights, data)))


def _varying_alike(tree: Any) -> Any:
    """Inside a caller's `shard_map`: all arrays vary over the axes that any does, so that loops carry one type."""
    axes = {axis for x in jax.tree.leaves(tree) for axis in jax.typeof(x).manual_axis_type.varying}

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _specs(spec: Spec) -> dict[str, PartitionSpec]:
    """Where each field of `Weights` and `Data` lives on the mesh."""
    assert spec.sharding is not None
    tokens, head = spec.sharding.tokens, spec.sharding.head
    of_tokens = ("hidden", "ref_hidden", "inverse_temperature", "targets", "mask")
    bias = PartitionSpec(spec.sharding.head_axes(spec.layout)[1] or None)
    return {"head": head, "ref_head": head, "bias": bias, **dict.fromkeys(of_tokens, tokens)}


def _fields(spec: Spec, values: Any) -> Any:
    """The specs of those fields of a named tuple that hold something; a scalar is whole everywhere."""
    known = _specs(spec)
    return type(values)(
        *(None if x is None else known.get(name, PartitionSpec()) for name, x in values._asdict().items())
    )


def _forward(spec: Spec, weights: Weights, data: Data, *, with_pull: bool) -> tuple[Stats, Saved]:
    local = functools.partial(forward, spec, with_pull=with_pull)
    if spec.sharding is None:
        return local(weights, data)
    mapped = jax.shard_map(
        local,
        mesh=spec.sharding.resolved_mesh(),
        in_specs=(_fields(spec, weights), _fields(spec, data)),
        out_specs=spec.sharding.tokens,
        check_vma=False,
    )
    return mapped(weights, data)


def _backward(spec: Spec, asked: Asked, weights: Weights, data: Data, per_token: tuple[Saved, Cotangents]) -> Gradients:
    local = functools.partial(backward, spec, asked)
    if spec.sharding is None:
        return local(weights, data, per_token)
    wanted = Gradients(*(x if ask else None for x, ask in zip(weights, asked, strict=True)))
    mapped = jax.shard_map(
        local,
        mesh=spec.sharding.resolved_mesh(),
        in_specs=(_fields(spec, weights), _fields(spec, data), spec.sharding.tokens),
        out_specs=_fields(spec, wanted),
        check_vma=False,
    )
    return mapped(weights, data, per_token)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(spec: Spec, weights: Weights, data: Data) -> Stats:
    return _forward(spec, weights, data, with_pull=False)[0]


def _stats_fwd(spec: Spec, weights: Any, data: Any) -> tuple[Stats, Any]:
    asked = Asked(*(x is not None and x.perturbed for x in weights))
    weights, data = jax.tree.map(lambda x: x.value, (weights, data), is_leaf=lambda x: hasattr(x, "perturbed"))
    # Nothing but the hidden states needs a gradient, and of nothing but the target's logit and the logsumexp: LoRA.
    only_hidden = asked == Asked(hidden=True, head=False)
    with_pull = only_hidden and data.targets is not None and spec.divergence is None and not spec.entropy_gradient
    stats, saved = _forward(spec, weights, data, with_pull=with_pull)
    return stats, (asked, weights, data, saved)


def _stats_bwd(spec: Spec, residual: Any, cotangents: Any) -> tuple[Weights, None]:
    asked, weights, data, saved = residual
    given = Cotangents(**{name: None if isinstance(x, SymbolicZero) else x for name, x in cotangents.items()})
    if not spec.entropy_gradient:
        given = given._replace(entropy=None)
    if saved.toward is not None:
        hidden = backward_by_pull(saved, given, weights.hidden, data.mask)
        return Weights(hidden, *(None,) * 4), None  # type: ignore[arg-type]
    return Weights(*_backward(spec, asked, weights, data, (saved, given))), None  # type: ignore[arg-type]


_stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)
