"""Saving of a policy as a Hugging Face folder, which transformers and vLLM load."""

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import kljax
from kljax._files import write_text_atomic
from train.data.tokenizers.byte import ByteTokenizer
from train.distributed.global_arrays import to_host
from train.distributed.peers import is_leader, processes
from train.models.decoder import Decoder
from train.models.experts import CHOICE_BIAS
from train.models.int8 import dequantise, is_int8
from train.models.merge import merge, rounded_away
from train.storage.paths import as_path
from train.weights.files import new_directory
from train.weights.huggingface.config import hf_config
from train.weights.huggingface.contents import CONFIG, INDEX, SINGLE
from train.weights.huggingface.fused import Piece, file_tensors
from train.weights.huggingface.names import (
    EMBEDDINGS,
    HEAD,
    PREFIXES,
    family_name,
    full_name,
    leaf_mappings,
)
from train.weights.huggingface.safetensors import dtype_name, nbytes, write_file
from train.weights.tensor_digests import write_tensor_digests

Tree = Any
MAX_FILE_BYTES = 5 * 10**9
GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Tokenizer and generation files, which are copied; weights and config.json are written anew.
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)


def save_folder(
    path: str | Path,
    model: Decoder,
    policy: kljax.Policy,
    *,
    source: str | Path | None = None,
    tokenizer: Any = None,
    dtype: str | None = None,
    drop_router_bias: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> float | None:
    """Writes a policy as a Hugging Face folder, atomically, with the digests of its tensors.

    An adapter is merged into the weights one layer at a time, and a quantized base is dequantized. Tensors are copied
    to the host one by one. In a run of several processes, all processes call this function and the leader writes: an
    error of writing is raised there alone.

    Args:
      path: the new folder, which must not exist.
      model: the decoder.
      policy: its parameters and adapter.
      source: original folder of the parameters; its tokenizer and other keys of `config.json` are copied.
      tokenizer: its `eos_ids` are added to `generation_config.json`; without `source`, its ids are in `config.json`,
        and bytes bring their files.
      dtype: "float32" or "bfloat16" in the files; None means the dtype of the parameters.
      drop_router_bias: whether to leave out biases of the choice of experts, which no family here has in a file.
      max_file_bytes: maximum size of a file with several tensors.

    Returns:
      The error of rounding the merged kernels to `dtype`, relative to the update of the adapter (both as norms over all
      kernels); None without an adapter, or if the update is 0.

    Raises:
      FileExistsError: `path` exists.
      ValueError: the adapter does not fit the model, `dtype` is not supported, or the model has a `CHOICE_BIAS`.
    """
    experts = model.config.experts
    if experts is not None and experts.choice_bias and not drop_router_bias:
        raise ValueError(
            f"no family of this model has a tensor for {CHOICE_BIAS}, the biases of routing.bias_update_rate; without "
            "them the routers choose other experts"
        )
    target = as_path(path)
    stored = jnp.dtype(dtype or policy.params["embed_tokens"]["embedding"].dtype)
    dtype_name(stored)
    tensors = file_tensors(model.config, list(_tensors(model)))
    pieces = [piece for tensor in tensors for piece in tensor.pieces]
    sums: list[jax.Array] = []
    arrays = _arrays(model, policy, pieces, stored, sums)
    try:
        if is_leader():
            with new_directory(target) as folder:
                if source is not None:
                    _copy_others(Path(source), folder)
                elif isinstance(tokenizer, ByteTokenizer):
                    for name, text in tokenizer.files().items():
                        write_text_atomic(folder / name, text)
                config = _config(model, source, tokenizer, stored)
                write_text_atomic(folder / CONFIG, json.dumps(config, indent=2) + "\n")
                if tokenizer is not None:
                    _add_ends(folder, tokenizer.eos_ids)
                model_type = config["model_type"]
                layout = {family_name(tensor.name, model_type): (stored, tensor.shape) for tensor in tensors}
                _write_weights(folder, layout, (tensor.join(arrays) for tensor in tensors), max_file_bytes)
                write_tensor_digests(folder)
    finally:
        # The others gather every tensor, also those that an error keeps from being written.
        if processes() > 1:
            for _ in arrays:
                pass
    error, update = np.sum([np.asarray(pair, np.float64) for pair in to_host(sums)], axis=0) if sums else (0.0, 0.0)
    return math.sqrt(error / update) if update > 0 else None


def _config(model: Decoder, source: str | Path | None, tokenizer: Any, dtype: np.dtype) -> dict[str, Any]:
    """Builds `config.json` from the source, the shape of this model, the dtype of the files, and the token ids."""
    like = None if source is None else json.loads((Path(source) / CONFIG).read_text(encoding="utf-8"))
    config = dict(hf_config(model.config, like=like))
    # Releases of transformers before 4.56 read only the longer name.
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype.name
    if like is None and tokenizer is not None:
        eos_ids = tuple(tokenizer.eos_ids)
        config |= {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else list(eos_ids),
            "pad_token_id": tokenizer.pad_id,
        }
    return config


def _add_ends(folder: Path, eos_ids: Sequence[int]) -> None:
    """Adds the ids that ended completions in training to the ids that end `generate` of transformers."""
    missing = missing_ends(folder, eos_ids)
    if missing:
        generation = _generation_config(folder)
        ends = [*_ends(generation), *missing]
        generation["eos_token_id"] = ends[0] if len(ends) == 1 else ends
        write_text_atomic(folder / GENERATION, json.dumps(generation, indent=2) + "\n")


def missing_ends(folder: str | Path, eos_ids: Sequence[int]) -> list[int]:
    """Lists the ids that do not end `generate` of transformers, which reads `generation_config.json` of a folder."""
    known = _ends(_generation_config(Path(folder)))
    return [number for number in eos_ids if number not in known]


def _generation_config(folder: Path) -> dict[str, Any]:
    """Reads `generation_config.json`; without one, transformers takes the ids of `config.json`."""
    if (folder / GENERATION).is_file():
        return dict(json.loads((folder / GENERATION).read_text(encoding="utf-8")))
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    ids = config | (config.get("text_config") or {})
    return {name: ids[name] for name in TOKEN_IDS if ids.get(name) is not None}


def _ends(generation: Mapping[str, Any]) -> list[int]:
    ends = generation.get("eos_token_id")
    return ends if isinstance(ends, list) else [] if ends is None else [ends]


def _tensors(model: Decoder) -> Iterator[Piece]:
    """Yields name, leaf and index in its leading axes of every tensor: embeddings, layers in order, norm and head."""

    def position(piece: Piece) -> tuple[int, int]:
        name, mapping, index = piece
        if mapping.layers is None:
            return {EMBEDDINGS: 0, HEAD: 3}.get(name, 2), 0
        return 1, mapping.layers[index[0]]

    leaves = leaf_mappings(model)
    pieces = [(name, leaf, index) for leaf in leaves for name, index in zip(leaf.names, leaf.indices(), strict=True)]
    for name, mapping, index in sorted(pieces, key=position):
        yield full_name(name, PREFIXES[0]), mapping, index


def _arrays(
    model: Decoder,
    policy: kljax.Policy,
    pieces: list[Piece],
    dtype: np.dtype,
    sums: list[jax.Array],
) -> Iterator[np.ndarray]:
    """Yields the tensors of the files; appends what `rounded_away` measures of each merged kernel to `sums`."""
    # A kernel in int8 becomes a float of `param_dtype`; merging rounds once, to the dtype of the files.
    stored = Decoder(dataclasses.replace(model.config, param_dtype="float32" if dtype.itemsize > 2 else "bfloat16"))
    for _, mapping, index in pieces:
        leaf = _subtree(policy.params, mapping.path)
        adapter = _subtree(policy.adapter, mapping.path[:-1])
        if index:
            leaf = jax.tree.map(lambda x, n=index: _matrix(x, n), leaf)
            if adapter is not None and mapping.path[-1] == "kernel":
                layer_adapter = {name: _matrix(value, index) for name, value in adapter.items()}
                wide = leaf if is_int8(leaf) else leaf.astype(jnp.promote_types(leaf.dtype, dtype))
                merged = merge(stored, {"kernel": wide}, layer_adapter)["kernel"].astype(dtype)
                sums.append(_measure(model)(leaf, layer_adapter, merged))
                leaf = merged
            elif is_int8(leaf):
                leaf = dequantise(leaf, dtype)
        sharding = leaf.sharding
        replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
        yield np.asarray(_converter(mapping.stacked, mapping.transposed, dtype, replicated)(leaf))


def _matrix(x: jax.Array, index: tuple[int, ...]) -> jax.Array:
    """Takes an entry of the leading axes of a stack, [1, ...]."""
    for number in index[:-1]:
        x = lax.dynamic_index_in_dim(x, number, keepdims=False)
    return lax.dynamic_slice_in_dim(x, index[-1], 1)


@functools.cache
def _measure(model: Decoder) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(rounded_away, model))


