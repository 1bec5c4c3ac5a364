"""Bytes that a compiled program reads from and writes to the main memory of a device, with the iterations of its loops.

Each kernel reads its operands and writes its results once. Slices of an array count instead of the array where a kernel
reads or writes only these, as a loop over stacked layers does.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence

from train.plan.compiler.hlo import CONTROL, HloModule, Instruction, array_bytes, array_sizes, executions

_FREE = CONTROL | {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "send", "recv",
}  # fmt: skip
_NO_KERNEL = re.compile(r'custom_call_target="(?:AllocateBuffer|AssumeGatherIndicesInBound|Sharding)"')
_FUSIONS = ("fusion", "fusion-start")
_SLICES = ("dynamic-slice", "slice", "gather")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
"""Kernels that write in place, with the operand that they write."""
_IN_PLACE = re.compile(r"\{\d*\}: \((\d+), \{\}")
"""An operand of a custom call whose memory a result has."""
_WHOLE = {
    "dot", "convolution", "custom-call", "reduce", "reduce-window", "scatter", "sort", "while", "call", "conditional",
}  # fmt: skip
"""Operations that read their operands whole, however little of their result is read."""
# Space 0, the default, is the main memory. Others are on the chip, or in the host.
_ELSEWHERE = re.compile(r"\w+\[[\d,]*\]\{[^{}]*S\([1-9]\d*\)[^{}]*\}")


def count_traffic(module: HloModule, expected: Mapping[str, float] | None = None) -> float:
    """Counts the bytes of the main memory that one device reads and writes in one run.

    Args:
      module: the program.
      expected: iterations of loops that depend on data, see `hlo.trip_count`.
    """
    kernels = Kernels(module)
    total = 0.0
    for name, times in executions(module, kernels=False, expected=expected).items():
        if times:
            shapes = {instruction.name: instruction.shape for instruction in module.computations[name]}
            total += times * sum(kernels.moved(instruction, shapes) for instruction in module.computations[name])
    return total


def memory_bytes(shape: str) -> int:
    """Counts the bytes of the arrays of a type that lie in the main memory."""
    return sum(array_bytes(_ELSEWHERE.sub("", shape)))


class Kernels:
    """The kernels of a program; what a fusion reads and writes is found once."""

    def __init__(self, module: HloModule) -> None:
        self._module = module
        self.read = functools.cache(self._read)
        self.written = functools.cache(self._written)
        self.shares = functools.cache(self._shares)

    def moved(self, instruction: Instruction, shapes: Mapping[str, str]) -> int:
        """Counts the bytes of one execution of an instruction outside kernels."""
        opcode = instruction.opcode
        shape = instruction.shape
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
        if opcode in _FUSIONS and called in self._module.computations:
            read = sum(memory_bytes(x) * self.read(called, number) for number, x in enumerate(operands))
            return round(read) + min(memory_bytes(shape), self.written(called))
        total = sum(map(memory_bytes, operands)) + memory_bytes(shape)
        # Of an array that is written in its place, such as a column of a cache, the program does not say how much.
        _, _, aliases = instruction.line.partition("output_to_operand_aliasing=")
        for operand in _IN_PLACE.findall(aliases):
            total -= 2 * memory_bytes(operands[int(operand)])
        return total

    def _read(self, computation: str, number: int) -> float:
        """Returns the share of a parameter that a kernel reads."""
        for instruction in self._module.computations[computation]:
            if instruction.opcode == "parameter" and f"parameter({number})" in instruction.line:
                return self.shares(computation)[instruction.name]
        return 0.0

    def _shares(self, computation: str) -> Mapping[str, float]:
        """Returns the share of the elements of each value of a kernel that its results need.

        A value that is computed element by element needs as many as are needed of it, so that a gather of a converted
        table reads the rows that it takes.
        """
        instructions = self._module.computations[computation]
        counts = {x.name: sum(math.prod(sizes) for _, sizes in array_sizes(x.shape)) for x in instructions}
        shares = dict.fromkeys(counts, 0.0) | {_root(instructions).name: 1.0}
        for instruction in reversed(instructions):
            elements = shares[instruction.name] * counts[instruction.name]
            called = instruction.called("calls")
            for place, operand in enumerate(instruction.operands):
                if not elements or not counts.get(operand) or (instruction.opcode in _UPDATES and place == 0):
                    continue
                if instruction.opcode in _FUSIONS and called in self._module.computations:
                    share = self.read(called, place)
                else:
                    share = 1.0 if instruction.opcode in _WHOLE else elements / counts[operand]
                shares[operand] = min(1.0, shares[operand] + share)
        return shares

    def _written(self, computation: str) -> int:
        """Counts the bytes that a kernel writes: its results, or the part of them that it updates."""
        instructions = self._module.computations[computation]
        by_name = {instruction.name: instruction for instruction in instructions}

        def source(result: Instruction) -> Instruction:
            return source(by_name[result.operands[0]]) if result.opcode == "bitcast" else result

        root = source(_root(instructions))
        total = 0
        for instruction in [source(by_name[name]) for name in root.operands] if root.opcode == "tuple" else [root]:
            if instruction.opcode in _UPDATES:
                total += sum(array_bytes(by_name[instruction.operands[_UPDATES[instruction.opcode]]].shape))
                continue
            called = instruction.called("calls") if instruction.opcode == "fusion" else ""
            known = called in self._module.computations
            total += self.written(called) if known else sum(array_bytes(instruction.shape))
        return total


def _root(instructions: Sequence[Instruction]) -> Instruction:
    return next(x for x in reversed(instructions) if x.line.lstrip().startswith("ROOT"))
