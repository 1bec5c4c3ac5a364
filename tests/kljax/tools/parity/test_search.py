"""Causes of one setting: what a header declares, divisors, samples of rows, and errors that no cause may raise."""

import itertools
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from kljax.__main__ import main
from kljax.tools.parity import search
from kljax.tools.parity.causes import causes_of
from kljax.tools.parity.command import compare
from kljax.tools.parity.dump import DumpError, open_dump
from kljax.tools.parity.recipe import read_recipe
from kljax.tools.parity.replay import MissingFields, Replay
from kljax.tools.parity.report import ParityReport
from kljax.tools.parity.stages import STAGES, recorded_results
from tests import parity
from tests.kljax.tools.parity.updates import EOS, PROMPT, Plant, mask_of, update
from tests.parity import write_dump

TRL = {"system": "trl", "dtype": "float32", "loss": {"name": "dapo"}, "reduction": {"name": "dapo"}}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def report_of(folder: pathlib.Path, header: dict[str, Any], arrays: dict[str, Any]) -> ParityReport:
    write_dump(folder / "dump.npz", header, {name: array for name, array in arrays.items() if array is not None})
    return compare(folder / "dump.npz")


def keys(report: ParityReport) -> list[str]:
    assert all(finding.explanations or finding.follows for finding in report.findings)
    return [cause.key for cause in report.causes]


def policy_only(mask: np.ndarray, weights: np.ndarray, factor: np.ndarray | float = 1.0) -> dict[str, Any]:
    """The arrays of a policy loss without clips, whose tokens have these weights: REINFORCE with its own old policy."""
    arrays = update(Plant(old=False))
    rows = arrays["advantages"].max(1) + arrays["advantages"].min(1)
    per_token = -rows[:, None] * np.ones(mask.shape) * factor
    fields = {name: arrays[name] for name in ("log_probs", "tokens", "lengths", "prompt_lengths", "group_ids")}
    fields |= {"mask": mask, "advantages": rows.astype(np.float32), "loss": np.float32((per_token * weights).sum())}
    return {**fields, "grad_log_probs": (per_token * weights).astype(np.float32), "entropy": arrays["entropy"]}


def test_ratio_of_one_in_both_terms_is_named(tmp_path: pathlib.Path) -> None:
    # TRL's ratio with the policy in the place of the old one, in the policy loss and in the KL term.
    rng = np.random.default_rng(0)
    shape = rows, length = 6, 8
    old, ref = -rng.uniform(0.2, 3, shape), -rng.uniform(0.2, 3, shape)
    log_probs = old + rng.normal(0, 0.3, shape)
    mask = (np.arange(length) < rng.integers(2, length + 1, (rows, 1))).astype(float)
    advantages, x = rng.normal(0, 1, (rows, 1)) * np.ones((1, length)), ref - log_probs
    k3, slope, count = np.exp(x) - x - 1, 1 - np.exp(x), mask.sum()
    arrays = {"log_probs": log_probs, "old_log_probs": old, "ref_log_probs": ref, "mask": mask}
    arrays |= {"advantages": advantages, "loss": ((-advantages + 0.04 * k3) * mask).sum() / count}
    arrays |= {"grad_log_probs": (-advantages + 0.04 * (slope + k3)) * mask / count}
    header = TRL | {"loss": {"name": "dapo", "clip_high": 0.28}}
    header |= {"kl": {"name": "k3+use_bias_correction_kl", "coef": 0.04}}
    report = report_of(tmp_path, header, {name: np.float32(array) for name, array in arrays.items()})
    assert keys(report) == ["ratio: log_probs as the old policy"]


