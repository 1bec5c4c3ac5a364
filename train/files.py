"""Files that are whole at any moment."""

import os
from pathlib import Path


def write_text_atomic(path: Path, text: str) -> None:
    """Write `path` so that a process killed at any moment leaves the old file or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
