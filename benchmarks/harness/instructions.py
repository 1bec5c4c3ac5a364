"""Instruction sets that contenders are limited to, so that one machine shows what lesser ones would measure.

The limit of XLA holds for the code that it generates. The matrix products of jaxlib choose their own instructions.
"""

import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Instructions(NamedTuple):
    """An instruction set.

    Attributes:
      title: for tables.
      settings: environment variables that limit PyTorch's own kernels, oneDNN and MKL.
    """

    title: str
    settings: Mapping[str, str]


def _instructions(title: str, onednn: str, mkl: str) -> Instructions:
    pytorch = {"ATEN_CPU_CAPABILITY": mkl.lower(), "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}
    return Instructions(title, pytorch)


FLAGS = {"SSE4_2": "sse4_2", "AVX": "avx", "AVX2": "avx2", "AVX512": "avx512f"}
"""By the name of XLA, the flag in /proc/cpuinfo of a processor that has the instruction set."""


# By the lower-case name that XLA gives them.
KNOWN: Mapping[str, Instructions] = {
    "avx2": _instructions("AVX2", "AVX2", "AVX2"),
    "avx512": _instructions("AVX-512", "AVX512_CORE", "AVX512"),
}


def title(name: str) -> str:
    """Returns the title of an instruction set, after a comma; nothing for all of the machine's."""
    return f", {KNOWN[name].title}" if name else ""


def settings(name: str) -> dict[str, str]:
    """Returns the environment variables of a limited process; none for all instructions of the machine."""
    if not name:
        return {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={name.upper()}".strip()
    return {"XLA_FLAGS": flags, **KNOWN[name].settings}


def lacking(names: Sequence[str]) -> list[str]:
    """Lists the instruction sets, in letters of either case, that this processor lacks."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return [] if platform.machine().lower() in ("x86_64", "amd64") else list(names)
    flags = set(cpuinfo.read_text().split())
    return [name for name in names if FLAGS[name.upper()] not in flags]
