"""The command that makes the tables: what it compiles, what it writes, what it says where a compiler is missing."""

import dataclasses
import json
import pathlib

import pytest

from benchmarks import head_aot
from benchmarks.harness.process import RemoteError
from benchmarks.suites import compiler
from benchmarks.suites.compiler import DEVICES, QUICK, CompiledPlan, Order

MIB = 2**20
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def compiled(monkeypatch):
    """Stands in for the compilers: plans that depend on the program alone. Records the orders."""
    orders: list[Order] = []

    def compile_in(directory, order):
        orders.append(order)
        if order.program == "naive_kl":
            raise RemoteError(f"{order}: internal error")
        if order.program == "naive":
            return CompiledPlan(temp_bytes=20_000 * MIB, fits=order.device != "v5e", seconds=0.2)
        scale = 10 if order.program == "tunix" else 1
        return CompiledPlan(
            scale * 250 * MIB, seconds=scale / 10, collective_bytes=scale * MIB, collective_executions=3
        )

    monkeypatch.setattr(compiler, "compile_in", compile_in)
    monkeypatch.setattr(compiler, "missing", lambda directory, platform: None)
    monkeypatch.setattr(compiler, "installed", lambda directory: {"jax": "1.2.3"})
    return orders


def test_orders_and_plans_travel_as_text():
    order = Order("v5e", "one", "kljax", tile=(8, 16), problem=QUICK)
    for item in (order, Order("v5e", "one", "kljax")):
        assert Order.from_json(json.loads(json.dumps(dataclasses.asdict(item)))) == item
    assert str(order) == "v5e one kljax 8x16"
    plan = CompiledPlan(7, collectives=[{"kind": "all-gather"}])
    assert CompiledPlan(**json.loads(json.dumps(dataclasses.asdict(plan)))) == plan


def test_the_tables(compiled, tmp_path, capsys):
    code = head_aot.main(["--targets", "v5e", "v5p", "h200", "--json", str(tmp_path / "a.json")])
    out = capsys.readouterr().out
    assert code == 1, "a program failed to compile"
    assert "**v5e, 16 devices, fsdp=4 x tensor=4**" in out
    assert "| naive JAX | 20,000, does not fit |" in out
    assert "| naive JAX, with exact KL | failed |" in out
    assert "| v5e, one: temporary memory | at most 300 MiB | 250 MiB | met |" in out
    assert "| v5e, one: temporary memory, forward only | at most 1 MiB | 250 MiB | missed |" in out
    assert "| v5p, sharded: collectives over Tunix, chunks | at most 0.100 | 0.100 | met |" in out
    assert "| v5p, one: estimated time over naive JAX | at most 1.100 | 0.500 | met |" in out
    assert "| h200, one: temporary memory over naive JAX | at most 0.020 | 0.013 | met |" in out
    recorded = json.loads((tmp_path / "a.json").read_text())
    assert recorded["versions"] == {"jax": "1.2.3"}
    assert len(recorded["results"]) == len(compiled)
    assert [entry["program"] for entry in recorded["results"] if entry["failed"]] == ["naive_kl"] * 3


def test_missing_baseline_is_reported_in_the_verdict():
    known = {
        ("v5e", "one", "kljax"): CompiledPlan(MIB, seconds=0.1),
        ("v5e", "one", "naive"): CompiledPlan(MIB, fits=False),
    }
    verdicts = {check.title: check.verdict for check in head_aot.checks(known)}
    assert verdicts == {
        "v5e, one: temporary memory": "met",
        "v5e, one: estimated time over naive JAX": "nothing to compare with",
    }


def test_quick_has_no_goals(compiled, capsys):
    head_aot.main(["--quick", "--targets", "v6e"])
    assert "verdict" not in capsys.readouterr().out
    assert {order.problem for order in compiled} == {QUICK}
    assert {order.effort for order in compiled} == {-1.0}


def test_tiles_are_compared(compiled, capsys):
    assert head_aot.main(["--targets", "v6e", "--tiles", "8192x2048", "4096x1024"]) == 0
    assert {(order.layout, order.program, order.tile) for order in compiled} == {
        (layout, "kljax", tile) for layout in ("one", "sharded") for tile in ((8192, 2048), (4096, 1024))
    }
    assert "| v6e | sharded | 4096x1024 | 250 | 100.0 |" in capsys.readouterr().out


def test_chosen_programs_are_compiled_alone(compiled, capsys):
    assert head_aot.main(["--targets", "v6e", "h200", "--programs", "kljax_frozen"]) == 0
    assert [order.key for order in compiled] == [("v6e", "one", "kljax_frozen")]
    assert "verdict" not in capsys.readouterr().out
    assert head_aot.main(["--targets", "h200", "--programs", "kljax_frozen"]) == 1
    assert "none of --programs is compiled for h200" in capsys.readouterr().err


@pytest.mark.parametrize("tile", ["8192", "8192x", "0x4", "axb", "8192x2048x1"])
def test_malformed_tile_is_refused(tile, capsys):
    with pytest.raises(SystemExit):
        head_aot.main(["--tiles", tile])
    assert "expected 2 positive numbers such as 8192x2048" in capsys.readouterr().err


def test_a_missing_environment_is_named(tmp_path, capsys):
    assert head_aot.main(["--env", str(tmp_path / "none"), "--targets", "v5e", "h100"]) == 1
    said = capsys.readouterr().err
    for target in ("v5e", "h100"):
        assert f"skipped {target}: there is no environment at {tmp_path / 'none'}; `{compiler.HOW}` makes it" in said


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "installed", lambda directory: {"jax": "1", "libtpu": "2"})
    assert compiler.missing(tmp_path, "tpu") is None
    assert "jax-cuda12-pjrt is not installed" in compiler.missing(tmp_path, "cuda")


def test_every_device_has_the_needed_entries():
    for name, device in DEVICES.items():
        if device.platform == "tpu":
            assert {name} <= set(head_aot.MEMORY_MIB) & set(head_aot.FORWARD_MIB) & set(head_aot.TIME_OF_NAIVE)
    assert set(head_aot.TITLES) == {key[2] for name in DEVICES for key in head_aot.programs_of(name)}


def test_sizes_are_readable():
    known = {
        ("v5e", "one", "kljax"): CompiledPlan(1234 * MIB, seconds=0.5),
        ("v5e", "one", "naive"): CompiledPlan(MIB // 2),
    }
    text = "\n".join(head_aot.plans_tables(known))
    assert "| kljax | 1,234 | 500.0 |  |  |" in text
    assert "| naive JAX | 0.5 |  |  |  |" in text
