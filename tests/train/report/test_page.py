"""The page of a run from its files: damaged files, runs that are going, exports of prime-rl, replayed dumps."""

import base64
import json
import os
import re
import shutil
import zlib

import numpy as np
import pytest
from pyarrow import parquet

from tests.train.report.conftest import ROLLOUTS, TOKENS
from train.report.__main__ import main
from train.report.page import PARTS, SCRIPTS
from train.report.quantities import QUANTITIES, color_limit, histogram
from train.report.rollouts import read_parquet, read_prime_rl
from train.report.runs import config_difference, read_run


def data_of(page: str) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def block_of(page: str, index: int) -> tuple[dict, np.ndarray]:
    """Unpacks the tokens of a rollout as the script of the page does."""
    text = re.search(rf'id="rollout-{index}">(.*?)</script>', page)[1]
    packed = zlib.decompress(base64.b64decode(text))
    start = 4 + int.from_bytes(packed[:4], "little")
    header = json.loads(packed[4:start])
    planes = np.frombuffer(packed[start:], np.uint8).reshape(4, -1)
    return header, np.ascontiguousarray(planes.T).view("<f4").reshape(len(header["columns"]), -1)


def test_page_has_the_numbers_of_the_recording(runs, pages):
    page = pages["one"].read_text()
    data = data_of(page)
    assert len(data["rollouts"]) == ROLLOUTS
    file = sorted((runs[0] / "rollouts").glob("*.parquet"))[1]
    records = parquet.read_table(file).to_pylist()
    index = next(i for i, rollout in enumerate(data["rollouts"]) if rollout["step"] == 2)
    header, columns = block_of(page, index)
    assert header["ids"] == records[0]["prompt_ids"] + records[0]["completion_ids"]
    assert "".join(header["texts"]) == "".join(records[0]["token_texts"])
    for name, values in zip(header["columns"], columns, strict=True):
        np.testing.assert_array_equal(values, np.array(records[0][name], np.float32))
    mean, largest = data["rollouts"][index]["numbers"]["log_ratio_reference"]
    gap = np.array(records[0]["policy_log_probs"]) - np.array(records[0]["ref_log_probs"])
    np.testing.assert_allclose(mean, gap.mean(), rtol=1e-4)
    np.testing.assert_allclose(largest, gap[np.abs(gap).argmax()], rtol=1e-4)
    for shown in data["histograms"]:
        run = shown["runs"][0]
        assert sum(run["counts"]) + run["below"] + run["above"] == ROLLOUTS * TOKENS


def test_page_names_nothing_outside_of_itself(pages):
    page = re.sub(r'<script type="text/plain".*?</script>', "", pages["both"].read_text())
    urls = set(re.findall(r"""(?:src|href)=["'](?!#)[^"']*|url\([^)]*\)|@import[^;]*""", page))
    assert not urls
    assert "default-src 'none'" in page


def test_page_has_every_file_of_its_script(pages):
    scripts = {path.stem: path.read_text() for path in PARTS.glob("*.js")}
    assert sorted(scripts) == sorted(SCRIPTS)
    page = pages["one"].read_text()
    for name, script in scripts.items():
        assert script in page
        # Either would end the element of the script, or hide its end.
        assert not re.search("</?script|<!--", script), name


def test_damaged_files_are_noted_and_left_out(runs, tmp_path):
    going = tmp_path / "going"
    shutil.copytree(runs[0], going)
    files = sorted((going / "rollouts").glob("*.parquet"))
    files[1].write_bytes(files[1].read_bytes()[:-40])
    files[2].write_bytes(b"")
    (going / "rollouts" / "00000099.parquet.partial").write_bytes(b"PAR1")
    with (going / "metrics.jsonl").open("a") as file:
        file.write('not a record\n{"phase": "train", "step": 7, "rew')
    run = read_run(going, rollouts=1000)
    assert len(run.recording.rollouts) == ROLLOUTS - 32
    assert run.notes[0] == "1 lines of the metrics are damaged and left out."
    assert run.notes[1].startswith("2 of 6 files of rollouts cannot be read, such as 00000002.parquet (")
    assert len(run.metrics["train"]["reward"]) == 6


def test_fewer_rollouts_are_taken_evenly(runs):
    recording = read_parquet(runs[0] / "rollouts", 48)
    assert sorted({rollout.step for rollout in recording.rollouts}) == [1, 3, 5, 6]
    assert recording.notes == ["shows 4 of 6 recorded steps; --rollouts N shows more"]


def test_differing_fields_of_configs_have_both_values(runs):
    first, second = (read_run(path, rollouts=16).config for path in runs)
    assert config_difference(first, second) == [("name", "a", "b"), ("seed", 0, 1)]
    assert config_difference(first, {}) == [(name, value, None) for name, value in first.items()]


