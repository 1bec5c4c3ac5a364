"""Loading of the tokenizer files of a Hugging Face folder."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from train.config.download import OFFLINE, download_hint
from train.config.errors import UserError, warn
from train.config.installation import shell_command
from train.config.json_text import parse_json
from train.config.regular_file import read_regular
from train.data.tokenizers.chat import ChatTemplate
from train.data.tokenizers.folder import FolderTokenizer
from train.data.tokenizers.pieces import steps

# No tokenizer of a model family comes near it.
MAX_GROWTH = 1000
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object of a JSON file; empty if the file does not exist.

    Raises:
      UserError: the file cannot be read, or has no JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"model.path: {path} holds {type(value).__name__}, expected a JSON object")
    return value


def check_folder_exists(folder: Path) -> None:
    """Raises `UserError` unless `folder` is a directory and no PEFT adapter."""
    # The message, and its command for a download, have the path as it is written.
    folder = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    try:
        is_folder = folder.is_dir()
        exists = folder.exists()
    except OSError as error:
        raise UserError(f"model.path: cannot open {str(folder)!r}: {error.strerror}") from error
    if exists and folder.suffix == ".gguf":
        raise UserError(
            f"model.path: got the GGUF file {str(folder)!r}; "
            f"run {shell_command('train.import')} {folder} --to FOLDER, and set model.path to the folder"
        )
    if not is_folder:
        without = f"{shell_command('train')} {OFFLINE} needs none"
        kind = "it is a file" if exists else f"there is no such directory ({without})"
        raise UserError(
            f"model.path: got {str(folder)!r}, expected a Hugging Face folder, but {kind}{download_hint(folder)}"
        )
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise UserError(
            f"model.path: got {str(folder)!r}, a PEFT adapter; set lora.path to it, and model.path to its base model"
        )


def _special(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Maps roles to texts of special tokens; `tokenizer_config.json` wins over `special_tokens_map.json`."""
    texts = {}
    for source in (read_json(folder / "special_tokens_map.json"), config):
        for role in ROLES:
            value = source.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[role] = text
    return texts


