"""The header of a GGUF file: as the package's own reader has it, and damaged or hostile in every length and number."""

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.train.weights.gguf.maker import golden_tensors, write_gguf, write_golden
from train.weights.gguf import import_gguf
from train.weights.gguf import tensors as tensors_module
from train.weights.gguf.folder import imported_folder
from train.weights.gguf.header import GgufTensor, read_header
from train.weights.gguf.tensors import is_readable, read_values
from train.weights.tensor_digests import check_tensors

HUGE = 2**62
U32, STRING, ARRAY, BOOL, U8 = 4, 8, 9, 7, 0
# The package has these for values that are no weights, or for products of a kernel.
UNREADABLE = {"F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K", "Q1_0"}


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, value: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + value


def entry(name: bytes = b"w", axes: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0, count=None) -> bytes:
    dimensions = struct.pack("<I", len(axes) if count is None else count) + struct.pack(f"<{len(axes)}Q", *axes)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def content(keys=(), entries=(), *, magic=b"GGUF", version=3, counts=None, data=64) -> bytes:
    """A file of these keys and entries, with `data` bytes after the padding of the header."""
    numbers = (len(entries), len(keys)) if counts is None else counts
    header = magic + struct.pack("<IQQ", version, *numbers) + b"".join(keys) + b"".join(entries)
    return header + bytes(-len(header) % 32) + bytes(data)