EXPORT = {
    "schema_version": 1,
    "step": 3,
    "export_step": 3,
    "rank": 0,
    "micro_step": 0,
    "micro_sequence_idx": 0,
    "export_sequence_idx": 0,
    "run_id": None,
    "env_name": "math",
    "token_ids": [5, 6, 7, 8],
    "position_ids": [0, 1, 2, 3],
    "loss_mask": [False, False, True, True],
    "advantages": [0.0, 0.0, 0.5, 0.5],
    "losses": [{}, {}, {"rl": {"advantage": 0.5, "mask": True}}, {"rl": {"advantage": 0.5, "mask": True}}],
    "rewards": [1.0, 1.0, 1.0, 1.0],
    "inference_logprobs": [0.0, 0.0, -1.0, -2.0],
    "trainer_logprobs": [0.0, 0.0, -1.25, -2.0],
    "entropy": [0.0, 0.0, 0.75, None],
    "mismatch_kl": [None, None, 0.03, 0.0],
    "is_masked": [None, None, False, True],
}


def test_token_export_of_prime_rl_is_read(tmp_path):
    for step in (3, 12):
        folder = tmp_path / "token_exports" / f"step_{step}"
        folder.mkdir(parents=True)
        line = json.dumps(EXPORT | {"export_step": step})
        (folder / "rank_0.jsonl").write_text(f"{line}\n{line}\n{line[:50]}")
    run = read_run(tmp_path / "token_exports", rollouts=100)
    assert [rollout.step for rollout in run.recording.rollouts] == [3, 3, 12, 12]
    rollout = run.recording.rollouts[0]
    assert (rollout.prompt_length, rollout.length, rollout.reward) == (2, 2, 1.0)
    ratio = next(quantity for quantity in QUANTITIES if quantity.key == "log_ratio_sampler")
    np.testing.assert_array_equal(ratio.of(rollout.columns), [-0.25, 0.0])
    np.testing.assert_array_equal(rollout.columns["is_masked"], [0, 1])
    np.testing.assert_array_equal(rollout.columns["entropy"], np.array([0.75, np.nan], np.float32))
    assert run.metrics["train"]["entropy"] == [(3, 0.75), (12, 0.75)]


def test_limit_holds_when_the_first_files_give_no_rollouts(tmp_path):
    for step in range(8):
        text = "damaged\n" if step == 0 else "" if step == 1 else json.dumps(EXPORT | {"export_step": step}) + "\n"
        (tmp_path / f"step_{step}.jsonl").write_text(text)
    sample = read_prime_rl(tmp_path, 2)
    assert [rollout.step for rollout in sample.rollouts] == [2, 4, 7]
    assert len(sample.notes) == 2


def test_token_export_of_another_schema_is_refused(tmp_path, capsys):
    (tmp_path / "rank_0.jsonl").write_text(json.dumps(EXPORT | {"schema_version": 2}) + "\n")
    assert main([str(tmp_path), "--output", str(tmp_path / "page.html")]) == 2
    assert "rank_0.jsonl, line 1: schema_version: got 2, expected 1 of prime-rl's export" in capsys.readouterr().err


def test_dumps_are_replayed_and_set_side_by_side(dumps):
    right, wrong = data_of(dumps.read_text())["dumps"]
    assert (right["name"], right["agrees"]) == ("right.npz", True)
    assert (wrong["name"], wrong["agrees"]) == ("wrong.npz", False)
    (finding,) = wrong["findings"]
    assert finding["field"] == "kl"
    assert [cause["name"] for (cause,) in finding["causes"]] == ["estimator k2"]
    assert "kl: " in wrong["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "there is no run at missing"),
        (["a.npz", "b"], "got a.npz and b; compare two runs, or two dumps"),
        (["a", "--rollouts", "0"], "--rollouts: got 0, expected at least 1"),
    ],
)
def test_mistakes_of_the_command_line_are_named(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_page_lies_in_the_run_by_default(runs, tmp_path, capsys):
    shutil.copytree(runs[0], tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / "report.html")
    assert data_of((tmp_path / "run" / "report.html").read_text())["title"] == "run"


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml"])
def test_page_never_replaces_a_file_of_the_run(runs, tmp_path, capsys, name):
    run = shutil.copytree(runs[0], tmp_path / "run")
    before = (run / name).read_bytes()
    assert main([str(run), "--output", str(run / name)]) == 2
    assert f"error: --output: {run / name} is a file of the run {run}" in capsys.readouterr().err
    assert (run / name).read_bytes() == before


NESTED = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (NESTED, "The config cannot be read: its aliases stand for too many values."),
        ("a: &a [*a]", "The config cannot be read: its aliases stand for too many values."),
        ("x" * 2**21, "The config cannot be read: it has 2097152 bytes"),
        ("a: [" * 5000, "The config cannot be read: it is nested too deeply."),
        ("", "The config is empty."),
        ("# digest of the lines below: 0\nname: a\n", "The config is damaged or was changed"),
    ],
)
def test_damaged_config_is_a_note(runs, tmp_path, text, note):
    run = shutil.copytree(runs[0], tmp_path / "run")
    (run / "config.yaml").write_text(text)
    assert main([str(run)]) == 0
    (written,) = data_of((run / "report.html").read_text())["runs"][0]["notes"]
    assert written.startswith(note)
    assert (run / "report.html").stat().st_size < 10**7


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"\0" * 1000, "The metrics are damaged: they have no whole line."),
        (b"[" * 100_000 + b"\n", "1 lines of the metrics are damaged"),
        (b'{"phase": "train", "step": Infinity}\n', "1 lines of the metrics are damaged"),
    ],
)
def test_damaged_metrics_are_a_note(runs, tmp_path, content, note):
    run = shutil.copytree(runs[0], tmp_path / "run")
    (run / "metrics.jsonl").write_bytes(content)
    assert read_run(run, rollouts=16).notes[0].startswith(note)


