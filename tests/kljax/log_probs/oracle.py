"""What log-probs, entropies and divergences from hidden states are, in float64: token by token, and with all logits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("reverse", "forward", "jsd")


class Arrays(NamedTuple):
    """`[..., D]` hidden states, `[D, V]` heads and a `[V]` bias."""

    hidden: Any
    head: Any
    bias: Any
    ref_hidden: Any
    ref_head: Any


class Numbers(NamedTuple):
    """What no gradient flows to; `softcap` of 0 does not cap. All of the shape of the tokens but the last three."""

    targets: Any
    mask: Any
    temperature: Any
    softcap: float
    logit_scale: float
    beta: float


def token_by_token(arrays: Arrays, numbers: Numbers) -> dict[str, np.ndarray]:
    """Every field, each token for itself and every divergence from its definition; 0 where the mask is 0."""
    shape = np.shape(numbers.targets)
    fields = {name: np.zeros(shape) for name in ("log_prob", "logsumexp", "entropy", *KINDS)}
    for at in zip(*np.nonzero(numbers.mask), strict=True):
        p, logsumexp = log_softmax(arrays.hidden[at], arrays.head, arrays.bias, numbers, numbers.temperature[at])
        q, _ = log_softmax(arrays.ref_hidden[at], arrays.ref_head, arrays.bias, numbers, numbers.temperature[at])
        mixture = np.log((1 - numbers.beta) * np.exp(p) + numbers.beta * np.exp(q))
        fields["log_prob"][at] = p[numbers.targets[at]]
        fields["logsumexp"][at] = logsumexp
        fields["entropy"][at] = -(np.exp(p) * p).sum()
        fields["reverse"][at] = (np.exp(p) * (p - q)).sum()
        fields["forward"][at] = (np.exp(q) * (q - p)).sum()
        fields["jsd"][at] = numbers.beta * (np.exp(q) * (q - mixture)).sum()
        fields["jsd"][at] += (1 - numbers.beta) * (np.exp(p) * (p - mixture)).sum()
    return fields


def log_softmax(
    hidden: np.ndarray, head: np.ndarray, bias: np.ndarray, numbers: Numbers, temperature: float
) -> tuple[np.ndarray, float]:
    """The log-probs of one token's vocabulary and the log of their normaliser."""
    z = numbers.logit_scale * (hidden @ head) + bias
    if numbers.softcap:
        z = numbers.softcap * np.tanh(z / numbers.softcap)
    z = z / temperature
    logsumexp = z.max() + np.log(np.exp(z - z.max()).sum())
    return z - logsumexp, logsumexp


def with_all_logits(arrays: Arrays, numbers: Numbers, bumps: tuple[Any, Any]) -> dict[str, jax.Array]:
    """The same for JAX to differentiate; `bumps` are added to `hidden @ head` of policy and reference."""

    def log_probs(hidden: Any, head: Any, bias: Any, bump: Any) -> tuple[jax.Array, jax.Array]:
        z = numbers.logit_scale * (hidden @ head + bump) + bias[(None,) * (hidden.ndim - 1)]
        cap = jnp.where(numbers.softcap == 0, 1.0, numbers.softcap)
        z = jnp.where(numbers.softcap == 0, z, cap * jnp.tanh(z / cap)) / numbers.temperature[..., None]
        return jax.nn.log_softmax(z), jax.nn.logsumexp(z, -1)

    p, logsumexp = log_probs(arrays.hidden, arrays.head, arrays.bias, bumps[0])
    q, _ = log_probs(arrays.ref_hidden, arrays.ref_head, jax.lax.stop_gradient(arrays.bias), bumps[1])
    mixture = jnp.log((1 - numbers.beta) * jnp.exp(p) + numbers.beta * jnp.exp(q))
    fields = {
        "log_prob": jnp.take_along_axis(p, numbers.targets[..., None], -1)[..., 0],
        "logsumexp": logsumexp,
        "entropy": -(jnp.exp(p) * p).sum(-1),
        "reverse": (jnp.exp(p) * (p - q)).sum(-1),
        "forward": (jnp.exp(q) * (q - p)).sum(-1),
        "jsd": (numbers.beta * jnp.exp(q) * (q - mixture) + (1 - numbers.beta) * jnp.exp(p) * (p - mixture)).sum(-1),
    }
    return {name: jnp.where(numbers.mask, value, 0) for name, value in fields.items()}


class Expected(NamedTuple):
    """Fields, gradients of their sum weighted by `weights`, and what the rounding of the gradients is relative to.

    A gradient is a matrix product of the slopes of `hidden @ head`; its `scale` is the same product of absolute values.
    """

    fields: dict[str, Any]
    gradients: Arrays
    scales: Arrays


@jax.jit
def expected(arrays: Arrays, numbers: Numbers, weights: dict[str, Any]) -> Expected:
    def loss(arrays: Arrays, bumps: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        fields = with_all_logits(arrays, numbers, bumps)
        return sum((fields[name] * weights[name]).sum() for name in weights), fields  # type: ignore[return-value]

    logits = jnp.zeros((*arrays.hidden.shape[:-1], arrays.head.shape[1]))
    ((gradients, slopes), fields) = jax.grad(loss, (0, 1), has_aux=True)(arrays, (logits, logits))

    def scales(hidden: Any, head: Any, slope: Any) -> tuple[Any, Any]:
        slope = jnp.abs(slope)
        return slope @ jnp.abs(head).T, jnp.einsum("...d,...v->dv", jnp.abs(hidden), slope)

    of_policy = scales(arrays.hidden, arrays.head, slopes[0])
    of_bias = (jnp.abs(slopes[0]) / numbers.logit_scale).sum(tuple(range(logits.ndim - 1)))
    of_ref = scales(arrays.ref_hidden, arrays.ref_head, slopes[1])
    return Expected(fields, gradients, Arrays(*of_policy, of_bias, *of_ref))
