"""The trainer: config, mesh, model, rollout, objective, step and loop. Run it as `python -m train CONFIG`."""

import importlib.util
import sys


def _check_packages() -> None:
    """Ends a command of a Python without the packages of the trainer, such as that of the system, in one line."""
    missing = [name for name in ("pydantic", "yaml", "jax") if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"error: {sys.executable} has no package {missing[0]}, which the trainer needs; run .venv/bin/python -m "
            "train, which `make .venv/.ready` in a checkout makes",
            file=sys.stderr,
        )
        sys.exit(2)


# Python looks for the module of -m at this moment, and has no other name for the command yet.
if sys.argv[:1] == ["-m"]:
    _check_packages()
