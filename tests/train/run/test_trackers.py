"""Trackers: the text that Prometheus reads, offline files of Weights & Biases, and what is missing is said at once."""

import importlib.util
import socket
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests import tiny
from train.config.errors import UserError
from train.run import trackers
from train.run.metrics import open_metrics, read_metrics


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode().splitlines()


def test_port_answers_with_the_last_values(port, tmp_path):
    writer = open_metrics(tiny.config_of(f"report.prometheus_port={port}"), tmp_path / "first")
    writer.write("train", 1, {"entropy": 0.5, "loss": float("nan")})
    writer.write("train", 2, {"entropy": 0.25})
    writer.timing(2, {"update": 1.5})
    lines = read(port)
    assert 'kljax_step{phase="train",run="first"} 2.0' in lines
    assert 'kljax_metric{metric="entropy",phase="train",run="first"} 0.25' in lines
    assert 'kljax_metric{metric="time/update",phase="train",run="first"} 1.5' in lines
    assert not [line for line in lines if 'metric="loss"' in line]
    with pytest.raises(UserError, match=rf"report\.prometheus_port: cannot listen on port {port}: "):
        open_metrics(tiny.config_of(f"report.prometheus_port={port}"), tmp_path / "second")
    writer.close()
    with pytest.raises(urllib.error.URLError):
        read(port)


def test_missing_package_of_a_tracker_is_named(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    trackers.check_trackers(tiny.config_of())
    message = "report.wandb: got 'kl', which needs the package wandb; install it with `pip install wandb`, or set"
    with pytest.raises(UserError, match=message):
        trackers.check_trackers(tiny.config_of("report.wandb=kl"))
    with pytest.raises(UserError, match="needs the package prometheus-client"):
        trackers.check_trackers(tiny.config_of("report.prometheus_port=9000"))


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed; run `make test-report`")
@pytest.mark.filterwarnings("default")
def test_offline_run_of_wandb_has_grouped_metrics(monkeypatch, tmp_path):
    for name, value in {"WANDB_MODE": "offline", "WANDB_CONFIG_DIR": str(tmp_path), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    writer = open_metrics(tiny.config_of("report.wandb=kl"), tmp_path / "first")
    writer.write("train", 1, {"entropy": 0.5, "kl_reference": 0.01})
    writer.write("eval", 1, {"accuracy": 60.0})
    writer.close()
    (file,) = (tmp_path / "first" / "wandb").glob("offline-run-*/*.wandb")
    names = (b"train/policy/entropy", b"train/kl/kl_reference", b"eval/reward/accuracy", b"train/step")
    # A process of its own writes the file.
    deadline = time.monotonic() + 60
    while not all(name in file.read_bytes() for name in names) and time.monotonic() < deadline:
        time.sleep(0.1)
    content = file.read_bytes()
    assert [name for name in names if name not in content] == []


def test_folder_of_the_name_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="needs the package wandb"):
        trackers.check_trackers(tiny.config_of("report.wandb=kl"))


KEY = "0123456789abcdef0123456789abcdef01234567"


def fake_wandb(monkeypatch, **functions: Any) -> None:
    run = types.SimpleNamespace(
        define_metric=lambda *_, **__: None, log=functions.get("log", id), finish=functions.get("finish", int)
    )
    module = types.SimpleNamespace(
        Settings=functions.get("settings", dict), init=functions.get("init", lambda **_: run), errors=None
    )
    monkeypatch.setitem(sys.modules, "wandb", module)


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("function", ["init", "settings"])
@pytest.mark.parametrize("error", [ValueError(f"bad key\n{KEY}"), SystemExit(1), KeyError("mode"), RuntimeError()])
def test_any_failure_at_the_start_is_one_line(function, error, monkeypatch, tmp_path):
    fake_wandb(monkeypatch, **{function: failing(error)})
    with pytest.raises(UserError, match=rf"^report\.wandb: {type(error).__name__}.*set report\.wandb=null") as caught:
        open_metrics(tiny.config_of("report.wandb=kl"), tmp_path)
    assert KEY not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_port_is_freed_when_another_tracker_fails(port, monkeypatch, tmp_path):
    fake_wandb(monkeypatch, init=failing(ValueError()))
    config = tiny.config_of(f"report={{wandb: kl, prometheus_port: {port}}}")
    with pytest.raises(UserError, match=r"report\.wandb"):
        open_metrics(config, tmp_path)
    with pytest.raises(urllib.error.URLError):
        read(port)


def test_failure_later_warns_once_without_keys(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    calls: list[object] = []

    def log(values: object) -> None:
        calls.append(values)
        raise ValueError(f"rejected short and {KEY}")

    fake_wandb(monkeypatch, log=log, finish=failing(ValueError()))
    writer = open_metrics(tiny.config_of("report.wandb=kl"), tmp_path)
    for step in (1, 2):
        writer.write("train", step, {"loss": 0.5})
    writer.close()
    assert len(calls) == 1
    message = "warning: report.wandb: ValueError: rejected *** and ***, at step 1; the run goes on without it\n"
    assert capsys.readouterr().err == message
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("function", ["log", "finish"])
def test_tracker_that_does_not_return_is_left_out(function, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(trackers, "MOST_SECONDS", 0.1)
    forever = threading.Event()
    fake_wandb(monkeypatch, **{function: lambda *_: forever.wait()})
    writer = open_metrics(tiny.config_of("report.wandb=kl"), tmp_path)
    writer.write("train", 1, {"loss": 0.5})
    writer.close()
    forever.set()
    assert "report.wandb: no answer within 0.1 s" in capsys.readouterr().err
