"""Reading of Parquet files that others wrote, within a limit of memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config.errors import UserError

if TYPE_CHECKING:
    import pyarrow

MAGIC = b"PAR1"
BATCH = 64
MAX_DECODED = 1 << 30
MAX_RATIO = 64
"""Bytes that a file may take in memory, and bytes more for each byte on disk: a few may stand for many."""
ROW_BYTES = 256
"""Bytes that a row takes at least, for its position: a column of nothing has none itself."""


def read_table(path: Path, field: str) -> "pyarrow.Table":
    """Decodes a file part by part, and stops at the limit of memory.

    Args:
      path: the file.
      field: config field of the path, for error messages.

    Raises:
      UserError: it cannot be read, is larger than the limit, or pyarrow is missing.
    """
    try:
        from pyarrow import ArrowException, Table, parquet
    except ImportError as error:
        raise UserError(
            f"{field}: {path} is Parquet, which needs pyarrow; install it, or convert the file to JSON lines"
        ) from error
    most = MAX_DECODED + MAX_RATIO * path.stat().st_size
    parts = []
    decoded = 0
    try:
        file = parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        declared = sum(group.total_byte_size + ROW_BYTES * group.num_rows for group in groups)
        for part in () if declared > most else file.iter_batches(batch_size=BATCH):
            decoded += part.nbytes + ROW_BYTES * part.num_rows
            if decoded > most:
                break
            parts.append(part)
    except (ArrowException, OSError) as error:
        raise UserError(f"{field}: {path} cannot be read as Parquet: {error}") from error
    if max(decoded, declared) > most:
        raise UserError(f"{field}: {path} has more than {most:,} bytes when it is decompressed; split it")
    return Table.from_batches(parts, file.schema_arrow)


def drop_empty(record: Mapping[str, Any]) -> dict[str, Any]:
    """Drops empty cells, also in nested structs: a Parquet column has the fields of all rows."""
    return {
        name: drop_empty(value) if isinstance(value, dict) else value
        for name, value in record.items()
        if value is not None
    }
