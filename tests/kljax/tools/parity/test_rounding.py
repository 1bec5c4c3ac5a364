"""Rounding that a division by almost nothing enlarges is neither a difference nor evidence of a cause."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from kljax.tools.parity.command import compare
from kljax.tools.parity.report import ParityReport
from tests import other_seeds
from tests.parity import write_dump

GROUP = 6
GRPO = {"function": "grpo_advantages", "eps": 1e-6}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def report_of(folder: pathlib.Path, header: dict[str, Any], **arrays: np.ndarray) -> ParityReport:
    header = {"kljax_parity": 1, "dtype": "float32", **header}
    write_dump(folder / "dump.npz", header, arrays)
    return compare(folder / "dump.npz")


def rows(rewards: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays of a batch whose groups have `GROUP` rows of two tokens."""
    shape = (len(rewards), 2)
    ids = np.arange(len(rewards)) // GROUP
    return {"mask": np.ones(shape, bool), "log_probs": np.full(shape, -1.0), "rewards": rewards, "group_ids": ids}


def grpo(rewards: np.ndarray) -> np.ndarray:
    """Compares the rewards of each group in float32, adding one number after the other."""
    groups = rewards.astype(np.float32).reshape(-1, GROUP)
    distances = groups - groups.cumsum(1)[:, -1:] / np.float32(GROUP)
    spread = np.sqrt(np.square(distances).sum(1, keepdims=True) / np.float32(GROUP - 1))
    return (distances / (spread + np.float32(1e-6))).reshape(-1)


def test_equal_rewards_with_inexact_mean_agree(tmp_path: pathlib.Path) -> None:
    rewards = np.full(2 * GROUP, 0.6, np.float32)
    advantages = grpo(rewards)
    assert np.abs(advantages).min() > 1e-2
    report = report_of(tmp_path, {"advantage": GRPO}, **rows(rewards), advantages=advantages)
    assert report.agrees
    assert any("advantages: undetermined by rounding" in note for note in report.notes)


def test_equal_rewards_with_exact_mean_have_no_noise(tmp_path: pathlib.Path) -> None:
    rewards = np.full(2 * GROUP, 0.75, np.float32)
    assert not grpo(rewards).any()
    advantages = np.full(2 * GROUP, 0.05, np.float32)
    report = report_of(tmp_path, {"advantage": GRPO}, **rows(rewards), advantages=advantages)
    assert [finding.difference.field for finding in report.findings] == ["advantages"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rewards_a_rounding_apart_agree(dtype: str, tmp_path: pathlib.Path) -> None:
    steps = np.array([0, 3, 1, 0, 5, 2, 1, 0, 0, 4, 2, 2])
    rewards = (np.float32(0.7) + steps * np.spacing(np.float32(0.7))).astype(np.float32)
    report = report_of(tmp_path, {"dtype": dtype, "advantage": GRPO}, **rows(rewards), advantages=grpo(rewards))
    assert report.agrees


def test_whitened_rounding_is_no_cause(tmp_path: pathlib.Path) -> None:
    # The centered rewards are 0 but for rounding, so that whitened ones may be any numbers of size 1.
    rewards = np.full(2 * GROUP, 0.6, np.float32)
    advantages = other_seeds.example(5).normal(size=2 * GROUP).clip(-1.5, 1.5).astype(np.float32)
    header = {"advantage": {"function": "grpo_advantages", "scale": "none"}}
    report = report_of(tmp_path, header, **rows(rewards), advantages=advantages)
    assert [finding.difference.field for finding in report.findings] == ["advantages"]
    assert not report.causes


@pytest.mark.parametrize("system", ["verl", "trinity", "openrlhf"])
def test_ratio_has_the_bound_of_the_systems_loss(system: str, tmp_path: pathlib.Path) -> None:
    old = np.array([[-1.0, -2.0, -1e-3], [-0.5, -30.0, -3.0]], np.float32)
    policy = np.array([[-1.5, -40.0, -25.0], [-0.5, -1.0, -3.5]], np.float32)
    arrays = {"mask": np.ones(old.shape, bool), "log_probs": policy, "old_log_probs": old}
    ratio = np.exp(np.clip(policy - old, -20, 20))
    header = {"system": system, "loss": {"name": "vanilla" if system == "verl" else "ppo"}}
    assert report_of(tmp_path, header, **arrays, ratio=ratio).agrees
    unbounded = report_of(tmp_path, header, **arrays, ratio=np.exp(policy - old))
    assert [finding.difference.field for finding in unbounded.findings] == ["ratio"]
    assert report_of(tmp_path, {"loss": {"function": "ppo_clip_loss"}}, **arrays, ratio=np.exp(policy - old)).agrees
