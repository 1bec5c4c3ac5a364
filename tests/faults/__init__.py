"""Faults that the trainer and its commands are put through: `python -m tests.faults` counts the outcomes."""
