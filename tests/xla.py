"""The flags that XLA is started with in tests, in their own process and in those that they start."""

import importlib.metadata
import os

# Tests compile many small programs and run each a few times: optimizing the code takes longer than it saves.
QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
# XLA aborts on a flag that it does not know, and releases from 0.11 on have no other way to compile fusions.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
# Flags of the caller that change how a CPU rounds; every process that a test starts takes them over.
ROUNDING = ("--xla_cpu_max_isa", "--xla_cpu_multi_thread_eigen", "--xla_cpu_experimental_ynn_fusion_type")
DEVICES = "--xla_force_host_platform_device_count"


def given() -> dict[str, str]:
    """Returns the flags of `XLA_FLAGS` by name."""
    return dict(flag.partition("=")[::2] for flag in os.environ.get("XLA_FLAGS", "").split())


def flags(devices: int) -> str:
    """Returns the value of `XLA_FLAGS` for quick compilation and this many CPU devices.

    The instruction set and the threads of this process's `XLA_FLAGS` are kept.
    """
    remaining = [f"{name}={value}" for name, value in given().items() if name in ROUNDING]
    return " ".join([f"{DEVICES}={devices}", *QUICK, *remaining])


def devices() -> int:
    """Returns the number of CPU devices of the test process: 8, or `KLJAX_TEST_DEVICES` for tests without a mesh."""
    return int(os.environ.get("KLJAX_TEST_DEVICES", "8"))


def instruction_set() -> str | None:
    """Returns the largest instruction set that XLA may use, if `XLA_FLAGS` names one."""
    return given().get("--xla_cpu_max_isa")


def multiplies_with_eigen() -> bool:
    """Says whether matrix products are those of Eigen, whose plans have buffers of their own."""
    return given().get("--xla_cpu_experimental_ynn_fusion_type") == ""


def compiles_float16() -> bool:
    """Says whether XLA compiles float16 for the instruction set that was asked for: only with F16C, as from AVX2 on."""
    return instruction_set() not in ("SSE4_2", "AVX")
