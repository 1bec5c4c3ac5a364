"""Tests of an integration run in the environment of its trainer alone: `make test-tunix`."""

import importlib.util

collect_ignore = [name for name in ("tunix",) if importlib.util.find_spec(name) is None]
