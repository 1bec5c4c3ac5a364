"""Trackers: the text that Prometheus reads, offline files of Weights & Biases, and what is missing is said at once."""

import importlib.util
import socket
import time
import urllib.error
import urllib.request

import pytest

from tests import tiny
from train.config.errors import UserError
from train.run import trackers
from train.run.metrics import open_metrics


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
