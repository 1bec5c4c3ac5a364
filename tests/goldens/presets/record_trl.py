"""TRL: whole steps of `GRPOTrainer` and `RLOOTrainer`, `train()` included. Needs accelerate and datasets.

Recorded prompts, completions, rewards and the log-probs of other policies replace generation, the reward function and
the forward passes without a gradient; everything else is the trainer's own, from the advantages to the accumulation.
"""

import contextlib
import copy
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import tokenizers
import torch
import transformers

from tests.goldens.presets import batch, model, record

ABOUT = {"version": "trl 1.16.0", "dtype": "float64"}
GRPO: dict[str, Any] = {"scale_rewards": "group", "epsilon": 0.2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, **GRPO},
    "dr_grpo": {"loss_type": "dr_grpo", "beta": 0.04, **GRPO, "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", **GRPO},
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "beta": 0.04,
        **GRPO,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
    },
    "cispo": {"loss_type": "cispo", **GRPO, "epsilon_high": 5.0},
    "rloo": {"beta": 0.05},
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of numbers, which the trainer asks for its special tokens and to decode."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(i): i for i in range(batch.VOCABULARY)}, unk_token="0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=str(batch.PAD), eos_token=str(batch.EOS)
    )


class StepGradients(transformers.TrainerCallback):
    """Keeps the gradients that the optimizer would use."""

    found: dict[str, Any]

    def on_pre_optimizer_step(self, *_: object, model: torch.nn.Module, **__: object) -> None:
        """Copies them."""
        self.found = record.gradients_of(model)


def recorded_trainer(base: type, recorded: batch.Recorded) -> type:
    """The trainer with recorded completions and log-probs; losses of the micro-batches are added up."""
    lengths = (recorded.completions != batch.PAD).sum(1)

    class Trainer(base):  # type: ignore[misc]
        loss = 0.0

        def _tokenize_prompts(self, prompts: list[str]) -> Any:
            rows = [recorded.prompts[row][recorded.prompt_mask[row]].tolist() for row in range(batch.ROWS)]
            assert [int(prompt) for prompt in prompts] == recorded.groups.tolist()
            return rows, None, {}

        def _generate_single_turn(self, *_: object, **__: object) -> Any:
            rows = [row[:end].tolist() for row, end in zip(recorded.completions, lengths, strict=True)]
            return rows if base.__name__ == "RLOOTrainer" else (rows, None)

        def _get_per_token_logps_and_entropies(self, scored: Any, *arguments: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                return super()._get_per_token_logps_and_entropies(scored, *arguments, **options)
            other = recorded.old_log_probs if scored is self.model else recorded.ref_log_probs
            return torch.from_numpy(other), None, None

        def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*arguments, **options)
            self.loss += loss.item()
            return loss

    return Trainer


@contextlib.contextmanager
def reference_from_memory(trained: torch.nn.Module) -> Iterator[None]:
    """The trainers load their reference from the path of the model, which has none."""
    made = lambda *_, **__: copy.deepcopy(trained)  # noqa: E731
    with (
        mock.patch("trl.trainer.grpo_trainer.create_model_from_path", made),
        mock.patch("trl.trainer.rloo_trainer.create_model_from_path", made),
    ):
        yield


def run(
    algorithm: str,
    accumulation: int,
    recorded: batch.Recorded,
    algorithms: Mapping[str, dict[str, Any]] = ALGORITHMS,
) -> record.Step:
    """One optimizer step of a trainer."""
    import datasets
    import trl

    settings = algorithms[algorithm]
    rloo = algorithm == "rloo"
    trained, gradients = model.load(), StepGradients()
    make_config: Any = trl.RLOOConfig if rloo else trl.GRPOConfig
    with tempfile.TemporaryDirectory() as directory, reference_from_memory(trained):
        # Two iterations, so that the old log-probs are not those of the update.
        arguments = make_config(
            output_dir=directory,
            per_device_train_batch_size=batch.ROWS // accumulation,
            gradient_accumulation_steps=accumulation,
            num_generations=batch.SAMPLES,
            num_iterations=2,
            max_completion_length=batch.COMPLETION_LENGTH,
            temperature=batch.TEMPERATURE,
            mask_truncated_completions=True,
            shuffle_dataset=False,
            max_steps=1,
            max_grad_norm=0.0,
            optim="sgd",
            learning_rate=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            disable_dropout=True,
            **settings,
        )
        trainer = recorded_trainer(trl.RLOOTrainer if rloo else trl.GRPOTrainer, recorded)(
            model=trained,
            reward_funcs=lambda **_: recorded.rewards.tolist(),
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"prompt": [str(i) for i in range(batch.PROMPTS)]}),
            processing_class=make_tokenizer(),
            callbacks=[gradients],
        )
        trainer.train()
    return record.Step(algorithm, accumulation, settings, trainer.loss, gradients.found)


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two micro-batches."""
    sys.path.insert(0, str(root))
    yield from model.float64_steps(run, ALGORITHMS)