def _subtree(tree: Tree, path: tuple[str, ...]) -> Tree:
    """Returns the subtree at a path, or None if there is none."""
    for name in path:
        if tree is None or name not in tree:
            return None
        tree = tree[name]
    return tree


@functools.cache
def _converter(
    stacked: bool, transposed: bool, dtype: np.dtype, replicated: NamedSharding | None
) -> Callable[[jax.Array], jax.Array]:
    """Compiles the conversion of one layer of a leaf to the layout of the file, replicated over the devices."""

    def convert(x: jax.Array) -> jax.Array:
        matrix = x[0] if stacked else x
        return (matrix.T if transposed else matrix).astype(dtype)

    return jax.jit(convert, out_shardings=replicated)


def _write_weights(
    folder: Path,
    layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterator[np.ndarray],
    max_file_bytes: int,
) -> None:
    files: list[dict[str, tuple[np.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, (dtype, shape) in layout.items():
        tensor_bytes = nbytes(dtype, shape)
        if files[-1] and size + tensor_bytes > max_file_bytes:
            files.append({})
            size = 0
        files[-1][name] = (dtype, shape)
        size += tensor_bytes
    if len(files) == 1:
        write_file(folder / SINGLE, layout, arrays)
        return
    weight_map: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / file, part, (next(arrays) for _ in part))
        weight_map |= dict.fromkeys(part, file)
    total = sum(nbytes(dtype, shape) for dtype, shape in layout.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_text_atomic(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _copy_others(source: Path, target: Path) -> None:
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
