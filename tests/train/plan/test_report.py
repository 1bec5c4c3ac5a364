"""Plans of programs for this machine's devices, reports made by hand, and the mistakes of a command line."""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tests.tiny import config_of, mesh_of
from train.models.sharding import device_bytes, host_bytes
from train.plan.__main__ import main
from train.plan.compiler.buffers import Buffer
from train.plan.compiler.lowering import compile_program
from train.plan.compiler.schedule import ProgramSeconds
from train.plan.compiler.topology import parse_topology
from train.plan.programs import AbstractRun, LoweredProgram
from train.plan.report import HardwareReport, ProgramReport, _read, markdown, report, summary, tables

GIB = 2**30
KL = "kl.loss.coef=0.1"


def test_the_programs_of_a_step():
    config = config_of(KL, "optim.updates_per_batch=2", "optim.epochs=3", "rollout.slots=4", "rollout.in_place=true")
    run = AbstractRun.of(config, mesh_of(2, 2, 1))
    programs = {program.name: program for program in run.lower()}
    assert list(programs) == ["sample", "score", "prepare", "update"]
    assert [program.runs for program in programs.values()] == [1, 1, 1, 6]
    # 8 rows in 4 slots, each of 4 tokens; the first is drawn before the loop.
    assert programs["sample"].loops["decode"] == 7
    assert programs["sample"].loops["refill"] == 4
    # 4 slots of 9 columns and 4 prompts of 5, on 4 devices.
    model = run.context.model.config
    numbers = 2 * model.layers * (4 * 9 + 4 * 5) * model.kv_heads * model.head_dim
    assert programs["sample"].parts["KV cache"] == numbers
    resident = {name: device_bytes(tree) for name, tree in run.resident().items()}
    assert programs["score"].beside == resident["optimizer"]
    assert programs["update"].beside == resident["reference"]
    assert programs["sample"].beside == resident["optimizer"] + resident["reference"]


def test_evaluation_is_planned_if_larger_than_a_rollout():
    in_place = "rollout.in_place=true"
    few, many = (AbstractRun.of(config_of(in_place, f"eval.batch_size={n}"), mesh_of(2, 2, 1)) for n in (4, 16))
    # It would be the second program, and those after it are not lowered here.
    assert "evaluate" not in [program.name for program in itertools.islice(few.lower(), 2)]
    programs = {program.name: program for program in itertools.islice(many.lower(), 2)}
    assert programs["evaluate"].runs == 0
    # 16 prompts with a completion each, in place of 4 with two.
    sizes = [programs[name].parts["KV cache"] for name in ("evaluate", "sample")]
    assert sizes[0] * (8 * 9 + 4 * 5) == sizes[1] * (16 * 9 + 16 * 5)


def test_cached_reference_log_probs_are_planned_apart():
    """Its program runs while rows are new; the other one scores the policy, if something reads that."""
    source = f"rollout.source={{type: file, path: {__file__}}}"
    for options, names in ((("optim.epochs=2",), ["score reference", "score"]), ((), ["score reference"])):
        run = AbstractRun.of(config_of(KL, source, "rollout.in_place=true", *options), mesh_of())
        lowered = (program.name for program in run.lower() if program.name != "evaluate")
        assert list(itertools.islice(lowered, len(names) + 1)) == [*names, "prepare"]


def test_moments_in_host_memory_are_counted_there():
    config = config_of("optim.host_memory=true", "rollout.in_place=true")
    run = AbstractRun.of(config, mesh_of(2, 2, 1))
    optimizer, weights = run.resident()["optimizer"], run.state.trainable
    assert host_bytes(optimizer) == 2 * device_bytes(weights)
    # The count of steps.
    assert device_bytes(optimizer) == 4
    assert "the memory of the host holds for each device, in GiB: optimizer 3.00" in summary(make(program()))


def test_planned_update_equals_the_update_of_a_run():
    config = config_of(KL, "rollout.in_place=true")
    run = AbstractRun.of(config, mesh_of())
    *_, update = run.lower()
    compiled = compile_program(update.lowered)
    state = dataclasses.replace(run.state, past=None, reference=None)
    # The counter of steps is no part of an update, and may be the only array that is not aliased.
    assert 0 <= device_bytes(state) - compiled.aliased <= 8
    assert compiled.text.partition("\n")[0].count("may-alias") >= len(jax.tree.leaves(state)) - 1


def test_work_is_that_of_all_runs_of_a_step():
    lowered = jax.jit(lambda x: x @ x.T).lower(jax.ShapeDtypeStruct((16, 8), jnp.float32))
    device = parse_topology("h100:1").device

    def work(runs):
        return _read(LoweredProgram("score", lowered, 0, {}, runs, {}), device, [0], None, None).work

    assert work(1).flops == 2 * 16 * 16 * 8
    assert work(3) == work(1) * 3


