"""Local copies of files and folders in stores, for readers that need a path of this machine.

A copy is made once for each state of the objects that it copies: its directory is named by their names, sizes and
versions, and appears by one rename. The address of a copy is known in the process that asked for it.
"""

import hashlib
import os
import secrets
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from train.config.errors import UserError
from train.config.installation import user_caches
from train.config.schema import Config
from train.config.storage import is_address
from train.storage.paths import as_path, filesystem, store_errors

AT_ONCE = 8
VARIABLE = "KLJAX_COPIES"
"""Environment variable with the directory of the copies; without it they are in the caches of the user."""
FIELDS = ("data.train", "data.eval", "data.chat_template", "model.path", "lora.path", "rollout.source.path")
"""Fields of a config whose files and folders are read from a copy; orbax reads its directories where they are."""
_ADDRESSES: dict[Path, str] = {}


def copies_directory() -> Path:
    """Returns the directory of the copies: that of the environment variable, or where the system has its caches."""
    directory = os.environ.get(VARIABLE)
    return Path(directory) if directory else user_caches() / "copies"


def local_copy(path: str | os.PathLike[str], field: str) -> Path:
    """Returns a file or folder of this machine: the path itself, or a copy of what is at an address.

    Raises:
      UserError: naming the field: nothing is there, it cannot be read, or the copy cannot be written.
    """
    source = as_path(path, field)
    if not is_address(source):
        return source
    try:
        return _copy(source, field)
    except OSError as error:
        what = "read" if is_address(error.filename or "") else "copy"
        raise UserError(f"{field}: cannot {what} {path}: {error.strerror or error}") from error


def _copy(source: Path, field: str) -> Path:
    files = filesystem(source)
    with store_errors(source):
        objects = {name: entry for name, entry in files.find(str(source), detail=True).items() if not _is_marker(entry)}
    if not objects:
        raise UserError(f"{field}: got {str(source)!r}, but nothing is there")
    root = files._strip_protocol(str(source))
    states = sorted((name, entry["size"], str(_version(entry))) for name, entry in objects.items())
    directory = copies_directory() / hashlib.sha256(repr((str(source), states)).encode()).hexdigest()[:16]
    copy = directory / source.name
    if not directory.is_dir():
        partial = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.partial")
        try:
            _download(files, source, {name: partial / source.name / name[len(root) :].strip("/") for name in objects})
            _check_sizes(source, {partial / source.name / n[len(root) :].strip("/"): size for n, size, _ in states})
            partial.rename(directory)
        except OSError:
            # Another process may have made the same copy first.
            if not directory.is_dir():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    _ADDRESSES[copy] = str(source)
    return copy


def _download(files: Any, source: Path, targets: dict[str, Path]) -> None:
    for target in targets.values():
        target.parent.mkdir(parents=True, exist_ok=True)

    def get(name: str) -> None:
        with store_errors(source):
            files.get_file(name, str(targets[name]))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(get, targets))


def _check_sizes(source: Path, sizes: dict[Path, int]) -> None:
    """Raises OSError if an object changed while it was copied."""
    for target, size in sizes.items():
        if target.stat().st_size != size:
            raise OSError(0, f"{target.name} changed while it was copied", str(source))


def _is_marker(entry: Any) -> bool:
    """Whether an object stands for a directory, as consoles of stores make them."""
    return entry["type"] == "directory" or (entry["size"] == 0 and entry["name"].endswith("/"))


def _version(entry: Any) -> Any:
    return entry.get("ETag") or entry.get("etag") or entry.get("md5Hash") or entry.get("created")


def origin_of(path: str | os.PathLike[str]) -> str:
    """Returns the address that a copy, or a file in it, was made of; of every other path its absolute form."""
    if is_address(path):
        return os.fspath(path)
    absolute = Path(path).absolute()
    for parent in (absolute, *absolute.parents):
        if parent in _ADDRESSES:
            inner = absolute.relative_to(parent).as_posix()
            return _ADDRESSES[parent] if inner == "." else f"{_ADDRESSES[parent]}/{inner}"
    return str(absolute)


def with_local_copies(config: Config) -> Config:
    """Returns a config whose files and folders in stores are copies of this machine.

    Run directories, recordings that are written, and directories that orbax reads stay where they are.

    Raises:
      UserError: naming the field: something cannot be read or copied.
    """
    raw = config.model_dump(mode="json")
    fields = [*FIELDS, "reference.path"] if _is_folder_reference(config) else list(FIELDS)
    found = {field: value for field in fields if is_address(value := _value(raw, field) or "")}
    if (path := found.get("model.path", "")).endswith(".gguf"):
        raise UserError(f"model.path: got {path!r}, a GGUF file in a store; copy it here, and import it")
    for field, value in found.items():
        *sections, name = field.split(".")
        section: Any = raw
        for key in sections:
            section = section[key]
        section[name] = str(local_copy(value, field))
    return Config.model_validate(raw) if found else config


def _is_folder_reference(config: Config) -> bool:
    """Whether the reference is a folder of transformers or PEFT in a store."""
    reference = config.reference
    if reference.source not in ("adapter", "checkpoint") or not is_address(reference.path):
        return False
    path = reference.path
    folder = as_path(path, "reference.path")
    try:
        return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    except OSError as error:
        raise UserError(f"reference.path: cannot read {path}: {error.strerror}") from error


def _value(raw: Any, field: str) -> Any:
    for key in field.split("."):
        raw = raw.get(key) if isinstance(raw, dict) else None
    return raw
