"""Statements about a dump without a cause: sums of groups, policies, trained tokens, counts, stages."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from kljax.tools.parity.command import compare
from kljax.tools.parity.report import ParityReport, as_text
from tests.kljax.tools.parity.updates import EOS, GROUP, HEADER, ROWS, Plant, mask_of, update
from tests.parity import write_dump


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def report_of(folder: pathlib.Path, header: dict[str, Any] | None = None, **changes: Any) -> ParityReport:
    """Compares a clean update with some fields replaced, or left out where they are None."""
    arrays = {name: array for name, array in (update(Plant()) | changes).items() if array is not None}
    write_dump(folder / "dump.npz", HEADER | (header or {}), arrays)
    return compare(folder / "dump.npz")


def broken(report: ParityReport) -> list[str]:
    return [invariant.text for invariant in report.invariants if invariant.holds is False]


def holding(report: ParityReport) -> list[str]:
    return [invariant.text for invariant in report.invariants if invariant.holds]


def test_advantages_of_groups_sum_to_zero(tmp_path: pathlib.Path) -> None:
    assert "advantages sum to 0 in each of 3 groups" in holding(report_of(tmp_path, rewards=None))


def test_advantages_of_other_rows_break_the_sums(tmp_path: pathlib.Path) -> None:
    clean = update(Plant())
    other = clean["advantages"].max(1) + clean["advantages"].min(1)
    # Without rewards nothing can be recomputed; the rows have moved by one.
    report = report_of(tmp_path, rewards=None, advantages=np.roll(other, 1), **dict.fromkeys(DEPENDENT))
    (text,) = broken(report)
    assert text.startswith("advantages of 3 of 3 groups do not sum to 0")
    assert not report.agrees


DEPENDENT = ("token_loss", "loss", "grad_log_probs")


def test_numbers_in_another_order_are_named(tmp_path: pathlib.Path) -> None:
    rows = np.random.default_rng(0).permutation(ROWS)
    per_row = update(Plant())["advantages"]
    per_row = (per_row.max(1) + per_row.min(1))[rows]
    report = report_of(tmp_path, advantages=per_row, **dict.fromkeys(DEPENDENT))
    assert [cause.key for cause in report.causes] == ["advantage: in another order"]
    assert "advantages are the expected ones in another order: those of other rows" in as_text(report)


@pytest.mark.parametrize("shuffled", [False, True])
def test_interleaved_groups_are_named_in_shuffled_rows(shuffled: bool, tmp_path: pathlib.Path) -> None:
    clean = update(Plant())
    rewards = np.round(np.random.default_rng(3).normal(size=ROWS), 2)
    groups = rewards.reshape(GROUP, -1)
    per_row = ((groups - groups.mean(0)) / (groups.std(0, ddof=1) + 1e-4)).reshape(-1)
    order = np.random.default_rng(1).permutation(ROWS) if shuffled else np.arange(ROWS)
    arrays = {name: clean[name][order] for name in ("mask", "log_probs", "lengths", "prompt_lengths", "tokens")}
    header = {"system": "trl", "dtype": "float32", "advantage": {"name": "scale_rewards=group"}, "eos_id": EOS}
    arrays |= {"rewards": rewards[order].astype(np.float32), "advantages": per_row[order].astype(np.float32)}
    arrays |= {"group_ids": (np.arange(ROWS) // GROUP)[order], "row_ids": order}
    write_dump(tmp_path / "dump.npz", header, arrays)
    report = compare(tmp_path / "dump.npz")
    assert [cause.key for cause in report.causes] == ["advantage: groups interleaved"]


def test_rows_of_cut_groups_are_not_compared(tmp_path: pathlib.Path) -> None:
    clean = update(Plant(), seed=1)
    rows = np.array([0, 1, 2, 3, 8, 9, 10])  # the second group is away, the third lacks a row
    by_row = {name: array[rows] for name, array in clean.items() if array.ndim and name not in DEPENDENT}
    write_dump(tmp_path / "dump.npz", HEADER | {"group_size": GROUP}, by_row)
    report = compare(tmp_path / "dump.npz")
    (advantages,) = [x for x in report.differences if x.field == "advantages"]
    assert advantages.agrees
    assert advantages.compared == clean["mask"][:4].sum()
    write_dump(tmp_path / "dump.npz", HEADER, by_row)
    assert not compare(tmp_path / "dump.npz").agrees


def test_old_policy_equals_the_first_update(tmp_path: pathlib.Path) -> None:
    old = update(Plant())["old_log_probs"]
    assert any("old_log_probs: mean log-ratio" in text for text in holding(report_of(tmp_path, first_log_probs=old)))
    for first, reason in (
        (old + np.float32(0.2), "other tokens, temperature or weights"),
        (np.roll(old, -1, 1), "they are moved by one position to the right"),
        (np.roll(old, 1, 1), "they are moved by one position to the left"),
    ):
        report = report_of(tmp_path, first_log_probs=first)
        assert any(text.startswith("old_log_probs") and reason in text for text in broken(report))
        assert not report.findings


def test_sampler_without_temperature_is_another_policy(tmp_path: pathlib.Path) -> None:
    first = update(Plant())["log_probs"]
    near = (first + 0.01 * np.random.default_rng(0).normal(size=first.shape)).astype(np.float32)
    changes = {"first_log_probs": first, "old_log_probs": first, **dict.fromkeys((*DEPENDENT, "ratio", "weights"))}
    report = report_of(tmp_path, {"correction": {}}, rollout_log_probs=near, **changes)
    assert not broken(report)
    assert any("slope 1" in text or "slope 0.99" in text for text in holding(report))
    report = report_of(tmp_path, {"correction": {}}, rollout_log_probs=first / np.float32(1.3), **changes)
    assert any(text.startswith("rollout_log_probs") and "slope 1.3:" in text for text in broken(report))


def test_share_of_trained_tokens_is_shown_by_position(tmp_path: pathlib.Path) -> None:
    lines = [invariant.text for invariant in report_of(tmp_path).invariants]
    (shares,) = [line for line in lines if line.startswith("trained: ")]
    assert "12 of 12 first tokens, 8 of 8 last tokens, 4 of 4 last tokens of rows cut at the limit" in shares


def test_untrained_end_is_seen_without_lengths(tmp_path: pathlib.Path) -> None:
    arrays = update(Plant())
    last = arrays["lengths"] - 1
    mask = arrays["mask"] * (np.arange(mask_width := arrays["mask"].shape[1]) != last[:, None])
    assert mask_width > 0
    left_out = dict.fromkeys((*DEPENDENT, "lengths", "advantages", "ratio", "weights", "kl"))
    report = report_of(tmp_path, mask=mask.astype(np.float32), **left_out)
    assert broken(report) == ["the end-of-sequence token behind the trained tokens is not trained in 8 of 12 rows"]
    assert not broken(report_of(tmp_path, **left_out))


def test_divisor_is_a_number_of_tokens(tmp_path: pathlib.Path) -> None:
    arrays = update(Plant())
    tokens = int(arrays["mask"].sum())
    assert f"divisor: {tokens}, the number of trained tokens" in holding(
        report_of(tmp_path, divisor=np.float32(tokens))
    )
    padded = int(mask_of("pad", arrays).sum())
    changes = {"loss": arrays["loss"] * tokens / padded, "grad_log_probs": arrays["grad_log_probs"] * tokens / padded}
    report = report_of(tmp_path, divisor=np.float32(padded), **changes)
    text = f"divisor: the system counted {padded} tokens, and {tokens} are trained, as many as with padding"
    assert broken(report) == [text]
    assert not report.findings


def test_factor_of_the_loss_names_its_tokens(tmp_path: pathlib.Path) -> None:
    arrays = update(Plant())
    tokens = int(arrays["mask"].sum())
    changes = {name: arrays[name] * tokens / 171 for name in ("loss", "grad_log_probs")}
    assert f": divided by 171, not by the {tokens} tokens of the batch" in as_text(report_of(tmp_path, **changes))


def test_ratios_of_one_are_said_to_hide_clips(tmp_path: pathlib.Path) -> None:
    arrays = update(Plant(old=False))
    report = report_of(tmp_path, **arrays)
    assert any("every ratio is 1" in invariant.text for invariant in report.invariants)


def test_claimed_stage_without_a_comparison_fails(tmp_path: pathlib.Path) -> None:
    report = report_of(tmp_path)
    assert report.passes
    # The header claims the log-probs, and the dump has no logits.
    report = report_of(tmp_path, {"log_probs": {"temperature": 0.9}})
    assert report.agrees
    assert not report.passes
    assert report.stages.claimed == ("log-probs",)
    *_, claimed, count = as_text(report).splitlines()
    assert claimed == "The header claims log-probs, which the dump does not show."
    assert count == "5 of 9 stages compared; not: log-probs, old log-probs, sampler, reference"
