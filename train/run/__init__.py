"""One run from start to end: setup, loop, run directory, checkpoints, reports."""
