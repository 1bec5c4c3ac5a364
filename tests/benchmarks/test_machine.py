"""The benchmarks on a system that lacks what Linux has: the calls are hidden, and each has an answer."""

import ctypes
import os
import types

import jax
import pytest

from benchmarks import memory
from benchmarks.harness import cli, machine, measure


def test_threads_are_limited_to_the_first_cores(monkeypatch, capsys):
    bound = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3, 1}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *arguments: bound.append(arguments), raising=False)
    cli.limit_threads(2)
    cli.limit_threads(0)
    assert (bound, capsys.readouterr().err) == ([(0, [1, 3])], "")


def test_threads_without_affinity_are_a_warning(monkeypatch, capsys):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    monkeypatch.setattr(cli.platform, "system", lambda: "Darwin")
    cli.limit_threads(2)
    assert capsys.readouterr().err == "warning: --threads: Darwin binds no process to cores: all are used\n"
    cli.limit_threads(0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("names", ["absent", "unknown"])
def test_a_machine_without_proc_and_sysconf_is_described(monkeypatch, tmp_path, names):
    def refuse(name):
        raise ValueError("unrecognized configuration name")

    if names == "absent":
        monkeypatch.delattr(os, "sysconf")
    else:
        monkeypatch.setattr(os, "sysconf", refuse)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine.platform, "processor", lambda: "arm")
    actual = machine.describe(jax.devices()[0])
    assert (actual["processor"], actual["memory"]) == ("arm", None)


def test_arm_linux_without_model_names_reports_its_architecture(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert machine.describe(jax.devices()[0])["processor"] == "aarch64"


@pytest.mark.parametrize("hidden", ["STATUS", "CLEAR", "malloc_trim"])
def test_a_system_without_peaks_has_no_memory_parts(monkeypatch, tmp_path, capsys, hidden):
    if hidden == "malloc_trim":
        monkeypatch.setattr(ctypes, "CDLL", lambda _: types.SimpleNamespace())
    else:
        monkeypatch.setattr(measure, hidden, tmp_path / "absent")
    peaks = measure.Memory()
    with peaks.part("any"):
        pass
    assert (measure.known(), peaks.parts) == (False, {})
    assert memory.main([]) == 1
    assert capsys.readouterr().err == "ERROR this system does not tell the peak memory of a process\n"
