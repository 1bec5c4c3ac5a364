"""Compiles lowered programs for devices that are not here, and keeps what their compiler reports."""

import dataclasses
import pathlib
import re
import tempfile
import time
from typing import Any

import jax

from train.distributed.compile_cache import compiled_anew

# The TPU's compiler reports in one of two forms that a program does not fit, with the memory of temporaries or of all.
_TOO_LARGE = re.compile(r"(?:temporaries \(|Used )([\d.]+)([KMGT])\)? (?:exceeds|of)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# Compiles in a fraction of the time. Collectives stay the same, temporary memory grows a little.
LEAST_EFFORT = -1.0


class DoesNotFitError(Exception):
    """The compiler refuses a program that needs more memory than the device has.

    Attributes:
      needed: bytes, as the compiler says.
    """

    def __init__(self, needed: int) -> None:
        self.needed = needed
        super().__init__(f"the program needs {needed / 2**30:.2f} GiB")


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled program, and the memory that it takes on one device.

    Attributes:
      text: the optimised HLO.
      assignment: the compiler's buffer assignment.
      arguments, results, aliased, temporary: bytes; results that take the memory of a donated argument are aliased and
        count in both.
      seconds: time to compile.
    """

    text: str
    assignment: str
    arguments: int
    results: int
    aliased: int
    temporary: int
    seconds: float

    @property
    def needed(self) -> int:
        """Returns the bytes that are allocated while the program runs."""
        return self.arguments + self.results - self.aliased + self.temporary

    def write(self, directory: pathlib.Path, name: str) -> None:
        """Writes the program and its buffer assignment as `NAME.hlo.txt` and `NAME.buffers.txt`."""
        (directory / f"{name}.hlo.txt").write_text(self.text)
        (directory / f"{name}.buffers.txt").write_text(self.assignment)


def compile_program(lowered: jax.stages.Lowered, *, effort: float | None = None) -> CompiledProgram:
    """Compiles a program.

    Args:
      lowered: the program.
      effort: of the compiler, from -1 to 1; None leaves its default.

    Raises:
      DoesNotFitError: it needs more memory than the device has.
    """
    with tempfile.TemporaryDirectory() as dump:
        options: dict[str, Any] = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True}
        # Later releases have no such option.
        if effort is not None and jax.__version_info__ < (0, 11):
            options["exec_time_optimization_effort"] = effort
        start = time.perf_counter()
        try:
            # The compiler says how it assigned buffers where it compiles, and a program that was kept does not.
            with compiled_anew():
                compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            needed = needed_memory(str(error))
            if needed is None:
                raise
            raise DoesNotFitError(needed) from error
        seconds = time.perf_counter() - start
        text = _text_of(compiled, pathlib.Path(dump))
        assignment = _largest(pathlib.Path(dump), "*-buffer-assignment.txt")
    memory = compiled.memory_analysis()
    assert memory is not None
    sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes)
    return CompiledProgram(
        text,
        assignment,
        *sizes,
        temporary=memory.temp_size_in_bytes,
        seconds=seconds,
    )


def needed_memory(message: str) -> int | None:
    """Reads the memory that a program needs from an error of the compiler; None if it is another error."""
    match = _TOO_LARGE.search(message)
    return round(float(match[1]) * _UNITS[match[2]]) if match else None


def _text_of(compiled: jax.stages.Compiled, dump: pathlib.Path) -> str:
    """Returns the compiled program, from the dump where JAX cannot print it."""
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        printed = _largest(dump, "*after_codegen.txt")
        if not printed:
            raise
        return printed


def _largest(dump: pathlib.Path, pattern: str) -> str:
    """Reads the largest file, which is that of the program; JAX compiles constants too."""
    by_size = sorted(dump.glob(pattern), key=lambda path: path.stat().st_size)
    return by_size[-1].read_text() if by_size else ""
