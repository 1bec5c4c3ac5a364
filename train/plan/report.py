"""The report of a plan: memory, work and exchanges of every program of a step on one device."""

import dataclasses
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from train.config.mesh import describe_mesh
from train.models.devices import GIB, Device
from train.models.sharding import device_bytes, host_bytes
from train.plan.compiler import hlo
from train.plan.compiler.buffers import Buffer, largest_buffers
from train.plan.compiler.collectives import bytes_by_kind, collectives, sent
from train.plan.compiler.flops import count_flops
from train.plan.compiler.lowering import CompiledProgram, DoesNotFitError, compile_program
from train.plan.compiler.schedule import ProgramSeconds, schedule_seconds
from train.plan.compiler.topology import Topology
from train.plan.compiler.traffic import count_traffic
from train.plan.compiler.work import Work
from train.plan.programs import AbstractRun, LoweredProgram

BUFFERS = 5
PROSE = 98
ORIGIN = 60
"""Characters of the origin of a buffer in a table."""
Table = tuple[str, list[str], list[list[str]]]


@dataclasses.dataclass(frozen=True)
class ProgramReport:
    """One program on one device.

    Attributes:
      name: see `LoweredProgram`.
      runs: executions in a step.
      beside: bytes of the arrays of the run that are no arguments.
      needed: bytes that the program allocates, arguments included; as the compiler says, if it refuses the program.
      refused: whether the compiler refuses the program.
      arguments, results, aliased, temporary: bytes.
      parts: bytes of known arrays among the temporary ones.
      work: of all executions in a step.
      seconds: the least, of all executions in a step.
      exchanged: executions and bytes in a step, by kind of collective.
      compile_seconds: time to compile.
      buffers: the largest temporary buffers.
    """

    name: str
    runs: int
    beside: int
    needed: int
    refused: bool = False
    arguments: int = 0
    results: int = 0
    aliased: int = 0
    temporary: int = 0
    parts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    work: Work = dataclasses.field(default_factory=Work)
    seconds: ProgramSeconds = dataclasses.field(default_factory=ProgramSeconds)
    exchanged: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    compile_seconds: float = 0.0
    buffers: Sequence[Buffer] = ()

    @property
    def total(self) -> int:
        """Returns the bytes in use while the program runs."""
        return self.beside + self.needed

    @property
    def others(self) -> int:
        """Returns the temporary bytes beside the known parts."""
        return max(self.temporary - sum(self.parts.values()), 0)


