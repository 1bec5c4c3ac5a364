"""Files that a run reads besides its config, with their digests, so that `--resume` notices other contents."""

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.config.errors import UserError, warn
from train.config.schema import Config
from train.weights.files import read_record, write_record

FUNCTION = re.compile(r"(?P<source>[^:]+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
DATA = ("data.train", "data.eval", "data.chat_template")
OF_THE_TRAINER = ("kljax", "train")
HINT = "restore it from a copy, or delete it to go on with the files as they are"


def input_digests(config: Config) -> dict[str, dict[str, str]]:
    """Returns by field the digest of each file that it names: data, and the source of user functions.

    Modules that the file of a function imports are not among them, nor are recordings, whose rows have digests.
    """
    digests: dict[str, dict[str, str]] = {}
    for field, text in _texts(config.model_dump(mode="json")):
        # A function of the user is written as the type of its section.
        name = re.sub(r"\.function$", ".type", field)
        for path in _files(field, text):
            digests.setdefault(name, {})[str(path)] = _digest(path)
    return digests


def write_inputs(path: Path, config: Config) -> None:
    """Records the files of a run that starts; raises `UserError` if one cannot be read."""
    write_record(path, {"files": input_digests(config)})


def check_inputs(path: Path, config: Config) -> None:
    """Compares the files of a run that is resumed with those that it was started with; notes new ones.

    Raises:
      UserError: they differ, or the record is damaged.
    """
    now = input_digests(config)
    if not path.is_file():
        if now:
            warn(f"there is no {path}: changes of data and functions since the start of the run are not noticed")
        write_record(path, {"files": now})
        return
    before = read_record(path, HINT)["files"]
    changed = [
        f"{field}: {_describe(before[field], files)}"
        for field, files in now.items()
        if field in before and sorted(before[field].values()) != sorted(files.values())
    ]
    if changed:
        raise UserError(
            f"--resume: {'; '.join(changed)} since the start of the run; restore the contents, or delete {path} to go "
            "on with the new ones"
        )
    if now.keys() - before.keys():
        write_record(path, {"files": before | now})


def _describe(before: dict[str, str], now: dict[str, str]) -> str:
    names = [name for name, digest in now.items() if before.get(name) != digest]
    names += [name for name in before if name not in now]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more} changed"


def _texts(value: Any, field: str = "") -> Iterator[tuple[str, str]]:
    """Yields each text of a config with the name of its field."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, f"{field}.{key}" if field else key)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{field}[{number}]")
    elif isinstance(value, str):
        yield field, value


def _files(field: str, text: str) -> list[Path]:
    """Returns the files that a text of the config names, in order; most texts name none."""
    if field in DATA:
        return [Path(text).absolute()]
    match = FUNCTION.fullmatch(text)
    if match is None or match["source"].partition(".")[0] in OF_THE_TRAINER:
        return []
    source = match["source"]
    if source.endswith(".py"):
        path = Path(source).absolute()
        return [path] if path.is_file() else []
    try:
        spec = importlib.util.find_spec(source)
    except (ImportError, ValueError):
        return []
    origin = None if spec is None or spec.origin is None else Path(spec.origin)
    return [] if origin is None or not origin.is_file() else [origin]


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
