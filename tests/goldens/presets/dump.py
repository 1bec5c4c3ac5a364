"""Runs the recorder of docs/parity.md, as it stands there, around the recorded step of a system.

    python -m tests.goldens.presets.dump SYSTEM RELEASE     slime, prime-rl, tunix: `grpo` with one micro-batch

It writes the dump of the system in `tests/goldens/parity/steps.json` and `steps.npz`; RELEASE is that of record.py.
"""

import argparse
import atexit
import importlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from tests.goldens.parity import page
from tests.goldens.presets import batch

DIRECTORY = batch.DIRECTORY.parent / "parity"
# What the recorder of a system declares, where the recorded step has other settings.
DECLARED: Mapping[str, Any] = {"prime-rl": ("grpo", {"type": "default"})}


def store(name: str, header: Mapping[str, Any], fields: Mapping[str, np.ndarray]) -> None:
    """Adds a dump to the files, or replaces it."""
    index, arrays = DIRECTORY / "steps.json", DIRECTORY / "steps.npz"
    dumps = json.loads(index.read_text())["dumps"] if index.exists() else []
    selected = dict(np.load(arrays)) if arrays.exists() else {}
    selected = {key: value for key, value in selected.items() if not key.startswith(f"{name}/")}
    selected |= {f"{name}/{field}": value for field, value in fields.items()}
    places = {field: f"{name}/{field}" for field in fields}
    dumps = [dump for dump in dumps if dump["name"] != name]
    dumps.append({"name": name, "header": dict(header), "planted": [], "arrays": places})
    lines = ",\n".join(json.dumps(dump) for dump in sorted(dumps, key=lambda dump: dump["name"]))
    index.write_text(f'{{"dumps": [\n{lines}\n]}}\n')
    np.savez_compressed(arrays, **dict(sorted(selected.items())))  # type: ignore[arg-type]


def run_first(system: str, release: pathlib.Path, **changes: Any) -> None:
    """Runs the step of `grpo` with one micro-batch, with other values under some names of the recorder's module."""
    module = recorder(system)
    algorithms = {"grpo": DECLARED.get(system, module.ALGORITHMS["grpo"])}
    with mock.patch.multiple(module, ALGORITHMS=algorithms, **changes):
        steps = module.steps(release)
        next(steps)
        steps.close()


def recorder(system: str) -> Any:
    """The module of the recorder of a system's steps."""
    return importlib.import_module(f"tests.goldens.presets.record_{system.replace('-', '_')}")


def record(system: str, release: pathlib.Path) -> None:
    """Records a system in PyTorch: its recorder replaces functions that the step then calls."""
    code, run = page.blocks(), recorder(system).run
    scope: dict[str, Any] = {}

    def recorded(*arguments: Any) -> Any:
        exec(code[page.SHARED], scope)
        exec(code[system], scope)
        return run(*arguments)

    with mock.patch.object(atexit, "register"):
        run_first(system, release, run=recorded)
    store(f"{system}-recorder", {"dtype": "float64", **scope["header"]}, scope["fields"]())


def record_tunix(release: pathlib.Path) -> None:
    """Records Tunix: its recorder is called with a cluster and the first batch of an update."""
    scope: dict[str, Any] = {}
    make_cluster = recorder("tunix").make_cluster
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "dump.npz"

        def made(*arguments: Any) -> Any:
            exec(page.blocks()["Tunix"], scope)
            cluster = make_cluster(*arguments)
            update = cluster.update_actor

            def recorded(train_ds: Any, *rest: Any) -> None:
                if not path.exists():
                    scope["record"](cluster, train_ds[0], path)
                update(train_ds, *rest)

            cluster.update_actor = recorded
            return cluster

        run_first("tunix", release, make_cluster=made)
        fields = dict(np.load(path))
    del fields["header"]
    store("tunix-recorder", {"dtype": "float64", **scope["header"]}, fields)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the dump of a system."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=["slime", "prime-rl", "tunix"])
    parser.add_argument("release", type=pathlib.Path)
    options = parser.parse_args(arguments)
    if options.system == "tunix":
        record_tunix(options.release)
    else:
        record(options.system, options.release)
    return 0


if __name__ == "__main__":
    sys.exit(main())
