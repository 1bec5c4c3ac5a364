"""Event files of TensorBoard, written without a thread."""

import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c
from tensorboardX.summary import scalar

from train.config.errors import warn
from train.run.glossary import tag_of


class EventFile:
    """Scalars of one run of TensorBoard.

    `tensorboardX.SummaryWriter` writes in a thread. That thread dies of a full disk without a word, and the run then
    waits for ever for room in its queue. Here the error reaches the run.
    """

    def __init__(self, directory: Path, *, purge_step: int | None = None, suffix: str = "") -> None:
        """Starts a file.

        Args:
          directory: made if missing.
          purge_step: TensorBoard drops the points of earlier files from this step on; None keeps all.
          suffix: ends the name of the file.

        Raises:
          OSError: the disk is full.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._failed = False
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}{suffix}"
        self._file = (directory / name).open("wb")
        self._add(Event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._add(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        size = struct.pack("<Q", len(data))
        self._file.write(size + _checksum(size) + data + _checksum(data))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a point for each metric, so that a TensorBoard that is open sees them.

        Raises:
          OSError: the disk is full.
        """
        try:
            for name, value in values.items():
                self._add(Event(step=step, summary=scalar(tag_of(name), value, display_name=name)))
            self._file.flush()
        except OSError as error:
            self._failed = True
            raise OSError(error.errno, error.strerror, self._file.name) from error

    def close(self) -> None:
        """Closes the file; an error that no write had before is a warning."""
        try:
            self._file.close()
        except OSError as error:
            if not self._failed:
                warn(f"cannot write {self._file.name}: {error.strerror}")


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", masked_crc32c(data))
