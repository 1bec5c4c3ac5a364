"""Numbers and choices of an update written out in NumPy are named, from a full dump and from a short one."""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from kljax.tools.parity.command import compare
from kljax.tools.parity.comparison import Residual
from kljax.tools.parity.numbers import is_simple, simplest, solve_between, solve_linear
from kljax.tools.parity.report import ParityReport, as_text
from tests import other_seeds
from tests.kljax.tools.parity.updates import HEADER, Plant, update
from tests.parity import write_dump

# What a short recorder does not have.
SHORT = ("token_loss", "kl", "ratio", "weights", "entropy", "tokens", "prompt_lengths", "lengths")
FULL_CASES: dict[str, dict[str, Any]] = {
    "kl: coef 0.08": {"kl_coef": 0.08},
    "loss: clip_low 0.1": {"clip_low": 0.1},
    "loss: scale 1.5": {"policy_scale": 1.5},
    "correction: upper 1.5": {"cap": 1.5},
    "advantage: epsilon inside the root": {"root": True},
    "advantage: eps 0.01": {"eps": 1e-2},
    "advantage: discount 0.95": {"discount": 0.95},
    "advantage: clip 1": {"advantage_clip": 1.0},
    "advantage: divided by the length": {"spread": True},
    "advantage: whitened again over the tokens": {"whiten": True},
    "entropy: coef 0.01": {"entropy": 0.01},
    "reduction: rows of equal groups dropped": {"drop_equal": True},
    "mask: rows cut at the limit left out": {"drop_cut": True},
    "reduction: scale 8": {"scale": 8.0},
    "reduction: eps 0.001": {"scale": 76 / 76.001},  # of the 76 trained tokens
    "gradient: scale 0.125": {"grad_scale": 0.125},
    "mask_rule: prompt tokens": {"mask": "prompt"},
    "mask_rule: rows cut at the limit left out": {"mask": "complete"},
}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def report_of(path: pathlib.Path, plant: Plant, *, short: bool = False, drop: tuple[str, ...] = ()) -> ParityReport:
    left_out = (*(SHORT if short else ()), *drop)
    arrays = {name: array for name, array in update(plant).items() if name not in left_out}
    write_dump(path / "dump.npz", HEADER, arrays)
    return compare(path / "dump.npz")


def names(report: ParityReport) -> list[str]:
    return [cause.key for cause in report.causes]


@pytest.mark.parametrize("cause", FULL_CASES)
def test_planted_fault_of_full_dump_is_named(cause: str, tmp_path: pathlib.Path) -> None:
    report = report_of(tmp_path, Plant(**FULL_CASES[cause]))
    assert names(report) == [cause]
    assert all(finding.explanations for finding in report.findings)


@pytest.mark.parametrize(
    ("cause", "change"),
    [("kl: coef 0.004", {"kl_coef": 0.004}), ("reduction: scale 0.25", {"scale": 0.25})],
)
def test_planted_number_of_short_dump_is_named(cause: str, change: dict[str, Any], tmp_path: pathlib.Path) -> None:
    assert names(report_of(tmp_path, Plant(**change), short=True)) == [cause]


def test_number_is_reported_beside_the_header(tmp_path: pathlib.Path) -> None:
    printed = as_text(report_of(tmp_path, Plant(kl_coef=0.08)))
    assert "kl.coef: the header says 0.04, the arrays say 0.08" in printed
    assert "a sum over 8 ranks or micro-batches" in as_text(report_of(tmp_path, Plant(scale=8.0)))


def test_policy_is_its_old_without_old_log_probs(tmp_path: pathlib.Path) -> None:
    report = report_of(tmp_path, Plant(old=False), drop=("old_log_probs", "weights", "ratio"))
    assert report.agrees
    assert any(difference.field == "grad_log_probs" for difference in report.differences)
    assert any("the policy is its own old policy" in invariant.text for invariant in report.invariants)


def test_random_numbers_are_unknown_not_a_dtype(tmp_path: pathlib.Path) -> None:
    arrays = update(Plant())
    noise = other_seeds.example(3).normal(size=arrays["advantages"].shape)
    # As large as the rounding of bfloat16, and not on its grid.
    arrays["advantages"] = (arrays["advantages"] * (1 + 2e-3 * noise)).astype(np.float32)
    for name in ("token_loss", "loss", "grad_log_probs"):
        del arrays[name]
    write_dump(tmp_path / "dump.npz", HEADER, arrays)
    report = compare(tmp_path / "dump.npz")
    assert not report.causes
    assert [finding.difference.field for finding in report.findings] == ["advantages"]
    assert "numbers differ" in report.findings[0].shape


def line(slopes: np.ndarray, true: float) -> Any:
    return lambda value: Residual(slopes * (true - value), np.full(len(slopes), 1e-9))


def test_solvers_return_the_number_of_all_results() -> None:
    evaluate = line(np.array([1.0, -2.0, 0.5]), 0.123)
    assert solve_linear(evaluate, 1.0, 2.0) == pytest.approx(0.123, abs=1e-9)
    value = solve_between(evaluate, (0.0, 0.1, 0.5, 1.0))
    assert value == pytest.approx(0.123, abs=1e-8)
    assert simplest(evaluate, float(value or 0)) == 0.123
    # Two results that show different numbers.
    both = lambda value: Residual(np.array([0.1 - value, 0.2 - value]), np.full(2, 1e-9))  # noqa: E731
    assert solve_linear(both, 1.0, 2.0) is None
    assert solve_between(both, (0.0, 0.15, 1.0)) is None


def test_simple_numbers_need_no_second_result() -> None:
    assert is_simple(0.08, 1e-6)
    assert is_simple(1 / 7, 1e-6)
    assert not is_simple(0.08, 1e-2)
    assert not is_simple(0.0812345, 1e-9)
    assert dataclasses.replace(Plant(), kl_coef=0.08) != Plant()


def test_empty_mask_is_no_cause_of_a_kl(tmp_path):
    header = {"kljax_parity": 1, "kl": {"estimator": "k3", "coef": 0.1}}
    rng = np.random.default_rng(0)
    log_probs, ref_log_probs, kl = -rng.exponential(size=(3, 4, 6))
    # Every row is full, so that each of them is cut at the limit.
    arrays = {"mask": np.ones((4, 6), bool), "log_probs": log_probs, "ref_log_probs": ref_log_probs, "kl": kl}
    write_dump(tmp_path / "dump.npz", header, arrays)
    report = compare(tmp_path / "dump.npz")
    assert not report.agrees
    assert not report.causes
