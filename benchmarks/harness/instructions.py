"""Instruction sets that contenders are limited to, so that one machine shows what lesser ones would measure.

The limit of XLA holds for the code that it generates. The matrix products of jaxlib choose their own instructions.
"""

import os
import pathlib
import platform
from collections.abc import Sequence

FLAGS = {"SSE4_2": "sse4_2", "AVX": "avx", "AVX2": "avx2", "AVX512": "avx512f"}
"""By the name of XLA, the flag in /proc/cpuinfo of a processor that has the instruction set."""
TITLES = {"avx2": "AVX2", "avx512": "AVX-512"}
"""Of the instruction sets that all contenders can be limited to, by the lower-case name of XLA."""


def title(name: str) -> str:
    """Returns the title of an instruction set, after a comma; nothing for all of the machine's."""
    return f", {TITLES[name]}" if name else ""


def settings(name: str) -> dict[str, str]:
    """Returns the environment variables of a limited process, for XLA and for PyTorch, oneDNN and MKL."""
    if not name:
        return {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa={name.upper()}".strip()
    onednn = {"avx512": "AVX512_CORE"}.get(name, name.upper())
    pytorch = {"ATEN_CPU_CAPABILITY": name, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": name.upper()}
    return {"XLA_FLAGS": flags, **pytorch}


def lacking(names: Sequence[str]) -> list[str]:
    """Lists the instruction sets, in letters of either case, that this processor lacks."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return [] if platform.machine().lower() in ("x86_64", "amd64") else list(names)
    flags = set(cpuinfo.read_text().split())
    return [name for name in names if FLAGS[name.upper()] not in flags]
