"""What the KL is measured against: found, loaded, followed, put on record, and proven not to have moved."""

from train.references.begin import begin_reference
from train.references.found import locate, run_of
from train.references.moving import current_reference, make_follow, moves, start_moving, staying, with_place
from train.references.record import (
    assert_unchanged,
    is_recorded,
    record_reference,
    reference_fingerprint,
)
from train.references.sources import check_reference, load_reference, pinned_steps
from train.references.teacher import check_base
from train.rl.reference import Reference, reference_head, with_base, without_base

__all__ = [
    "Reference",
    "assert_unchanged",
    "begin_reference",
    "check_base",
    "check_reference",
    "current_reference",
    "is_recorded",
    "load_reference",
    "locate",
    "make_follow",
    "moves",
    "pinned_steps",
    "record_reference",
    "reference_fingerprint",
    "reference_head",
    "run_of",
    "start_moving",
    "staying",
    "with_base",
    "with_place",
    "without_base",
]
