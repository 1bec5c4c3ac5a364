"""The directory of a run: never one that is taken, and continued only by the config it was started with."""

from pathlib import Path

import pytest

from tests import tiny
from train.config.errors import UserError
from train.config.load import load
from train.config.schema import Config
from train.run.directory import open_run, resume_run, start_run


def config_of(output: Path, *overrides: str) -> Config:
    return tiny.config_of(f"output={output}", "name=first", *overrides)


def files(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_a_new_run_has_its_config(tmp_path):
    config = config_of(tmp_path / "runs")
    run = start_run(config)
    assert run.root == tmp_path / "runs" / "first"
    assert load(run.config).config == config
    names = (run.base, run.checkpoints, run.metrics, run.summary)
    assert [path.name for path in names] == ["base", "checkpoints", "metrics.jsonl", "summary.json"]
    assert {path.parent for path in names} == {run.root}


def test_taken_name_gets_a_number_without_overwriting(tmp_path):
    runs = [start_run(config_of(tmp_path, f"seed={seed}")) for seed in range(3)]
    assert [run.root.name for run in runs] == ["first", "first-2", "first-3"]
    assert [load(run.config).config.seed for run in runs] == [0, 1, 2]
    (tmp_path / "first-4").mkdir()
    (tmp_path / "first-4" / "thesis.tex").write_text("irreplaceable")
    before = files(tmp_path)
    assert start_run(config_of(tmp_path)).root.name == "first-5"
    assert {name: text for name, text in files(tmp_path).items() if name in before} == before


def test_an_empty_directory_is_used(tmp_path):
    (tmp_path / "first").mkdir()
    assert start_run(config_of(tmp_path)).root == tmp_path / "first"


def test_a_file_is_not_a_directory(tmp_path):
    (tmp_path / "first").write_text("a file")
    assert start_run(config_of(tmp_path)).root == tmp_path / "first-2"
    assert (tmp_path / "first").read_text() == "a file"
    with pytest.raises(UserError, match=r"^output: cannot create .*first/first: Not a directory$"):
        start_run(config_of(tmp_path / "first"))


def test_a_run_is_resumed_by_its_config(tmp_path):
    started = start_run(config_of(tmp_path))
    assert resume_run(config_of(tmp_path)).root == started.root


def test_run_stays_when_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "rate.py").write_text("def rate(record, completion, finished): return 1.0\n")
    config = config_of(
        Path("runs"), "task=jsonl", "data={train: train.jsonl, eval: train.jsonl, reward: 'rate.py:rate'}"
    )
    (tmp_path / "left").mkdir()
    monkeypatch.chdir("left")
    with open_run(config, resume=False, start=tmp_path) as run:
        assert run.root == tmp_path / "runs" / "first"
    with open_run(config, resume=True, start=tmp_path) as resumed:
        assert resumed.root == run.root
    assert list(Path.cwd().iterdir()) == []
    monkeypatch.chdir(tmp_path)
    assert load(run.config).config.output == "runs"


def test_numbered_run_is_resumed_by_its_name(tmp_path):
    start_run(config_of(tmp_path))
    second = start_run(config_of(tmp_path))
    assert load(second.config).config.name == "first-2"
    assert resume_run(config_of(tmp_path, "name=first-2")).root == second.root
    assert resume_run(load(second.config).config).root == second.root


def test_fields_without_effect_may_differ_on_resume(tmp_path):
    start_run(config_of(tmp_path))
    longer = config_of(tmp_path, "steps=9", "eval.every=3", "checkpoint={every: 2, keep: 5}")
    run = resume_run(longer)
    assert load(run.config).config == longer


@pytest.mark.parametrize(
    ("section", "changed", "fixed"),
    [
        (
            "type: openai, url: 'http://a:1', model: m",
            "timeout: 9, retries: 1, concurrency: 2, api_key_env: KEY, folder: /tmp",
            "in_flight: keep, sync: weights",
        ),
        (
            "type: endpoint, agent: 'train.data.agents.calculator:play'",
            "host: localhost, port: 8001, reward_key_file: /key, concurrency: 2",
            "max_failures: 0.5",
        ),
    ],
)
def test_server_of_a_resumed_run_may_move(tmp_path, section, changed, fixed):
    start_run(config_of(tmp_path, f"rollout.source={{{section}}}"))
    resume_run(config_of(tmp_path, f"rollout.source={{{section}, {changed}}}"))
    with pytest.raises(UserError, match=r"^--resume: the config differs .* rollout\.source\."):
        resume_run(config_of(tmp_path, f"rollout.source={{{section}, {fixed}}}"))


def test_pad_embedding_that_is_trained_may_be_written_on_resume(tmp_path):
    start_run(config_of(tmp_path))
    resume_run(config_of(tmp_path, "model.freeze_pad_embedding=false"))
    resume_run(config_of(tmp_path))
    with pytest.raises(UserError, match=r"model.freeze_pad_embedding: the run has False, got True$"):
        resume_run(config_of(tmp_path, "model.freeze_pad_embedding=true"))


def test_every_differing_field_is_named(tmp_path):
    start_run(config_of(tmp_path))
    before = files(tmp_path)
    updates = "optim={learning_rate: 1e-5, micro_batches: 2, optimizer: sgd}"
    other = config_of(tmp_path, "seed=3", "kl.loss.coef=0.5", "lora={rank: 2}", updates, "steps=9")
    with pytest.raises(UserError) as caught:
        resume_run(other)
    message = str(caught.value)
    assert message.startswith(f"--resume: the config differs from that of {tmp_path / 'first'}: ")
    for part in ("kl.loss.coef: the run has 0.0, got 0.5", "seed: the run has 0, got 3", "lora.rank: the run has None"):
        assert part in message
    for name in ("learning_rate", "micro_batches", "optimizer.type"):
        assert f"optim.{name}: the run has " in message
    assert "steps" not in message
    assert files(tmp_path) == before


def test_missing_run_cannot_be_resumed(tmp_path):
    with pytest.raises(UserError, match=r"^--resume: there is no run at .*first; leave the flag out to start one$"):
        resume_run(config_of(tmp_path))
    assert not list(tmp_path.iterdir())
