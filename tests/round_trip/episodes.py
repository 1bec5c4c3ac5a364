"""Episodes of a trained model with a tool, by kljax and by transformers from its export: equal ids in every turn.

    python -m tests.round_trip.episodes --torch-env ENV   # `make test-transformers` runs this

A folder of Qwen 3 with a chat template that tells tools learns from demonstrations to call one, takes two RL steps of
episodes, and is exported. Its greedy evaluation is played again by `play.py`: `apply_chat_template` with the tools,
`generate`, and the observation as a message of the tool. Exit code 1 if an id differs, or no episode called the tool.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import jax

from tests.round_trip import sums
from train.config.load import load
from train.export import export
from train.process.console import quiet_orbax
from train.rl.keys import purpose_key
from train.rollouts.episodes import EpisodeSource
from train.rollouts.source import Request
from train.run.run import run
from train.run.saved_run import SavedRun
from train.run.setup import make_context

FOLDER = Path(__file__).parents[1] / "goldens" / "models" / "qwen3"
PLAYER = Path(__file__).with_name("play.py")
POSITIONS = 1024
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CONFIG = """
steps: 2
output: {output}
task: {sums}:task
model: {{path: {folder}}}
environment: {{name: '{sums}:Adder', max_turns: 3, turn_tokens: 80}}
data: {{max_prompt_length: 512, max_completion_length: 160}}
warm_start: {{steps: {warm_steps}, batch_size: 4, learning_rate: 1e-2}}
rollout: {{prompts_per_step: 2, samples_per_prompt: 4}}
optim: {{learning_rate: 1e-4}}
eval: {{every: 2, prompts: 4, batch_size: 4}}
checkpoint: {{every: 2}}
report: {{rollouts: 0}}
"""


class ObservedEpisodes(EpisodeSource):
    """Keeps the observations of each episode."""

    observed: dict[int, list[str]]

    def _go_on(self, engine: Any, number: int, state: Any, *, text: str, role: str) -> None:
        self.observed.setdefault(number, []).append(text)
        super()._go_on(engine, number, state, text=text, role=role)


def write_folder(folder: Path) -> None:
    """Writes the golden folder with a template that tells tools, for longer sequences."""
    shutil.copytree(FOLDER, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": POSITIONS}))


@quiet_orbax()
def train_and_export(directory: Path, warm_steps: int) -> SavedRun:
    """Trains the folder, and exports it to `hf`; returns the run."""
    write_folder(directory / "model")
    config = directory / "config.yaml"
    options = {"output": directory, "folder": directory / "model", "sums": sums.__file__, "warm_steps": warm_steps}
    config.write_text(CONFIG.format(**options))
    if code := run(load(config, [])):
        raise SystemExit(f"{directory.name}: the run ended with {code}")
    export(directory / "run", directory / "hf", step=None, form="hf", merge=False)
    return SavedRun.at(directory / "run")


def evaluate(saved: SavedRun) -> dict[str, Any]:
    """The greedy episodes of an evaluation: messages, observations, and the ids of prompt and reply of each turn."""
    context = make_context(saved.config)
    step = saved.step(None)
    key = purpose_key(saved.config.seed, "held_out")
    request = Request.held_out(context, 0, step=step, key=key, greedy=True)
    with jax.set_mesh(context.mesh), closing(ObservedEpisodes(context)) as source:
        source.observed = {}
        source.update(saved.policy(context.model, context.mesh, step), step)
        completions = source.sample(request)
        tools = source._tools
        observed = source.observed
    assert completions.sampled is not None
    episodes = [
        {
            "messages": context.tokenizer.messages(example),
            "observations": observed.get(number, []),
            "turns": [[list(turn.prompt_ids), list(turn.ids)] for turn in turns],
        }
        for number, (example, turns) in enumerate(zip(request.examples, completions.sampled, strict=True))
    ]
    return {"tools": tools, "turn_tokens": saved.config.environment.turn_tokens, "episodes": episodes}


def compare(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """Prints what differs; returns the exit code."""
    turns = [len(episode["turns"]) for episode in ours]
    for number, (episode, played) in enumerate(zip(ours, theirs, strict=True)):
        for turn, (expected, actual) in enumerate(itertools.zip_longest(episode["turns"], played)):
            if expected != actual:
                print(
                    f"episode {number}, turn {turn}: prompt and reply are {expected} by kljax, {actual} by transformers"
                )
                return 1
    print(f"{len(turns)} episodes of {turns} turns: all ids are equal")
    if max(turns) < 2:
        print("no episode called the tool, which proves nothing")
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line; returns the exit code."""
    command = argparse.ArgumentParser(
        prog="python -m tests.round_trip.episodes", description=str(__doc__).partition("\n")[0]
    )
    command.add_argument("--torch-env", type=Path, required=True, help="an environment with torch and transformers")
    command.add_argument("--warm-steps", type=int, default=150, help="supervised steps; the default is %(default)s")
    options = command.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        given = evaluate(train_and_export(directory, options.warm_steps))
        (directory / "episodes.json").write_text(json.dumps(given))
        python = options.torch_env / "bin" / "python"
        command_line = [python, PLAYER, directory / "hf", directory / "episodes.json"]
        played = subprocess.run(command_line, check=True, stdout=subprocess.PIPE, text=True)
        return compare(given["episodes"], json.loads(played.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
