"""The time of a compiled program in the order of its schedule: its kernels, and what exchanges leave exposed."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from train.models.devices import Device
from train.plan.compiler.collectives import ASYNCHRONOUS_STEP, Collective, channel, read_collective, sent
from train.plan.compiler.flops import kernel_flops
from train.plan.compiler.hlo import CONTROL, HloModule, Instruction, trip_count
from train.plan.compiler.traffic import Kernels


@dataclasses.dataclass(frozen=True)
class ProgramSeconds:
    """The least time of a program on one device, at published rates.

    Attributes:
      kernels: each takes its operations or its bytes, whichever takes longer, and one runs after the other.
      exposed: what the device waits for exchanges that no kernel hides.
    """

    kernels: float = 0.0
    exposed: float = 0.0

    @property
    def total(self) -> float:
        """Returns the sum."""
        return self.kernels + self.exposed

    def __add__(self, other: "ProgramSeconds") -> "ProgramSeconds":
        """Adds the time of another program."""
        return ProgramSeconds(self.kernels + other.kernels, self.exposed + other.exposed)

    def __mul__(self, times: float) -> "ProgramSeconds":
        """Repeats the program."""
        return ProgramSeconds(self.kernels * times, self.exposed * times)


def schedule_seconds(
    module: HloModule, device: Device, islands: Sequence[int], expected: Mapping[str, float] | None = None
) -> ProgramSeconds:
    """Walks the schedule of a program.

    Exchanges take the links one after the other, each for its bytes over their rate. A synchronous one is exposed; of
    an asynchronous one what is left when the program waits for it. Of a conditional each branch counts as taken.

    Args:
      module: the program.
      device: its rates.
      islands: see `collectives.sent`.
      expected: iterations of loops that depend on data, see `hlo.trip_count`.
    """
    kernels = Kernels(module)

    def exchange_seconds(collective: Collective) -> float:
        moved = sent(collective, islands)
        return moved.links / device.links + moved.network / device.network

    def kernel_seconds(instruction: Instruction, shapes: Mapping[str, str]) -> float:
        moved = kernels.moved(instruction, shapes)
        return max(kernel_flops(module, instruction, shapes) / device.flops, moved / device.bandwidth)

    def control_seconds(instruction: Instruction) -> ProgramSeconds:
        total = ProgramSeconds()
        for _, name in instruction.computations:
            if name in module.computations:
                total += of_computation(name)
        return total * (trip_count(module, instruction, expected) if instruction.opcode == "while" else 1)

    @functools.cache
    def of_computation(name: str) -> ProgramSeconds:
        instructions = module.computations[name]
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        collectives_of = [_collectives_of(module, instruction) for instruction in instructions]
        waits = _waits(instructions, collectives_of)
        total = ProgramSeconds()
        links_free = 0.0
        ends: dict[str, float] = {}
        for number, (instruction, collectives) in enumerate(zip(instructions, collectives_of, strict=True)):
            if instruction.opcode in CONTROL:
                total += control_seconds(instruction)
                continue
            for key, collective in collectives.items():
                if key not in ends:
                    links_free = max(links_free, total.total) + exchange_seconds(collective)
                    ends[key] = links_free
            # A synchronous exchange moves in memory what it sends, at a higher rate.
            if not collectives or instruction.opcode == "fusion":
                total += ProgramSeconds(kernels=kernel_seconds(instruction, shapes))
            for key in waits.get(number, ()):
                total += ProgramSeconds(exposed=max(0.0, ends.get(key, 0.0) - total.total))
        return total

    return of_computation(module.entry)


def _collectives_of(module: HloModule, instruction: Instruction) -> dict[str, Collective]:
    """Returns the collectives that an instruction is, starts, or has in its fusion, by a name for their parts."""
    own = read_collective(instruction)
    if own is not None:
        return {instruction.name: own}
    called = instruction.called("calls") if instruction.opcode == "fusion" else ""
    found = {}
    for part in module.computations.get(called, ()):
        collective = read_collective(part)
        if collective is not None:
            steps = f"{collective.kind} {collective.shape} {channel(part)}"
            found[steps if ASYNCHRONOUS_STEP in called else instruction.name] = collective
    return found


def _waits(
    instructions: Sequence[Instruction], collectives_of: Sequence[Mapping[str, Collective]]
) -> dict[int, list[str]]:
    """Returns the exchanges for which the program waits at each instruction.

    It waits for an asynchronous one at its "-done", or at the last fusion with a step of it; for another at once.
    """
    last: dict[str, int] = {}
    for number, (instruction, collectives) in enumerate(zip(instructions, collectives_of, strict=True)):
        last |= dict.fromkeys(collectives, number)
        if instruction.opcode.endswith("-done") and instruction.operands and instruction.operands[0] in last:
            last[instruction.operands[0]] = number
    # What nobody waits for here, the next iteration of a loop may wait for.
    starts = {x.name: n for n, x in enumerate(instructions) if x.opcode.endswith("-start") or x.opcode == "send"}
    waits: dict[int, list[str]] = {}
    for key, number in last.items():
        if starts.get(key) != number:
            waits.setdefault(number, []).append(key)
    return waits
