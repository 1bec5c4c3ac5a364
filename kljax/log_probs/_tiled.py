"""Value and gradient of the operation tile by tile, on one device or as two `shard_map`s."""

import functools
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from kljax._typing import Array
from kljax.log_probs._backward import Asked, Cotangents, backward, backward_by_pull
from kljax.log_probs._forward import Saved, forward
from kljax.log_probs._inputs import Data, Weights
from kljax.log_probs._options import Spec

Stats = dict[str, Array]


@jax.tree_util.register_static
class _Wanted(Asked):
    """`Asked` as part of a tree, without leaves."""


def tiled_stats(spec: Spec, weights: Weights, data: Data) -> Stats:
    """Log-prob of each target, logsumexp and, if asked, entropy and divergence; 0 where the mask is 0."""
    weights, data = _varying_alike((weights, data))
    return _stats(spec, weights, data)


def _varying_alike(tree: Any) -> Any:
    """Inside a caller's `shard_map`: all arrays vary over the axes that any does, so that loops carry one type."""
    axes = {axis for x in jax.tree.leaves(tree) for axis in jax.typeof(x).manual_axis_type.varying}

    def vary(x: Array) -> Array:
        missing = tuple(sorted(axes - jax.typeof(x).manual_axis_type.varying))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def _specs(spec: Spec) -> tuple[PartitionSpec, Weights, Data]:
    """Where tokens, weights and data live on the mesh."""
    assert spec.sharding is not None
    tokens, head = spec.sharding.tokens, spec.sharding.head
    bias = PartitionSpec(spec.sharding.head_axes(spec.layout)[1] or None)
    whole = PartitionSpec()
    return tokens, Weights(tokens, head, bias, tokens, head), Data(tokens, whole, tokens, tokens, whole, whole)  # type: ignore[arg-type]


def _present(specs: Any, values: Any) -> Any:
    """The specs of the fields that hold something."""
    return type(values)(*(None if x is None else spec for spec, x in zip(specs, values, strict=True)))


def _forward(spec: Spec, weights: Weights, data: Data, *, with_pull: bool) -> tuple[Stats, Saved]:
    local = functools.partial(forward, spec, with_pull=with_pull)
    if spec.sharding is None:
        return local(weights, data)
    tokens, of_weights, of_data = _specs(spec)
    return jax.shard_map(
        local,
        mesh=spec.sharding.resolved_mesh(),
        in_specs=(_present(of_weights, weights), _present(of_data, data)),
        out_specs=tokens,
        check_vma=False,
    )(weights, data)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stats(spec: Spec, weights: Weights, data: Data) -> Stats:
    return _forward(spec, weights, data, with_pull=False)[0]


def _stats_fwd(spec: Spec, weights: Any, data: Any) -> tuple[Stats, Any]:
    asked = _Wanted(*(x is not None and x.perturbed for x in weights))
    weights, data = jax.tree.map(lambda x: x.value, (weights, data), is_leaf=lambda x: hasattr(x, "perturbed"))
    # Only the hidden states of the policy, and nothing that needs another product: LoRA, or a frozen head.
    only_hidden = asked == (True, False, False, False, False)
    with_pull = only_hidden and data.targets is not None and spec.divergence is None and not spec.entropy_gradient
    stats, saved = _forward(spec, weights, data, with_pull=with_pull)
    return stats, (asked, weights, data, saved)


def _stats_bwd(spec: Spec, residual: Any, cotangents: Any) -> tuple[Weights, None]:
    asked, weights, data, saved = residual
    given = {name: None if isinstance(x, SymbolicZero) else x for name, x in cotangents.items()}
    if not spec.entropy_gradient:
        given["entropy"] = None
    given = Cotangents(**given)
    if saved.toward is not None:
        return Weights(backward_by_pull(saved, given, weights.hidden, data.mask), None), None  # type: ignore[arg-type]
    local = functools.partial(backward, spec, asked=asked)
    if spec.sharding is None:
        return local(weights, data, saved, given), None
    tokens, of_weights, of_data = _specs(spec)
    outputs = Weights(*(s if wanted else None for s, wanted in zip(of_weights, asked, strict=True)))  # type: ignore[arg-type]
    gradients = jax.shard_map(
        local,
        mesh=spec.sharding.resolved_mesh(),
        in_specs=(_present(of_weights, weights), _present(of_data, data), tokens, tokens),
        out_specs=outputs,
        check_vma=False,
    )(weights, data, saved, given)
    return gradients, None


_stats.defvjp(_stats_fwd, _stats_bwd, symbolic_zeros=True)
