"""A GGUF file as a Hugging Face folder: written once, completely or not at all, and read like any other."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kljax._files import write_text_atomic
from train.models.decoder import Decoder
from train.weights.files import file_digest, new_directory, read_record, write_record
from train.weights.gguf.config import ROPE_FACTORS, hf_mapping
from train.weights.gguf.header import MAGIC, GgufTensor, read_header
from train.weights.gguf.tensors import hf_arrays, match_tensors, read_values
from train.weights.gguf.tokenizer import Vocabulary, read_vocabulary
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.contents import CONFIG, SINGLE
from train.weights.huggingface.names import PREFIXES, full_name
from train.weights.huggingface.safetensors import write_file
from train.weights.tensor_digests import write_tensor_digests

SUFFIX = ".gguf"
RECORD = "gguf.json"
# Architectures whose files interleave the halves of the heads of queries and keys.
INTERLEAVED = ("llama", "mistral")


def is_gguf(path: str | Path) -> bool:
    """Tells a GGUF file by its name or its first bytes."""
    file = Path(path)
    if not file.is_file():
        return False
    if file.suffix == SUFFIX:
        return True
    with file.open("rb") as opened:
        return opened.read(len(MAGIC)) == MAGIC


def import_gguf(file: str | Path, target: str | Path, *, dtype: str = "float32") -> dict[str, Any]:
    """Writes the model and the tokenizer of a GGUF file as a Hugging Face folder, atomically.

    Tensors are dequantized to float32 one by one. Digests of all files lie beside them, which every load compares.

    Args:
      file: the GGUF file.
      target: the new folder, which must not exist.
      dtype: "float32" or "bfloat16" in the folder.

    Returns:
      The `config.json` of the folder.

    Raises:
      FileNotFoundError: there is no such file.
      FileExistsError: `target` exists.
      ValueError: the file is damaged, of another architecture, or has a key or a tensor that is not understood, or
        values that are not finite; names it. Nothing was written.
    """
    header = read_header(file)
    factors = header.tensors.get(ROPE_FACTORS)
    if factors is not None and len(factors.shape) != 1:
        raise ValueError(f"{file}: {ROPE_FACTORS}: got axes {list(factors.shape)}, expected one")
    mapping = hf_mapping(header, None if factors is None else read_values(factors))
    try:
        model = Decoder(decoder_config(mapping))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    tensors = match_tensors(header, model)
    vocabulary = read_vocabulary(header)
    rows = mapping["vocab_size"]
    size = vocabulary.tokenizer.get_vocab_size()
    if size > rows:
        raise ValueError(f"{file}: tokenizer.ggml.tokens: got {size} tokens, but the embeddings have {rows} rows")
    stored = jnp.dtype(dtype)
    config = {**mapping, **_token_ids(vocabulary), "dtype": dtype}
    layout = {full_name(name, PREFIXES[0]): (stored, tensor.shape) for name, tensor in tensors.items()}
    arrays = hf_arrays(tensors, model.config, interleaved=header.keys["general.architecture"] in INTERLEAVED)
    with new_directory(Path(target)) as folder:
        _write_json(folder / CONFIG, config)
        _write_tokenizer(folder, vocabulary, config)
        write_file(folder / SINGLE, layout, _rounded(file, arrays, tensors, stored))
        write_tensor_digests(folder)
        write_record(folder / RECORD, {"file": Path(file).name, "sha256": file_digest(Path(file)), "dtype": dtype})
    return config


def _rounded(
    file: str | Path, arrays: Iterator[np.ndarray], tensors: Mapping[str, GgufTensor], dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Yields the values of each tensor in the dtype of the folder; raises ValueError if some are not finite."""
    for values, tensor in zip(arrays, tensors.values(), strict=True):
        with np.errstate(over="ignore", invalid="ignore"):
            stored = values.astype(dtype, copy=False)
        if not np.isfinite(stored).all():
            count = int((~np.isfinite(stored)).sum())
            kind = tensor.kind.name
            raise ValueError(
                f"{file}: the tensor {tensor.name!r} of type {kind} has {count:,} values that are not finite"
            )
        yield stored


def folder_of(file: str | Path) -> Path:
    """Returns the folder that a GGUF file is imported to by default: beside it, `NAME.hf`."""
    return Path(file).with_suffix(".hf")


def imported_folder(file: str | Path) -> Path:
    """Returns `folder_of` a file, after importing it if the folder is not there.

    Raises:
      FileExistsError, ValueError: as `import_gguf`, or the folder was made of another file.
      OSError: the folder cannot be written.
    """
    folder = folder_of(file)
    if not folder.exists():
        import_gguf(file, folder)
        return folder
    hint = f"remove {folder}, or set model.path to a folder"
    if not (folder / RECORD).is_file():
        raise ValueError(f"{folder} is there, and was not made of {file}; {hint}")
    if read_record(folder / RECORD, hint)["sha256"] != file_digest(Path(file)):
        raise ValueError(f"{folder} was made of another file than {file}; {hint}")
    return folder


def _token_ids(vocabulary: Vocabulary) -> dict[str, Any]:
    """Lists the ids of special tokens for `config.json`."""
    roles = {"bos_token_id": "bos_token", "pad_token_id": "pad_token"}
    number = vocabulary.tokenizer.token_to_id
    ids = {key: number(vocabulary.config[role]) for key, role in roles.items() if role in vocabulary.config}
    stops = vocabulary.eos_ids
    return {**ids, "eos_token_id": stops[0] if len(stops) == 1 else list(stops)} if stops else ids


def _write_tokenizer(folder: Path, vocabulary: Vocabulary, config: dict[str, Any]) -> None:
    write_text_atomic(folder / "tokenizer.json", vocabulary.tokenizer.to_str())
    length = config["max_position_embeddings"]
    _write_json(folder / "tokenizer_config.json", {**vocabulary.config, "model_max_length": length})
    if vocabulary.template is not None:
        write_text_atomic(folder / "chat_template.jinja", vocabulary.template)
    _write_json(folder / "generation_config.json", _token_ids(vocabulary))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
