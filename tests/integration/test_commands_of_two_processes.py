"""Two processes do as one: sources from elsewhere, references, a roll-back, an evaluation, and exports."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from kljax._files import write_text_atomic
from tests import peers
from tests.integration.command import LORA, Run, assert_same_arrays, files, records, run_here, saved_arrays
from tests.integration.commands_peer import NEXT
from tests.integration.test_eval import assert_as_written
from tests.train.rollouts.fake_server import Answer, Digits, serving
from train.data.tokenizers import ByteTokenizer
from train.export import main as export

MESH = "mesh={fsdp: 2}"
STEPS = 2
FOUND = "found.json"
# An adapter that starts at zero: the order of sums shows in its first changes, see docs/pods.md.
CLOSE = 1e-5


def pair(module: str, *arguments: object, env) -> Run:
    """Runs a command to its end in two processes of one device; returns what the leader printed."""
    ended = peers.run(module, *arguments, processes=2, devices=1, env=env)
    for code, out, err in ended:
        assert code == 0, f"{out}\n{err}"
        assert "Traceback" not in err
    assert "run directory:" not in ended[1][1], "the leader alone prints"
    assert ended[1][2] == "", "the leader alone warns"
    return Run(*ended[0])


def train_and_evaluate(*arguments: str, env) -> Run:
    """Runs both commands in one pair of processes; the numbers of the evaluation lie beside the run."""
    output = Path(arguments[-1].removeprefix("output="))
    evaluation = ("train.eval", output / "lora", "--step", STEPS, "--json", output / FOUND)
    return pair("tests.integration.commands_peer", "train", *arguments, NEXT, *evaluation, env=env)


def assert_close(root: Path, expected: Path) -> None:
    """The same completions and rewards, and the weights after the warm start and the losses up to rounding."""
    base, expected_base = (saved_arrays(run / "base") for run in (root, expected))
    for name, value in expected_base.items():
        np.testing.assert_allclose(base[name], value, rtol=0, atol=CLOSE * np.abs(value).max(), err_msg=name)
    got, want = records(root, "train"), records(expected, "train")
    assert len(got) == len(want) == STEPS
    for name in ("reward", "completion_length", "finished"):
        assert [record[name] for record in got] == [record[name] for record in want]
    for name in ("loss", "kl_reference"):
        pairs = [[record[name] for record in item] for item in (got, want)]
        np.testing.assert_allclose(*pairs, rtol=CLOSE, atol=CLOSE, err_msg=name)


def recorded_row(group: int, sample: int) -> dict:
    """A digit that ends, as a sampler would have written it."""
    first, second = (ord("0") + number % 10 for number in (group, group + sample))
    return {
        "group": group,
        "prompt_ids": [first, *b"+1="],
        "completion_ids": [second, ByteTokenizer().eos_id],
        "log_probs": [-1.5 - 0.1 * sample, -0.1],
        "reward": (group + 3 * sample) % 5 / 4,
    }


@pytest.fixture(scope="module")
def arguments(session_directory):
    """A run on recorded rows, with a step as reference. No policy has this entropy: weights roll back every step."""
    rows = [recorded_row(group, sample) for group in range(STEPS * 8) for sample in range(2)]
    path = session_directory / "recorded.jsonl"
    # Other test processes may read it by now.
    write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in rows))
    source = f"rollout.source={{type: file, path: {path}}}"
    guard = "guard={min_entropy: 100, action: roll_back}"
    reference = "reference={source: step, step: 0}"
    short = ("model.layers=1", "warm_start.steps=10", "checkpoint.every=2")
    return (*LORA, *short, source, guard, reference, "kl.loss.coef=0.1")


@pytest.fixture(scope="module")
def of_two(shared, arguments, env):
    """The run in two processes, and its evaluation."""
    return shared(*arguments, MESH, command=functools.partial(train_and_evaluate, env=env))


@pytest.mark.slow
def test_rows_step_reference_rollback_and_evaluation_run(of_two, arguments, tmp_path):
    single = run_here(*arguments, "eval.greedy=false", f"output={tmp_path}").succeeded()
    for run in (of_two, single):
        assert run.stderr.count("rolled back to the weights of step 0") == STEPS
    assert_close(of_two.root, single.root)
    recorded, record = json.loads((of_two.root.parent / FOUND).read_text()), records(of_two.root, "eval")[-1]
    assert_as_written(recorded, record)
    written = (of_two.root / "samples" / f"{STEPS}.jsonl").read_text().splitlines()
    assert [sample | {"decoding": "sampled"} for sample in recorded["samples"]] == [
        json.loads(line) for line in written
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["peft", "orbax", "hf"])
def test_export_equals_the_export_of_one_process(of_two, env, tmp_path, form):
    flags = ["--format", form, *(["--merge"] if form == "hf" else [])]
    first, second = tmp_path / "one" / "out", tmp_path / "two" / "out"
    assert export([str(of_two.root), "--to", str(first), *flags]) == 0
    assert str(second) in pair("train.export", of_two.root, "--to", second, *flags, env=env).stdout
    if form == "orbax":
        assert_same_arrays(saved_arrays(second), saved_arrays(first))
    else:
        assert files(second) == files(first)


class Adapters(Digits):
    """A server that loads adapters, and notes the paths."""

    def __init__(self) -> None:
        super().__init__(ByteTokenizer().eos_id)
        self.loaded: list[str] = []

    def __call__(self, path: str, body: dict) -> Answer:
        if path == "/v1/load_lora_adapter":
            assert (Path(body["lora_path"]) / "adapter_model.safetensors").is_file()
            self.loaded.append(body["lora_name"])
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": name} for name in ("m", *self.loaded)]})
        return (200, "") if path.endswith("_lora_adapter") else super().__call__(path, body)


@pytest.mark.thorough
def test_a_server_and_a_teacher(shared, env, tmp_path):
    teacher = tmp_path / "teacher"
    assert export([str(shared(*LORA).succeeded().root), "--to", str(teacher), "--merge"]) == 0
    reference = f"reference={{source: checkpoint, path: {teacher}}}"

    def options(url: str, name: str) -> tuple[str, ...]:
        source = f"rollout.source={{type: openai, url: '{url}', model: m, folder: {tmp_path / name}}}"
        return (*LORA, source, reference, "kl.loss.coef=0.1", f"output={tmp_path / name}")

    first, second = Adapters(), Adapters()
    with serving(first) as url:
        alone = run_here(*options(url, "one")).succeeded()
    with serving(second) as url:
        pair("train", *options(url, "two"), MESH, env=env)
    assert_close(tmp_path / "two" / "lora", alone.root)
    assert len(second.loaded) == len(first.loaded) == STEPS
    assert asked(second) == asked(first)
    assert len(asked(first)) == STEPS * 8 * 2


def asked(server: Digits) -> list[tuple[list[int], int]]:
    """The prompts and seeds of all requests but those that try the server."""
    return sorted((body["prompt"], body["seed"]) for body in server.bodies if not body["ignore_eos"])
