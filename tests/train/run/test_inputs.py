"""A resumed run has the data and the functions that it was started with."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests import tiny
from train.config.errors import UserError
from train.data.tokenizers import FOLDER_FILES, files
from train.run.directory import RunDirectory, resume_run, start_run
from train.run.inputs import input_digests

REWARD = "def rate(record, completion, finished):\n    return float(len(completion))\n"
LOSS = "import jax.numpy as jnp\ndef mean(log_probs, advantages, mask): return -log_probs * advantages\n"
ROW = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.fixture
def config(tmp_path):
    """The config of a run with data and functions in files."""
    for name, text in {"train.jsonl": ROW * 4, "eval.jsonl": ROW, "rate.py": REWARD, "loss.py": LOSS}.items():
        (tmp_path / name).write_text(text)
    return tiny.config_of(
        f"output={tmp_path / 'runs'}",
        "name=first",
        "task=jsonl",
        f"data={{train: {tmp_path}/train.jsonl, eval: {tmp_path}/eval.jsonl, reward: '{tmp_path}/rate.py:rate'}}",
        f"loss={tmp_path}/loss.py:mean",
    )


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("train.jsonl", "data.train"),
        ("eval.jsonl", "data.eval"),
        ("rate.py", "data.reward"),
        ("loss.py", "loss.type"),
    ],
)
def test_other_contents_are_refused_by_field(config, tmp_path, name, field):
    run = start_run(config)
    resume_run(config)
    with (tmp_path / name).open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=f"^--resume: {field}: {tmp_path / name} changed since the start .*inputs.json"):
        resume_run(config)
    run.inputs.unlink()
    assert resume_run(config).root == run.root
    assert resume_run(config).root == run.root


def test_run_without_a_record_warns_once(config, capsys):
    run = start_run(config)
    run.inputs.unlink()
    resume_run(config)
    assert f"there is no {run.inputs}" in capsys.readouterr().err
    resume_run(config)
    assert capsys.readouterr().err == ""


def test_damaged_record_is_refused(config):
    run = start_run(config)
    run.inputs.write_text(run.inputs.read_text().replace("data.train", "data.eval"))
    with pytest.raises(UserError, match=r"inputs\.json is damaged.*delete it"):
        resume_run(config)


def test_metrics_without_any_checkpoint_are_refused(config):
    run = start_run(config)
    run.metrics.write_text('{"accuracy": 1.0, "phase": "eval", "step": 0}\n')
    resume_run(config)
    with run.metrics.open("a") as file:
        file.write('{"phase": "train", "reward": 1.0, "step": 2}\n')
    with pytest.raises(UserError, match=r"^--resume: .*checkpoints has no checkpoint, although .* has step 2"):
        resume_run(config)
    (run.checkpoints / "0").mkdir(parents=True)
    run.base.mkdir()
    assert resume_run(config).root == RunDirectory.of(config).root


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "inputs.json", "reference.json", "curves.png"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipe_or_directory_in_place_of_a_file_is_refused(config, name, make):
    run = start_run(config)
    (run.root / name).unlink(missing_ok=True)
    make(run.root / name)
    with pytest.raises(UserError, match=f"^--resume: {run.root / name} is no regular file; move it away"):
        resume_run(config)


def append(path):
    with path.open("a") as file:
        file.write("\n")


@pytest.fixture
def folder(tmp_path):
    """A Hugging Face folder without weights, which no digest reads."""
    return shutil.copytree(Path(__file__).parents[2] / "goldens/tokenizers/chatml", tmp_path / "model")


@pytest.mark.parametrize("name", FOLDER_FILES)
def test_changed_file_of_the_model_folder_is_refused(folder, tmp_path, name):
    """A new file, too: `chat_template.jinja` replaces the template of `tokenizer_config.json`."""
    config = tiny.config_of(f"output={tmp_path / 'runs'}", f"model={{path: {folder}}}", "warm_start.steps=2")
    start_run(config)
    resume_run(config)
    append(folder / name)
    with pytest.raises(UserError, match=f"^--resume: model.path: {folder / name} changed since the start of the run"):
        resume_run(config)


def test_digests_have_every_file_that_a_tokenizer_reads(folder, monkeypatch):
    template = (folder / "chat_template.jinja").read_text()
    read = []
    monkeypatch.setattr(files, "read_regular", lambda path: read.append(path.name) or path.read_bytes())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    for name in ("special_tokens_map.json", "config.json"):
        (folder / name).write_text("{}")
    files.load_folder(folder)
    (folder / "chat_template.jinja").unlink()
    files.load_folder(folder)
    assert {*read} == {*FOLDER_FILES} - {"tokenizer.json"}  # which the library of tokenizers reads


@pytest.fixture
def recording(tmp_path):
    """The config of a run that reads a directory of recordings."""
    (tmp_path / "rows").mkdir()
    for number in range(2):
        rows = [{"prompt": f"{number}", "completion": "a", "reward": sample} for sample in range(2)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"rows/{number}.jsonl").write_text(text)
    source = f"rollout.source={{type: file, path: {tmp_path / 'rows'}}}"
    lengths = "data={max_prompt_length: 5, max_completion_length: 4}"
    return tiny.config_of(
        f"output={tmp_path / 'runs'}", "task=recording", lengths, source, "warm_start.steps=0", "eval.prompts=0"
    )


def change_row(rows):
    append(rows / "1.jsonl")


def add_file(rows):
    shutil.copy(rows / "1.jsonl", rows / "2.jsonl")


def remove_file(rows):
    (rows / "1.jsonl").unlink()


def swap_files(rows):
    """Other rows at each step, with the same contents in all."""
    (rows / "0.jsonl").rename(rows / "2.jsonl")


@pytest.mark.parametrize("change", [change_row, add_file, remove_file, swap_files])
def test_changed_recording_is_refused(recording, tmp_path, change):
    start_run(recording)
    resume_run(recording)
    change(tmp_path / "rows")
    with pytest.raises(UserError, match=f"^--resume: rollout.source.path: {tmp_path}/rows/.* changed since the start"):
        resume_run(recording)


def test_moved_recording_with_the_same_files_is_resumed(recording, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = recording.rollout.source.model_copy(update={"path": "rows"})
    moved = recording.model_copy(update={"rollout": recording.rollout.model_copy(update={"source": section})})
    start_run(moved)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "rows").rename(tmp_path / "elsewhere/rows")
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume_run(moved)


def test_other_recording_of_whole_rows_is_refused(recording, tmp_path):
    """The checks of rows say that each is whole, and not that it is of this recording."""
    start_run(recording)
    shutil.copy(tmp_path / "rows/1.jsonl", tmp_path / "rows/0.jsonl")
    with pytest.raises(UserError, match=r"rollout\.source\.path: .*0\.jsonl changed"):
        resume_run(recording)


@pytest.mark.parametrize("name", ["config.json", "adapter_config.json"])
def test_changed_config_of_a_reference_is_refused_and_another_reference_is_not(tmp_path, name):
    source = "checkpoint" if name == "config.json" else "adapter"
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(f'{{"{folder}": 1}}')

    def config_with(folder):
        return tiny.config_of(
            f"output={tmp_path / 'runs'}",
            "lora={rank: 2}",
            "kl.loss.coef=0.1",
            f"reference={{source: {source}, path: {tmp_path / folder}}}",
        )

    start_run(config_with("a"))
    resume_run(config_with("a"))
    resume_run(config_with("b"))
    resume_run(config_with("b"))
    append(tmp_path / "b" / name)
    with pytest.raises(UserError, match=f"^--resume: reference.path: {tmp_path}/b/{name} changed since"):
        resume_run(config_with("b"))


TASK = """
from train.data.tasks import Example, Task
def make(path, log):
    score = lambda example, completion, finished: {"reward": 0.0, "correct": 0.0}
    examples = [Example(line, "") for line in open(path)]
    return Task("mine", train=examples, eval=examples, score=score)
