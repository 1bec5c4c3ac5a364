"""The experts of tokens in the answers of vLLM and SGLang.

- vLLM 0.21: lists `[tokens, layers, experts]`, `prompt_routed_experts` of the answer and `routed_experts` of each
  completion; -1 where the prompt was cached.
- vLLM from 0.22: `routed_experts` of each completion, base64 of a `.npy` file of prompt and completion.
- Dynamo: `routed_experts` of each completion, `data` in base64 with `shape`, `dtype` and `start`.
- SGLang: `sglext.routed_experts` of the answer, of its first completion: base64 of integers without a header.

The last token of a completion is never computed, so that it has no experts. A server may leave out the first tokens of
a prompt, and then says how many.
"""

import base64
import binascii
import io
import math
from typing import Any

import numpy as np

from train.models.config import DecoderConfig
from train.models.experts import NO_EXPERT

FORMS = "lists [tokens, layers, experts], or base64 of a .npy file or of integers"
MOST_BYTES_PER_EXPERT = 12
"""Bytes of the number of an expert in an answer: base64 of 64 bits has 11."""
_NPY = b"\x93NUMPY"


def routes_size(config: DecoderConfig) -> int:
    """Returns the most experts of a token in an answer, which may also have a slot for each dense layer."""
    return config.layers * config.experts.active if config.experts else 0


def decode_routes(value: Any, tokens: int, config: DecoderConfig, *, start: int = 0) -> np.ndarray:
    """Decodes the experts of consecutive tokens.

    Args:
      value: from the JSON of an answer, in any of the forms above.
      tokens: number of tokens, with the ones that the value leaves out.
      config: the decoder, whose layers with experts are L.
      start: the first tokens that the value leaves out.

    Returns:
      [tokens, L, k] int16, -1 for the tokens that were left out.

    Raises:
      ValueError: "got X, expected Y", for another form, size or expert.
    """
    assert config.experts is not None
    if isinstance(value, dict) and value.get("start") is not None:
        start = value["start"]
    if type(start) is not int or not 0 <= start <= tokens:
        raise ValueError(f"got the start {start!r}, expected 0 to {tokens}, the number of tokens")
    ids = _decode(value, tokens - start, config)
    layers, active = config.route_shape
    if ids.shape[1] == config.layers and ids.shape[1] != layers:
        # SGLang has a slot for each layer, also for dense ones.
        ids = ids[:, np.array(config.expert_layers)]
    if ids.shape[1:] != (layers, active):
        raise ValueError(
            f"got {ids.shape[1]} layers x {ids.shape[2]} experts, expected {layers} x {active}; only layers with "
            "experts count"
        )
    if len(ids) != tokens - start:
        raise ValueError(f"got {len(ids)} tokens, expected {tokens - start}; the last one of a completion has none")
    outside = (ids < NO_EXPERT) | (ids >= config.experts.count)
    if outside.any():
        token, layer, _ = map(int, np.argwhere(outside)[0])
        raise ValueError(
            f"got the experts {ids[token, layer].tolist()} at token {token + start}, layer "
            f"{config.expert_layers[layer]}, expected numbers below {config.experts.count}"
        )
    routes = np.full((tokens, layers, active), NO_EXPERT, np.int16)
    routes[start:] = ids
    return routes


def _decode(value: Any, tokens: int, config: DecoderConfig) -> np.ndarray:
    """Returns integers [tokens, layers, experts] with the sizes that the value has."""
    if isinstance(value, list):
        try:
            return _checked(np.array(value if value else np.zeros((0, *config.route_shape), np.int16)))
        except (ValueError, OverflowError):
            raise ValueError(
                "got lists of unequal lengths, or numbers that are no integers, expected " + FORMS
            ) from None
    text = value.get("data") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ValueError(f"got {type(text).__name__}, expected {FORMS}")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"got a text of {len(text)} characters that is no base64, expected {FORMS}") from None
    if isinstance(value, dict):
        return _checked(_of_fields(data, value.get("dtype"), value.get("shape")))
    return _checked(_of_npy(data) if data.startswith(_NPY) else _of_integers(data, tokens, config))


def _checked(ids: np.ndarray) -> np.ndarray:
    if ids.dtype.kind not in "iu" or ids.ndim != 3:
        raise ValueError(f"got {ids.dtype} {list(ids.shape)}, expected integers [tokens, layers, experts]")
    return ids


def _of_npy(data: bytes) -> np.ndarray:
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(file)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"got a .npy file with a damaged header ({error}), expected a whole one") from None
    if fortran_order:
        raise ValueError("got a .npy file in Fortran order, expected C order")
    return _of_bytes(data[file.tell() :], dtype, shape)


def _of_fields(data: bytes, dtype: Any, shape: Any) -> np.ndarray:
    try:
        numpy_dtype = np.dtype(dtype if isinstance(dtype, str) else None)
    except TypeError:
        numpy_dtype = None
    if not isinstance(dtype, str) or numpy_dtype is None:
        raise ValueError(f"got the dtype {dtype!r}, expected the name of integers, such as int32")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"got the shape {shape!r}, expected [tokens, layers, experts]")
    return _of_bytes(data, numpy_dtype, tuple(shape))


def _of_bytes(data: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    if dtype.kind not in "iu":
        raise ValueError(f"got the dtype {dtype}, expected integers")
    if len(data) != (size := math.prod(shape) * dtype.itemsize):
        raise ValueError(f"got {len(data)} bytes, expected {size} of {dtype} {list(shape)}")
    return np.frombuffer(data, dtype).reshape(shape)


def _of_integers(data: bytes, tokens: int, config: DecoderConfig) -> np.ndarray:
    """Reads integers without a header: their width is the number of bytes over the number of experts."""
    expert_layers, active = config.route_shape
    doubtful = ""
    for layers in dict.fromkeys((config.layers, expert_layers)):
        width, rest = divmod(len(data), tokens * layers * active) if tokens else (len(data), len(data))
        if rest or width not in (1, 2, 4, 8):
            continue
        ids = np.frombuffer(data, "u1" if width == 1 else f"<i{width}")
        # Half of the tokens at twice the width are as many bytes.
        if ids.size < 2 or ids[1::2].any():
            return ids.reshape(tokens, layers, active)
        doubtful = "; every second number is 0, so that half of the tokens may be missing"
    raise ValueError(
        f"got {len(data)} bytes, expected integers of 1, 2, 4 or 8 bytes for {tokens} tokens x {expert_layers} layers "
        f"x {active} experts{doubtful}"
    )
