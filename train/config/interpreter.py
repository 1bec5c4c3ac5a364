"""The Python of this process as the reader's shell starts it, for commands that an output or an error names."""

import shlex
import shutil
import sys
from pathlib import Path


def python_command() -> str:
    """Returns the interpreter: `python` if the shell finds it so, else its path, relative to the working directory."""
    # An environment's interpreter is a link: followed, it would lose the environment.
    program, named = Path(sys.executable), shutil.which("python")
    if named is not None and Path(named) == program:
        return "python"
    return shlex.quote(str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program))