def test_clip_between_the_ratios_of_the_gradient_is_decided_by_the_loss(tmp_path: pathlib.Path) -> None:
    # No ratio lies between 1.13 and 1.24, so that the gradient leaves the clip of 0.2 open.
    ratio = np.array([[0.9, 1.05, 1.13, 1.24], [1.5, 0.95, 1.27, 1.02]])
    ones, old = np.ones(ratio.shape), -np.ones(ratio.shape)
    arrays = {"log_probs": old + np.log(ratio), "old_log_probs": old, "mask": ones, "advantages": ones}
    arrays |= {"loss": -np.minimum(ratio, 1.2).mean(), "grad_log_probs": np.where(ratio < 1.2, -ratio, 0) / 8}
    header = TRL | {"loss": {"name": "dapo", "clip_low": 0.1, "clip_high": 0.28}}
    report = report_of(tmp_path, header, {name: np.float32(array) for name, array in arrays.items()})
    assert keys(report) == ["loss: clip_high 0.2"]


@pytest.mark.parametrize("detail", ["full", "loss"])
def test_two_causes_together_raise_nothing(detail: str, tmp_path: pathlib.Path) -> None:
    for name in ("verl-clean-token-mean", "trl-clean", "art-clean"):
        (dump,) = [dump for dump in parity.dumps() if dump["name"] == name]
        parity.write(dump, tmp_path / "dump.npz", detail=detail)
        opened = open_dump(tmp_path / "dump.npz")
        replay = Replay(opened, read_recipe(opened), STAGES)
        recipe = replay.recipe
        fields = [name for name, reason in recorded_results(replay).items() if not reason]
        causes = causes_of(replay, recipe)
        pairs = list(itertools.permutations(causes, 2))
        # Another function after which the others are applied, and some of all pairs.
        chosen = [pair for pair in pairs if "function" in repr(pair[0].changes)] + pairs[::97]
        for first, second in chosen:
            changed = second.apply(first.apply(recipe))
            for field in fields:
                try:
                    with np.errstate(all="ignore"):
                        replay.predict(field, changed)
                except (ValueError, TypeError, MissingFields):
                    pass  # A refusal of the settings: such a pair is no cause.


def test_mask_rule_of_the_header_holds(tmp_path: pathlib.Path) -> None:
    arrays = update(Plant())
    position, sizes = np.arange(arrays["mask"].shape[1]), arrays["lengths"]
    answers = (position >= PROMPT + 1) & (position < PROMPT + 3) & (position < sizes[:, None])
    cut = (sizes == arrays["mask"].shape[1])[:, None]
    completions = mask_of("completion", arrays) > 0
    fields = {name: arrays[name] for name in ("log_probs", "tokens", "lengths", "prompt_lengths")}
    fields |= {"tool_mask": 1 - (answers & completions)}
    header = TRL | {"eos_id": [EOS, 0], "mask": {"tools": False, "truncated": False}}
    right = completions & ~answers & ~cut
    assert report_of(tmp_path, header, fields | {"mask": right}).agrees
    for mask, cause in (
        (completions & ~cut, "mask_rule: tools trained"),
        (completions & ~answers, "mask_rule: rows cut at the limit trained"),
    ):
        assert keys(report_of(tmp_path, header, fields | {"mask": mask})) == [cause]
    for key, message in (("tool", "header.mask: got 'tool'"), ("shift", "header.mask: got 'shift'")):
        with pytest.raises(ValueError, match=message):
            report_of(tmp_path, header | {"mask": {key: False}}, fields | {"mask": right})


def test_mask_of_unknown_cause_is_unknown(tmp_path: pathlib.Path) -> None:
    arrays = update(Plant())
    fields = {name: arrays[name] for name in ("log_probs", "tokens", "lengths", "prompt_lengths")}
    mask = np.random.default_rng(0).random(arrays["mask"].shape) < 0.5
    (finding,) = report_of(tmp_path, TRL | {"eos_id": EOS}, fields | {"mask": mask}).findings
    assert not finding.explanations
    assert "numbers differ" in finding.shape


