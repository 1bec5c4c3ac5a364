"""Libraries of agents, with the code of docs/agents.md, train a run: every trained token is one that was drawn."""

import collections
import doctest
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.integration.command import ROOT, records, run_here
from train.rollouts.engine import TurnEngine

PAGE = (ROOT / "docs/agents.md").read_text()
# The environments of `make test-agents`.
CLIENTS = Path(sys.prefix) / "clients"
KEY = "sk-rewards"
# After this warm start some turns are calls, and most of these can be computed.
RECIPE = (
    "configs/calculator_agent.yaml",
    "model={layers: 1, width: 32, heads: 2, kv_heads: 1, head_dim: 16, mlp_width: 64}",
    "warm_start={steps: 150, batch_size: 32, learning_rate: 1e-2}",
    "rollout={prompts_per_step: 4, samples_per_prompt: 2, fork_rows: 0}",
    "optim={warmup_steps: 0, updates_per_batch: 1}",
    "data.max_completion_length=60",
    "eval=null",
    "report.rollouts=0",
    "steps=2",
)
Drawn = collections.namedtuple("Drawn", "prompt tokens log_probs")


def code_of(*names: str) -> str:
    """Returns the definitions of these names on the page, and its imports of the library that they need."""
    sources = []
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        examples = doctest.DocTestParser().get_examples(block)
        text = "".join(example.source for example in examples)
        if any(re.search(rf"^(async )?(def|class) {name}\b", text, re.MULTILINE) for name in names):
            sources.append(text)
    assert len(sources) == len(names)
    return "\n".join(sources)


@pytest.fixture
def drawn(monkeypatch):
    """Collects the turns that the engine draws to their ends."""
    turns: list[Drawn] = []
    step = TurnEngine.step

    def collecting(self):
        ended = step(self)
        turns.extend(Drawn(tuple(turn.ids), tuple(turn.tokens), tuple(turn.log_probs)) for turn in ended)
        return ended

    monkeypatch.setattr(TurnEngine, "step", collecting)
    return turns


def turns_of(row: dict) -> list[Drawn]:
    """Returns the turns of a recorded row: what was sampled, and all tokens before it."""
    tokens = [*row["prompt_ids"], *row["completion_ids"]]
    mask = row.get("completion_mask", [True] * len(row["completion_ids"]))  # left out where there is no observation
    sampled = np.pad(np.array([False] * len(row["prompt_ids"]) + mask, int), 1)
    log_probs = [None] * len(row["prompt_ids"]) + row["log_probs"]
    starts, ends = (np.flatnonzero(np.diff(sampled) == sign) for sign in (1, -1))
    return [
        Drawn(tuple(tokens[:start]), tuple(tokens[start:end]), tuple(log_probs[start:end]))
        for start, end in zip(starts, ends, strict=True)
    ]


def train(folder: Path, *options: str) -> None:
    """Trains two steps, whose batches are recorded."""
    run_here(*RECIPE, f"rollout.record={folder / 'recorded'}", f"output={folder}", *options).succeeded()


def assert_trained_is_drawn(folder: Path, drawn: list[Drawn], *, turns: float = 1) -> None:
    """Every recorded row is made of turns of the engine, and each of these is in one row, with its log-probs."""
    steps = records(folder / "calculator-agent", "train")
    assert [record["step"] for record in steps] == [1, 2]
    failed = {name: value for record in steps for name, value in record.items() if "episodes_failed" in name and value}
    assert not failed
    assert np.mean([record["episode_turns"] for record in steps]) > turns
    rows = [
        json.loads(line) for step in (0, 1) for line in (folder / f"recorded/{step:08d}.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 16
    trained = [turn for row in rows for turn in turns_of(row)]
    assert sorted(trained) == sorted(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["verifiers", "inspect-ai", "openpipe-art"])
def test_library_outside_trains_what_was_drawn(library, drawn, monkeypatch, tmp_path):
    play = {"verifiers": "play_verifiers", "inspect-ai": "play_inspect", "openpipe-art": "play_art"}[library]
    python = CLIENTS / library / "bin/python"
    if not python.exists():
        pytest.skip(f"make test-agents makes the environment of {library}")
    (tmp_path / "mine.py").write_text(code_of("take_episodes", play))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    code = f"import asyncio, mine; asyncio.run(mine.take_episodes({url!r}, {KEY!r}, mine.{play}))"
    path = os.pathsep.join([str(python.parent), str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)}
    monkeypatch.setenv("REWARD_KEY", KEY)
    with (tmp_path / "client.log").open("w") as log:
        program = subprocess.Popen([python, "-c", code], env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        source = f"{{type: endpoint, agent: null, port: {port}, reward_key_env: REWARD_KEY, max_failures: 0.0}}"
        train(tmp_path, f"rollout.source={source}")
    finally:
        program.terminate()
        program.wait()
        print((tmp_path / "client.log").read_text())
    assert_trained_is_drawn(tmp_path, drawn)


@pytest.mark.slow
def test_agents_of_openai_train_what_was_drawn(drawn, tmp_path):
    pytest.importorskip("agents")
    (tmp_path / "mine.py").write_text(code_of("play_agent"))
    train(tmp_path, f"rollout.source={{type: endpoint, agent: '{tmp_path}/mine.py:play_agent'}}")
    assert_trained_is_drawn(tmp_path, drawn)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "turns"), [("env: gsm8k", 0.9), ("env: gsm8k_multi_turn, max_turns: 2", 1.9)])
def test_environment_of_skyrl_trains_what_was_drawn(arguments, turns, drawn, tmp_path):
    pytest.importorskip("skyrl_gym")
    (tmp_path / "mine.py").write_text(code_of("SkyRL"))
    environment = f"{{name: '{tmp_path}/mine.py:SkyRL', arguments: {{{arguments}}}, max_turns: 2, turn_tokens: 20}}"
    length = "data.max_completion_length=240"
    train(tmp_path, f"environment={environment}", "rollout.source={type: jax}", length)
    assert_trained_is_drawn(tmp_path, drawn, turns=turns)
