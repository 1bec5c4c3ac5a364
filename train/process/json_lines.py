"""Lines of a command as JSON objects, for programs that collect logs."""

import json
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from train.distributed.peers import process

LEVELS: Mapping[str, str] = {"warning: ": "warning", "error: ": "error", "note: ": "info"}
"""The beginning of a line that says how grave it is."""


class JsonLines:
    """A text stream that writes each line as an object: `time` (UTC), `process`, `level` and `text`."""

    def __init__(self, stream: TextIO, level: str) -> None:
        """Wraps a stream, whose lines have this level if they do not begin with another."""
        self._stream = stream
        self._level = level
        # A line of one thread is not that of another.
        self._begun = threading.local()

    def __getattr__(self, name: str) -> Any:
        """Everything else is that of the stream."""
        return getattr(self._stream, name)

    def isatty(self) -> bool:
        """Whether a person reads the lines: no, so that nothing is drawn over."""
        return False

    def write(self, text: str) -> int:
        """Writes the lines that are complete."""
        *lines, self._begun.text = (getattr(self._begun, "text", "") + text).split("\n")
        for line in lines:
            self._write_line(line)
        return len(text)

    def flush(self) -> None:
        """Flushes the complete lines."""
        self._stream.flush()

    def _write_line(self, line: str) -> None:
        if not line.strip():
            return
        beginning = next((beginning for beginning in LEVELS if line.startswith(beginning)), "")
        record = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "process": process(),
            "level": LEVELS.get(beginning, self._level),
            "text": line.removeprefix(beginning).rstrip(),
        }
        self._stream.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_json_lines() -> None:
    """Lets standard output and error write JSON lines, until their guards are taken away."""
    sys.stdout = JsonLines(sys.stdout, "info")
    sys.stderr = JsonLines(sys.stderr, "error")
