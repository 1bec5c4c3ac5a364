"""The loss of tokens from hidden states and the LM head, where it treats tokens alone."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from kljax._checks import check_at_least
from kljax._devices import over_devices
from kljax._typing import Array, ArrayLike, AxisName, Mask, Scalar
from kljax.log_probs._api import Reference
from kljax.log_probs._fused import fused_loss
from kljax.log_probs._head import Head, Tile, device_kind, head_defaults
from kljax.log_probs._inputs import Constants, Weights, as_reference, completed, prepare, run_on_mesh
from kljax.log_probs._loss_plan import Leaves, LossPlan, TokenLoss
from kljax.log_probs._reference import reference_stats
from kljax.log_probs._tiles import pack, plan_packing, unpack, zero_unless


def token_loss_from_hidden(
    hidden: ArrayLike,
    head: ArrayLike | Head,
    targets: ArrayLike,
    token_loss: TokenLoss,
    per_token: Any,
    *,
    mask: Mask | None = None,
    temperature: Scalar = 1.0,
    entropy: bool | Literal["constant"] = False,
    sum_squared_probs: bool = False,
    kept_ids: ArrayLike | None = None,
    reference: Reference | None = None,
    token_chunk: int | None = None,
    axis_name: AxisName = None,
) -> tuple[Array, Any]:
    """Computes a loss that treats tokens alone, from hidden states and the LM head, with gradients in the forward pass.

    With the statistics `s_t` of token `t`, as `log_probs_from_hidden` returns them, and its inputs `x_t`:

        loss = sum_t token_loss(s_t, x_t)[0] over the unmasked tokens

    It takes 3 matrix products of `2 N D V` operations for value and gradients where `log_probs_from_hidden` takes 4,
    and 2 instead of 3 for a head that needs no gradient. The price is memory: the logits of one chunk of tokens, and
    the gradient of the head in float32.

    Args:
      hidden: `[..., D]` final hidden states, any float type.
      head: as in `log_probs_from_hidden`.
      targets: `[...]` integer ids of the tokens to score.
      token_loss: maps `(TokenStats, inputs)` of a chunk of tokens, each array `[tokens, ...]`, to a loss `[tokens]` and
        metrics, a pytree of arrays `[tokens, ...]`. The loss of a token may depend on that token only: the function
        sees chunks of unmasked tokens, flat and padded with copies of one of them. It may close over Python numbers;
        arrays come through `per_token`.
      per_token: pytree of the inputs of `token_loss`: arrays `[..., *]` with the axes of `targets` first, and scalars.
      mask: `[...]` boolean; positions where it is 0 cost nothing and may hold anything, NaN too.
      temperature: as in `log_probs_from_hidden`; a scalar or `[...]`, may be traced.
      entropy: as in `log_probs_from_hidden`.
      sum_squared_probs: as in `log_probs_from_hidden`.
      kept_ids: `[..., K]` integer ids of the tokens that the sampler kept: the statistics are as in
        `renormalized_log_probs`. None: over the whole vocabulary.
      reference: as in `log_probs_from_hidden`, for the exact KL.
      token_chunk: tokens per chunk, whose logits are held at once, in float32. More of them read and write the gradient
        of the head less often. None takes the number of the table for this kind of device.
      axis_name: mapped axes that hold the other tokens; the loss is summed over them.

    Returns:
      The loss, a scalar, float32, or float64 if an input is; and the metrics, each `[..., *]` with the leading axes of
      `targets`. Masked positions hold 0.

    Gradient:
      Of the loss to `hidden`, to the weights and biases of `head` and of the reference, and to `per_token`. Metrics,
      temperature, cap and scale are constants. There is no second derivative, and no `jvp`: both raise an error. Heads
      with `implementation="reference"` have every derivative.

    Raises:
      ValueError: as `log_probs_from_hidden`; if `per_token`, the loss or a metric has another shape.
      NotImplementedError: if the gradient is differentiated again.

    References:
      Hsu et al., "Liger kernel: efficient Triton kernels for LLM training" (2024), for gradients in the forward pass.

    Example:
      >>> import jax, jax.numpy as jnp, kljax
      >>> def token_loss(stats, inputs):
      ...     return -inputs["advantages"] * stats.log_prob - 0.01 * stats.entropy, {"entropy": stats.entropy}
      >>> def loss(hidden):
      ...     inputs = {"advantages": jnp.array([1.0, -1.0])}
      ...     return kljax.token_loss_from_hidden(
      ...         hidden, jnp.eye(4), jnp.array([0, 1]), token_loss, inputs, entropy=True
      ...     )
      >>> (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.zeros((2, 4)))
      >>> print(f"{value:.4f}", metrics["entropy"], gradient[0])
      -0.0277 [1.3862944 1.3862944] [-0.75  0.25  0.25  0.25]
    """
    check_at_least("token_chunk", token_chunk, 1)
    ref = as_reference(reference)
    call = prepare(
        hidden,
        head,
        targets=targets,
        mask=mask,
        temperature=temperature,
        entropy=entropy,
        sum_squared_probs=sum_squared_probs,
        kept_ids=kept_ids,
        reference=ref,
        divergence=None if ref is None else ref.direction,
    )
    leaves, tree = _leaves_of(per_token, call.weights.hidden.shape[:-1])
    size = head_defaults(device_kind(call.spec.sharding)).token_chunk if token_chunk is None else token_chunk
    spec = dataclasses.replace(call.spec, tile=Tile(size, call.spec.tile.vocab))
    plan = LossPlan(spec, token_loss, tree, tuple(x.shape == () for x in leaves))
    implementation = _reference_loss if call.implementation == "reference" else fused_loss

    def compute(weights: Weights, constants: Constants, *leaves: Array) -> tuple[Array, Any]:
        return implementation(plan, weights, completed(spec, weights, constants), leaves)

    loss, metrics = run_on_mesh(call._replace(spec=spec), compute, leaves)
    return over_devices(loss, axis_name), lax.stop_gradient(metrics)


def _leaves_of(per_token: Any, leading: tuple[int, ...]) -> tuple[Leaves, Any]:
    """Returns the leaves of `per_token` as arrays, and its structure; raises `ValueError` for another shape."""
    named_leaves, tree = jax.tree.flatten_with_path(per_token)
    leaves = tuple(jnp.asarray(x) for _, x in named_leaves)
    for (path, _), x in zip(named_leaves, leaves, strict=True):
        if x.shape != () and x.shape[: len(leading)] != leading:
            raise ValueError(
                f"per_token{jax.tree_util.keystr(path)}: got shape {list(x.shape)}, expected a scalar or the leading "
                f"axes of hidden {list(leading)}"
            )
    return leaves, tree


def _reference_loss(plan: LossPlan, weights: Weights, constants: Constants, leaves: Leaves) -> tuple[Array, Any]:
    """Computes the loss from the logits of all positions, and leaves the derivatives to JAX."""
    leading = weights.hidden.shape[:-1]
    stats = reference_stats(plan.spec, weights, constants)
    mask = None if constants.mask is None else constants.mask.reshape(-1)
    flat = {name: x.reshape(-1) for name, x in stats.items()}
    tokens = flat["log_prob"].shape[0]
    packing = plan_packing(mask, tokens, max(1, tokens))

    def packed(arrays: Any) -> Any:
        rows = [x.reshape(tokens, *x.shape[len(leading) :]) for x in arrays]
        # Gradients of repeated tokens are added up in the type of the statistics.
        dtype = flat["log_prob"].dtype
        wide = [x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in rows]
        return [x.astype(like.dtype) for x, like in zip(pack(packing, wide), rows, strict=True)]

    loss, metrics = plan(pack(packing, flat), plan.split(leaves, packed))
    has_token = jnp.arange(packing.rows) < tokens if packing.has_token is None else packing.has_token
    metrics = jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), unpack(packing, metrics))
    return zero_unless(has_token, loss).sum(), metrics
