"""The commands of the trainer that is installed beside the library: `kljax-train` and its siblings.

They run in folders with a `train.py`, a `train/` or a `tests/` of the user's, also on PYTHONPATH, and never import
those: the trainer is found by the place of this package. The working directory comes last on the path, for functions of
the user that a config names.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path


def _command(module: str) -> Callable[[], None]:
    def run() -> None:
        beside = str(Path(__file__).resolve().parents[1])
        sys.path.insert(0, beside)
        try:
            importlib.import_module("train")
            command = importlib.import_module(module)
            end = importlib.import_module("train.process.interrupt").exit_with
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] in ("kljax", "train"):
                raise
            name = Path(sys.argv[0]).name
            print(f"{name}: needs the package {error.name}; run: pip install 'kljax[train]'", file=sys.stderr)
            sys.exit(2)
        finally:
            sys.path.remove(beside)
        sys.path.append(os.getcwd())
        end(command.main())

    return run


train = _command("train.__main__")
evaluate = _command("train.eval")
export = _command("train.export")
import_ = _command("train.import")
plan = _command("train.plan.__main__")
real = _command("train.real")
report = _command("train.report.__main__")
serve = _command("train.serve")