@dataclasses.dataclass(frozen=True)
class HardwareReport:
    """A config on a topology.

    Attributes:
      topology: the hardware.
      mesh: sizes of its axes, with slices.
      sampling: the layout for sampling, in words.
      remat: how `model.remat: auto` was resolved, in words; "" if the config names it.
      usable: bytes that a run can use on a device.
      resident: bytes on a device of the arrays that stay from step to step, by name.
      host: bytes of such arrays in the memory of the host, for one device, by name.
      programs: of one step.
    """

    topology: Topology
    mesh: Mapping[str, int]
    sampling: str
    remat: str
    usable: int
    resident: Mapping[str, int]
    host: Mapping[str, int]
    programs: Sequence[ProgramReport]

    @property
    def peak(self) -> ProgramReport:
        """Returns the program that needs the most."""
        return max(self.programs, key=lambda program: program.total)

    @property
    def fits(self) -> bool:
        """Whether every program fits beside what stays in memory."""
        return not any(program.refused for program in self.programs) and self.peak.total <= self.usable

    @property
    def seconds(self) -> float:
        """Returns the lower bound of the time of a step."""
        return sum(program.seconds.total for program in self.programs)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data, with the derived numbers."""
        device = self.topology.device
        peak = self.peak
        programs = []
        for program in self.programs:
            fields = dataclasses.asdict(program) | {"buffers": [buffer._asdict() for buffer in program.buffers]}
            programs.append(fields | {"total": program.total, "least_seconds": program.seconds.total})
        return {
            "topology": str(self.topology),
            "devices": self.topology.size,
            "device": dataclasses.asdict(device),
            "mesh": dict(self.mesh),
            "sampling": self.sampling,
            "remat": self.remat,
            "fits": self.fits,
            "usable": self.usable,
            "peak": {"program": peak.name, "bytes": peak.total},
            "resident": dict(self.resident),
            "host": dict(self.host),
            "least_seconds": self.seconds,
            "programs": programs,
        }


def report(
    run: AbstractRun,
    topology: Topology,
    mesh: Mapping[str, int],
    *,
    effort: float | None,
    keep: Path | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> HardwareReport:
    """Compiles and reads the programs of a step, one after the other.

    Args:
      run: the run on a mesh of the topology.
      topology: the hardware.
      mesh: sizes of the axes of the config.
      effort: of the compiler, see `compile_program`.
      keep: directory for the compiled programs and their buffer assignments, or None.
      tell: called with a line before each program, which can take minutes.
    """
    islands = [_island(device, topology) for device in run.context.mesh.devices.flat]
    tell(f"tracing the programs of a step for {topology} ...")
    programs = []
    for program in run.lower():
        tell(f"compiling {program.name} ...")
        programs.append(_read(program, topology.device, islands, effort, keep))
    resident, host = (
        {name: count(tree) for name, tree in run.resident().items()} for count in (device_bytes, host_bytes)
    )
    host = {name: size for name, size in host.items() if size}
    remat = "" if run.context.remat is None else run.context.remat.line
    usable = topology.device.usable
    return HardwareReport(topology, mesh, run.context.layout.line, remat, usable, resident, host, programs)


def _island(device: Any, topology: Topology) -> int:
    """Returns the slice of a TPU or the host of a GPU, within which devices are linked."""
    if topology.device.platform == "tpu":
        return int(getattr(device, "slice_index", None) or 0)
    return int(device.id) // topology.shape[1]


def _read(
    program: LoweredProgram, device: Device, islands: Sequence[int], effort: float | None, keep: Path | None
) -> ProgramReport:
    try:
        compiled = compile_program(program.lowered, effort=effort)
    except DoesNotFitError as error:
        return ProgramReport(program.name, program.runs, program.beside, error.needed, refused=True)
    if keep is not None:
        compiled.write(keep, program.name.replace(" ", "_"))
    module = hlo.parse(compiled.text)
    operations = collectives(module, program.loops)
    each = [sent(operation, islands) for operation in operations]
    work = Work(
        flops=count_flops(module, program.loops),
        memory=count_traffic(module, program.loops),
        links=sum(traffic.links for traffic in each),
        network=sum(traffic.network for traffic in each),
    )
    kinds = {
        kind: (times * program.runs, size * program.runs) for kind, (times, size) in bytes_by_kind(operations).items()
    }
    return ProgramReport(
        name=program.name,
        runs=program.runs,
        beside=program.beside,
        needed=compiled.needed,
        arguments=compiled.arguments,
        results=compiled.results,
        aliased=compiled.aliased,
        temporary=compiled.temporary,
        parts=_parts(program, compiled),
        work=work * program.runs,
        seconds=schedule_seconds(module, device, islands, program.loops) * program.runs,
        exchanged=kinds,
        compile_seconds=round(compiled.seconds, 1),
        buffers=largest_buffers(compiled.assignment, BUFFERS, compiled.text),
    )


def _parts(program: LoweredProgram, compiled: CompiledProgram) -> dict[str, int]:
    """Returns the known parts, at most what the compiler plans: it may reuse the memory of a donated argument."""
    left = compiled.temporary
    parts = {}
    for name, size in program.parts.items():
        parts[name] = min(size, left)
        left -= parts[name]
    return parts


def tables(hardware: HardwareReport) -> list[Table]:
    """Returns the tables of a report: title, header and rows."""
    return [_memory(hardware), _work(hardware), _exchanges(hardware), _buffers(hardware)]


def summary(hardware: HardwareReport) -> list[str]:
    """Returns the answer in a few lines: the layout, whether it fits, and the least time."""
    device = hardware.topology.device
    peak = hardware.peak
    needs = f"{peak.name} needs {_gib(peak.total)} GiB of {_gib(hardware.usable)} on a device"
    refused = [program for program in hardware.programs if program.refused]
    verdict = f"fits: {needs}" if hardware.fits else f"does not fit: {needs}"
    if refused:
        said = ", ".join(f"{_gib(program.needed)} GiB for {program.name}" for program in refused)
        verdict = f"does not fit: the compiler needs {said}; a device has {_gib(hardware.usable)}"
    resident, host = (
        ", ".join(f"{name} {_gib(size)}" for name, size in sizes.items())
        for sizes in (hardware.resident, hardware.host)
    )
    lines = [
        f"{hardware.topology}, {hardware.topology.size} devices, mesh {describe_mesh(hardware.mesh)}",
        hardware.sampling,
        *([hardware.remat] if hardware.remat else []),
        verdict,
    ]
    lines.append(f"from step to step a device holds, in GiB: {resident}")
    if host:
        lines.append(f"the memory of the host holds for each device, in GiB: {host}")
    if not refused:
        lines.append(
            f"a step takes at least {_number(hardware.seconds)} s at the published rates of {device.name}: kernels one "
            "after the other, exchanges behind them as scheduled, completions of full length, rewards that take no time"
        )
    return lines


def markdown(hardware: HardwareReport) -> str:
    """Returns the answer and the tables in Markdown; of exchanges and buffers, the largest."""
    lines = [
        textwrap.fill(f"- {line}", PROSE, subsequent_indent="  ", break_on_hyphens=False) for line in summary(hardware)
    ]
    for title, header, rows in tables(hardware):
        lines += ["", f"**{title[0].upper()}{title[1:]}**", "", f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _memory(hardware: HardwareReport) -> Table:
    names = list(dict.fromkeys(name for program in hardware.programs for name in program.parts))
    header = ["program", "arguments", "beside", *names, "others", "total"]
    rows = []
    for program in hardware.programs:
        if program.refused:
            rows.append(
                [program.name, "", _gib(program.beside), *[""] * len(names), "", f"{_gib(program.needed)}, refused"]
            )
            continue
        known = [_gib(program.parts[name]) if name in program.parts else "" for name in names]
        rows.append(
            [
                program.name,
                _gib(program.arguments),
                _gib(program.beside),
                *known,
                _gib(program.others),
                _gib(program.total),
            ]
        )
    return "memory of a device, GiB", header, rows


def _work(hardware: HardwareReport) -> Table:
    header = ["program", "runs", "TFLOP", "memory GB", "links GB", "network GB", "kernels s", "exposed s", "compile s"]
    rows = []
    for program in _compiled(hardware):
        numbers = (
            program.work.flops / 1e12,
            program.work.memory / 1e9,
            program.work.links / 1e9,
            program.work.network / 1e9,
            program.seconds.kernels,
            program.seconds.exposed,
        )
        cells = [_number(number) for number in numbers]
        rows.append([program.name, str(program.runs), *cells, f"{program.compile_seconds:.0f}"])
    return "work of a device in a step", header, rows


def _exchanges(hardware: HardwareReport) -> Table:
    rows = [
        [program.name, kind, f"{times:,.0f}", _number(size / 1e9)]
        for program in _compiled(hardware)
        for kind, (times, size) in program.exchanged.items()
        if size >= 5e6
    ]
    return "collectives of a device in a step", ["program", "kind", "executions", "GB"], rows


def _buffers(hardware: HardwareReport) -> Table:
    rows = [
        [program.name, _gib(buffer.size), buffer.values.split(", ")[0], _short(buffer.origin) or "the compiler"]
        for program in _compiled(hardware)
        for buffer in program.buffers
        if buffer.size >= 5e6
    ]
    return "the largest temporary buffers", ["program", "GiB", "array", "from"], rows


def _compiled(hardware: HardwareReport) -> Iterable[ProgramReport]:
    return (program for program in hardware.programs if not program.refused)


def _short(origin: str) -> str:
    """Shortens the path of scopes to its end."""
    steps = [step for step in origin.split("/")[1:] if step not in ("body", "closed_call", "checkpoint")]
    return "/".join(steps)[-ORIGIN:]


def _gib(size: float) -> str:
    return _number(size / GIB)


def _number(value: float) -> str:
    """Writes three digits or more."""
    digits = next(digits for digits, least in enumerate((100, 10, 1, 0)) if value >= least)
    return f"{value:,.{digits}f}"
