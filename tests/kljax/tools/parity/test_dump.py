"""The reader of dumps: both formats, parts of an array, and files that are not as the schema has it."""

import io
import json
import pathlib
import zipfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kljax.tools.parity.dump import DumpError, open_dump
from tests.parity import write_dump

ROWS, LENGTH = 3, 4


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    needed = {"log_probs": -rng.random((ROWS, LENGTH), np.float32), "mask": np.ones((ROWS, LENGTH), np.int64)}
    return {name: array for name, array in {**needed, **changes}.items() if array is not None}


def save(path: pathlib.Path, header: str | None = None, **changes: Any) -> pathlib.Path:
    np.savez(path, header=np.array('{"kljax_parity": 1}' if header is None else header), **arrays(**changes))
    return path


def test_npz_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    written = arrays(loss=np.float32(0.25), advantages=np.asfortranarray(np.arange(12.0).reshape(3, 4)))
    write_dump(tmp_path / "dump.npz", {"system": "verl"}, written)
    dump = open_dump(tmp_path / "dump.npz")
    assert dump.header == {"kljax_parity": 1, "system": "verl"}
    assert set(dump) == set(written)
    for name, array in written.items():
        np.testing.assert_array_equal(dump.read(name), array)
        assert dump.stored(name).loaded is None  # mapped, not loaded
    np.testing.assert_array_equal(dump.stored("advantages").part(1, slice(2)), [4, 5])
    assert dump.read("mask").dtype == bool
    np.savez_compressed(tmp_path / "small.npz", header=np.array('{"kljax_parity": 1}'), **written)
    np.testing.assert_array_equal(open_dump(tmp_path / "small.npz").read("advantages"), written["advantages"])


