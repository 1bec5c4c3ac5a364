"""ART: groups, packing and inputs by its preprocessing, then `compute_loss` of its unsloth trainer on each packed row.

Needs pydantic; what else is not installed is replaced. The trajectories are tokens already, so that no chat template
runs. One packed row is an optimizer step of ART; two are accumulated as transformers does, by their mean. ART adds 1e-6
to the number of tokens whose inverse weighs a trajectory: the recordings have the inverse itself. It knows no
temperature. Packed rows share their prompts; the model sees each token at its position in its own sequence.
"""

import os
import pathlib
import random
import sys
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.goldens.presets import batch, model, record, stubs
from tests.goldens.systems import release

ABOUT = {"version": "openpipe-art 0.5.18", "dtype": "float64"}
# Settings of `dev.TrainConfig`.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "cispo": {},
    "grpo": {"ppo": True},
    "gspo": {"ppo": True, "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
}


class Packed(torch.nn.Module):
    """The model on a packed row: its hidden states take the place of logits, as with unsloth."""

    def __init__(self, trained: torch.nn.Module) -> None:
        super().__init__()
        self.trained = trained
        self.positions = torch.zeros(0)

    def get_output_embeddings(self) -> torch.nn.Module:
        """The LM head."""
        return self.trained.get_output_embeddings()

    def forward(self, input_ids: torch.Tensor, causal_mask: torch.Tensor) -> Any:
        """The hidden states after the last norm."""
        bias = causal_mask[:, None].to(torch.get_default_dtype()).clamp(min=torch.finfo(torch.get_default_dtype()).min)
        states = self.trained.model(input_ids=input_ids, position_ids=self.positions, attention_mask=bias)
        return types.SimpleNamespace(logits=states.last_hidden_state)


def tokenized(recorded: batch.Recorded, row: int, advantage: float) -> Any:
    """The result of a trajectory of one prompt and one completion; None if no token is trained, as in ART."""
    from art.preprocessing.tokenize import TokenizedResult

    length = int(recorded.mask[row].sum())
    if length == 0:
        return None
    prompt = recorded.prompts[row][recorded.prompt_mask[row]].tolist()
    tokens = prompt + recorded.completions[row, :length].tolist()
    return TokenizedResult(
        advantage=advantage,
        chat="",
        token_ids=tokens,
        input_pos=list(range(len(tokens))),
        assistant_mask=[0] * len(prompt) + [1] * length,
        logprobs=[float("nan")] * len(prompt) + recorded.old_log_probs[row, :length].tolist(),
        pixel_values=None,
        image_grid_thw=None,
        trajectory=None,
        choice_offsets=[],
        extra_logprobs={},
        _tokenizer=None,
    )


def results_of(recorded: batch.Recorded, exact: bool = True) -> list[Any]:
    """The tokenized trajectories with the advantages and weights of ART; `exact` takes 1e-6 out of the weights."""
    from art.preprocessing import tokenize

    rows = [
        types.SimpleNamespace(
            reward=float(recorded.rewards[row]), row=row, messages_and_choices=[], tools=None, additional_histories=[]
        )
        for row in range(batch.ROWS)
    ]
    groups = [[rows[row] for row in np.flatnonzero(recorded.groups == group)] for group in range(batch.PROMPTS)]

    def tokenize_trajectory(
        _: Any, __: Any, ___: Any, advantage: float, ____: Any, trajectory: Any, **_____: Any
    ) -> Any:
        return tokenized(recorded, trajectory.row, advantage)

    with mock.patch.object(tokenize, "tokenize_trajectory", tokenize_trajectory):
        results = list(tokenize.tokenize_trajectory_groups(None, groups, False, True))
    for result in results if exact else ():
        result.weight = 1 / sum(result.assistant_mask)
    return results


def packed_rows(results: list[Any], accumulation: int) -> Any:
    """The results packed into as many rows as there are micro-batches."""
    from art.preprocessing.pack import packed_tensors_from_tokenized_results

    longest = sum(len(result.token_ids) for result in results)
    for length in range(longest // accumulation, longest + 1):
        packed = packed_tensors_from_tokenized_results(results, length, pad_token_id=batch.PAD)
        if len(packed["tokens"]) == accumulation:
            return packed
    raise ValueError(f"no length packs the trajectories into {accumulation} rows")


def run(algorithm: str, accumulation: int, recorded: batch.Recorded, exact: bool = True) -> record.Step:
    """One optimizer step of the trainer."""
    from art.preprocessing.inputs import create_train_inputs
    from art.unsloth.train import get_compute_loss_fn

    random.seed(0)
    packed = packed_rows(results_of(recorded, exact), accumulation)
    settings = {**ALGORITHMS[algorithm], "logprob_calculation_chunk_size": packed["tokens"].shape[1]}
    trained = model.load()
    rows = Packed(trained)
    accelerator = types.SimpleNamespace(device=torch.device("cpu"))
    trainer = types.SimpleNamespace(
        model=rows, accelerator=accelerator, optimizer=None, _metrics={"train": defaultdict(list)}
    )
    compute_loss = get_compute_loss_fn(trainer)
    config = types.SimpleNamespace(learning_rate=0.0, kl_penalty_coef=0.0)
    losses = []
    for row in range(accumulation):
        rows.positions = packed["input_pos"][row : row + 1]
        inputs = create_train_inputs(packed, row, config, settings, False)
        losses.append(compute_loss(rows, inputs) / accumulation)
        losses[-1].backward()
    loss = sum(value.item() for value in losses)
    return record.Step(algorithm, accumulation, ALGORITHMS[algorithm], loss, record.gradients_of(trained))


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two packed rows."""
    root = root.resolve()
    for package in ("art", "art.preprocessing", "art.unsloth", "art.utils"):
        release.bare(root, package)
    for name in ("art.dev", "art.types", "art.trajectories"):
        sys.modules[name] = stubs.Anything(name)
    stubs.replace("nest_asyncio", "trl", "peft", "datasets")
    # Read where the type of the model is; the sums are in that of the model.
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    with stubs.missing_replaced(root):
        import art.preprocessing.tokenize
        import art.unsloth.train  # noqa: F401
    yield from model.float64_steps(run, ALGORITHMS)
