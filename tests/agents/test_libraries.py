"""Libraries of agents, with the code of docs/agents.md, train a run: every trained token is one that was drawn."""

import collections
import contextlib
import doctest
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.integration.command import ROOT, recorded_rows, records, run_here
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
# The tokens of Qwen 3 that the renderer of this family asks for, besides those of the tokenizer.
QWEN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Two turns whose prompts the client renders as ids, for /inference/v1/generate.
PLAY_IDS = """
import os
from renderers import Qwen3RendererConfig
import verifiers.v1 as vf
from verifiers.v1.harnesses.null import NullHarnessConfig

async def play_ids(row, base_url, api_key, model):
    os.environ[api_key] = api_key
    client = vf.TrainClientConfig(
        base_url=base_url,
        api_key_var=api_key,
        renderer_model_name=os.path.abspath("tokenizer"),
        renderer=Qwen3RendererConfig(enable_thinking=False),
    )
    config = vf.AgentConfig(
        harness=NullHarnessConfig(id="null"),
        runtime=vf.SubprocessConfig(),
        client=client,
        model=model,
        sampling=vf.SamplingConfig(max_tokens=4),
    )
    async with vf.Agent(config) as agent, agent.interaction(vf.Task(vf.TaskData())) as talk:
        for text in (row["prompt"], "Sure?"):
            await talk.turn(text)
    return float(len(talk.trace.last_reply))
"""
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
        turns.extend(Drawn(tuple(turn.ids), tuple(turn.tokens), tuple(turn.rollout_log_probs)) for turn in ended)
        return ended

    monkeypatch.setattr(TurnEngine, "step", collecting)
    return turns


def turns_of(row: dict) -> list[Drawn]:
    """Returns the turns of a recorded row: what was sampled, and all tokens before it."""
    tokens = row["ids"]
    log_probs = row["log_probs"]
    sampled = np.pad(np.array(row["trained"], int), 1)
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
    rows = [row for step in (1, 2) for row in recorded_rows(folder / "recorded", step)]
    assert sum(any(row["trained"]) for row in rows) >= 16
    trained = [turn for row in rows for turn in turns_of(row)]
    assert sorted(trained) == sorted(drawn)


@contextlib.contextmanager
def program(library: str, play: str, source: str, folder: Path) -> Iterator[str]:
    """Runs a function of a source, which plays episodes, in the environment of a library; yields the run's source."""
    python = CLIENTS / library / "bin/python"
    if not python.exists():
        pytest.skip(f"make test-agents makes the environment of {library}")
    (folder / "mine.py").write_text(source)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    code = f"import asyncio, mine; asyncio.run(mine.take_episodes('http://127.0.0.1:{port}/v1', {KEY!r}, mine.{play}))"
    path = os.pathsep.join([str(python.parent), str(Path(sys.prefix) / "bin"), os.environ["PATH"]])
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
    with (folder / "client.log").open("w") as log:
        process = subprocess.Popen([python, "-c", code], env=env, cwd=folder, stdout=log, stderr=log)
    try:
        chosen = f"type: endpoint, agent: null, port: {port}, reward_key_env: REWARD_KEY, max_failures: 0.0"
        yield f"rollout.source={{{chosen}}}"
    finally:
        process.terminate()
        process.wait()
        print((folder / "client.log").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "play"),
    [("verifiers", "play_verifiers"), ("inspect-ai", "play_inspect"), ("openpipe-art", "play_art")],
)
def test_library_outside_trains_what_was_drawn(library, play, drawn, monkeypatch, tmp_path):
    monkeypatch.setenv("REWARD_KEY", KEY)
    with program(library, play, code_of("take_episodes", play), tmp_path) as source:
        train(tmp_path, source)
    assert_trained_is_drawn(tmp_path, drawn)


@pytest.mark.slow
def test_client_of_renderers_trains_what_was_drawn(drawn, monkeypatch, tmp_path):
    monkeypatch.setenv("REWARD_KEY", KEY)
    folder = tmp_path / "tokenizer"
    shutil.copytree(ROOT / "tests/goldens/tokenizers/chatml", folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    for text in QWEN_TOKENS:
        last = state["added_tokens"][-1]
        state["added_tokens"].append(last | {"id": last["id"] + 1, "content": text})
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (tmp_path / "words.py").write_text(
        f"from train.data.tokenizers.files import load_folder\ndef make(): return load_folder({str(folder)!r})"
    )
    # Where so young a policy draws a token of control within a turn, the renderer writes all anew, which forks.
    rows = "rollout.samples_per_prompt=4", "rollout.fork_rows=2"
    lengths = "warm_start.steps=0", "data.max_prompt_length=80", "data.max_completion_length=80"
    with program("verifiers", "play_ids", code_of("take_episodes") + PLAY_IDS, tmp_path) as source:
        train(tmp_path, source, f"data.tokenizer={tmp_path}/words.py:make", *rows, *lengths)
    assert_trained_is_drawn(tmp_path, drawn, turns=1.9)
    assert all(record["episode_forks"] < 0.5 for record in records(tmp_path / "calculator-agent", "train"))


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
