"""A mixture of experts: a router, the experts that it chooses for each token, and an optional one for all tokens.

Shapes: B rows, T tokens, D model width, E experts, k of them active, N tokens of all rows. The routes of a token are
the numbers of its experts, in any order.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from train.models.config import ClampedSwiglu, DecoderConfig, ExpertsConfig
from train.models.dispatch import run_experts, run_experts_over
from train.models.grouped import grouped_dot
from train.models.layers import InitKey, Int8Kernel, kaiming_uniform, param, projection, residual_scale
from train.models.mlp import DenseMlp, activate
from train.models.self_attention import LayerContext
from train.models.sharding import axis_size, constrain, divides, mesh_axes, mesh_is_set, partition_spec

CHOICE_BIAS = "choice_bias"
"""The parameter of `ExpertMlp` that the optimizer does not train."""
NO_EXPERT = -1
"""The route of padding, which nobody computes, and of a token whose experts the router has to choose."""
_TOKENS = ("rows", "tokens")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """The choices of a router for the tokens of a layer.

    Attributes:
      routes: [B, T, k] int16, the experts that were used, ascending; -1 at padding.
      chosen: [B, T, k] int16, the experts that the router chooses, ascending; -1 at padding.
      logits: [B, T, E], of the router, in the compute type.
    """

    routes: jax.Array
    chosen: jax.Array
    logits: jax.Array


class ExpertMlp(nnx.Module):
    """`sum over the routes e of a token: gate_e(x) down_e(act(gate_proj_e(x)) * up_proj_e(x))`, or `ClampedSwiglu`.

    Gates are the softmax of the router's logits, computed in float32, at the routes. The routes are the k experts with
    the largest probability plus bias, of equal ones the lower, unless `LayerContext.routes` has others.
    """

    def __init__(self, config: DecoderConfig, key: InitKey):
        assert config.experts is not None
        self.config = config
        experts = config.experts
        router = dataclasses.replace(config, quantization=None)
        sizes = (config.width, experts.count)
        self.gate = projection(router, "gate", sizes, ("embed", "router"), key, bias=experts.bias)
        if experts.choice_bias:
            # Float32 whatever the other parameters are: its steps are small.
            self.choice_bias = param(jnp.zeros(experts.count), ("router",))
        self.experts = ExpertWeights(config, key.child("experts"))
        if experts.shared_width is not None:
            self.shared_expert = DenseMlp(config, key.child("shared_expert"), width=experts.shared_width)
            sizes = (config.width, 1)
            self.shared_expert_gate = projection(router, "shared_expert_gate", sizes, ("embed", "router"), key)

    def __call__(self, x: jax.Array, context: LayerContext) -> tuple[jax.Array, Routed]:
        experts = self.config.experts
        assert experts is not None
        logits = self.gate(x)
        threshold = self.config.replay_threshold
        bias = self.choice_bias[...] if experts.choice_bias else None
        gates, routes, chosen = route(logits, experts, context.real, context.routes, bias=bias, threshold=threshold)
        y = self.experts(x, routes, gates if experts.wide_gates else gates.astype(x.dtype))
        if experts.shared_width is not None:
            y = y + jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert.run(x)
        return y, Routed(routes.astype(jnp.int16), chosen.astype(jnp.int16), logits)


def route(
    logits: jax.Array,
    experts: ExpertsConfig,
    real: jax.Array,
    replayed: jax.Array | None = None,
    *,
    bias: jax.Array | None = None,
    threshold: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses the experts of every token, and their gates.

    Args:
      logits: [..., E] of the router.
      experts: how many to choose, and whether gates add up to 1.
      real: [...] bool, the tokens that are no padding.
      replayed: [..., k] int, experts to use instead; a token with -1 chooses for itself. None: all tokens do.
      bias: [E], added to the router's probabilities for the choice, not to the gates; None: 0.
      threshold: with p the router's probabilities, a replayed expert e is used if `p_e >= threshold min_c p_c` over
        the chosen experts c; of the other experts the first in the order of choice take the places of refused ones.

    Returns:
      Gates [..., k] in float32 at least, routes [..., k] int32 and the router's own choice [..., k], both ascending, so
      that replayed routes sum as chosen ones do; -1 at padding.

    Gradient:
      Of the logits through the gates, also of replayed experts: through the softmax over all experts. Which experts
      are used is treated as a constant, so that the bias has no gradient.
    """
    probabilities = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=-1)
    scores = lax.stop_gradient(probabilities if bias is None else probabilities + bias)
    chosen = jnp.sort(lax.top_k(scores, experts.active)[1], axis=-1)
    routes = chosen
    if replayed is not None:
        recorded = jnp.sort(replayed.astype(jnp.int32), axis=-1)
        if threshold > 0:
            passes = _is_probable(lax.stop_gradient(probabilities), recorded, chosen, threshold)
            recorded = _with_replacements(scores, recorded, passes)
        # Padding may have any routes; the gate of an expert that does not exist is NaN, which attention would spread.
        routes = jnp.where((replayed >= 0) & real[..., None], recorded, chosen)
    gates = jnp.take_along_axis(probabilities, routes, axis=-1)
    if experts.normalize:
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
    routes, chosen = (jnp.where(real[..., None], ids, NO_EXPERT) for ids in (routes, chosen))
    return gates, routes, chosen


