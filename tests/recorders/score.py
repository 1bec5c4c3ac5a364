"""What `kljax parity` says of the mistakes in TRL's source: `make test-recorders ARGS=--mistakes`.

docs/parity.md has the score.
"""

import collections
import pathlib
from collections.abc import Iterator

import jax

from kljax.tools.parity.command import compare
from kljax.tools.parity.report import ParityReport

# By mistake: its cause; else the field whose invariant is broken, or the first one of unknown cause. Nothing shows what
# stands behind the loss.
EXPECTED = {
    "accumulation-missing": "reduction: sum of micro-batches",
    "accumulation-twice": "reduction: scale 0.5",
    "advantages-not-shuffled": "advantage: in another order",
    "advantages-of-other-rows": "advantages",
    "bf16-kl-sign": "kl: sign flipped",
    "bf16-labels-shifted": "log_probs: moved by one (left)",
    "bf16-reference-is-policy": "reference: of old_log_probs",
    "bf16-temperature-missing": "log_probs: temperature missing",
    "biased-deviation": "advantage: ddof 0",
    "cispo-differentiated": "loss: weight has a gradient",
    "clipped-term-alone": "loss: clipped alone",
    "clips-exchanged": "loss: clips exchanged",
    "cut-rows-counted": "divisor",
    "cut-rows-trained": "mask_rule: rows cut at the limit trained",
    "delta-ignored": "loss: no cap of the ratio",
    "divisor-of-dr-grpo": "reduction: token mean",
    "end-untrained": "mask_rule: end of sequence left out",
    "entropy-sign": "entropy: coef -0.02",
    "epsilon-of-deviation": "advantage: eps 0.01",
    "first-token-untrained": "mask: first token left out",
    "greater-for-lesser": "loss: optimistic",
    "groups-interleaved-both-ways": "advantage: groups interleaved",
    "groups-interleaved": "advantages",
    "groups-of-the-batch": "advantage: centered on the batch",
    "kl-coefficient-missing": "kl: coefficient missing",
    "kl-coefficient-squared": "kl: coefficient twice",
    "kl-detached": "kl: gradient none",
    "kl-direction": "kl: direction swapped",
    "kl-in-the-reward-too": "advantage: kl_coef 0.1",
    "kl-is-k1": "kl: estimator k1",
    "kl-over-tokens": "kl_reduction: token mean",
    "kl-ratio-missing": "kl: importance ratio left out",
    "kl-sign": "kl: sign flipped",
    "labels-shifted": "log_probs: moved by one (left)",
    "learning-rate": "",
    "left-padding-attended": "log_probs",
    "log-probs-in-bfloat16": "rounding: bfloat16",
    "loss-doubled": "reduction: scale 2",
    "loss-sign": "loss: sign flipped",
    "low-entropy-trained": "loss",
    "mask-shifted": "mask: shifted right by one",
    "old-shifted": "old_log_probs",
    "old-without-temperature": "old_log_probs",
    "padding-counted": "reduction: Dr. GRPO over the longest row",
    "padding-trained": "mask: pad tokens",
    "ratio-always-1": "ratio: log_probs as the old policy",
    "ratio-inverted": "ratio: direction swapped",
    "ratio-of-row-is-product": "loss: ratio summed over the row",
    "recorded-mask-shifted": "mask_rule: first token left out",
    "reference-is-policy": "reference: of old_log_probs",
    "rows-first": "reduction: sequence mean of token means",
    "sampler-without-temperature": "rollout_log_probs",
    "temperature-missing": "log_probs: temperature missing",
    "temperature-twice": "log_probs: temperature twice",
    "tokens-first": "reduction: token mean",
    "tools-trained": "mask: tools trained",
    "upper-clip-forgotten": "loss: clip_high 0.2",
    "whitened-twice": "advantage: whitened again over the rows, ddof 1, eps 0.0001",
    "window-of-the-generation": "reduction: scale 0.5",
}
ALONE, BESIDE, TIED, INVARIANT, FIELD, SILENT = (
    *("named alone", "named, and a field of unknown cause", "one of several causes that fit as well"),
    *("a broken invariant", "cause unknown, first field right", "nothing"),
)


def judge(report: ParityReport, expected: str) -> str | None:
    """Returns how a mistake is reported; None if in another way than expected."""
    if not report.findings:
        broken = [invariant.text for invariant in report.invariants if invariant.holds is False]
        if not broken or not expected:
            return SILENT if report.passes and not expected else None
        return INVARIANT if any(text.startswith(expected) for text in broken) else None
    first, *others = report.findings
    keys = [cause.key for cause in first.explanations]
    if not keys:
        return FIELD if first.difference.field == expected else None
    if expected not in keys:
        return None
    if not all(finding.explanations or finding.follows for finding in others):
        return BESIDE
    return ALONE if len(keys) == 1 else TIED


def problems_of(folder: pathlib.Path) -> Iterator[str]:
    """Yields the runs whose report is not the expected one, and prints the score."""
    score: collections.Counter[str] = collections.Counter()
    for path in sorted(folder.glob("*.npz")):
        with jax.enable_x64(True):
            report = compare(path)
        if path.stem not in EXPECTED:
            score["no mistake, no difference"] += report.passes
            if not report.passes:
                yield f"{path.stem}: differs, or a stage of the header was not compared"
            continue
        outcome = judge(report, EXPECTED[path.stem])
        if outcome is None:
            causes = [cause.key for finding in report.findings for cause in finding.explanations]
            yield f"{path.stem}: got {causes}, expected {EXPECTED[path.stem]!r}"
        else:
            score[outcome] += 1
    print("\n".join(f"{count:4} {outcome}" for outcome, count in score.most_common()))
