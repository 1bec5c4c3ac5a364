"""Modules that only an environment with torch can import."""

collect_ignore = ["transformers_side.py"]
