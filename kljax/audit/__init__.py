"""The audit: how good each KL estimator is, in value and in gradient, for a given pair of policies.

`audit_logits` and `audit_checkpoints` know the whole distributions and compare with the exact KL over the vocabulary;
`audit_batch` has the recorded log-probs of the sampled tokens alone. `python -m kljax audit` is the command.
"""

from kljax.audit.batch import audit_batch
from kljax.audit.checkpoints import audit_checkpoints
from kljax.audit.example import example_logits
from kljax.audit.logits import audit_logits
from kljax.audit.report import Answer, Audit, Interval, Result

__all__ = [
    "Answer",
    "Audit",
    "Interval",
    "Result",
    "audit_batch",
    "audit_checkpoints",
    "audit_logits",
    "example_logits",
]