def has_expert(routes: jax.Array, experts: int) -> jax.Array:
    """Returns which experts are among the routes [..., k], bool [..., E]; the routes of padding, -1, have none."""
    return jnp.any(routes[..., None] == jnp.arange(experts, dtype=routes.dtype), axis=-2)


def _is_probable(probabilities: jax.Array, recorded: jax.Array, chosen: jax.Array, threshold: float) -> jax.Array:
    """Returns which recorded experts [..., k] pass the threshold of `route`."""
    weakest = jnp.min(jnp.take_along_axis(probabilities, chosen, axis=-1), axis=-1, keepdims=True)
    return jnp.take_along_axis(probabilities, recorded, axis=-1) >= threshold * weakest


def _with_replacements(scores: jax.Array, recorded: jax.Array, passes: jax.Array) -> jax.Array:
    """Replaces recorded experts [..., k] that do not pass by the others with the largest scores, sorted."""
    is_used = has_expert(jnp.where(passes, recorded, NO_EXPERT), scores.shape[-1])
    # Above every score, so that what passes comes first.
    return jnp.sort(lax.top_k(jnp.where(is_used, jnp.inf, scores), recorded.shape[-1])[1], axis=-1)


class ExpertLinear(nnx.Module):
    """The matrices [E, I, O] of one projection of all experts, with adapters [E, I, r] and [E, r, O] if it is a target.

    Biases [E, O] are there if the mixture has some.

    Args:
      config: the decoder.
      name: of the projection.
      sizes: I and O.
      axes: logical axes of a matrix.
      key: random key of this projection.
      init_scale: factor of the standard deviation `I ** -0.5` of new weights.
    """

    def __init__(
        self,
        config: DecoderConfig,
        name: str,
        sizes: tuple[int, int],
        axes: tuple[str, str],
        *,
        key: InitKey,
        init_scale: float = 1.0,
    ):
        assert config.experts is not None
        key = key.child(name)
        count = config.experts.count
        self.axes = ("expert", *axes)
        normal = jax.nn.initializers.normal(init_scale * sizes[0] ** -0.5)
        kernel = normal(key.draw(0, 1), (count, *sizes), jnp.dtype(config.param_dtype))
        self.kernel = param(kernel, self.axes) if config.quantization is None else Int8Kernel(kernel, self.axes)
        if config.experts.bias:
            self.bias = param(jnp.zeros((count, sizes[1]), jnp.dtype(config.param_dtype)), ("expert", axes[1]))
        lora = config.lora if config.lora is not None and name in config.lora.targets else None
        self.lora_scale = None if lora is None else lora.scale
        if lora is not None:
            lora_a = kaiming_uniform(key.draw(0, 2), (count, sizes[0], lora.rank))
            self.lora_A = param(lora_a, ("expert", axes[0], "lora_rank"), nnx.LoRAParam)
            lora_b = jnp.zeros((count, lora.rank, sizes[1]))
            self.lora_B = param(lora_b, ("expert", "lora_rank", axes[1]), nnx.LoRAParam)

    def arrays(self, dtype: Any) -> tuple[dict[str, jax.Array], dict[str, tuple[str | None, ...]]]:
        """Returns the arrays of `expert_product`, and the logical axes over which a device has a part of them.

        Axis fsdp splits them between products alone, as it splits rows: they are gathered, in the compute type.
        """
        expert, *axes = (None if axis == "expert_embed" else axis for axis in self.axes)
        split: dict[str, tuple[str | None, ...]] = {"kernel": (expert, *axes), "scale": (expert, axes[1])}
        split["bias"] = (expert, axes[1])
        split |= {"lora_A": (expert, axes[0], None), "lora_B": (expert, None, axes[1])}
        arrays = {"kernel": self.kernel.qvalue[...] if isinstance(self.kernel, Int8Kernel) else self.kernel[...]}
        if isinstance(self.kernel, Int8Kernel):
            arrays["scale"] = self.kernel.scale[...]
        elif axis_size("expert_embed") > 1:
            arrays["kernel"] = arrays["kernel"].astype(dtype)
        if hasattr(self, "bias"):
            arrays["bias"] = self.bias[...]
        if self.lora_scale is not None:
            arrays |= {"lora_A": self.lora_A[...], "lora_B": self.lora_B[...]}
        return {name: constrain(x, *split[name]) for name, x in arrays.items()}, {name: split[name] for name in arrays}