DAMAGED = {
    "empty": (b"", "got 0 bytes"),
    "format": (content(magic=b"GGML"), "does not begin with GGUF"),
    "version 1": (content(version=1), "it has version 1, expected 2 or 3"),
    "big-endian": (content(version=3 << 24), "it is big-endian"),
    "number of tensors": (content(counts=(HUGE, 0)), "4,611,686,018,427,387,904 tensors need more than"),
    "number of keys": (content(counts=(0, HUGE)), "keys need more than the 72 bytes"),
    "length of a name": (content([text(b"", HUGE)]), "name of a key has 4,611,.* bytes, .* 1,024"),
    "length of a text": (content([key(b"a", STRING, text(b"x", HUGE))]), "a has 4,611,.* bytes, expected at most"),
    "gigabytes of text": (content([key(b"a", STRING, text(b"x", 2**26))]), "a takes 67,108,864 bytes, and the"),
    "array of numbers": (content([key(b"a", ARRAY, array(U8, HUGE))]), "a takes 4,611,.* bytes, and the"),
    "array of texts": (content([key(b"a", ARRAY, array(STRING, HUGE))]), "a has 4,611,.* strings, which need more"),
    "text in an array": (content([key(b"a", ARRAY, array(STRING, 1, text(b"", 2**40)))]), "a has 1,099,511,627,776"),
    "array of arrays": (content([key(b"a", ARRAY, array(ARRAY, 1))]), "a: got an array of arrays"),
    "type of a value": (content([key(b"a", 13, b"")]), "a has a value of the unknown type 13"),
    "truth value": (content([key(b"a", BOOL, b"\7")]), "a has a truth value that is neither 0 nor 1"),
    "UTF-8": (content([key(b"a", STRING, text(b"\xff"))]), "a is not UTF-8"),
    "key twice": (content([key(b"a", U32, b"\0" * 4)] * 2), "duplicate key 'a'"),
    "tensor twice": (content([], [entry(), entry()]), "duplicate tensor 'w'"),
    "number of axes": (content([], [entry(count=2**31)]), "the tensor 'w' has 2147483648 axes, expected 1 to 4"),
    "axes that overflow": (content([], [entry(axes=(2**33, 2**33))]), "'w' takes bytes .* but the file has"),
    "empty axis": (content([], [entry(axes=(8, 0))]), r"'w' of type F32 has axes \[8, 0\], expected sizes above 0"),
    "part of a block": (content([], [entry(kind=2)]), r"'w' of type Q4_0 has axes \[8\], .* a multiple of 32"),
    "type of a tensor": (content([], [entry(kind=99)]), "the tensor 'w' has the unknown type 99"),
    "offset": (content([], [entry(offset=64)]), "'w' takes bytes .* but the file has"),
    "offset that overflows": (content([], [entry(offset=2**64 - 32)]), "'w' takes bytes 18,446,744,073,709,551,"),
    "offset unaligned": (content([], [entry(offset=4)]), "'w' begins at 4, expected a multiple of 32"),
    "overlap": (content([], [entry(axes=(16,)), entry(b"v", offset=32)]), "tensors 'w' and 'v' overlap"),
    "gap between tensors": (
        content([], [entry(), entry(b"v", offset=64)], data=96),
        "32 bytes after the tensor 'w' belong",
    ),
    "gap before the tensors": (content([], [entry(offset=32)]), "32 bytes after the header belong to no tensor"),
    "bytes after the tensors": (
        content([], [entry()]),
        "32 bytes after the tensor 'w' belong to no tensor; the file is",
    ),
    "bytes of no tensor": (content(), "64 bytes after the header belong to no tensor"),
    "type of half the size": (content([], [entry(axes=(16,), kind=1)]), "32 bytes after the tensor 'w' belong"),
    "alignment 0": (content([key(b"general.alignment", U32, b"\0" * 4)]), "got 0, expected a power of two"),
    "alignment of gigabytes": (
        content([key(b"general.alignment", U32, struct.pack("<I", 2**31))], [entry()]),
        "'w' takes bytes 2,147,483,648 to .*, but the file has",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_header_is_an_error_without_memory(name, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(DAMAGED[name][0])
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=DAMAGED[name][1]) as caught:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(str(path))


def test_file_cut_anywhere_is_an_error(tmp_path):
    path, cut = write_golden(tmp_path / "model.gguf", "qwen2"), tmp_path / "cut.gguf"
    whole_file = path.read_bytes()
    end = max(tensor.offset + tensor.nbytes for tensor in read_header(path).tensors.values())
    for size in [*range(0, 2_000, 7), *range(2_000, end, 4_999), end - 1]:
        cut.write_bytes(whole_file[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            read_header(cut)
    read_header(path)


def test_flipped_bytes_never_give_a_traceback(tmp_path):
    path, flipped = write_golden(tmp_path / "model.gguf", "gemma2"), tmp_path / "flipped.gguf"
    whole_file = path.read_bytes()
    start = min(tensor.offset for tensor in read_header(path).tensors.values())
    rng = random.Random(0)
    refused = 0
    for number in range(200):
        damaged = bytearray(whole_file)
        damaged[rng.randrange(start)] ^= 1 << rng.randrange(8)
        flipped.write_bytes(damaged)
        try:
            import_gguf(flipped, tmp_path / str(number))
        except ValueError as error:
            refused += str(error).startswith(str(flipped))
    assert refused > 100


@pytest.mark.parametrize("data", [32, 33, 63])
def test_padding_below_the_alignment_is_read(data, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content([], [entry()], data=data))
    assert read_header(path).tensors["w"].nbytes == 32


@pytest.mark.parametrize("name", ["llama3", "gemma2", "qwen3"])
def test_type_of_another_size_is_an_error(name, tmp_path):
    path = write_golden(tmp_path / "model.gguf", name)
    original = path.read_bytes()
    for stored in (b"blk.0.ffn_up.weight", b"token_embd.weight", list(read_header(path).tensors)[-1].encode()):
        damaged = bytearray(original)
        at = original.index(stored) + len(stored)
        dimensions = int.from_bytes(original[at : at + 4], "little")
        damaged[at + 4 + 8 * dimensions] ^= 1  # F32 becomes F16
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="belong to no tensor; the file is damaged"):
            import_gguf(path, tmp_path / "folder")


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (-np.inf, "float32"), (3.4e38, "bfloat16")])
def test_values_not_finite_are_named(value, dtype, tmp_path):
    name = "blk.1.ffn_down.weight"
    values = golden_tensors("llama3")[name]
    values.flat[3] = value
    path = write_golden(tmp_path / "model.gguf", "llama3", tensors={name: values})
    message = r"the tensor 'blk\.1\.ffn_down\.weight' of type F32 has 1 values that are not finite"
    with pytest.raises(ValueError, match=message):
        import_gguf(path, tmp_path / "folder", dtype=dtype)
    assert not (tmp_path / "folder").exists()


def test_imported_files_have_digests(tmp_path):
    path = write_golden(tmp_path / "model.gguf", "llama3")
    folder = imported_folder(path)
    check_tensors(folder)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        original = (folder / name).read_bytes()
        damaged = bytearray(original)
        damaged[-20] ^= 1
        (folder / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}.* is damaged"):
            check_tensors(imported_folder(path))
        (folder / name).write_bytes(original)


def test_header_equals_the_one_of_the_package(tmp_path):
    keys = {"a.text": "naïve", "a.flag": True, "a.count": 7, "a.rate": 0.1, "a.names": ["x", ""], "a.ids": [1, -2]}
    tensors = {"one": np.arange(6, dtype=np.float32).reshape(2, 3), "two": np.arange(5, dtype=np.float16)}
    path = write_gguf(tmp_path / "model.gguf", keys, tensors)
    header, reader = read_header(path), gguf.GGUFReader(path)
    expected = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    actual = {name: x.tolist() if isinstance(x, np.ndarray) else x for name, x in header.keys.items()}
    assert actual == expected
    for tensor in reader.tensors:
        entry_read = header.tensors[tensor.name]
        assert (entry_read.offset, entry_read.nbytes) == (tensor.data_offset, tensor.n_bytes)
        np.testing.assert_array_equal(read_values(entry_read), tensor.data.astype(np.float32))


@pytest.mark.parametrize("kind", list(GGMLQuantizationType), ids=lambda kind: kind.name)
def test_every_type_is_read_as_the_package_does(kind, tmp_path, monkeypatch):
    block, size = GGML_QUANT_SIZES[kind]
    if not is_readable(kind):
        assert kind.name in UNREADABLE
        return
    rows, columns = 7, 2 * block
    data = np.random.default_rng(int(kind)).integers(0, 256, (rows, 2 * size), np.uint8)
    path = write_gguf(tmp_path / "model.gguf", {}, {"before": np.zeros(3, np.float32), "w": (data, kind)})
    tensor = read_header(path).tensors["w"]
    assert (tensor.kind, tensor.shape, tensor.nbytes) == (kind, (rows, columns), data.size)
    monkeypatch.setattr(tensors_module, "PIECE_BYTES", 3 * 4 * columns)
    reader = next(entry for entry in gguf.GGUFReader(path).tensors if entry.name == "w")
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(reader.data, kind)
    actual = read_values(tensor)
    assert actual.dtype == np.float32
    np.testing.assert_array_equal(actual, expected)


def test_quantized_values_are_near_the_original(tmp_path):
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    for kind, tolerance in (("Q8_0", 0.02), ("Q5_0", 0.15), ("Q4_1", 0.25), ("BF16", 0.02), ("F16", 2e-3)):
        number = GGMLQuantizationType[kind]
        data = gguf.quantize(values, number)
        pair = (data, number) if kind not in ("F16",) else data
        path = write_gguf(tmp_path / f"{kind}.gguf", {}, {"w": pair})
        np.testing.assert_allclose(read_values(read_header(path).tensors["w"]), values, atol=tolerance)


def test_missing_file_and_directory_are_named(tmp_path):
    for path, kind in ((tmp_path / "none.gguf", "there is no such file"), (tmp_path, "it is no file")):
        with pytest.raises(FileNotFoundError, match=kind):
            read_header(path)


def test_bytes_of_a_tensor_are_mapped_by_row():
    tensor = GgufTensor(Path(__file__), "w", GGMLQuantizationType.F32, (2, 3), 8, 24)
    np.testing.assert_array_equal(tensor.data().ravel(), np.frombuffer(Path(__file__).read_bytes()[8:32], np.uint8))
