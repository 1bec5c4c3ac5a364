"""Hugging Face folders that are damaged, contradict themselves or reach outside."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.faults.case import Fault, damaged, raised
from train.config.errors import field_errors
from train.data.tokenizers.files import load_folder
from train.models import Decoder
from train.models.sharding import make_mesh
from train.weights.huggingface import check_folder, load_params
from train.weights.huggingface.config import decoder_config

GOLDENS = Path(__file__).parents[1] / "goldens"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def folder(directory: Path) -> Path:
    """Copies a folder whose head is tied."""
    return Path(shutil.copytree(GOLDENS / "models" / "qwen2", directory / "folder"))


@functools.cache
def decoder() -> Decoder:
    """Makes the decoder of `folder`."""
    return Decoder(decoder_config(GOLDENS / "models" / "qwen2"))


def check(path: Path) -> None:
    """Checks a folder as a run does before it starts."""
    with field_errors("model.path"):
        check_folder(path, decoder())


damaged_folder = functools.partial(damaged, folder, check, "model.path")


def split_header(path: Path) -> tuple[dict, bytes]:
    """Reads the header and the data of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_header(path: Path, header: str, data: bytes) -> None:
    """Writes a safetensors file with any text as its header."""
    path.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)


def with_header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Makes a change of the header of a folder's weights."""

    def write(path: Path) -> None:
        header, data = split_header(path / WEIGHTS)
        change(header)
        write_header(path / WEIGHTS, json.dumps(header), data)

    return write


def with_header_text(text: str) -> Callable[[Path], None]:
    """Makes a change that replaces the header of a folder's weights."""
    return lambda path: write_header(path / WEIGHTS, text, b"")


def overlap(header: dict) -> None:
    """Moves a tensor onto another one of its size."""
    first, second = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    header[second]["data_offsets"] = header[first]["data_offsets"]


def negative(header: dict) -> None:
    """Moves a tensor to before the data."""
    entry = header["model.norm.weight"]
    begin, end = entry["data_offsets"]
    entry["data_offsets"] = [begin - end, 0]


def negative_shape(header: dict) -> None:
    """Gives a matrix two negative sizes, whose product is right."""
    entry = header["model.layers.0.mlp.up_proj.weight"]
    entry["shape"] = [-size for size in entry["shape"]]


def lengthened(path: Path) -> None:
    """Adds bytes that no tensor covers."""
    with (path / WEIGHTS).open("ab") as file:
        file.write(bytes(64))


def cut(path: Path) -> None:
    """Cuts the weights in the middle."""
    os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size // 2)


def indexed(name: str) -> Callable[[Path], None]:
    """Makes a change to a folder whose index names one file, which is there."""

    def write(path: Path) -> None:
        names = list(split_header(path / WEIGHTS)[0])
        target = path / name.replace("ABSOLUTE", str(path.parent))
        target.parent.mkdir(parents=True, exist_ok=True)
        (path / WEIGHTS).rename(target)
        text = name.replace("ABSOLUTE", str(path.parent))
        (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, text)}))

    return write


def index_of(text: str) -> Callable[[Path], None]:
    """Makes a change to a folder that has this index and no single file."""

    def write(path: Path) -> None:
        (path / WEIGHTS).unlink()
        (path / INDEX).write_text(text)

    return write


def other_head(path: Path) -> None:
    """Adds an LM head that differs from the tied embeddings."""
    tensors = load_file(path / WEIGHTS)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path / WEIGHTS)


def loaded(change: Callable[[Path], None], *words: str) -> Callable[[Path], str]:
    """Makes a fault of weights that must be refused when they are read, and that an option allows."""

    def run(directory: Path) -> str:
        path = folder(directory)
        change(path)
        check(path)

        def load() -> None:
            with field_errors("model.path"):
                load_params(path, decoder(), make_mesh())

        load_params(path, decoder(), make_mesh(), allow_nonfinite=True)
        return raised(load, "model.path", "not finite", "model.allow_nonfinite=true", *words)

    return run


def with_value(name: str, value: float, dtype: type = np.float32) -> Callable[[Path], None]:
    """Makes a change of the last value of a tensor, in a file of a dtype."""

    def write(path: Path) -> None:
        tensors = {key: array.astype(dtype) for key, array in load_file(path / WEIGHTS).items()}
        tensors[name].flat[-1] = value
        save_file(tensors, path / WEIGHTS)

    return write


