"""Parameters to a Hugging Face folder that transformers and vLLM load."""

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import kljax
from train.models.decoder import Decoder
from train.models.int8 import dequantise, is_int8
from train.models.merge import merge
from train.weights.files import check_free, new_directory, write_text_atomic
from train.weights.huggingface.config import hf_config
from train.weights.huggingface.contents import CONFIG, INDEX, SINGLE
from train.weights.huggingface.names import EMBEDDINGS, HEAD, PREFIXES, Slot, full_name, slots
from train.weights.huggingface.safetensors import dtype_name, nbytes, write_file

Tree = Any
MAX_FILE_BYTES = 5 * 10**9
# Files of a folder that say how text becomes tokens and how it is sampled; weights and config.json are written anew.
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
    "generation_config.json",
)


def save_folder(
    path: str | Path,
    model: Decoder,
    policy: kljax.Policy,
    *,
    source: str | Path | None = None,
    tokenizer: Any = None,
    dtype: str | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Writes a policy as a Hugging Face folder, whole or not at all.

    An adapter is merged into the weights, one layer at a time; of a quantised base they are the weights that it stands
    for. One tensor after the other comes to the host. In a run
    of several processes all of them call this, and the first writes.

    Args:
      path: the folder that is made; nothing may be there yet.
      model: the decoder; policy: its parameters and adapter.
      source: the folder that the parameters came from, whose tokenizer and other keys of `config.json` are kept.
      tokenizer: whose `bos_id`, `eos_ids` and `pad_id` `config.json` gets if there is no `source`.
      dtype: "float32" or "bfloat16" in the files; None: that of the parameters.
      max_file_bytes: where a new file is begun.

    Raises:
      FileExistsError: there is something at `path`.
      ValueError: an adapter that does not fit the model, or a dtype that is not written.
    """
    target = Path(path)
    check_free(target)
    stored = jnp.dtype(dtype or policy.params["embed_tokens"]["embedding"].dtype)
    dtype_name(stored)
    pieces = list(_tensors(model))
    arrays = _arrays(model, policy, pieces, stored)
    if jax.process_index() != 0:
        for _ in arrays:
            pass
        return
    with new_directory(target) as folder:
        if source is not None:
            _copy_others(Path(source), folder)
        config = _config(model, source, tokenizer, stored)
        write_text_atomic(folder / CONFIG, json.dumps(config, indent=2) + "\n")
        _write_weights(folder, {name: (stored, slot.shape) for name, slot, _ in pieces}, arrays, max_file_bytes)


def _config(model: Decoder, source: str | Path | None, tokenizer: Any, dtype: np.dtype) -> dict[str, Any]:
    """`config.json`: that of the source with the shape of this model, the dtype of the files, the tokenizer's ids."""
    like = None if source is None else json.loads((Path(source) / CONFIG).read_text(encoding="utf-8"))
    found = dict(hf_config(model.config, like=like))
    # Releases before 4.56 know it by the longer name.
    found["torch_dtype" if "torch_dtype" in found else "dtype"] = dtype.name
    if like is None and tokenizer is not None:
        ends = tuple(tokenizer.eos_ids)
        found |= {
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": ends[0] if len(ends) == 1 else list(ends),
            "pad_token_id": tokenizer.pad_id,
        }
    return found


def _tensors(model: Decoder) -> Iterator[tuple[str, Slot, int | None]]:
    """Name, leaf and layer of every tensor: embeddings, then layer by layer, then the last norm and the head."""
    rank = {EMBEDDINGS: 0, HEAD: 3}
    single = [slot for slot in slots(model) if not slot.stacked]
    ordered = sorted(single, key=lambda slot: rank.get(slot.names[0], 2))
    found = [(slot.names[0], slot, None) for slot in ordered if rank.get(slot.names[0]) == 0]
    stacked = [slot for slot in slots(model) if slot.stacked]
    layers = [(slot.names[layer], slot, layer) for layer in range(model.config.layers) for slot in stacked]
    rest = [(slot.names[0], slot, None) for slot in ordered if rank.get(slot.names[0]) != 0]
    for name, slot, layer in [*found, *layers, *rest]:
        yield full_name(name, PREFIXES[0]), slot, layer


def _arrays(
    model: Decoder, policy: kljax.Policy, pieces: list[tuple[str, Slot, int | None]], dtype: np.dtype
) -> Iterator[np.ndarray]:
    for _, slot, layer in pieces:
        leaf, adapter = _at(policy.params, slot.path), _at(policy.adapter, slot.path[:-1])
        if layer is not None:
            leaf = jax.tree.map(lambda x, n=layer: lax.dynamic_slice_in_dim(x, n, 1), leaf)
            if adapter is not None and slot.path[-1] == "kernel":
                own = {name: lax.dynamic_slice_in_dim(value, layer, 1) for name, value in adapter.items()}
                leaf = merge(model, {"kernel": leaf}, own)["kernel"]
            elif is_int8(leaf):
                leaf = dequantise(leaf, dtype)
        whole = NamedSharding(leaf.sharding.mesh, PartitionSpec()) if isinstance(leaf.sharding, NamedSharding) else None
        yield np.asarray(_converter(slot.stacked, slot.transposed, dtype, whole)(leaf))


def _at(tree: Tree, path: tuple[str, ...]) -> Tree:
    """The subtree at a path; None where there is none."""
    for name in path:
        if tree is None or name not in tree:
            return None
        tree = tree[name]
    return tree


@functools.cache
def _converter(
    stacked: bool, transposed: bool, dtype: np.dtype, whole: NamedSharding | None
) -> Callable[[jax.Array], jax.Array]:
    """One layer of a leaf as the file has it, on every device."""

    def convert(x: jax.Array) -> jax.Array:
        own = x[0] if stacked else x
        return (own.T if transposed else own).astype(dtype)

    return jax.jit(convert, out_shardings=whole)


def _write_weights(
    folder: Path,
    layout: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    arrays: Iterator[np.ndarray],
    max_file_bytes: int,
) -> None:
    files: list[dict[str, tuple[np.dtype, tuple[int, ...]]]] = [{}]
    size = 0
    for name, (dtype, shape) in layout.items():
        own = nbytes(dtype, shape)
        if files[-1] and size + own > max_file_bytes:
            files.append({})
            size = 0
        files[-1][name] = (dtype, shape)
        size += own
    if len(files) == 1:
        write_file(folder / SINGLE, layout, arrays)
        return
    where: dict[str, str] = {}
    for number, part in enumerate(files, start=1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / file, part, (next(arrays) for _ in part))
        where |= dict.fromkeys(part, file)
    total = sum(nbytes(dtype, shape) for dtype, shape in layout.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    write_text_atomic(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _copy_others(source: Path, target: Path) -> None:
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
