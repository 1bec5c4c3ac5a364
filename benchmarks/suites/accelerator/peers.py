"""TRL's GRPO trainer of a random model with an adapter of PEFT, on the batch of kljax.

Runs in the environment of `--peers`. Sampling is `generate` of transformers, and an update TRL's: scores of the
reference, the loss, AdamW. With Liger, the layers and the loss are those of its kernels.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.environments import MissingError
from benchmarks.suites.accelerator import work
from benchmarks.suites.accelerator.work import UpdateWork

LIBRARIES = ("torch", "transformers", "peft", "trl", "datasets")
STEPS = 3
"""StepTimes of which the fastest after the first counts."""


class PeersContender:
    """Trains some steps of "TITLE: NAME lora"; a title with Liger has its kernels."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        self.shape = dict(shape)
        _check("torch")

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in LIBRARIES}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Times steps of a trainer, each apart into sampling and update."""
        title, _, model = of.rpartition(": ")
        batch = work.work_of(model.split()[0])
        for name in LIBRARIES:
            _check(name)
        liger = "Liger" in title
        if liger:
            _check("liger_kernel")
        import torch

        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(self.shape, batch, folder, liger=liger)
            measured = StepTimes(trainer, time.monotonic() + seconds)
            trainer.train()
        # The first step compiles and allocates.
        best = {part: min(walls[1:] or walls) for part, walls in measured.seconds.items()}
        peaks = measured.peaks if torch.cuda.is_available() else dict.fromkeys(best)
        return [{"name": of, **work.measured(batch, best, measured.sampled, peaks)}]


class StepTimes:
    """Times every step of a trainer in two parts, and its peak memory; ends it after some steps or at a time."""

    def __init__(self, trainer: Any, until: float) -> None:
        import torch
        import transformers

        self.seconds: dict[str, list[float]] = {"rollout": [], "update": []}
        self.peaks: dict[str, int] = {"rollout": 0, "update": 0}
        self.sampled = 0
        self.began = self.generated = 0.0
        steps = self
        cuda = torch.cuda.is_available()

        def now() -> float:
            if cuda:
                torch.cuda.synchronize()
            return time.perf_counter()

        def peak(part: str) -> None:
            if cuda:
                self.peaks[part] = max(self.peaks[part], torch.cuda.max_memory_allocated())
                torch.cuda.reset_peak_memory_stats()

        class Callback(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                steps.began, steps.generated = now(), 0.0
                peak("update")

            def on_step_end(self, _: Any, __: Any, control: Any, **___: Any) -> None:
                steps.seconds["update"].append(now() - steps.began - steps.generated)
                steps.seconds["rollout"].append(steps.generated)
                peak("update")
                left = until - time.monotonic()
                control.should_training_stop |= left < 1.5 * sum(walls[-1] for walls in steps.seconds.values())

        generate = trainer._generate_single_turn

        @functools.wraps(generate)
        def timed(*arguments: Any, **options: Any) -> Any:
            start = now()
            peak("update")
            result = generate(*arguments, **options)
            steps.generated += now() - start
            peak("rollout")
            # Prompts and completions come first, as lists of ids, whatever follows them in a release.
            completions = result[1] if isinstance(result[1], list) else result[0]
            steps.sampled = sum(map(len, completions))
            return result

        trainer._generate_single_turn = timed
        trainer.add_callback(Callback())


def make_trainer(shape: Mapping[str, Any], batch: UpdateWork, folder: str, *, liger: bool) -> Any:
    """Makes the trainer of a random model, whose reference is the model with its adapter off."""
    import datasets
    import peft
    import torch
    import transformers
    import trl

    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda else torch.float32
    fields = {key: value for key, value in shape.items() if key not in ("model_type", "architectures")}
    torch.manual_seed(0)
    with torch.device("cuda" if cuda else "cpu"):
        config = transformers.Qwen3Config(**fields, pad_token_id=1, bos_token_id=None, dtype=dtype)
        model = transformers.Qwen3ForCausalLM(config).to(dtype)
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(2, shape["vocab_size"], (batch.prompts, batch.prompt_length), generator=rng)
    prompts = [" ".join(map(str, row)) for row in ids.tolist()]
    options = trl.GRPOConfig(
        output_dir=folder,
        max_steps=STEPS,
        per_device_train_batch_size=batch.rows // batch.micro_batches,
        gradient_accumulation_steps=batch.micro_batches,
        num_generations=batch.samples,
        max_completion_length=batch.completion_length,
        # Every completion has its full length, as those of a random model nearly do by themselves.
        generation_kwargs={"min_new_tokens": batch.completion_length},
        beta=work.KL_COEF,
        loss_type="grpo",
        learning_rate=work.LEARNING_RATE,
        bf16=cuda,
        use_cpu=not cuda,
        use_liger_kernel=liger,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    adapter = peft.LoraConfig(r=work.RANK, lora_alpha=work.ALPHA, target_modules=list(work.PROJECTIONS))
    with contextlib.redirect_stdout(None):
        return trl.GRPOTrainer(
            model=model,
            reward_funcs=rewards,
            args=options,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
            processing_class=make_tokenizer(shape["vocab_size"], shape["eos_token_id"]),
            peft_config=adapter,
        )


def make_tokenizer(vocabulary: int, end: int) -> Any:
    """Makes a tokenizer that writes ids as words."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({str(number): number for number in range(vocabulary)}, unk_token="2")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "1", "eos_token": str(end)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Rewards an even last token, as the batch of kljax does."""
    return [float(int((text.split() or ["1"])[-1]) % 2) for text in completions]


def _check(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise MissingError(f"{name} is not installed in the environment of --peers")


load = PeersContender