def path_that_is(make: Callable[[Path], str | Path], *words: str) -> Callable[[Path], str]:
    """Makes a fault of a `model.path` that is no folder."""
    return lambda directory: raised(lambda: load_folder(make(directory)), "model.path", *words)


def file_at(directory: Path) -> Path:
    """Makes a file."""
    (directory / "file").touch()
    return directory / "file"


def peft_at(directory: Path) -> Path:
    """Makes a PEFT folder."""
    (directory / "adapter_config.json").write_text("{}")
    return directory


def config_that_is(text: str, *words: str) -> Callable[[Path], str]:
    """Makes a fault of a `config.json` with this text."""

    def run(directory: Path) -> str:
        (directory / "config.json").write_text(text)

        def read() -> None:
            with field_errors("model.path"):
                decoder_config(directory)

        return raised(read, "model.path", "config.json", *words)

    return run


def both_kinds(directory: Path) -> str:
    """Reads `model.safetensors` beside an index that names other weights."""
    path = folder(directory)
    tensors = load_file(path / WEIGHTS)
    save_file({name: np.zeros_like(array) for name, array in tensors.items()}, path / "model-1.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}))
    (path / "model-1.safetensors").rename(path / "elsewhere")
    check(path)  # raises if a file of the index is read
    return "identical"


DEEP = "[" * 100_000
LONG = "1" * 6000
CASES = {
    "offsets overlap": damaged_folder(with_header(overlap), "not a complete safetensors file"),
    "negative offsets": damaged_folder(with_header(negative), "safetensors"),
    "negative shape": damaged_folder(with_header(negative_shape), "safetensors"),
    "bytes that no tensor covers": damaged_folder(lengthened, "not a complete safetensors file"),
    "weights cut off": damaged_folder(cut, "cut off"),
    "header nested too deeply": damaged_folder(with_header_text('{"a":' + DEEP), "not a complete safetensors file"),
    "header with a number of 6,000 digits": damaged_folder(
        with_header_text('{"a":' + LONG + "}"), "not a complete safetensors"
    ),
    "header that is a list": damaged_folder(with_header_text("[]"), "not a complete safetensors file"),
    "NaN in a norm": loaded(with_value("model.norm.weight", np.nan), "model.norm.weight"),
    "infinity in a matrix": loaded(
        with_value("model.layers.1.mlp.up_proj.weight", -np.inf, ml_dtypes.bfloat16), "layers.1.mlp.up_proj"
    ),
    "NaN in float16 embeddings": loaded(with_value("model.embed_tokens.weight", np.nan, np.float16), "embed_tokens"),
    "a tied head that differs": damaged_folder(other_head, "ties the output head to the embeddings"),
    "index leaves the folder": damaged_folder(indexed("../elsewhere.safetensors"), "expected files inside the folder"),
    "index leaves the folder and returns": damaged_folder(indexed("../folder/a.safetensors"), "inside the folder"),
    "index with an absolute path": damaged_folder(
        indexed("ABSOLUTE/away.safetensors"), "expected files inside the folder"
    ),
    "index names a system file": damaged_folder(index_of('{"weight_map": {"a": "/etc/passwd"}}'), "inside the folder"),
    "index nested too deeply": damaged_folder(index_of('{"weight_map":' + DEEP), "nested too deeply"),
    "index that is a list": damaged_folder(index_of("[]"), "expected a JSON object with weight_map"),
    "index beside model.safetensors": both_kinds,
    "config nested too deeply": config_that_is(DEEP, "nested too deeply"),
    "config with a number of 6,000 digits": config_that_is('{"vocab_size": ' + LONG + "}", "not valid JSON"),
    "path that does not exist": path_that_is(lambda _: "/nowhere/at-all", "there is no such directory"),
    "path that is a name on the Hub": path_that_is(lambda _: "Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B"),
    "path that is a file": path_that_is(file_at, "it is a file"),
    "path that is a PEFT folder": path_that_is(peft_at, "a PEFT adapter; set lora.path"),
    "path of 300 characters": path_that_is(lambda directory: directory / ("x" * 300), "File name too long"),
}
HARMLESS = {"index beside model.safetensors": "transformers reads the single file too"}
FAULTS = [Fault("model folders", name, run, HARMLESS.get(name, "")) for name, run in CASES.items()]
