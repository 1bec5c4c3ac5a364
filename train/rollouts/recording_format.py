"""The format of recordings, by which a release refuses those of a later one."""

import json
from collections.abc import Collection, Mapping
from typing import Any

FORMAT = 1
"""Version of the meaning of fields and columns; rows without one have the first."""
SEQUENCES = 2
"""The format of sequences (`ids`), and of rows with observations (`completion_mask`) or an episode of another row."""
FORMAT_FIELD = "kljax_format"
"""Field of a row."""
METADATA = "kljax"
"""Key of the metadata of a Parquet file, JSON with `format`."""


def format_of(names: Collection[str]) -> int:
    """Returns the format of rows with these fields."""
    return SEQUENCES if {"ids", "completion_mask", "episode"} & {*names} else FORMAT


def check_format(name: str, version: Any) -> None:
    """Raises ValueError, naming the field, unless this release knows a format."""
    if not isinstance(version, int | float) or not version <= SEQUENCES:
        raise ValueError(
            f"{name}: got {version!r}, expected at most {SEQUENCES}: a later release of kljax recorded it; update kljax"
        )


def check_table(metadata: Mapping[bytes, bytes] | None) -> None:
    """Raises ValueError if the metadata of a file are damaged, or of a later release; files of others have none."""
    written = (metadata or {}).get(METADATA.encode())
    if written is None:
        return
    try:
        version = json.loads(written)["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the metadata {METADATA!r} are damaged") from error
    check_format("format", version)
