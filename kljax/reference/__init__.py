"""Reference policies: where they come from, and how they follow the policy."""

from kljax.reference.sources import (
    Policy,
    adapter_reference,
    base_reference,
    check_tree,
    checkpoint_reference,
    fingerprint,
    restore_tree,
)
from kljax.reference.updates import bema_reference, ema_reference, refreshed_reference

__all__ = [
    "Policy",
    "adapter_reference",
    "base_reference",
    "bema_reference",
    "check_tree",
    "checkpoint_reference",
    "ema_reference",
    "fingerprint",
    "refreshed_reference",
    "restore_tree",
]
