"""Reference policies: found, loaded, followed, recorded, and checked to be unchanged at the end."""

from train.references.find import SavedReference, locate, run_directory_of, warn_of_other_base
from train.references.follow import (
    current_reference,
    make_follow,
    start_following,
    with_abstract_reference,
)
from train.references.load import check_reference, load_reference, pinned_steps, start_reference
from train.references.record import (
    assert_unchanged,
    is_recorded,
    record_reference,
    reference_fingerprint,
    restore_record,
    saved_entries,
)
from train.references.store import ReferenceStore, make_reference_store

__all__ = [
    "ReferenceStore",
    "SavedReference",
    "assert_unchanged",
    "check_reference",
    "current_reference",
    "is_recorded",
    "load_reference",
    "locate",
    "make_follow",
    "make_reference_store",
    "pinned_steps",
    "record_reference",
    "reference_fingerprint",
    "restore_record",
    "run_directory_of",
    "saved_entries",
    "start_following",
    "start_reference",
    "warn_of_other_base",
    "with_abstract_reference",
]
