"""Modules that only an environment with torch can import."""

collect_ignore = ["draw_shapes.py", "make_families.py", "play.py", "score.py"]
