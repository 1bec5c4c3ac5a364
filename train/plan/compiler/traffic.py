"""Bytes that a compiled program reads from and writes to the main memory of a device, with the iterations of its loops.

Each kernel reads its operands and writes its results once. Slices of an array count instead of the array where a kernel
reads or writes only these, as a loop over stacked layers does.
"""

import functools
import re
from collections.abc import Mapping

from train.plan.compiler.hlo import CONTROL, HloModule, Instruction, array_bytes, executions

_FREE = CONTROL | {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "send", "recv",
}  # fmt: skip
_NO_KERNEL = re.compile(r'custom_call_target="(?:AllocateBuffer|AssumeGatherIndicesInBound|Sharding)"')
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Kernels that write in place, with the operand that they write."""
# Space 0, the default, is the main memory. Others are on the chip, or in the host.
_ELSEWHERE = re.compile(r"\w+\[[\d,]*\]\{[^{}]*S\([1-9]\d*\)[^{}]*\}")


def count_traffic(module: HloModule, expected: Mapping[str, float] | None = None) -> float:
    """Counts the bytes of the main memory that one device reads and writes in one run.

    Args:
      module: the program.
      expected: iterations of loops that depend on data, see `hlo.trip_count`.
    """
    kernels = _Kernels(module)
    total = 0.0
    for name, times in executions(module, kernels=False, expected=expected).items():
        if times:
            shapes = {instruction.name: instruction.shape for instruction in module.computations[name]}
            total += times * sum(kernels.moved(instruction, shapes) for instruction in module.computations[name])
    return total


def memory_bytes(shape: str) -> int:
    """Counts the bytes of the arrays of a type that lie in the main memory."""
    return sum(array_bytes(_ELSEWHERE.sub("", shape)))


class _Kernels:
    """The kernels of a program; what a fusion reads and writes is found once."""

    def __init__(self, module: HloModule) -> None:
        self._module = module
        self.read, self.written = functools.cache(self._read), functools.cache(self._written)

    def moved(self, instruction: Instruction, shapes: Mapping[str, str]) -> int:
        """Counts the bytes of one execution of an instruction outside kernels."""
        opcode, shape = instruction.opcode, instruction.shape
        if opcode in _FREE or opcode.endswith("-done") or _NO_KERNEL.search(instruction.line):
            return 0
        operands = [shapes.get(name, "") for name in instruction.operands]
        if opcode in _SLICES:
            return 2 * memory_bytes(shape)
        if opcode in _UPDATES:
            return 2 * memory_bytes(operands[_UPDATES[opcode]])
        if opcode == "copy-start":
            return memory_bytes(shape)
        called = instruction.called("calls")
        if opcode == "fusion" and called in self._module.computations:
            read = [(memory_bytes(operand), self.read(called, number)) for number, operand in enumerate(operands)]
            total = sum(size if part is None else min(size, part) for size, part in read)
            return total + min(memory_bytes(shape), self.written(called))
        return sum(map(memory_bytes, operands)) + memory_bytes(shape)

    def _read(self, computation: str, number: int) -> int | None:
        """Counts the bytes that a kernel reads of a parameter; None: all of it."""
        instructions = self._module.computations[computation]
        names = {
            instruction.name
            for instruction in instructions
            if instruction.opcode == "parameter" and f"parameter({number})" in instruction.line
        }
        total = 0
        for instruction in instructions:
            places = [position for position, name in enumerate(instruction.operands) if name in names]
            if not places or instruction.opcode == "parameter":
                continue
            if instruction.opcode == "bitcast":
                names.add(instruction.name)
            elif instruction.opcode in _SLICES and places == [0]:
                total += sum(array_bytes(instruction.shape))
            elif instruction.opcode in _UPDATES and places == [0]:
                continue
            elif instruction.opcode == "fusion" and instruction.called("calls") in self._module.computations:
                inner = [self.read(instruction.called("calls"), position) for position in places]
                if None in inner:
                    return None
                total += sum(size for size in inner if size is not None)
            else:
                return None
        return total

    def _written(self, computation: str) -> int:
        """Counts the bytes that a kernel writes: its results, or the part of them that it updates."""
        instructions = self._module.computations[computation]
        by_name = {instruction.name: instruction for instruction in instructions}
        root = next(
            instruction for instruction in reversed(instructions) if instruction.line.lstrip().startswith("ROOT")
        )

        def source(result: Instruction) -> Instruction:
            return source(by_name[result.operands[0]]) if result.opcode == "bitcast" else result

        root = source(root)
        total = 0
        for instruction in [source(by_name[name]) for name in root.operands] if root.opcode == "tuple" else [root]:
            if instruction.opcode in _UPDATES:
                total += sum(array_bytes(by_name[instruction.operands[_UPDATES[instruction.opcode]]].shape))
                continue
            called = instruction.called("calls") if instruction.opcode == "fusion" else ""
            known = called in self._module.computations
            total += self.written(called) if known else sum(array_bytes(instruction.shape))
        return total
