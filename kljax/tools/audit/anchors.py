"""Two anchors of a KL term, the reference and the sampler, audited at several lags of the sampler."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from kljax._typing import Array, ArrayLike
from kljax.tools.audit.logits import audit_logits
from kljax.tools.audit.report import Audit, number, write_report
from kljax.tools.audit.results import Result

__all__ = ["AnchorAudit", "audit_anchors"]

# Columns of the table: the heading, and the labels of its results.
VALUES: Mapping[str, Mapping[str, str]] = {
    f"{estimator}{suffix}": {"estimator": estimator, "correction": correction}
    for estimator in ("k1", "k3")
    for correction, suffix in (("none", ""), ("ratio", " x r"))
}
GRADIENTS: Mapping[str, Mapping[str, str]] = {
    "k2 loss": {"place": "loss", "estimator": "k2", "correction": "none"},
    "k2 st x r": {"place": "straight_through", "estimator": "any", "correction": "ratio"},
    "k3 loss": {"place": "loss", "estimator": "k3", "correction": "none"},
    "k3 loss x r": {"place": "loss", "estimator": "k3", "correction": "ratio"},
}
NOTES = (
    "bias: over the exact KL(policy || anchor), or over the norm of its gradient",
    "variance: of one estimate, or the trace of the covariance of one gradient; snr: mean over standard deviation",
    "x r: times the importance ratio policy / sampler; st: straight-through, the gradient of k2 under a constant ratio",
    "k1 in the reward has the gradients of the columns k2, for a token alone",
    "without lag the sampler is the policy: the KL to it is 0, and the ratio is 1",
)


@dataclasses.dataclass(frozen=True)
class AnchorAudit:
    """An audit of each anchor at each lag.

    Attributes:
      audits: (anchor, lag) to its `Audit`, anchor being "reference" or "sampler"; no audit of the sampler without lag,
        where it is the policy.

    Example:
      >>> import jax, kljax
      >>> policy, ref, stale = jax.random.normal(jax.random.key(0), (3, 8, 3, 5))
      >>> measured = kljax.audit.audit_anchors(policy, ref, {0: policy, 4: stale}, bootstrap=0)
      >>> sorted(measured.audits)
      [('reference', 0), ('reference', 4), ('sampler', 4)]
    """

    audits: Mapping[tuple[str, int], Audit]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data for JSON.

        Returns:
          "anchors", a list of the audits' own data with the keys "anchor" and "lag".
        """
        labelled = [{"anchor": anchor, "lag": lag, **audit.to_dict()} for (anchor, lag), audit in self.audits.items()]
        return {"anchors": labelled}

    def table(self) -> str:
        """Writes the values and the gradients of both anchors as plain text.

        Returns:
          Lines joined by newlines, without one at the end.
        """
        lines = ["Anchors of a KL term, per token", *(f"Note: {note}" for note in NOTES)]
        for title, kind, columns in (("Values", "value", VALUES), ("Gradients", "gradient", GRADIENTS)):
            lines += ["", f"{title}: bias, variance, snr", *self._lines(kind, columns)]
        return "\n".join(lines)

    def write(self, directory: str | pathlib.Path) -> list[pathlib.Path]:
        """Writes `anchors.txt` and `anchors.json`.

        Args:
          directory: made if it does not exist; files of these names in it are overwritten.

        Returns:
          The paths of the files.
        """
        return write_report(directory, "anchors", self.table(), self.to_dict())

    def _lines(self, kind: str, columns: Mapping[str, Mapping[str, str]]) -> list[str]:
        cells = [["anchor", "lag", "KL", *columns]]
        for (anchor, lag), audit in self.audits.items():
            results = [_first(audit, kind, labels) for labels in columns.values()]
            kl = number(audit.kl["token"].value)
            cells.append([anchor, str(lag), kl, *map(_cell, results)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def audit_anchors(
    logits: ArrayLike,
    ref_logits: ArrayLike,
    sampling_logits: Mapping[int, ArrayLike | None],
    mask: ArrayLike | None = None,
    *,
    draws: int = 0,
    bootstrap: int = 1000,
    confidence: float = 0.95,
    max_ratio: float | None = 2.0,
    key: Array | None = None,
) -> AnchorAudit:
    """Audits KL(policy || reference) and KL(policy || sampler) on tokens of samplers that lag behind the policy.

    Args:
      logits: `[N, T, V]` logits of the policy.
      ref_logits: same shape, logits of the reference.
      sampling_logits: lag, in updates, to the logits of the policy that many updates ago, same shape. At lag 0 they are
        the policy's and are not read, so that None will do.
      mask: `[N, T]` booleans, the positions to audit; None audits all.
      draws: as in `audit_logits`, and so are the others.
      bootstrap: replicates of the bootstrap; 0 has no intervals.
      confidence: coverage of the intervals.
      max_ratio: cap of the capped correction; None leaves it out.
      key: PRNG key of the draws and of the bootstrap.

    Returns:
      An `AnchorAudit`: one audit of the reference for each lag, and one of the sampler for each lag above 0.

    Raises:
      ValueError: without a lag, for a negative one, without logits at one above 0, or as `audit_logits`.

    References:
      Tang and Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (2025).

    Example:
      >>> import jax, kljax
      >>> policy, ref, stale = jax.random.normal(jax.random.key(0), (3, 8, 3, 5))
      >>> measured = kljax.audit.audit_anchors(policy, ref, {1: stale}, bootstrap=0)
      >>> loss = measured.audits["sampler", 1].find(kind="gradient", place="straight_through", correction="ratio")
      >>> print(f"{loss.metrics['relative_bias'].value:.3f}")
      0.000
    """
    if not sampling_logits or min(sampling_logits) < 0:
        raise ValueError(f"sampling_logits: got lags {sorted(sampling_logits)}, expected one or more of at least 0")
    for lag, sampler in sorted(sampling_logits.items()):
        if lag and sampler is None:
            raise ValueError(f"sampling_logits: got None at lag {lag}, expected logits; only lag 0 needs none")
    settings: dict[str, Any] = {
        "draws": draws,
        "bootstrap": bootstrap,
        "confidence": confidence,
        "max_ratio": max_ratio,
        "key": key,
    }
    measure: Callable[..., Audit] = functools.partial(audit_logits, **settings)
    audits = {}
    for lag, sampler in sorted(sampling_logits.items()):
        audits["reference", lag] = measure(logits, ref_logits, sampler if lag else None, mask)
    for lag, sampler in sorted(sampling_logits.items()):
        if lag and sampler is not None:
            audits["sampler", lag] = measure(logits, sampler, sampler, mask)
    return AnchorAudit(audits)


def _first(audit: Audit, kind: str, labels: Mapping[str, str]) -> Result | None:
    """The exact result per token with these labels, or None; without a lag no ratio is measured, as it is 1."""
    results = audit.select(kind=kind, level="token", how="exact", **labels)
    if not results and labels["correction"] == "ratio":
        results = audit.select(kind=kind, level="token", how="exact", **{**labels, "correction": "none"})
    return results[0] if results else None


def _cell(result: Result | None) -> str:
    if result is None:
        return "-"
    bias, variance, snr = (result.metrics[name].value for name in ("relative_bias", "variance", "snr"))
    share = f"{round(100 * bias, 1) + 0.0:.1f} %" if math.isfinite(bias) else "-"
    return f"{share}, {number(variance)}, {number(snr)}"