def test_safetensors_is_read_as_it_was_written(tmp_path: pathlib.Path) -> None:
    narrow = np.linspace(-3, 0, ROWS * LENGTH).reshape(ROWS, LENGTH).astype(ml_dtypes.bfloat16)
    written = arrays(old_log_probs=narrow, mask=np.ones((ROWS, LENGTH), bool), loss=np.array(0.25))
    save_file(written, tmp_path / "dump.safetensors", {"header": '{"kljax_parity": 1, "dtype": "bfloat16"}'})
    dump = open_dump(tmp_path / "dump.safetensors")
    assert dump.header["dtype"] == "bfloat16"
    for name, array in written.items():
        np.testing.assert_array_equal(dump.read(name), np.asarray(array, np.float64))
    assert dump.stored("old_log_probs").kind == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log_probs": None}, "log_probs: missing"),
        ({"mask": None}, "mask: missing"),
        ({"old_logprobs": np.zeros((3, 4))}, r"old_logprobs: no such field.*did you mean 'old_log_probs'\?"),
        ({"old_log_probs": np.zeros((3, 5))}, r"old_log_probs: got shape \[3, 5\], expected \[B, T\]; T is 4"),
        ({"loss": np.zeros(2)}, r"loss: got shape \[2\], expected \[\]"),
        ({"mask": np.full((3, 4), 0.5)}, r"mask: got 0.5 at \(row, token\) \(0, 0\)"),
        ({"tokens": np.zeros((3, 4))}, "tokens: got dtype float64, expected integers"),
        ({"rewards": np.array(["a", "b", "c"])}, "rewards: got dtype str"),
        ({"rewards": np.array([1, None, 2])}, "rewards: holds Python objects, which need pickle"),
        ({"hidden": np.zeros((1, 4, 2)), "rows": np.array([0])}, "hidden: needs head"),
        ({"logits": np.zeros((1, 4, 2))}, "logits: logits and hidden states need rows and tokens"),
        ({"rows": np.array([3])}, r"rows: got \[3\], expected rows from 0 to 2"),
        ({"rewards": np.array([0.0, np.nan, 1.0])}, "rewards: got nan at row 1, expected a finite number"),
        ({"rewards": np.array([0.0, np.inf, 1.0])}, "rewards: got inf"),
        ({"divisor": np.array(np.inf)}, "divisor: got inf, expected a finite number"),
        ({"advantages": np.full((3, 4), np.nan)}, r"advantages: got nan at \(row, token\) \(0, 0\)"),
        ({"advantages": np.full(3, np.nan)}, "advantages: got nan at row"),
        ({"lengths": np.array([4, 5, 4])}, "lengths: got 5 at row 1, expected 0 to 4"),
        ({"tokens": np.full((3, 4), -1)}, r"tokens: got -1 at \(row, token\) \(0, 0\)"),
        (
            {"tokens": np.full((3, 4), 9), "logits": np.zeros((1, 4, 9)), "rows": np.array([0])},
            r"tokens: got 9 at \(row, token\) \(0, 0\), expected 0 to 8",
        ),
        (
            {"tokens": np.zeros((3, 4), int), "logits": np.zeros((1, 4, 0)), "rows": np.array([0])},
            r"logits: got shape \[1, 4, 0\], expected at least 1 along each axis",
        ),
        ({"log_probs": np.zeros((0, 4)), "mask": np.zeros((0, 4))}, "expected at least 1 along each axis"),
        ({"log_probs": np.zeros((3, 0)), "mask": np.zeros((3, 0))}, "expected at least 1 along each axis"),
        ({"metric/a\x1b[31m": np.zeros(())}, "expected a printable name"),
        ({"header": '{"kljax_parity": 1, "eos_id": "x"}'}, "header.eos_id: got 'x', expected a token id"),
        ({"header": '{"kljax_parity": 1, "pad_id": Infinity}'}, "header.pad_id: got inf, expected a token id"),
        ({"header": "[1]"}, "header: got list"),
        ({"header": "{"}, "header: is not JSON"),
        ({"header": "{}"}, "header.kljax_parity: got None, expected 1"),
        ({"header": '{"kljax_parity": 1, "sytem": "verl"}'}, r"header.sytem: no such key.*did you mean 'system'\?"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_malformed_fields_are_named(tmp_path: pathlib.Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DumpError, match=message):
        open_dump(save(tmp_path / "dump.npz", **changes))


def test_files_without_dumps_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "dump"
    for content in (b"", b"text", b"\x80\x04\x95pickle", b"\x02\0\0\0\0\0\0\0[]", b"PK\x03\x04 no archive"):
        path.write_bytes(content)
        with pytest.raises(DumpError, match=r"cannot be read|neither an \.npz nor a safetensors file"):
            open_dump(path)
    with pytest.raises(DumpError, match="cannot be read"):
        open_dump(tmp_path / "absent")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("log_probs.npy", "no array")
    with pytest.raises(DumpError, match="log_probs: is not a NumPy array"):
        open_dump(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("log_probs.npy", b"\x93NUMPY\x01\x00\x76\x00" + b"[" * 118)
    with pytest.raises(DumpError, match="log_probs: is not a NumPy array: its header cannot be parsed"):
        open_dump(path)
    with zipfile.ZipFile(path, "w") as archive:
        member = io.BytesIO()
        np.save(member, np.zeros((3, 4)))
        archive.writestr("log_probs.npy", member.getvalue()[:-8])
    with pytest.raises(DumpError, match="log_probs: 88 bytes for shape"):
        open_dump(path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 96]}, "do not hold shape"),
        ({"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 1 << 40]}, "do not hold shape"),
        ({"dtype": "F8_E4M3", "shape": [3, 4], "data_offsets": [0, 12]}, "expected a shape, offsets and a dtype"),
        ({"dtype": "F32"}, "expected a shape, offsets and a dtype"),
        (7, "expected a shape, offsets and a dtype"),
        ({"dtype": "F32", "shape": "34", "data_offsets": [0, 48]}, "expected a shape, offsets and a dtype"),
        ({"dtype": "F32", "shape": [3.9, 4.9], "data_offsets": [0, 48]}, "expected a shape, offsets and a dtype"),
        (
            {"dtype": "F32", "shape": [float("inf"), 4], "data_offsets": [0, 48]},
            "expected a shape, offsets and a dtype",
        ),
        ({"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]}, "expected at least 1 along each axis"),
    ],
)
def test_malformed_safetensors(tmp_path: pathlib.Path, entry: Any, message: str) -> None:
    header = json.dumps({"__metadata__": {"header": '{"kljax_parity": 1}'}, "log_probs": entry}).encode()
    (tmp_path / "dump").write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    with pytest.raises(DumpError, match=f"log_probs: .*{message}"):
        open_dump(tmp_path / "dump")