def _end_ids(folder: Path, tokenizer: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    """Lists the EOS ids: `eos_token` of the tokenizer first, then the stops of the generation config."""
    sources = {folder / "generation_config.json": read_json(folder / "generation_config.json")}
    sources |= {folder / "config.json": _merged_config(folder)}
    path, stops = next(
        ((path, source["eos_token_id"]) for path, source in sources.items() if source.get("eos_token_id") is not None),
        (folder, []),
    )
    stops = stops if isinstance(stops, list) else [stops]
    rows = max(_rows(folder) or 0, _size(tokenizer))
    wrong = [number for number in stops if type(number) is not int or number >= rows]
    if wrong:
        raise UserError(
            f"model.path: {path}: eos_token_id: got {wrong[0]!r}, expected ids below {rows}, the vocabulary"
        )
    candidates = [] if eos_token is None else [tokenizer.token_to_id(eos_token)]
    ids = [number for number in (*candidates, *stops) if number is not None and number >= 0]
    if not ids:
        raise UserError(
            f"model.path: {folder} has no EOS token; set eos_token in tokenizer_config.json "
            "or eos_token_id in generation_config.json or config.json"
        )
    return ids


def _size(tokenizer: tokenizers.Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _template_text(folder: Path, config: Mapping[str, Any], override: str | None) -> str | None:
    if override is not None:
        return _read_text(Path(override), "data.chat_template")
    if (folder / "chat_template.jinja").exists():
        return _read_text(folder / "chat_template.jinja", "model.path")
    value = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    others = sorted(path.stem for path in (folder / "additional_chat_templates").glob("*.jinja"))
    if value is None and others:
        value = dict.fromkeys(others)
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {str(entry.get("name")): entry.get("template") for entry in value}
    if isinstance(value, dict):
        if "default" not in value:
            names = ", ".join(value) or "[]"
            raise UserError(
                f"model.path: {folder}: chat_template: got the templates {names}, expected one called default; "
                "set data.chat_template=FILE to one of them, or data.chat=false"
            )
        value = value["default"] or value
    if value is not None and not isinstance(value, str):
        raise UserError(
            f"model.path: {folder}: chat_template: got {type(value).__name__}, expected text or named texts"
        )
    return value


def _read_text(path: Path, field: str) -> str:
    try:
        return read_regular(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{field}: cannot read {path}: {error}") from error


def _merged_config(folder: Path) -> dict[str, Any]:
    """Reads `config.json`, with the fields of its text part where it has none of its own."""
    model = read_json(folder / "config.json")
    text = model.get("text_config")
    return (text if isinstance(text, dict) else {}) | {
        name: value for name, value in model.items() if value is not None
    }


def _rows(folder: Path) -> int | None:
    """Returns the vocabulary of the model, which may have more ids than its tokenizer."""
    rows = _merged_config(folder).get("vocab_size")
    return rows if isinstance(rows, int) else None


def _check_vocabulary(folder: Path, size: int) -> None:
    if not size:
        raise UserError(f"model.path: the tokenizer of {folder} has no tokens")
    rows = _rows(folder)
    if rows is not None and size > rows:
        raise UserError(f"model.path: the tokenizer of {folder} has {size} ids, but config.json a vocabulary of {rows}")


def _check_growth(file: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Refuses a normalizer or decoder that lengthens a text beyond memory, where the library ends the process."""
    for name, part in (("normalizer", tokenizer.normalizer), ("decoder", tokenizer.decoder)):
        growth = 1.0 if part is None else math.prod(map(_growth, steps(json.loads(part.__getstate__()))))
        if growth > MAX_GROWTH:
            raise UserError(
                f"model.path: {file}: {name}: makes a text up to {growth:,.0f} times as long, "
                f"expected at most {MAX_GROWTH:,} times"
            )


def _growth(step: Mapping[str, Any]) -> float:
    """Returns how many times as long a step of a normalizer or decoder may make a text."""
    if step["type"] != "Replace":
        return 1
    pattern = step["pattern"]
    content = step["content"]
    # A regular expression may match one character, or between any two.
    return max(1, len(content) / len(pattern["String"]) if pattern.get("String") else 1 + len(content))


def _switch_dropout_off(file: Path, tokenizer: tokenizers.Tokenizer) -> None:
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        tokenizer.model.dropout = None
        warn(f"model.path: {file}: the dropout of {dropout:g} is switched off: it tokenizes a text anew each time")


def load_folder(
    path: str | Path,
    *,
    chat: bool | None = None,
    system: str | None = None,
    template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> FolderTokenizer:
    """Loads the tokenizer of a Hugging Face folder.

    Args:
      path: the folder.
      chat: whether to apply the chat template; None means if the folder has one.
      system: text of the system message.
      template: path of a jinja file that replaces the template of the folder.
      arguments: variables of the template, such as `enable_thinking`.

    Raises:
      UserError: a file is missing or cannot be read, there is no EOS token, a required template is missing, or prompts
        would differ from day to day.
    """
    folder = Path(path)
    check_folder_exists(folder)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"model.path: {folder} has no tokenizer.json; convert the tokenizer with transformers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(f"model.path: cannot read {file}: {error}") from error
    _check_growth(file, tokenizer)
    _switch_dropout_off(file, tokenizer)
    config = read_json(folder / "tokenizer_config.json")
    special = _special(folder, config)
    source = _template_text(folder, config, template) if chat is not False else None
    if chat and source is None:
        raise UserError(f"data.chat: got true, but {folder} has no chat template; set data.chat_template=FILE")
    if source is None and (system is not None or arguments):
        field = "data.system" if system is not None else "data.template_arguments"
        raise UserError(
            f"{field}: only a chat template reads it, and "
            + ("data.chat is false" if chat is False else f"{folder} has none; set data.chat_template=FILE")
        )
    try:
        compiled = None if source is None else ChatTemplate(source, {**special, **(arguments or {})})
        if compiled is not None:
            compiled.check_repeats()
    except ValueError as error:
        raise UserError(f"data.chat: {template or folder}: {error}") from error
    _check_vocabulary(folder, _size(tokenizer))
    return FolderTokenizer(
        tokenizer,
        special=special,
        eos_ids=_end_ids(folder, tokenizer, special.get("eos_token")),
        add_bos=config.get("add_bos_token"),
        template=compiled,
        system=system,
    )