def program(name: str = "update", **changes: object) -> ProgramReport:
    fields = {"runs": 2, "beside": GIB, "needed": 4 * GIB, "temporary": 2 * GIB, "parts": {"gradients": GIB // 2}}
    return ProgramReport(name=name, **(fields | changes))  # type: ignore[arg-type]


def make(*programs: ProgramReport) -> HardwareReport:
    topology = parse_topology("v5e:4x4", 2)
    mesh = {"data": 2, "fsdp": 16, "tensor": 1, "slices": 2}
    usable = topology.device.usable
    return HardwareReport(
        topology,
        mesh,
        "sampling: in place",
        "model.remat auto: full",
        usable,
        {"parameters": GIB},
        {"optimizer": 3 * GIB},
        programs,
    )


def test_programs_within_and_beyond_memory_are_reported():
    small, large = program("score", needed=GIB), program(needed=15 * GIB)
    assert make(small).fits
    assert "model.remat auto: full" in summary(make(small))
    assert not make(small, large).fits
    assert make(small, large).peak is large
    refused = make(small, program(needed=GIB, refused=True))
    assert not refused.fits
    assert "does not fit: the compiler needs 1.00 GiB for update; a device has 15.8" in "\n".join(summary(refused))
    assert "does not fit: update needs 16.0 GiB of 15.8" in "\n".join(summary(make(small, large)))


def test_a_step_takes_the_sum_of_its_programs():
    actual = make(program(seconds=ProgramSeconds(2, 1)), program("score", seconds=ProgramSeconds(1.5, 0.5)))
    assert math.isclose(actual.seconds, 5)
    plain = json.loads(json.dumps(actual.to_json()))
    assert plain["least_seconds"] == pytest.approx(5)
    assert [program["seconds"] for program in plain["programs"]] == [
        {"kernels": 2, "exposed": 1},
        {"kernels": 1.5, "exposed": 0.5},
    ]
    assert [program["least_seconds"] for program in plain["programs"]] == [3, 2]
    assert plain["peak"] == {"program": "update", "bytes": 5 * GIB}
    assert plain["devices"] == 32


def test_tables_show_known_values():
    buffers = (Buffer(GIB, "f32[2], f32[3]", "jit(update)/while/body/closed_call/dot"), Buffer(GIB, "s32[1]"))
    exchanged = {"all-gather": (8.0, 3e9), "all-reduce": (2.0, 4e6)}
    actual = make(program(buffers=buffers, exchanged=exchanged), program("sample", refused=True, needed=20 * GIB))
    memory, work, exchanges, arrays = tables(actual)
    assert memory[2][0] == ["update", "0.000", "1.00", "0.500", "1.50", "5.00"]
    assert memory[2][1][-1] == "20.0, refused"
    assert [row[0] for row in work[2]] == ["update"]
    assert exchanges[2] == [["update", "all-gather", "8", "3.00"]]
    assert [row[2:] for row in arrays[2]] == [["f32[2]", "while/dot"], ["s32[1]", "the compiler"]]
    text = markdown(actual)
    assert "**Memory of a device, GiB**" in text
    assert "| update | 0.000 | 1.00 | 0.500 | 1.50 | 5.00 |" in text


def test_each_program_is_told_before_it_compiles(monkeypatch):
    told = []
    run = AbstractRun.of(config_of(KL), mesh_of(1, 1, 1))
    names = ["sample", "score", "prepare", "update"]
    lowered = [SimpleNamespace(name=name) for name in names]
    monkeypatch.setattr(AbstractRun, "lower", lambda run: lowered)
    monkeypatch.setattr("train.plan.report._read", lambda program, *rest: told.append(program.name))
    topology = parse_topology("v5e:1x1", 1)
    report(run, topology, {"data": 1}, effort=None, tell=told.append)
    assert told[0] == "tracing the programs of a step for v5e:1x1 ..."
    assert told[1:] == [line for name in names for line in (f"compiling {name} ...", name)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--topology", "v5p"], "topology: got 'v5p', expected v5e:4x4, "),
        (["--topology", "v5e:2x2"], "mesh: data=1 x fsdp=1 x tensor=1 has 1 devices, but v5e:2x2 has 4; set the mesh"),
        (["--topology", "v5e:1x1", "mesh={data: 2, slices: 2}"], "mesh.slices: got 2, but --slices is 1; set both"),
        (["--topology", "v5e:1x1", "--slices", "0"], "slices: got 0, expected at least 1"),
        (["--topology", "v5e:1x1", "--json", "no/where.json"], "--json: there is no directory no"),
        (["--topology", "v5e:1x1", "--markdown", "docs"], "--markdown: docs is a directory; name a file"),
        (["--topology", "v5e:1x1", "--keep", "nowhere"], "--keep: there is no directory nowhere"),
        (["--topology", "v5e:1x1", "--candidates", "0"], "--candidates: got 0, expected at least 1"),
        (["--topology", "v5e:1x1", "model.layers=0"], "model.layers"),
    ],
)
def test_mistakes_are_named_before_jax_starts(arguments, said, capsys, monkeypatch):
    monkeypatch.setattr("train.plan.__main__.load_compilers", None)
    assert main(["configs/smoke.yaml", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_missing_compiler_error_names_its_installation(capsys, monkeypatch):
    monkeypatch.setattr("train.plan.compiler.topology.util", SimpleNamespace(find_spec=lambda module: None))
    assert main(["configs/smoke.yaml", "--topology", "h200:1"]) == 2
    assert (
        "h200:1x1 needs jax-cuda12-plugin, which is not installed here; `uv sync --group aot`"
        in capsys.readouterr().err
    )
