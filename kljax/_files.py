"""Files that a command writes where the user says: never in the place of a run's own file, an input or a device."""

import argparse
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

CONFIG_STARTS = ("# digest of the lines below: ", "# id of the run: ")
"""The first line of the config of a run, and the second, which is first where a user has deleted the digest."""
RUN_ENTRIES = frozenset(
    (
        *("config.yaml", "base", "base.json", "checkpoints", "damaged", "reference.json", "inputs.json"),
        *("metrics.jsonl", "samples", "nonfinite", "rollouts", "summary.json", "curves.png", "tensorboard", "wandb"),
        ".lock",
    )
)
"""What the trainer writes into the directory of a run; the page and files of the user may lie beside it."""


def local_file(text: str) -> str:
    """Reads an argument of a command line that names a file or folder.

    Raises:
      ArgumentTypeError: it is an address in an object store.
    """
    if _is_in_store(text):
        raise argparse.ArgumentTypeError(f"got {text!r} (an address; copy it here, or name a path of a mount)")
    return text


def write_text_atomic(path: Path, text: str) -> None:
    """Writes a file atomically: a killed process leaves the old file or the new file, and an error the old one.

    Raises:
      OSError: it cannot be written, or something else than a file is there, which is not replaced.
    """
    if _is_in_store(path):
        # One request, and the store has the old object or the new one.
        path.write_bytes(text.encode())
        return
    _check_regular(path)
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with partial.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def check_output(path: Path, inputs: Iterable[Path] = (), *, option: str = "") -> None:
    """Checks that a command may write a file, so that no work is done in vain.

    Args:
      path: the file, which may exist: a device or a pipe is written, a file replaced.
      inputs: files that the command reads.
      option: named by the message, if there is one.

    Raises:
      ValueError: it cannot be written, is a file of a run, or is one of the inputs.
    """
    check_outside_of_runs(path, option=option)
    try:
        problem = _output_problem(path, inputs)
    except OSError as error:
        problem = f"cannot write {path}: {error.strerror}"
    if problem:
        raise ValueError(_named(option, problem))


def check_outside_of_runs(path: Path, *, option: str = "") -> None:
    """Raises ValueError naming the option if a path is, or lies in, what the trainer wrote into a run directory."""
    resolved = path if _is_in_store(path) else Path(os.path.realpath(path))
    # An address has the store itself and the root above its bucket.
    for root in list(resolved.parents)[: -2 if _is_in_store(path) else None]:
        entry, *inner = resolved.relative_to(root).parts
        # The file system may take names in capitals for the same.
        if entry.casefold() in RUN_ENTRIES and _is_run(root, marked_by_metrics=not inner):
            raise ValueError(
                _named(option, f"{path} is a file of the run {root}, which would be lost; name another path")
            )


def write_output(path: Path, text: str) -> None:
    """Writes a file that `check_output` allows: atomically, or in place if it is a device or a pipe.

    Raises:
      OSError: it cannot be written.
    """
    if _is_in_store(path):
        write_text_atomic(path, text)
    elif _is_stream(path) or Path(os.path.abspath(path)).parts[1:2] in (("dev",), ("proc",)):
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
    else:
        # The file that a link names, so that the link stays.
        write_text_atomic(Path(os.path.realpath(path)), text)


def _is_in_store(path: str | Path) -> bool:
    """Whether a path is that of epath in an object store, which has no links, devices and permissions of files."""
    return "://" in os.fspath(path)


def _named(option: str, problem: str) -> str:
    return f"{option}: {problem}" if option else problem


def _output_problem(path: Path, inputs: Iterable[Path]) -> str:
    """Describes why a file cannot be written; empty if it can, as far as is known before."""
    if path.is_dir():
        return f"{path} is a directory; name a file"
    if _is_in_store(path):
        return ""
    if any(other.exists() and path.exists() and path.samefile(other) for other in inputs):
        return f"{path} is read by this command; name another file"
    directory = Path(os.path.realpath(path)).parent
    if not directory.is_dir():
        return f"there is no directory {path.parent}"
    if _is_stream(path):
        return "" if os.access(path, os.W_OK) else f"cannot write to {path}"
    _check_regular(path)
    return "" if os.access(directory, os.W_OK) else f"cannot write to the directory {directory}, which is read-only"


def _is_stream(path: Path) -> bool:
    """Whether a path is a device of characters, such as /dev/null and a terminal, or a pipe."""
    return path.is_char_device() or path.is_fifo()


def _check_regular(path: Path) -> None:
    """Raises OSError if something else than a regular file is there; a link counts as what it names."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a directory" if stat.S_ISDIR(mode) else "it is no regular file", str(path))


def _is_run(root: Path, *, marked_by_metrics: bool) -> bool:
    """Whether a directory is that of a run, of which files may be missing or damaged."""
    if (root / ".lock").is_file() or (marked_by_metrics and (root / "metrics.jsonl").is_file()):
        return True
    config = root / "config.yaml"
    if not config.is_file():
        return False
    with config.open(encoding="utf-8", errors="replace") as file:
        return file.read(max(map(len, CONFIG_STARTS))).startswith(CONFIG_STARTS)
