"""Audits: how good each KL estimator is, in value and in gradient, for a pair of policies.

`audit_logits` and `audit_checkpoints` have the whole distributions and compare with the exact KL over the vocabulary.
`audit_batch` has only the recorded log-probs of the sampled tokens. The command is `python -m kljax audit`.
"""

from kljax.tools.audit.anchors import AnchorAudit, audit_anchors
from kljax.tools.audit.batch import audit_batch
from kljax.tools.audit.checkpoints import Checkpoints, audit_checkpoints
from kljax.tools.audit.example import example_logits
from kljax.tools.audit.logits import audit_logits
from kljax.tools.audit.report import Audit
from kljax.tools.audit.results import Answer, Interval, Result

__all__ = [
    "AnchorAudit",
    "Answer",
    "Audit",
    "Checkpoints",
    "Interval",
    "Result",
    "audit_anchors",
    "audit_batch",
    "audit_checkpoints",
    "audit_logits",
    "example_logits",
]
