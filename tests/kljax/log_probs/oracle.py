"""Log-probs, entropies and divergences from hidden states in float64: token by token, and with all logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("reverse", "forward", "jsd")
FIELDS = ("log_prob", "logsumexp", "entropy", "sum_squared_probs", "log_kept_mass", "kept_log_prob", *KINDS)


class Arrays(NamedTuple):
    """`[..., D]` hidden states, `[D, V]` heads and `[V]` biases."""

    hidden: Any
    head: Any
    bias: Any
    ref_hidden: Any
    ref_head: Any
    ref_bias: Any


class Numbers(NamedTuple):
    """Inputs without a gradient; a cap of 0 does not cap.

    Attributes:
      targets, mask, temperature: of the shape of the tokens.
      softcap, logit_scale: of the policy and of the reference.
      beta: weight of the reference in the mixture of the JSD.
      kept: `[..., V]` booleans, the kept tokens; the target is kept in any case.
    """

    targets: Any
    mask: Any
    temperature: Any
    softcap: tuple[Any, Any]
    logit_scale: tuple[Any, Any]
    beta: Any
    kept: Any


def token_by_token(arrays: Arrays, numbers: Numbers) -> dict[str, np.ndarray]:
    """Returns every field, each token for itself and every statistic from its definition; 0 where the mask is 0."""
    shape = np.shape(numbers.targets)
    fields = {name: np.zeros(shape) for name in FIELDS}
    for at in zip(*np.nonzero(numbers.mask), strict=True):
        temperature, target = numbers.temperature[at], numbers.targets[at]
        policy, ref = (
            {"softcap": cap, "logit_scale": scale, "temperature": temperature}
            for cap, scale in zip(numbers.softcap, numbers.logit_scale, strict=True)
        )
        p, logsumexp = log_softmax(arrays.hidden[at], arrays.head, arrays.bias, **policy)
        q, _ = log_softmax(arrays.ref_hidden[at], arrays.ref_head, arrays.ref_bias, **ref)
        mixture = np.log((1 - numbers.beta) * np.exp(p) + numbers.beta * np.exp(q))
        selected = set(np.flatnonzero(numbers.kept[at])) | {target}
        mass = sum(np.exp(p[token]) for token in selected)
        fields["log_prob"][at] = p[target]
        fields["logsumexp"][at] = logsumexp
        fields["entropy"][at] = -(np.exp(p) * p).sum()
        fields["sum_squared_probs"][at] = (np.exp(p) ** 2).sum()
        fields["log_kept_mass"][at] = np.log(mass)
        fields["kept_log_prob"][at] = np.log(np.exp(p[target]) / mass)
        fields["reverse"][at] = (np.exp(p) * (p - q)).sum()
        fields["forward"][at] = (np.exp(q) * (q - p)).sum()
        fields["jsd"][at] = numbers.beta * (np.exp(q) * (q - mixture)).sum()
        fields["jsd"][at] += (1 - numbers.beta) * (np.exp(p) * (p - mixture)).sum()
    return fields


def log_softmax(
    hidden: np.ndarray, head: np.ndarray, bias: np.ndarray, *, softcap: float, logit_scale: float, temperature: float
) -> tuple[np.ndarray, float]:
    """Returns the log-probs of one token's vocabulary and the log of their normaliser."""
    z = logit_scale * (hidden @ head) + bias
    if softcap:
        z = softcap * np.tanh(z / softcap)
    z = z / temperature
    logsumexp = z.max() + np.log(np.exp(z - z.max()).sum())
    return z - logsumexp, logsumexp


def with_all_logits(arrays: Arrays, numbers: Numbers, bumps: tuple[Any, Any]) -> dict[str, jax.Array]:
    """Returns the same for JAX to differentiate; `bumps` are added to `hidden @ head` of policy and reference."""

    def log_probs(hidden: Any, head: Any, bias: Any, bump: Any, side: int) -> tuple[jax.Array, jax.Array]:
        z = numbers.logit_scale[side] * (hidden @ head + bump) + bias[(None,) * (hidden.ndim - 1)]
        cap = jnp.where(numbers.softcap[side] == 0, 1.0, numbers.softcap[side])
        z = jnp.where(numbers.softcap[side] == 0, z, cap * jnp.tanh(z / cap)) / numbers.temperature[..., None]
        return jax.nn.log_softmax(z), jax.nn.logsumexp(z, -1)

    p, logsumexp = log_probs(arrays.hidden, arrays.head, arrays.bias, bumps[0], 0)
    q, _ = log_probs(arrays.ref_hidden, arrays.ref_head, arrays.ref_bias, bumps[1], 1)
    mixture = jnp.log((1 - numbers.beta) * jnp.exp(p) + numbers.beta * jnp.exp(q))
    log_prob = jnp.take_along_axis(p, numbers.targets[..., None], -1)[..., 0]
    selected = numbers.kept | (jax.nn.one_hot(numbers.targets, p.shape[-1]) > 0)
    mass = jax.nn.logsumexp(p, -1, where=selected)
    fields = {
        "log_prob": log_prob,
        "logsumexp": logsumexp,
        "entropy": -(jnp.exp(p) * p).sum(-1),
        "sum_squared_probs": jnp.exp(2 * p).sum(-1),
        "log_kept_mass": mass,
        "kept_log_prob": log_prob - mass,
        "reverse": (jnp.exp(p) * (p - q)).sum(-1),
        "forward": (jnp.exp(q) * (q - p)).sum(-1),
        "jsd": (numbers.beta * jnp.exp(q) * (q - mixture) + (1 - numbers.beta) * jnp.exp(p) * (p - mixture)).sum(-1),
    }
    return {name: jnp.where(numbers.mask, value, 0) for name, value in fields.items()}


class Expected(NamedTuple):
    """Fields, gradients of their weighted sum, and the scale that the rounding of the gradients is relative to.

    A gradient is a matrix product of the slopes of `hidden @ head`; its `scale` is the same product of absolute values.
    """

    fields: dict[str, Any]
    gradients: Arrays
    scales: Arrays


@jax.jit
def expected(arrays: Arrays, numbers: Numbers, weights: dict[str, Any]) -> Expected:
    """Returns the fields and the gradients of their sum, weighted by `weights`."""

    def loss(arrays: Arrays, bumps: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        fields = with_all_logits(arrays, numbers, bumps)
        return sum((fields[name] * weights[name]).sum() for name in weights), fields  # type: ignore[return-value]

    logits = jnp.zeros((*arrays.hidden.shape[:-1], arrays.head.shape[1]))
    ((gradients, slopes), fields) = jax.grad(loss, (0, 1), has_aux=True)(arrays, (logits, logits))

    def scales(hidden: Any, head: Any, side: int) -> tuple[Any, Any, Any]:
        slope = jnp.abs(slopes[side])
        bias = (slope / numbers.logit_scale[side]).sum(tuple(range(logits.ndim - 1)))
        return slope @ jnp.abs(head).T, jnp.einsum("...d,...v->dv", jnp.abs(hidden), slope), bias

    policy, ref = scales(arrays.hidden, arrays.head, 0), scales(arrays.ref_hidden, arrays.ref_head, 1)
    return Expected(fields, gradients, Arrays(*policy, *ref))
