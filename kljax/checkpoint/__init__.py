"""Checkpoints that orbax wrote: their metadata, their arrays in a layout, and digests that reveal damage on disk.

`restore` reads a tree into the shapes, dtypes and shardings of an abstract one. The digests of the arrays lie beside
them, sealed by a digest of their own: `seal({"arrays": tree_digests(tree)})` is the `custom_metadata` to save. Orbax is
imported on first use, so that the library does not need it.
"""

from kljax.checkpoint._digests import array_digest, json_digest, open_sealed, seal, text_hash, tree_digests
from kljax.checkpoint._orbax import (
    CheckpointMetadata,
    check_fits,
    check_restored,
    first_line,
    read_array,
    read_metadata,
    restore,
)
from kljax.checkpoint._trees import first_five, named_leaves, shape_and_dtype

__all__ = [
    "CheckpointMetadata",
    "array_digest",
    "check_fits",
    "check_restored",
    "first_five",
    "first_line",
    "json_digest",
    "named_leaves",
    "open_sealed",
    "read_array",
    "read_metadata",
    "restore",
    "seal",
    "shape_and_dtype",
    "text_hash",
    "tree_digests",
]
