"""The flags that XLA is started with in tests, in their own process and in those that they start."""

import importlib.metadata

# Tests compile many small programs and run each a few times: optimizing the code takes longer than it saves.
QUICK = [
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
]
# XLA aborts on a flag that it does not know, and releases from 0.11 on have no other way to compile fusions.
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK.append("--xla_cpu_use_fusion_emitters=false")


def flags(devices: int) -> str:
    """Returns the value of `XLA_FLAGS` for quick compilation and this many CPU devices."""
    return " ".join([f"--xla_force_host_platform_device_count={devices}", *QUICK])
