"""Files that a run reads besides its config, with their digests, so that `--resume` notices other contents."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from train.config.data import HUB
from train.config.errors import UserError, warn
from train.config.schema import Config
from train.config.signatures import source_of
from train.data.tokenizers import FOLDER_FILES
from train.rollouts.recorded.files import list_files
from train.storage.copies import origin_of, with_local_copies
from train.storage.paths import as_path
from train.weights.files import file_digest, read_record, write_record
from train.weights.huggingface.contents import CONFIG

FUNCTION = re.compile(r"(?P<source>[^:]+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
ARGUMENT = re.compile(r"(?:^|.*\.)(?:tokenizer_)?arguments\..*")
OF_THE_TRAINER = ("kljax", "train")
HINT = "restore it from a copy, or delete it to go on with the files as they are"


def input_digests(config: Config) -> dict[str, dict[str, str]]:
    """Returns by field the digest of each file that a run reads.

    The weights of folders and checkpoints have digests of their own, in `base.json`, `reference.json` and the
    checkpoints. Weights that a run reads at its start alone, of `lora.path` and `warm_start.checkpoint`, are not
    compared, nor are modules that the file of a function imports.
    """
    digests: dict[str, dict[str, str]] = {}
    config = with_local_copies(config)
    for field, path in (*_data_files(config), *_folder_files(config), *_function_files(config)):
        digests.setdefault(field, {})[origin_of(path)] = _digest(path)
    return digests


def _data_files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yields prompts, chat template and recordings, each with its field."""
    data = config.data
    source = config.rollout.source
    for name, path in (("train", data.train), ("eval", data.eval), ("chat_template", data.chat_template)):
        if path is not None and not path.startswith(HUB):
            yield f"data.{name}", Path(path)
    if source.type == "file":
        yield from (("rollout.source.path", path) for path in list_files(Path(source.path)))


def _folder_files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yields the files beside the weights of a folder: they make its decoder or adapter, tokenizer and template."""
    reference = config.reference
    folders: list[tuple[str, str, Sequence[str]]] = []
    if config.model.path is not None:
        folders.append(("model.path", config.model.path, (CONFIG,) if config.data.tokenizer else FOLDER_FILES))
    if reference.source in ("adapter", "checkpoint"):
        folders.append(("reference.path", reference.path, (CONFIG, "adapter_config.json")))
    for field, folder, names in folders:
        paths = (as_path(folder) / name for name in names)
        yield from ((field, path) for path in paths if path.is_file())


def _function_files(config: Config) -> Iterator[tuple[str, Path]]:
    """Yields the files of user functions, and those that the arguments of these name."""
    for field, text in _texts(config.model_dump(mode="json")):
        if ARGUMENT.fullmatch(field):
            if _is_file(text):
                yield field, Path(text)
        elif (path := _source(text)) is not None:
            # A function of the user is written as the type of its section.
            yield re.sub(r"\.function$", ".type", field), path


def write_inputs(path: Path, config: Config) -> None:
    """Records the files of a run that starts; raises `UserError` if one cannot be read."""
    write_record(path, {"files": input_digests(config)})


def check_inputs(path: Path, config: Config, *, differing: Collection[str] = ()) -> None:
    """Compares the files of a run that is resumed with those that it was started with; notes new ones.

    Args:
      path: the record.
      config: of the run.
      differing: fields that have other values than at the start, whose files are others on purpose.

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
        if field in before and field not in differing and _in_order(before[field]) != _in_order(files)
    ]
    if changed:
        raise UserError(
            f"--resume: {'; '.join(changed)} since the start of the run; restore the contents, or delete {path} to go "
            "on with the new ones"
        )
    # A file of an argument that was not there at the start is one that the function writes.
    noted = {field: files for field, files in now.items() if field in before or not ARGUMENT.fullmatch(field)}
    if before | noted != before:
        write_record(path, {"files": before | noted})


def _in_order(files: dict[str, str]) -> list[str]:
    """Lists the digests by the names of the files, in which order a directory is read."""
    return [files[name] for name in sorted(files)]


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


def _is_file(text: str) -> bool:
    """Whether an argument names a file; most are other texts, of any length."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _source(text: str) -> Path | None:
    """Returns the file of the function that a text of the config names; most texts name none."""
    match = FUNCTION.fullmatch(text)
    if match is None or match["source"].partition(".")[0] in OF_THE_TRAINER:
        return None
    source = match["source"]
    try:
        path = Path(source) if source.endswith(".py") else source_of(source)
    except LookupError:
        return None
    return path if _is_file(str(path)) else None


def _digest(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