"""


def test_file_that_an_argument_names_is_compared(tmp_path):
    """A file that was not there at the start is one that the function writes."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "problems.txt").write_text("1\n2\n")
    arguments = f"{{path: {tmp_path}/problems.txt, log: {tmp_path}/log.txt}}"
    config = tiny.config_of(
        f"output={tmp_path / 'runs'}", f"task={tmp_path}/task.py:make", f"data.arguments={arguments}"
    )
    start_run(config)
    for _ in range(3):
        append(tmp_path / "log.txt")
        resume_run(config)
    append(tmp_path / "problems.txt")
    with pytest.raises(UserError, match=r"^--resume: data\.arguments\.path: .*problems\.txt changed since"):
        resume_run(config)


def test_dataset_of_the_hub_has_no_file(config):
    data = config.data.model_copy(update={"train": "datasets:openai/gsm8k:main:train"})
    digests = input_digests(config.model_copy(update={"data": data}))
    assert set(digests) == {"data.eval", "data.reward", "loss.type"}


def test_reward_of_a_package_is_found_without_importing_it(config, tmp_path, monkeypatch):
    package = tmp_path / "failing_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    shutil.copy(tmp_path / "rate.py", package / "rewards.py")
    monkeypatch.syspath_prepend(tmp_path)
    data = config.data.model_copy(update={"reward": "failing_package.rewards:rate"})
    digests = input_digests(config.model_copy(update={"data": data}))
    assert list(digests["data.reward"]) == [str(package / "rewards.py")]
