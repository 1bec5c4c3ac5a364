"""Modules that only an environment with torch can import."""

collect_ignore = ["draw_shapes.py", "make_families.py", "score.py"]
