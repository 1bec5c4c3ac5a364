"""Two processes do as one: sources from elsewhere, references, a roll-back, an evaluation, and exports."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests import peers
from tests.integration.command import LORA, files, records, run_here, saved_arrays
from tests.integration.test_eval import assert_as_written
from tests.train.rollouts.fake_server import Answer, Digits, serving
from train.data.tokenizers import ByteTokenizer
from train.export import main as export

MESH = "mesh={fsdp: 2}"
STEPS = 2
# An adapter that starts at zero: the order of sums shows in its first changes, see docs/pods.md.
CLOSE = 1e-5


def pair(module: str, *arguments: object, env) -> tuple[str, str]:
    """Runs a command to its end in two processes of one device; returns output and errors of the leader."""
    ended = peers.run(module, *arguments, processes=2, devices=1, env=env)
    for code, out, err in ended:
        assert code == 0, f"{out}\n{err}"
        assert "Traceback" not in err
    assert ended[1][2] == "", "the leader alone warns"
    return ended[0][1:]


def assert_close(root: Path, expected: Path) -> None:
    """The same completions and rewards, and the losses up to rounding."""
    got, want = records(root, "train"), records(expected, "train")
    assert len(got) == len(want) == STEPS
    for name in ("reward", "completion_length", "finished"):
        assert [record[name] for record in got] == [record[name] for record in want]
    for name in ("loss", "kl_reference"):
        pairs = [[record[name] for record in one] for one in (got, want)]
        np.testing.assert_allclose(*pairs, rtol=CLOSE, atol=CLOSE, err_msg=name)


@pytest.fixture(scope="module")
def recorded(shared, session_directory):
    """A run of one process, and the directory with its rollouts."""
    rollouts = session_directory / "recorded-rollouts"
    run = shared(*LORA, f"rollout.record={rollouts}").succeeded()
    return run.root, rollouts


@pytest.mark.slow
def test_recorded_rows_a_step_as_reference_and_a_roll_back(recorded, env, tmp_path):
    source = f"rollout.source={{type: file, path: {recorded[1]}}}"
    # No policy has this entropy: the weights of step 0 come back after every step.
    guard = "guard={min_entropy: 100, action: roll_back}"
    arguments = (*LORA, source, guard, "reference={source: step, step: 0}", "kl.loss.coef=0.1", "checkpoint.every=2")
    _, warnings = pair("train", *arguments, MESH, f"output={tmp_path / 'two'}", env=env)
    one = run_here(*arguments, f"output={tmp_path / 'one'}").succeeded()
    for text in (warnings, one.stderr):
        assert text.count("rolled back to the weights of step 0") == STEPS
    assert_close(tmp_path / "two" / "lora", one.root)


@pytest.mark.slow
def test_an_evaluation_has_the_numbers_of_the_run(recorded, env, tmp_path):
    root, _ = recorded
    pair("train.eval", root, MESH, "--step", 0, "--json", tmp_path / "found.json", env=env)
    found = json.loads((tmp_path / "found.json").read_text())
    assert_as_written(found, records(root, "eval")[0])


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["peft", "orbax", "hf"])
def test_an_export_is_that_of_one_process(recorded, env, tmp_path, form):
    root, _ = recorded
    flags = ["--format", form, *(["--merge"] if form == "hf" else [])]
    one, two = tmp_path / "one" / "out", tmp_path / "two" / "out"
    assert export([str(root), "--to", str(one), *flags]) == 0
    printed, _ = pair("train.export", root, "--to", two, *flags, env=env)
    assert printed.startswith(str(two))
    if form == "orbax":
        got, expected = saved_arrays(two), saved_arrays(one)
        assert {name: array.tobytes() for name, array in got.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }
    else:
        assert files(two) == files(one)


class Adapters(Digits):
    """A server that loads adapters, and notes the paths."""

    def __init__(self) -> None:
        super().__init__(ByteTokenizer().eos_id)
        self.loaded: list[str] = []

    def __call__(self, path: str, body: dict) -> Answer:
        if path == "/v1/load_lora_adapter":
            assert (Path(body["lora_path"]) / "adapter_model.safetensors").is_file()
            self.loaded.append(body["lora_name"])
        return (200, "") if path.endswith("_lora_adapter") else super().__call__(path, body)


@pytest.mark.thorough
def test_a_server_and_a_teacher(recorded, env, tmp_path):
    teacher = tmp_path / "teacher"
    assert export([str(recorded[0]), "--to", str(teacher), "--merge"]) == 0
    reference = f"reference={{source: checkpoint, path: {teacher}}}"

    def arguments(url: str, name: str) -> tuple[str, ...]:
        source = f"rollout.source={{type: openai, url: '{url}', model: m, folder: {tmp_path / name}}}"
        return (*LORA, source, reference, "kl.loss.coef=0.1", f"output={tmp_path / name}")

    one, two = Adapters(), Adapters()
    with serving(one) as url:
        alone = run_here(*arguments(url, "one")).succeeded()
    with serving(two) as url:
        pair("train", *arguments(url, "two"), MESH, env=env)
    assert_close(tmp_path / "two" / "lora", alone.root)
    assert len(two.loaded) == len(one.loaded) == STEPS
    asked = [sorted(json.dumps(body, sort_keys=True) for body in server.bodies) for server in (one, two)]
    assert len(asked[0]) == len(asked[1]) == STEPS * 8
