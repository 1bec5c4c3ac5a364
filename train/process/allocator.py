"""The memory that the C library keeps for the next arrays of a CPU."""

import ctypes
import os

from train.config.accelerator import CPU
from train.process.xla_flags import used_accelerator

M_TOP_PAD = -2
"""The number of `mallopt` for what a heap gets from the system, and keeps, beyond what is asked for."""
KEPT_BYTES = 64 * 2**20


def keep_freed_memory() -> bool:
    """Lets each heap of this process keep some freed memory, if JAX uses CPUs; returns whether the C library can.

    glibc keeps 128 KiB. A program frees more at its end, and the next one gets new pages, which the system fills with
    zeros at their first use: for a small model that was a seventh of the CPU time.
    """
    if used_accelerator(os.environ) != CPU:
        return False
    # macOS and musl have no such function.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(M_TOP_PAD, KEPT_BYTES))
