"""Tensors that fuse the experts of a layer: split into one for each projection when read, and joined when written.

transformers 5 fuses experts in memory, and writes them so where a folder has no names for single experts:
`gate_up_proj` [E, 2 F, D], gates first, and `down_proj` [E, D, F]. GPT-OSS always does, in its own layout:
`gate_up_proj` [E, D, 2 F], gates at even columns, and `down_proj` [E, F, D], with biases [E, 2 F] and [E, D]. In mxfp4
they are `_blocks` [E, 2 F, D / 32, 16] and [E, D, F / 32, 16], and `_scales` without the last axis.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from train.models.config import DecoderConfig
from train.weights.huggingface.mxfp4 import BLOCK_BYTES
from train.weights.huggingface.names import LeafMapping
from train.weights.huggingface.safetensors import Tensor, TensorPart

PROJECTIONS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")
_SINGLE = re.compile(r"(.+\.experts)\.(\d+)\.(\w+_proj)\.(weight|bias)")
Piece = tuple[str, LeafMapping, tuple[int, ...]]
"""A tensor of one expert, or of none: name, leaf, and index in the leading axes of the leaf."""


def is_gpt_oss(config: DecoderConfig) -> bool:
    """Tells whether files of this decoder have the layout of GPT-OSS, whose experts alone have biases."""
    return config.experts is not None and config.experts.bias


def split_experts(tensors: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Replaces fused tensors of experts by their parts, one for each projection of each expert.

    Raises:
      ValueError: blocks and scales of mxfp4 that do not fit each other.
    """
    split = dict[str, Tensor]()
    interleaved = is_gpt_oss(config)
    for name, tensor in tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            split[name] = tensor
            continue
        path, fused, form = match.groups()
        parts = _split_interleaved if interleaved else _split_concatenated
        names = parts(tensors, tensor, PROJECTIONS[fused], name, form or "")
        split |= {f"{path}.{ending}": part for ending, part in names.items()} or {name: tensor}
    scales = [name for name in split if name.endswith("_scales") and f"{name[:-7]}_blocks" in tensors]
    return {name: tensor for name, tensor in split.items() if name not in scales}


def _split_concatenated(
    tensors: Mapping[str, Tensor], tensor: Tensor, projections: tuple[str, ...], name: str, form: str
) -> dict[str, Tensor]:
    if form or len(tensor.shape) != 3:
        return {}
    experts, rows, columns = tensor.shape
    rows //= len(projections)
    return {
        f"{expert}.{projection}.weight": dataclasses.replace(
            tensor, shape=(rows, columns), part=TensorPart(expert, number * rows)
        )
        for expert in range(experts)
        for number, projection in enumerate(projections)
    }


def _split_interleaved(
    tensors: Mapping[str, Tensor], tensor: Tensor, projections: tuple[str, ...], name: str, form: str
) -> dict[str, Tensor]:
    axes = {"": 3, "_bias": 2, "_blocks": 4}.get(form)
    if axes != len(tensor.shape):
        return {}
    step = len(projections)
    scales = None
    dtype = tensor.dtype
    rows = tensor.shape[2 if form == "" else 1] // step
    shape: tuple[int, ...] = (rows,)
    if form == "":
        shape = (rows, tensor.shape[1])
    elif form == "_blocks":
        scales = _scales_of(tensors, tensor, name)
        dtype = "BF16"
        shape = (rows, 2 * math.prod(tensor.shape[2:]))
    ending = "bias" if form == "_bias" else "weight"
    parts = {}
    for expert in range(tensor.shape[0]):
        for number, projection in enumerate(projections):
            part = TensorPart(expert, number, step, transposed=form == "")
            if scales is not None:
                part = dataclasses.replace(part, scales=dataclasses.replace(scales, part=part))
            parts[f"{expert}.{projection}.{ending}"] = dataclasses.replace(tensor, dtype=dtype, shape=shape, part=part)
    return parts


def _scales_of(tensors: Mapping[str, Tensor], blocks: Tensor, name: str) -> Tensor:
    other = name.removesuffix("_blocks") + "_scales"
    scales = tensors.get(other)
    if scales is None:
        raise ValueError(f"{blocks.file}: {name} has no {other}")
    if blocks.shape != (*scales.shape, BLOCK_BYTES) or {blocks.dtype, scales.dtype} != {"U8"}:
        got = " and ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in (blocks, scales))
        raise ValueError(
            f"{blocks.file}: {name} and {other}: got {got}, expected U8 [experts, rows, blocks, {BLOCK_BYTES}] and U8 "
            "without the last axis"
        )
    return scales


@dataclasses.dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, and the pieces that it is joined of."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def join(self, arrays: Iterator[np.ndarray]) -> np.ndarray:
        """Takes an array for each piece, and joins experts; a single piece stays the same array."""
        fused = _FUSED.fullmatch(self.name)
        if fused is None:
            return next(arrays)
        projections = PROJECTIONS[fused[2]]
        joined = None
        for name, _, _ in self.pieces:
            _, expert, projection, _ = _parsed(name)
            array = next(arrays)
            joined = np.empty(self.shape, array.dtype) if joined is None else joined
            joined[int(expert), ..., projections.index(projection) :: len(projections)] = array.T
        assert joined is not None
        return joined


def file_tensors(config: DecoderConfig, pieces: Sequence[Piece]) -> list[FileTensor]:
    """Lists the tensors of the files of a decoder, in the order of their first pieces."""
    if not is_gpt_oss(config):
        return [FileTensor(piece[0], piece[1].shape, (piece,)) for piece in pieces]
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        groups.setdefault(_fused_name(piece[0]), []).append(piece)
    return [FileTensor(name, _joined_shape(name, group), tuple(group)) for name, group in groups.items()]


def _parsed(name: str) -> tuple[str, ...]:
    match = _SINGLE.fullmatch(name)
    assert match is not None
    return match.groups()


def _fused_name(name: str) -> str:
    if _SINGLE.fullmatch(name) is None:
        return name
    path, _, projection, ending = _parsed(name)
    fused = next(fused for fused, projections in PROJECTIONS.items() if projection in projections)
    return f"{path}.{fused}{'_bias' if ending == 'bias' else ''}"


def _joined_shape(name: str, group: Sequence[Piece]) -> tuple[int, ...]:
    match = _FUSED.fullmatch(name)
    _, mapping, _ = group[0]
    if match is None:
        return mapping.shape
    ways = len(PROJECTIONS[match[2]])
    *inner, last = mapping.shape[::-1]
    return (len(group) // ways, *inner, ways * last)
