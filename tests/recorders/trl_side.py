"""The recorder of TRL around real trainers of a tiny Qwen 2 on a CPU: `python -m tests.recorders.trl_side FOLDER`.

Needs torch, transformers and trl; tests/recorders/__main__.py runs it in their environment.
"""

import contextlib
import copy
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import datasets
import tokenizers
import transformers
import trl

from tests.goldens.presets import batch
from tests.recorders.page import recorder

# The dump, and what the run sets beside the defaults of TRL.
RUNS: dict[str, dict[str, Any]] = {
    "trl-defaults": {"max_steps": 1},
    # The second update of a batch, on which the ratios differ from 1.
    "trl-second-update": {
        "max_steps": 2,
        "num_iterations": 2,
        "beta": 0.05,
        "epsilon_high": 0.28,
        "learning_rate": 3e-2,
    },
}


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of numbers, a token each."""
    words = tokenizers.models.WordLevel({str(i): i for i in range(batch.VOCABULARY)}, unk_token="2")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": str(batch.PAD), "eos_token": str(batch.EOS)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def rewards_of(completions: list[str], **_: Any) -> list[float]:
    """Some number that differs between completions."""
    return [sum(map(int, completion.split())) % 7 / 7 for completion in completions]


@contextlib.contextmanager
def unrecorded_afterwards() -> Iterator[None]:
    """Undoes what a recorder assigns to the class."""
    names = ("_generate", "_compute_loss", "_get_per_token_logps_and_entropies", "_generate_and_score_completions",
             "_calculate_rewards")  # fmt: skip
    with mock.patch.multiple(trl.GRPOTrainer, **{name: getattr(trl.GRPOTrainer, name) for name in names}):
        yield


def make_trainer(folder: str | pathlib.Path, *, rollout_func: Any = None, **options: Any) -> trl.GRPOTrainer:
    """Makes a trainer of the tiny model, whose reference is a copy of it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(batch.MODEL, dtype="float32")
    prompts = [" ".join(map(str, range(2 + i, 5 + 2 * i))) for i in range(8)]
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True}
    tiny = {"max_completion_length": 8, "use_cpu": True, "seed": 1}
    # The reference is loaded from the path of the model, which a copy has none of.
    copied = lambda *_, **__: copy.deepcopy(model)  # noqa: E731
    with mock.patch("trl.trainer.grpo_trainer.create_model_from_path", copied):
        return trl.GRPOTrainer(
            model=model,
            reward_funcs=rewards_of,
            args=trl.GRPOConfig(output_dir=str(folder), **{**quiet, **tiny, **options}),
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=make_tokenizer(),
            rollout_func=rollout_func,
        )


def run(path: pathlib.Path, options: dict[str, Any]) -> None:
    """Trains some steps with the recorder in place."""
    with tempfile.TemporaryDirectory() as folder, unrecorded_afterwards(), recorder("TRL", path):
        make_trainer(folder, **options).train()


def main() -> None:
    """Writes one dump a run."""
    transformers.set_seed(0)
    print(f"trl {trl.__version__}, transformers {transformers.__version__}")
    for name, options in RUNS.items():
        run(pathlib.Path(sys.argv[1]) / f"{name}.npz", options)


if __name__ == "__main__":
    main()