def test_pipes_of_a_run_are_never_opened(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    rollouts = sorted((run / "rollouts").glob("*.parquet"))[1]
    for path in (run / "metrics.jsonl", rollouts):
        path.unlink()
        os.mkfifo(path)
    notes = read_run(run, rollouts=1000).notes
    assert notes[0] == "The metrics cannot be read: it is no regular file."
    assert "00000002.parquet (it is no regular file)" in notes[1]


def rewritten(table, name, values):
    index = table.schema.get_field_index(name)
    return table.set_column(index, name, [values])


@pytest.mark.parametrize("name", ["prompt", "completion", "token_texts", "reward", "kl_reference"])
def test_wrong_rows_of_rollouts_are_a_note(runs, tmp_path, name):
    run = shutil.copytree(runs[0], tmp_path / "run")
    file = sorted((run / "rollouts").glob("*.parquet"))[1]
    table = parquet.read_table(file)
    field = name if name in table.column_names else next(n for n in table.column_names if n.endswith("log_probs"))
    values = table.column(field).to_pylist()
    values[0] = values[0][:-1] if isinstance(values[0], list) else None if name != "reward" else "high"
    values = [str(value) for value in values] if name == "reward" else values
    parquet.write_table(rewritten(table, field, values), file)
    (note,) = read_run(run, rollouts=1000).notes
    assert note.startswith("1 of 6 files of rollouts cannot be read, such as 00000002.parquet (row ")
    assert main([str(run)]) == 0


def test_flipped_bits_of_rollouts_are_noticed(runs, tmp_path):
    file = sorted((runs[0] / "rollouts").glob("*.parquet"))[1]
    content, whole = bytearray(file.read_bytes()), parquet.read_table(file)
    path = tmp_path / "00000001.parquet"
    for position in range(4, len(content) // 2, len(content) // 40):
        changed = bytearray(content)
        changed[position] ^= 16
        path.write_bytes(changed)
        recording = read_parquet(tmp_path, 1000)
        assert recording.notes or parquet.read_table(path).equals(whole)


@pytest.mark.parametrize(
    "change",
    [{"token_ids": None}, {"loss_mask": 3}, {"step": "x", "export_step": "x"}, {"env_name": 3}, {"rewards": ["a"] * 4}],
)
def test_wrong_token_export_is_one_line(tmp_path, capsys, change):
    (tmp_path / "rank_0.jsonl").write_text(json.dumps(EXPORT | change) + "\n")
    assert main([str(tmp_path), "--output", str(tmp_path / "page.html")]) == 2
    assert "rank_0.jsonl, row 0: " in capsys.readouterr().err
    (tmp_path / "rank_1.jsonl").write_text(json.dumps(EXPORT) + "\n")
    assert main([str(tmp_path), "--output", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize("content", ["some text\n", "", '{"schema_version": 1, "tokens": [1]}\n'])
def test_file_that_is_no_run_is_refused(tmp_path, capsys, content):
    (tmp_path / "notes.jsonl").write_text(content)
    assert main([str(tmp_path / "notes.jsonl"), "--output", str(tmp_path / "page.html")]) == 2
    assert "notes.jsonl is neither a run nor a token export: " in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_colours_and_bars_ignore_infinite_numbers():
    values = np.array([0.5, -1.0, np.nan, np.inf, 3.0], np.float32)
    assert 2.9 < color_limit(values) <= 3.0
    counted = histogram(values, 2.0)
    assert (sum(counted["counts"]), counted["below"], counted["above"]) == (2, 0, 1)
    assert color_limit(np.zeros(3)) == color_limit(np.zeros(0)) == 1.0
