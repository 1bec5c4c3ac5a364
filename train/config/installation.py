"""How this trainer was installed: its recipes, and its commands as the reader's shell starts them.

A checkout has the recipes in `configs/` and runs `python -m train`; a wheel has them inside of the package, and runs
`kljax-train`, in any folder.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parent
"""The folder that has the package `train`: that of the checkout, or of the installed packages."""
INSTALLED = (PACKAGE / "configs").is_dir()
RECIPES = PACKAGE / "configs" if INSTALLED else ROOT / "configs"


def user_caches(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of the user for what can be made again, below `XDG_CACHE_HOME` or where systems have it."""
    caches = environment.get("XDG_CACHE_HOME") or ("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(os.path.expanduser(caches)) / "kljax"


def python_command() -> str:
    """Returns the interpreter: `python` if the shell finds it so, else its path, relative to the working directory."""
    # An environment's interpreter is a link: followed, it would lose the environment.
    return _as_typed(Path(sys.executable), "python")


def shell_command(module: str) -> str:
    """Returns the command of a module as the reader types it: `python -m train.eval`, or `kljax-eval` if installed."""
    if not INSTALLED:
        return f"{python_command()} -m {module}"
    name = f"kljax-{module.rpartition('.')[2]}"
    return _as_typed(Path(sys.executable).with_name(name), name)


def _as_typed(program: Path, name: str) -> str:
    named = shutil.which(name)
    if named is not None and Path(named) == program:
        return name
    return shlex.quote(str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program))


def as_installed(text: str) -> str:
    """Returns a text that names commands and recipes of a checkout with those of this installation."""
    if not INSTALLED:
        return text
    text = re.sub(r"configs/(\w+)\.yaml", r"\1", text)
    return re.sub(r"python -m train(?:\.(\w+))?\b", lambda found: f"kljax-{found[1] or 'train'}", text)


def recipe_path(name: str) -> Path:
    """Returns the path of a config: `name` if it is a file, else the shipped recipe of this name, if there is one."""
    path = Path(name)
    if path.exists() or path.name != name or path.suffix:
        return path
    recipe = RECIPES / f"{name}.yaml"
    return recipe if recipe.is_file() else path


def child_environment() -> dict[str, str]:
    """Returns the environment of a child process that runs a module of the trainer by `python -P -m`.

    A `train` in the working directory or on the path of Python is not the trainer, so its folder comes first.
    """
    folders = [str(ROOT), *(folder or os.getcwd() for folder in sys.path)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
