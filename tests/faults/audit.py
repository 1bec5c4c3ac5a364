"""Files and functions that `python -m kljax audit` is given, damaged or senseless."""

import io
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np

from kljax.__main__ import main
from kljax.tools.audit import _files
from tests.faults.case import Fault, refused, run_command

SHAPE = (3, 2, 4)
BATCH = {name: np.full((3, 5), -1.0) for name in ("log_probs", "ref_log_probs", "rollout_log_probs")}
BATCH["mask"] = np.ones((3, 5), bool)


def npy(array: np.ndarray) -> bytes:
    """Writes an array to bytes."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header(shape: tuple[int, ...], descr: str = "<f8") -> bytes:
    """Writes the header of an array of any size."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue()


def archive(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Writes a zip file."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written:
        for name, content in members.items():
            written.writestr(f"{name}.npy", content)
    return file.getvalue()


def batch(**changes: np.ndarray | bytes) -> dict[str, bytes]:
    """Lists the members of a batch with some of them replaced."""
    arrays = {**BATCH, **changes}
    return {name: array if isinstance(array, bytes) else npy(array) for name, array in arrays.items()}


def audited(directory: Path, *arguments: str, words: tuple[str, ...]) -> str:
    """Audits and expects a refusal with the words."""
    report = directory / "report"
    outcome = refused(
        run_command(main, "audit", *arguments, "--bootstrap", "10", "--out", str(report)), "error:", *words
    )
    return "silent" if outcome == "refused" and report.exists() else outcome


def from_batch(content: bytes, *words: str) -> Callable[[Path], str]:
    """Makes a fault of a batch file with these bytes."""

    def run(directory: Path) -> str:
        path = directory / "batch.npz"
        path.write_bytes(content)
        return audited(directory, "--batch", str(path), words=("--batch", *words))

    return run


def example(word: str, *options: str) -> Callable[[Path], str]:
    """Makes a fault of the options of the example."""
    return lambda directory: audited(directory, "--example", *options, words=(word,))


def values(name: str, array: np.ndarray, *words: str, options: tuple[str, ...] = ()) -> Callable[[Path], str]:
    """Makes a fault of a batch with another array."""

    def run(directory: Path) -> str:
        path = directory / "batch.npz"
        np.savez(path, **{**BATCH, name: array})
        return audited(directory, "--batch", str(path), *options, words=words)

    return run


def logits(content: bytes, *words: str) -> Callable[[Path], str]:
    """Makes a fault of a file of logits with these bytes."""

    def run(directory: Path) -> str:
        (directory / "policy.npy").write_bytes(content)
        np.save(directory / "ref.npy", np.zeros(SHAPE))
        paths = (str(directory / "policy.npy"), "--ref-logits", str(directory / "ref.npy"))
        return audited(directory, "--logits", *paths, words=words)

    return run


def function(body: str, *words: str) -> Callable[[Path], str]:
    """Makes a fault of a function of the user, in a module whose import it may end."""

    def run(directory: Path) -> str:
        (directory / "tokens.npy").write_bytes(npy(np.zeros((3, 2), int)))
        (directory / "functions.py").write_text(body)
        sys.path.insert(0, str(directory))
        try:
            paths = ("--tokens", str(directory / "tokens.npy"), "--apply", "functions:logits")
            return audited(directory, "--checkpoints", "a", "b", *paths, words=("--apply", *words))
        finally:
            sys.path.remove(str(directory))
            sys.modules.pop("functions", None)

    return run


def encrypted() -> bytes:
    """Sets the flag of encryption on the log-probs, in both headers of the member."""
    content = bytearray(archive(batch()))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.index(signature)
        flags = struct.unpack_from("<H", content, at + offset)[0]
        struct.pack_into("<H", content, at + offset, flags | 1)
    return bytes(content)


def wrong_sum() -> bytes:
    """Changes a number without its checksum."""
    content = bytearray(archive(batch()))
    content[content.index(struct.pack("<d", -1.0))] ^= 1
    return bytes(content)


def bomb(directory: Path) -> str:
    """Compresses zeros beyond the limit, which is lowered for it."""
    content = archive(batch(log_probs=header((1 << 10, 135)) + bytes(1080 << 10)), zipfile.ZIP_DEFLATED)
    with mock.patch.object(_files, "MAX_COMPRESSED", 1 << 20):
        return from_batch(content, "log_probs", "bytes are compressed, expected at most 1,048,576")(directory)


def compared(content: bytes, *words: str) -> Callable[[Path], str]:
    """Makes a fault of a dump for the parity command."""

    def run(directory: Path) -> str:
        (directory / "dump").write_bytes(content)
        return refused(run_command(main, "parity", str(directory / "dump")), "error:", *words)

    return run


def dated(dtype: str) -> np.ndarray:
    """Makes a batch's array of another kind of values."""
    return np.zeros((3, 5), dtype)


HUGE = (1 << 50, 1)
POSITIVE = np.where(np.arange(15).reshape(3, 5) == 7, 50.0, -1.0)
CASES = {
    "no zip file": from_batch(b"PK\x03\x04" + bytes(40), "cannot be read"),
    "a zip file that is cut off": from_batch(archive(batch())[:-200], "cannot be read"),
    "a wrong checksum": from_batch(wrong_sum(), "log_probs", "Bad CRC-32"),
    "an encrypted array": from_batch(encrypted(), "log_probs", "is encrypted"),
    "broken compression": from_batch(
        archive(batch(), zipfile.ZIP_DEFLATED).replace(b"\x9b\xec", b"\xff\xff"), "cannot be read"
    ),
    "a header of 9 PB": from_batch(archive(batch(log_probs=header(HUGE) + bytes(8))), "log_probs: 8 bytes for shape"),
    "a header of a negative shape": from_batch(archive(batch(log_probs=header((-3, 5)))), "log_probs"),
    "no header": from_batch(archive(batch(log_probs=b"no array")), "log_probs: cannot be read as an array"),
    "a header that is no mapping": from_batch(
        archive(batch(log_probs=header((3, 5)).replace(b"{", b"["))), "log_probs: cannot be read as an array"
    ),
    "compressed zeros": bomb,
    "an array of Python objects": from_batch(archive(batch(log_probs=header((3, 5), "|O"))), "log_probs has dtype"),
    "complex log-probs": values("log_probs", dated("c16"), "log_probs has dtype complex128, expected numbers"),
    "dates as log-probs": values("log_probs", dated("M8[s]"), "log_probs has dtype datetime64"),
    "durations as log-probs": values("ref_log_probs", dated("m8[s]"), "ref_log_probs has dtype timedelta64"),
    "structured log-probs": values("log_probs", dated("f8,f8"), "log_probs has dtype [('f0'"),
    "texts as log-probs": values("log_probs", dated("U3"), "log_probs has dtype <U3"),
    "a complex mask": values("mask", dated("c16"), "mask has dtype complex128"),
    "a log-prob of 50": values("log_probs", POSITIVE, "log_probs: got 50 at (row, token) (1, 2), expected log-probs"),
    "a log-prob of the sampler of 50": values("rollout_log_probs", POSITIVE, "got 50 at (row, token) (1, 2)"),
    "NaN as a log-prob": values("log_probs", np.full((3, 5), np.nan), "log_probs: 15 unmasked numbers are not finite"),
    "-inf as a log-prob": values("ref_log_probs", np.full((3, 5), -np.inf), "numbers are not finite"),
    "a mask of 2": values("mask", np.full((3, 5), 2), "mask: got 2 at (0, 0), expected 0 or 1"),
    "a mask of NaN": values("mask", np.full((3, 5), np.nan), "mask: got nan at (0, 0), expected 0 or 1"),
    "an exact KL below 0": values(
        "kl", np.full((3, 5), -1.0), "kl: got -1 at", "at least 0", options=("--kl-is", "exact")
    ),
    "log-probs of -1e38": values("ref_log_probs", np.full((3, 5), -1e38), "expected at most 700"),
    "draws of a batch": values("log_probs", BATCH["log_probs"], "--draws: a batch", options=("--draws", "-1")),
    "an example of terabytes": example("--rows: 1000000000 rows", "--rows", "1000000000"),
    "a seed of 20 digits": example("--seed: got 99999999999999999999", "--seed", "99999999999999999999"),
    "draws below 0": example("draws", "--draws", "-1", "--rows", "2"),
    "an example with a KL of 1e30": example("kl", "--kl", "1e30", "--rows", "2"),
    "other shapes": values("ref_log_probs", np.zeros((3, 4)), "shapes differ"),
    "a mask of nothing": values("mask", np.zeros((3, 5), bool), "no position is unmasked"),
    "log-probs without axes": values("log_probs", np.array(-1.0), "shapes differ"),
    "logits whose header lies": logits(header(HUGE) + bytes(64), "--logits", "cannot be read as a NumPy file"),
    "logits cut off": logits(npy(np.zeros(SHAPE))[:-8], "--logits", "cannot be read as a NumPy file"),
    "an empty file of logits": logits(b"", "--logits", "cannot be read as a NumPy file"),
    "complex logits": logits(npy(np.zeros(SHAPE, complex)), "--logits", "has dtype complex128"),
    "logits that are NaN": logits(npy(np.full(SHAPE, np.nan)), "logits: NaN"),
    "logits that are +inf": logits(npy(np.full(SHAPE, np.inf)), "logits: NaN"),
    "a directory as a file": lambda directory: audited(
        directory, "--batch", str(directory), words=("--batch", "cannot be read")
    ),
    "a module that exits": function("raise SystemExit(0)", "functions:logits", "SystemExit: 0"),
    "a module that fails": function("1 / 0", "functions:logits", "ZeroDivisionError"),
}
DUMPS = {
    "an encrypted dump": compared(encrypted(), "is not a NumPy array", "encrypted"),
    "a dump of other bytes": compared(archive({"log_probs": b"no array"}), "is not a NumPy array"),
    "a dump whose header is nested too deeply": compared(
        (100_000).to_bytes(8, "little") + b"[" * 100_000, "is neither an .npz nor a safetensors file"
    ),
}
FAULTS = [
    *(Fault("audit files", name, run) for name, run in CASES.items()),
    *(Fault("parity files", name, run) for name, run in DUMPS.items()),
]