def test_tools_in_the_loss_alone_are_named(tmp_path: pathlib.Path) -> None:
    arrays = update(Plant())
    completions = mask_of("completion", arrays)
    answers = completions * (np.arange(completions.shape[1]) == PROMPT + 1)
    mask = completions - answers
    # The count of tokens is made elsewhere, so that it does not change with the mask of the loss.
    dump = policy_only(mask, completions / mask.sum()) | {"tool_mask": 1 - answers.astype(int)}
    header = TRL | {"mask": {"tools": False}, "eos_id": EOS}
    assert keys(report_of(tmp_path, header, dump | {"divisor": np.float32(mask.sum())})) == ["mask: tools trained"]


def test_shifted_mask_needs_no_companion_with_the_divisor(tmp_path: pathlib.Path) -> None:
    mask = mask_of("completion", update(Plant()))
    shifted = np.pad(mask, ((0, 0), (1, 0)))[:, :-1]
    dump = policy_only(mask, shifted / mask.sum()) | {"divisor": np.float32(mask.sum())}
    assert keys(report_of(tmp_path, TRL | {"eos_id": EOS}, dump)) == ["mask: shifted right by one"]


def test_entropy_quantile_and_bonus_of_the_header_hold(tmp_path: pathlib.Path) -> None:
    arrays = update(Plant())
    mask, entropy = mask_of("completion", arrays) > 0, arrays["entropy"].astype(np.float32)
    parts = np.arange(len(mask)) * 2 // len(mask)
    chosen, bonus = np.zeros_like(mask), 0.0
    for part in (0, 1):
        rows = parts == part
        limit = np.quantile(entropy[rows][mask[rows]], np.float32(0.7))
        chosen[rows] = mask[rows] & (entropy[rows] >= limit)
        bonus += entropy[rows][chosen[rows]].mean() / 2
    dump = policy_only(mask, mask / mask.sum(), factor=chosen) | {"micro_batch_ids": parts}
    dump["loss"] = np.float32(dump["loss"] - 0.02 * bonus)
    header = TRL | {"entropy": {"coef": 0.02, "quantile": 0.3}}
    assert report_of(tmp_path, header, dump).agrees
    report = report_of(tmp_path, TRL | {"entropy": {"coef": 0.03, "quantile": 0.3}}, dump)
    assert keys(report) == ["entropy: coef 0.02"]
    assert not report_of(tmp_path, TRL | {"entropy": {"coef": 0.02}}, dump).agrees
    assert report_of(tmp_path, header, dump | {"entropy": None}).not_compared[-1][1] == "needs entropy"


