"""The audit of a pair of policies given as logits."""

from typing import Any

import jax
import numpy as np

from kljax._checks import check_mask, check_same_shape
from kljax._typing import Array, ArrayLike
from kljax.audit._measure import Block, Options, measure
from kljax.audit.report import Audit

__all__ = ["audit_logits"]


def audit_logits(
    logits: ArrayLike,
    ref_logits: ArrayLike,
    behaviour_logits: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    draws: int = 0,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    max_ratio: float | None = 2.0,
    resample: str | None = None,
    chunk_size: int | None = None,
    key: Array | None = None,
) -> Audit:
    """Bias, variance and signal-to-noise of every estimator's value and gradient against the exact KL.

    At each position the policy pi, the reference and the behaviour policy q (pi itself unless given) are softmaxes of
    the logits, and one token is drawn from q. Values are compared with `KL = sum_v pi_v x_v`, `x = log pi - log ref`.
    Gradients are with respect to the logits of the policy and are compared with `pi * (x - KL)`; the places are

        loss             the derivative of the estimate
        straight_through `gradient="k2"` (or "weighted_k2") of `estimate_kl`, the same for every estimator
        reward           the policy gradient with the estimate as its (negative) reward; in a sequence every token also
                         gets the sum of the estimates after it
        reward_baseline  the same less its expectation, as a perfect critic would have it
        advantage        the estimate less its mean over all tokens, with no credit for later tokens, as
                         `centered_kl_advantages`

    Off-policy each is measured as it is, times the importance ratio, and times that ratio capped at `max_ratio`.
    With 64-bit JAX the audit is float64 whatever the inputs are, else float32, whose rounding shows as relative biases
    near 1e-6. Only a few positions are on the device at a time: arrays may be `np.memmap`.

    Metrics of a value: mean, bias, relative_bias (bias / KL), variance of one estimate, snr (`|mean| / sd`), rmse.
    Metrics of a gradient, positions taken as one long vector: bias_norm (root mean square per unit), relative_bias
    (norm of the bias over that of the exact gradient), cosine, gain (inner product with the exact gradient over its
    squared norm; 1 is right), variance (trace of the covariance), snr (norm of the mean over the root of that trace).

    Args:
      logits: `[N, T, V]` logits of the policy, any float type; -inf forbids a token.
      ref_logits: same shape, logits of the reference at the same prefixes.
      behaviour_logits: same shape, logits of the policy that draws the tokens; None draws them from the policy.
      mask: `[N, T]` booleans aligned with the logits, the positions to audit; None audits all.
      draws: tokens drawn at each position to measure everything a second time by sampling; 0 draws none.
      bootstrap: replicates of the bootstrap; 0 has no intervals.
      confidence: coverage of the percentile intervals.
      max_ratio: cap of the capped correction; None leaves that correction out.
      resample: "rows" or "positions", what the bootstrap of the results per token resamples; None takes rows if there
        are at least 8. Results per sequence always resample rows.
      chunk_size: positions on the device at a time; None chooses by the size of the vocabulary.
      key: PRNG key of the draws and of the bootstrap; None is `jax.random.key(0)`.

    Returns:
      An `Audit`, on the host.

    Gradient:
      None; an audit is a report. It loops on the host, so it is not for use under `jit` or `vmap`.

    Raises:
      ValueError: if shapes differ, nothing is unmasked, logits are NaN, the KL is infinite, or for a senseless option.
      TypeError: if the mask has a floating type.

    References:
      Schulman, "Approximating KL divergence" (2020); Tang and Munos, "On a few pitfalls in KL divergence gradient
      estimation for RL" (2025); Efron, "Bootstrap methods" (1979).

    Example:
      >>> import jax, kljax
      >>> policy, ref = jax.random.normal(jax.random.key(0), (2, 8, 3, 5))
      >>> audit = kljax.audit.audit_logits(policy, ref, bootstrap=50)
      >>> for place, estimator in (("loss", "k1"), ("loss", "k2"), ("reward", "k1")):
      ...     found = audit.find(kind="gradient", level="token", place=place, estimator=estimator)
      ...     print(place, estimator, f"{found.metrics['relative_bias'].value:.2f}")
      loss k1 1.00
      loss k2 0.00
      reward k1 0.00
    """
    options = Options(draws, bootstrap, confidence, max_ratio, resample, chunk_size, key)
    shape = check_same_shape(logits=logits, ref_logits=ref_logits, behaviour_logits=behaviour_logits)
    if len(shape) != 3 or not all(shape):
        raise ValueError(f"logits: got shape {list(shape)}, expected [N, T, V] with none of them 0")
    given = (logits, ref_logits) if behaviour_logits is None else (logits, ref_logits, behaviour_logits)
    return measure([Block.of(*map(as_given, given))], host_mask(mask, shape[:2]), options, "logits")


def as_given(array: ArrayLike) -> Any:
    """Arrays as they are, on disk, host or device; anything else as an array."""
    return array if isinstance(array, np.ndarray | jax.Array) else np.asarray(array)


def host_mask(mask: ArrayLike | None, shape: tuple[int, ...]) -> np.ndarray:
    """The mask as booleans on the host; everything if there is none."""
    if mask is None:
        return np.ones(shape, bool)
    if np.shape(mask) != shape:
        raise ValueError(f"mask: got shape {list(np.shape(mask))}, expected {list(shape)}, the positions of the logits")
    return np.asarray(check_mask(mask))
