"""Runs configs/replay.yaml on recordings of TRL and verl, and compares it with the systems' own numbers."""

import json
import pathlib

import jax
import numpy as np

from tests.train.presets.proof import prepared_batch
from train.config.load import LoadedConfig, load
from train.data.tokenizers import load_tokenizer
from train.models.sharding import make_mesh
from train.rollouts.collect import collect
from train.rollouts.open import open_stream
from train.run.metrics import read_metrics
from train.run.run import run
from train.run.saved_run import SavedRun
from train.run.setup import make_context
from train.weights.huggingface import load_params
from train.weights.model import make_model

CONFIG = pathlib.Path(__file__).parents[2] / "configs/replay.yaml"
# Largest relative difference, in float32; that of weights is relative to their way since the start. The rounding of a
# forward pass in bfloat16 is larger, and AdamW makes a sign of a gradient that is rounding.
BOUND, BF16_BOUND = 1e-4, 0.5
SHORT = ("data.max_prompt_length=32", "data.max_completion_length=8", "checkpoint={every: 1, keep: 9}")
# Prompts have the padding token; the tokenizer, one of numbers, has no texts of single tokens for the report.
TINY = (*SHORT, "model.freeze_pad_embedding=true", "report.rollouts=0")
# TRL logs the KL as a mean over tokens, as a controller of the coefficient measures it; this one keeps 0.04.
SCHEDULE = "{type: linear, end_value: 0.04, transition_steps: 1}"
# `preset=` replaces the KL of the file.
MEASURED = ("kl.loss.coef=0.04", f"kl.loss.controller={{type: scheduled, schedule: {SCHEDULE}}}")
TRL = (
    *("steps=3", "rollout.prompts_per_step=1", "rollout.samples_per_prompt=8", "optim.epochs=2"),
    *("optim.learning_rate=1e-3", *MEASURED, *TINY),
)
SGD = ("optim.optimizer=sgd", "optim.learning_rate=0.02")
VERL = ("preset=verl/grpo", "steps=1", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=3", *TINY)


def load_replay(recorded: pathlib.Path, model: pathlib.Path, *overrides: str) -> LoadedConfig:
    """Loads the config of a recording and of the model it started from."""
    paths = (f"model.path={model}", f"rollout.source.path={recorded}/recording.jsonl", f"output={recorded}/runs")
    return load(CONFIG, (*paths, *overrides))


def trl_differences(recorded: pathlib.Path) -> dict[str, float]:
    """Replays a run of TRL; returns the largest difference over the steps of losses, KLs and weights."""
    _, _, preset, *variant = recorded.name.split("-")
    changes = (*TRL, *(SGD if "sgd" in variant else ()))
    loaded = load_replay(recorded, recorded / "model", f"preset=trl/{preset}", *changes)
    assert run(loaded) == 0
    config, updates, mesh = loaded.config, loaded.config.optim.epochs, make_mesh()
    model, saved = make_model(config, load_tokenizer(config)), SavedRun.at(recorded / "runs/replay")
    logs = json.loads((recorded / "log.json").read_text())
    steps = [record for record in read_metrics(saved.directory.metrics) if record["phase"] == "train"]
    # TRL logs every update, kljax the mean of a step.
    largest = {}
    for name, metric in (("loss", "loss"), ("kl", "kl_loss_per_token")):
        expected = np.reshape([log[name] for log in logs], (-1, updates)).mean(1)
        largest[name] = float(np.max(np.abs([step[metric] for step in steps] / expected - 1)))

    def folder_weights(name: str) -> np.ndarray:
        return _vector(load_params(recorded / name, model, mesh))

    start, ways = folder_weights("model"), []
    for step in range(1, len(steps) + 1):
        weights, actual = folder_weights(f"update-{step * updates}"), _vector(saved.policy(model, mesh, step).params)
        ways.append(np.linalg.norm(actual - weights) / np.linalg.norm(weights - start))
    return {**largest, "weights": float(max(ways))}


def verl_differences(recorded: pathlib.Path, model: pathlib.Path) -> dict[str, float]:
    """Reads a recording of verl; returns the largest difference of the advantages of its rows."""
    context = make_context(load_replay(recorded, model, *VERL).config)
    with jax.set_mesh(context.mesh):
        batch = prepared_batch(context.config, collect(context, open_stream(context), 0).batch)
    first = np.asarray(batch.prompt_lengths)[:, None]
    with np.load(recorded / "advantages.npz") as arrays:
        of_rows = np.take_along_axis(np.asarray(batch.advantages), first, axis=1)[:, 0]
        off = np.abs(of_rows - arrays["advantages"])
    return {"advantages": float(off.max())}


def problems_of(folder: pathlib.Path) -> list[str]:
    """Replays every recording of a folder, prints the differences, and lists the ones beyond the bound."""
    problems, models = [], sorted(folder.glob("replay-trl-*/model"))
    for recorded in sorted(folder.glob("replay-*")):
        named = trl_differences(recorded) if recorded / "model" in models else verl_differences(recorded, models[0])
        print(f"-- {recorded.name}: {', '.join(f'{name} {off:.1e}' for name, off in named.items())}", flush=True)
        bound = BF16_BOUND if "-bf16" in recorded.name else BOUND
        problems += [f"{recorded.name}: {name} differs by {off:.1e}" for name, off in named.items() if not off < bound]
    return problems


def _vector(tree: object) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(tree)])
