"""Recorded completions: written by a run, read for offline and off-policy training."""

from train.rollouts.recorded.source import FileSource
from train.rollouts.recorded.write import name_parents, open_recording, record_rows, write_rows

__all__ = ["FileSource", "name_parents", "open_recording", "record_rows", "write_rows"]
