"""Modules that need an environment with torch, TRL or llama.cpp."""

collect_ignore = ["transformers_side.py", "exports_side.py", "llama_side.py", "trl_update_side.py", "step_trl.py"]