class ExpertWeights(nnx.Module):
    """The experts of a layer."""

    def __init__(self, config: DecoderConfig, key: InitKey):
        assert config.experts is not None
        self.config = config
        sizes = (config.width, config.experts.width)
        axes = ("expert_embed", "mlp")
        self.gate_proj = ExpertLinear(config, "gate_proj", sizes, axes, key=key)
        self.up_proj = ExpertLinear(config, "up_proj", sizes, axes, key=key)
        scale = residual_scale(config)
        self.down_proj = ExpertLinear(config, "down_proj", sizes[::-1], axes[::-1], key=key, init_scale=scale)

    def __call__(self, x: jax.Array, routes: jax.Array, gates: jax.Array) -> jax.Array:
        """Computes [B, T, D] of x [B, T, D], routes [B, T, k] and gates [B, T, k]; 0 where all routes are -1."""
        projections = {"gate": self.gate_proj, "up": self.up_proj, "down": self.down_proj}
        parts = {name: linear.arrays(x.dtype) for name, linear in projections.items()}
        weights = {name: arrays for name, (arrays, _) in parts.items()}
        scales = {name: linear.lora_scale for name, linear in projections.items()}
        run = functools.partial(_run_experts, config=self.config, scales=scales)
        if not mesh_is_set():
            return run(x, routes, gates, weights)
        # Every device sorts its own tokens. The partitioner would gather all of them to sort them together.
        tokens = partition_spec(_TOKENS if divides(x.shape[1], "tokens") else _TOKENS[:1])
        specs = {
            name: {leaf: partition_spec(axes) for leaf, axes in split.items()} for name, (_, split) in parts.items()
        }
        return jax.shard_map(run, in_specs=(tokens, tokens, tokens, specs), out_specs=tokens, check_vma=False)(
            x, routes, gates, weights
        )


Weights = Mapping[str, Mapping[str, jax.Array]]


def _run_experts(
    x: jax.Array,
    routes: jax.Array,
    gates: jax.Array,
    weights: Weights,
    *,
    config: DecoderConfig,
    scales: Mapping[str, float | None],
) -> jax.Array:
    """Computes the experts of the tokens of a device, with its part of the experts and of their hidden width."""
    compute = functools.partial(_expert_rows, config=config, scales=scales)
    tokens, routes, gates = (array.reshape(-1, array.shape[-1]) for array in (x, routes, gates))
    split, partial = (mesh_axes(axis) if axis_size(axis) > 1 else () for axis in ("expert", "mlp"))
    if partial and "bias" in weights["down"]:
        # Each device has a part of the sum of hidden units; one of them adds the bias.
        bias = jnp.where(lax.axis_index(partial) == 0, weights["down"]["bias"], 0)
        weights = {**weights, "down": {**weights["down"], "bias": bias}}
    if split:
        y = run_experts_over(compute, tokens, routes, gates, weights, axes=split, partial=partial)
    else:
        y = run_experts(compute, tokens, routes, gates, weights)
        y = lax.psum(y, partial) if partial else y
    return y.astype(x.dtype).reshape(x.shape)


def _expert_rows(
    rows: jax.Array,
    ids: jax.Array,
    sizes: jax.Array,
    weights: Weights,
    *,
    config: DecoderConfig,
    scales: Mapping[str, float | None],
) -> jax.Array:
    """Computes rows [R, D] by their experts, as `train.models.dispatch.ExpertRows` says."""
    assert config.experts is not None
    product = functools.partial(expert_product, ids=ids, sizes=sizes)
    gate, up = (product(rows, weights[name], scale=scales[name]) for name in ("gate", "up"))
    swiglu = config.experts.swiglu
    hidden = activate(config, gate) * up if swiglu is None else clamped_swiglu(swiglu, gate, up)
    return product(hidden, weights["down"], scale=scales["down"])


def clamped_swiglu(swiglu: ClampedSwiglu, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes the activation that `ClampedSwiglu` says; a value at the limit has its gradient, as in torch."""
    limit = swiglu.limit
    gate = jnp.where(gate > limit, limit, gate)
    up = jnp.where(jnp.abs(up) > limit, limit * jnp.sign(up), up)
    return (up + 1) * gate * jax.nn.sigmoid(swiglu.alpha * gate)


def expert_product(
    x: jax.Array, arrays: Mapping[str, jax.Array], *, ids: jax.Array, sizes: jax.Array, scale: float | None
) -> jax.Array:
    """Multiplies rows with the matrix of their expert, and adds its bias and its adapter.

    Args:
      x: [N, I], sorted by expert.
      arrays: `kernel` [E, I, O]; `scale` [E, O] if it is int8; `bias` [E, O] if there is one; `lora_A` and `lora_B` if
        there is an adapter.
      ids: [N] int32, the expert of each row; below 0: none.
      sizes: [E] int32, the rows of each expert.
      scale: of the adapter.
    """
    y = grouped_dot(x, arrays["kernel"], sizes)
    if "scale" in arrays:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        y = (y.astype(wide) * jnp.take(arrays["scale"], jnp.maximum(ids, 0), axis=0)).astype(x.dtype)
    if "bias" in arrays:
        # A product as well: the gradient of a gather would be a scatter, and rows of no expert stay 0.
        y = y + grouped_dot(jnp.ones((len(x), 1), x.dtype), arrays["bias"][:, None], sizes)
    if scale is not None:
        inner = grouped_dot(x.astype(arrays["lora_A"].dtype), arrays["lora_A"], sizes)
        update = grouped_dot(inner, arrays["lora_B"], sizes)
        # Rounds once, after the sum, if the base computes in bfloat16.
        y = (y + scale * update).astype(y.dtype)
    return y