def test_logits_of_some_columns_from_another_pass(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    shape, columns = (3, 12, 20), np.arange(3, 9)
    logits, tokens = 3 * rng.normal(size=shape), rng.integers(0, 20, shape[:2])
    scores = logits[:, :-1] / 0.8
    scores = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    log_probs = np.pad(np.take_along_axis(scores, tokens[:, 1:, None], 2)[..., 0], ((0, 0), (1, 0)))
    mask = np.arange(shape[1]) * np.ones((3, 1)) >= 4
    arrays = {"tokens": tokens, "mask": mask, "log_probs": log_probs, "rows": np.array([2, 0]), "columns": columns}
    noisy = logits[[2, 0]][:, columns] * (1 + 2**-9 * rng.normal(size=(2, 6, 1)))
    header = {"dtype": "float32", "log_probs": {"temperature": 0.8, "forward": "bfloat16"}}
    report = report_of(tmp_path, header, arrays | {"logits": noisy})
    assert report.passes
    assert report.differences[0].compared == 12
    for other, cause in ((1.0, "temperature missing"), (0.64, "temperature twice")):
        scores = logits[:, :-1] / other
        wrong = np.take_along_axis(scores - np.log(np.exp(scores).sum(-1, keepdims=True)), tokens[:, 1:, None], 2)
        changed = np.pad(wrong[..., 0], ((0, 0), (1, 0)))
        report = report_of(tmp_path, header, arrays | {"logits": noisy, "log_probs": changed})
        assert keys(report)[0] == f"log_probs: {cause}"
    exact = {"dtype": "float32", "log_probs": {"temperature": 0.8}}
    assert not report_of(tmp_path, exact, arrays | {"logits": noisy}).agrees
    with pytest.raises(DumpError, match=r"columns: got \[\d+.*\], expected columns from 0 to 11"):
        report_of(tmp_path, header, arrays | {"logits": noisy, "columns": columns + 5})


def large_dump(folder: pathlib.Path, **changes: Any) -> pathlib.Path:
    """An update of TRL's dapo over 64 rows of 512 tokens, whose KL coefficient is 0.1."""
    rng = np.random.default_rng(0)
    shape = 64, 512
    old, ref = -rng.uniform(0.2, 3, shape), -rng.uniform(0.2, 3, shape)
    log_probs = old + rng.normal(0, 0.1, shape)
    mask = np.arange(shape[1]) < rng.integers(2, shape[1] + 1, (shape[0], 1))
    advantages, x, ratio = rng.normal(0, 1, shape[0]), ref - log_probs, np.exp(log_probs - old)
    a = advantages[:, None] * np.ones(shape)
    plain = ratio * a <= np.clip(ratio, 0.8, 1.2) * a
    loss = -np.where(plain, ratio, np.clip(ratio, 0.8, 1.2)) * a + 0.1 * (np.exp(x) - x - 1)
    slope = np.where(plain, -ratio * a, 0) + 0.1 * (1 - np.exp(x))
    arrays = {"log_probs": log_probs, "old_log_probs": old, "ref_log_probs": ref, "advantages": advantages}
    arrays |= {"loss": (loss * mask).sum() / mask.sum(), "grad_log_probs": slope * mask / mask.sum()}
    arrays = {name: np.float32(array) for name, array in arrays.items()} | {"mask": mask} | changes
    header = TRL | {"kl": {"name": "k3", "coef": 0.04}}
    write_dump(folder / "dump.npz", header, {name: array for name, array in arrays.items() if array is not None})
    return folder / "dump.npz"


def test_sample_of_rows_explains_a_large_dump(tmp_path: pathlib.Path) -> None:
    report = compare(large_dump(tmp_path))
    assert keys(report) == ["kl: coef 0.1"]
    (note,) = [note for note in report.notes if "causes were tried on rows" in note]
    assert note.startswith("every number of 64 rows was compared; causes were tried on rows ")
    assert len(note.split(",")) < 64
    fields = {difference.field: difference.compared for difference in report.differences}
    assert fields == {"loss": 1, "grad_log_probs": 64 * 512}


def test_parts_have_the_results_of_all_rows(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = large_dump(tmp_path)
    together = compare(path)
    monkeypatch.setattr("kljax.tools.parity.replay.BLOCK", 5 * 512)
    monkeypatch.setattr(search, "SMALL", 1 << 30)
    parts = compare(path)
    for first, second in zip(together.differences, parts.differences, strict=True):
        assert first.at == second.at
        assert first.compared == second.compared
        np.testing.assert_allclose(first.expected, second.expected, rtol=1e-12)
    assert keys(parts) == keys(together)


def test_one_differing_row_is_found_among_many(tmp_path: pathlib.Path) -> None:
    with np.load(large_dump(tmp_path)) as recorded:
        grad = recorded["grad_log_probs"].copy()
        header = json.loads(str(recorded["header"])) | {"kl": {"name": "k3", "coef": 0.1}}
        arrays = {name: recorded[name] for name in recorded.files if name != "header"}
    row = int(arrays["mask"].sum(1).argmax())
    grad[row] *= 1.5
    report = report_of(tmp_path, header, arrays | {"grad_log_probs": grad})
    (finding,) = report.findings
    assert finding.difference.rows == (row,)
    assert f"in rows {row}" in finding.shape
    assert "by the factor 1.5" in finding.shape


def test_exit_codes_of_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(large_dump(tmp_path))
    assert main(["parity", path]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 of 7 stages compared; not: mask, log-probs, ")
    with pytest.raises(SystemExit, match="2"):
        main(["parity", path, "--candidates", "5"])
