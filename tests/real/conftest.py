"""Modules that need an environment with torch or llama.cpp."""

collect_ignore = ["transformers_side.py", "exports_side.py", "llama_side.py"]
