"""`python -m train.import FILE.gguf --to FOLDER`: a GGUF file as a Hugging Face folder, which `model.path` takes."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from train.config.errors import UserError
from train.config.model import DType
from train.config.storage import local_argument
from train.process.console import make_parser, run_command
from train.process.interrupt import exit_with

DTYPES = get_args(DType)
EXAMPLES = """\
examples:
  python -m train.import SmolLM2-135M-Instruct.Q4_1.gguf --to checkpoints/SmolLM2-135M
  python -m train.import model.gguf --to checkpoints/model --dtype bfloat16
"""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    command = make_parser(
        "train.import", "Write a GGUF file as a Hugging Face folder. Nothing is ever overwritten.", EXAMPLES
    )
    command.add_argument("file", metavar="FILE.gguf", type=local_argument, help="a file of llama.cpp, quantized or not")
    command.add_argument(
        "--to", metavar="FOLDER", type=local_argument, required=True, help="where to write; must not exist yet"
    )
    command.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of the weights in the folder (default float32: exact)"
    )
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, 2 for an error that the user can fix, 130 for Ctrl-C."""
    options = parser().parse_args(arguments)
    return run_command(lambda: import_file(options.file, options.to, dtype=options.dtype))


def import_file(file: Path, target: Path, *, dtype: str) -> None:
    """Writes the folder, completely or not at all, and prints a line.

    Raises:
      UserError: the file cannot be read or is not understood, or the folder cannot be written.
    """
    # Imported late, so that an error on the command line shows before JAX starts.
    from train.weights.gguf import import_gguf

    try:
        config = import_gguf(file, target, dtype=dtype)
    except FileExistsError as error:
        raise UserError(f"--to: {error}") from error
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"FILE.gguf: {error}") from error
    except OSError as error:
        raise UserError(f"--to: cannot write {target}: {error.strerror or error}") from error
    print(f"{target}: {config['model_type']} with {config['num_hidden_layers']} layers, {dtype}, of {file}")


if __name__ == "__main__":
    exit_with(main())
