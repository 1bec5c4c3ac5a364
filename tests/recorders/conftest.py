"""Modules that need an environment with torch, and trl or verl: see `make test-recorders`."""

collect_ignore = ["trl_side.py", "trl_mistakes.py", "trl_replay.py", "verl_side.py", "verl_replay.py"]
