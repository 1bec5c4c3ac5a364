"""The files of a Hugging Face folder that say how text becomes ids."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from train.config.errors import UserError
from train.data.tokenizers.chat import ChatTemplate
from train.data.tokenizers.folder import FolderTokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty if there is no such file.

    Raises:
      UserError: the file cannot be read, or holds no JSON object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"model.path: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"model.path: {path} holds {type(value).__name__}, expected a JSON object")
    return value


def _special(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The text of each special token by role; `tokenizer_config.json` counts before the older file."""
    found = {}
    for source in (read_json(folder / "special_tokens_map.json"), config):
        for role in ROLES:
            value = source.get(role)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[role] = text
    return found


def _end_ids(folder: Path, tokenizer: tokenizers.Tokenizer, eos_token: str | None) -> list[int]:
    """The tokenizer's own end first, then those that generation stops at."""
    model = read_json(folder / "config.json")
    sources = (read_json(folder / "generation_config.json"), model, model.get("text_config") or {})
    stops: Any = next((ids for ids in (source.get("eos_token_id") for source in sources) if ids is not None), [])
    found = [] if eos_token is None else [tokenizer.token_to_id(eos_token)]
    found += stops if isinstance(stops, list) else [stops]
    known = [number for number in found if isinstance(number, int)]
    if not known:
        raise UserError(
            f"model.path: {folder} names nothing that ends a completion: expected eos_token in tokenizer_config.json "
            "or eos_token_id in generation_config.json or config.json"
        )
    return known


def _template_text(folder: Path, config: Mapping[str, Any], override: str | None) -> str | None:
    if override is not None:
        try:
            return Path(override).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"data.chat_template: cannot read {override}: {error}") from error
    if (folder / "chat_template.jinja").exists():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    value = read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value}
        value = named.get("default")
    return value


def _check_vocabulary(folder: Path, size: int) -> None:
    model = read_json(folder / "config.json")
    rows = model.get("vocab_size") or (model.get("text_config") or {}).get("vocab_size")
    if isinstance(rows, int) and size > rows:
        raise UserError(f"model.path: the tokenizer of {folder} has {size} ids, but config.json a vocabulary of {rows}")


def load_folder(
    path: str | Path,
    *,
    chat: bool | None = None,
    system: str | None = None,
    template: str | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> FolderTokenizer:
    """The tokenizer of a Hugging Face folder.

    Args:
      path: the folder.
      chat: whether prompts go through the chat template; None: where the folder has one.
      system: what the system says first in a conversation.
      template: a jinja file instead of the folder's template.
      arguments: variables of the template, such as `enable_thinking`.

    Raises:
      UserError: a file is missing or cannot be read, nothing ends a completion, or a template is asked for that is
          not there.
    """
    folder = Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UserError(
            f"model.path: {folder} has no tokenizer.json; transformers makes it of other tokenizers: "
            "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own for it
        raise UserError(f"model.path: cannot read {file}: {error}") from error
    config = read_json(folder / "tokenizer_config.json")
    special = _special(folder, config)
    source = _template_text(folder, config, template) if chat is not False else None
    if chat and source is None:
        raise UserError(f"data.chat: got true, but {folder} has no chat template; data.chat_template=FILE gives one")
    if source is None and (system is not None or arguments):
        field = "data.system" if system is not None else "data.template_arguments"
        raise UserError(
            f"{field}: only a chat template reads it, and "
            + ("data.chat is false" if chat is False else f"{folder} has none; data.chat_template=FILE gives one")
        )
    try:
        compiled = None if source is None else ChatTemplate(source, {**special, **(arguments or {})})
    except ValueError as error:
        raise UserError(f"data.chat: {template or folder}: {error}") from error
    _check_vocabulary(folder, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
    return FolderTokenizer(
        tokenizer,
        special=special,
        eos_ids=_end_ids(folder, tokenizer, special.get("eos_token")),
        add_bos=config.get("add_bos_token"),
        template=compiled,
        system=system,
    )
