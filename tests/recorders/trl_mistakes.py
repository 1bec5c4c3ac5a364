"""Mistakes in TRL's source, and runs without one, recorded as docs/parity.md says: dumps for `kljax parity`.

    python -m tests.recorders.trl_mistakes FOLDER [NAME ...]

Needs torch, transformers and trl; tests/recorders/__main__.py runs it in their environment. A mistake is one change of
a text of TRL's source while it is imported; the header says what the arguments of the trainer say. Of each run the
second update of the second batch is kept, in which ratios differ from 1.
"""

import contextlib
import functools
import json
import pathlib
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import transformers
import trl
from trl.trainer import grpo_trainer

from tests.goldens.presets import batch
from tests.recorders import trl_side
from tests.recorders.page import recorder

COMMON: dict[str, Any] = {
    **{"max_steps": 4, "num_iterations": 2, "beta": 0.04, "temperature": 0.8, "learning_rate": 3e-3},
    **{"loss_type": "grpo", "epsilon_high": 0.28, "max_completion_length": 9, "num_generations": 4},
    **{"per_device_train_batch_size": 16, "bf16": False},
}
# Two micro-batches an update.
TWO = {"max_steps": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
GSPO = {"importance_sampling_level": "sequence", "epsilon": 3e-3, "epsilon_high": 4e-3}
CISPO = {"loss_type": "cispo", "epsilon_high": 1.2}
DAPO = {"loss_type": "dapo"}
DR_GRPO = {"loss_type": "dr_grpo", "scale_rewards": "none"}
CUT = {"mask_truncated_completions": True}
# Runs without a mistake.
CLEAN: dict[str, dict[str, Any]] = {
    "clean-grpo": {},
    "clean-dapo": DAPO,
    "clean-bnpo": {"loss_type": "bnpo"},
    "clean-dr-grpo": DR_GRPO,
    "clean-luspo": {"loss_type": "luspo"},
    "clean-cispo": CISPO,
    "clean-sapo": {"loss_type": "sapo"},
    "clean-vespo": {"loss_type": "vespo"},
    "clean-gspo": GSPO,
    "clean-delta": {"delta": 1.1},
    "clean-no-reference": {"beta": 0.0},
    "clean-batch-std": {"scale_rewards": "batch"},
    "clean-k3-without-ratio": {"use_bias_correction_kl": False},
    "clean-accumulation": TWO,
    "clean-accumulation-bnpo": TWO | {"loss_type": "bnpo"},
    "clean-accumulation-dapo-entropy": TWO | DAPO | {"entropy_coef": 0.02},
    "clean-tools": {"tools": True},
    "clean-truncated": CUT | DAPO,
    "clean-top-entropy": {"top_entropy_quantile": 0.3},
    "clean-entropy": {"entropy_coef": 0.02},
    "clean-bf16": {"bf16": True},
    "clean-bf16-dapo-accumulation": TWO | DAPO | {"bf16": True},
    "clean-half-batch": TWO | DAPO | {"steps_per_generation": 4, "max_steps": 8, "per_device_train_batch_size": 4},
}


class Mistake(NamedTuple):
    """A text of TRL's source, which stands there once, what it becomes, and what the run sets beside `COMMON`."""

    old: str
    new: str
    options: Mapping[str, Any] = types.MappingProxyType({})


def after(old: str, line: str, **options: Any) -> Mistake:
    """Adds a line of `_compute_loss` behind a text."""
    return Mistake(old, f"{old}\n        {line}\n", options)


# Places of the source.
TOOL_MASK = 'mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]'
MASK = f"{TOOL_MASK}\n\n        # Compute the per_token_logps"
DRAWN = "completion_mask = [torch.ones_like(ids, dtype=torch.long) for ids in completion_ids]"
SCORED = "logps = torch.cat(all_logps, dim=0)"
HEAD = "temperature=self.temperature,\n            cast_lm_head_to_fp32=args.cast_lm_head_to_fp32,\n            outputs"
ATTENDED = 'model_inputs = {"input_ids": input_ids_batch, "attention_mask": attention_mask_batch}'
OLD = "            # Compute the importance sampling ratio when using vLLM, to correct"
REFERENCE = "                        self.ref_model,\n                        prompt_completion_ids,"
RATIO = "log_ratio = per_token_logps - old_per_token_logps"
LEVEL = "log_importance_weights = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)"
K3 = "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
KL_RATIO = "per_token_kl = per_token_kl * coef_1"
TERM = "per_token_loss = per_token_loss + self.beta * per_token_kl"
CLIPS = "coef_2 = torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)"
LESSER = "per_token_loss = -torch.min(per_token_loss1, per_token_loss2)"
DELTA = "coef_1 = torch.clamp(coef_1, max=self.args.delta)"
CAPPED = "clamped_ratios = torch.clamp(coef_1, max=self.epsilon_high).detach()"
WEIGHED = "rewards = (rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)"
MEANS = "mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)"
GROUP_MEAN = "mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)"
GROUP_STD = "std_rewards = nanstd(rewards.view(-1, num_generations), dim=1)"
SCALED = "advantages = advantages / (std_rewards + 1e-4)\n            is_std_zero"
BY_ROW = "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
CONSTANT = "(per_token_loss.size(0) * self.max_completion_length)"
WINDOW = 'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes'
SHARE = "normalizer = normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation"
COUNTED = "num_items_in_batch = self.accelerator.gather(loss_mask.sum()).sum()"
ACCUMULATED = """loss.detach()
            loss = loss / normalizer
        elif self.loss_type == "bnpo":"""
BONUS = "loss = loss - apply_coef * entropy_loss"
HIGH = "entropy_mask = masked_entropies >= entropy_threshold"
END = "        # Log the metrics\n        def masked_seq_mean(x):"
SHUFFLED = "generation_batch = shuffle_sequence_dict(generation_batch)"
RIGHT = "torch.nn.functional.pad({}, (1, 0))[:, :-1]"
# The projects of these are named in docs/parity.md where an issue is alike.
MISTAKES: dict[str, Mistake] = {
    # The mask.
    "mask-shifted": after(MASK.partition("\n")[0] + "\n\n", f"mask = {RIGHT.format('mask')}"),
    "padding-trained": after(MASK.partition("\n")[0] + "\n\n", "mask = torch.ones_like(mask)"),
    "first-token-untrained": after(MASK.partition("\n")[0] + "\n\n", "mask = mask * (mask.cumsum(1) > 1)"),
    "end-untrained": after(
        DRAWN,
        "completion_mask = [m * (x != self._tokenizer.eos_token_id) for m, x in zip(completion_mask, completion_ids)]",
    ),
    "recorded-mask-shifted": after(
        DRAWN, "completion_mask = [torch.nn.functional.pad(m, (1, 0))[:-1] for m in completion_mask]"
    ),
    "tools-trained": Mistake(MASK, MASK.replace(TOOL_MASK, "mask = completion_mask"), {"tools": True}),
    "cut-rows-trained": Mistake(
        "completion_mask = completion_mask * (~is_truncated).unsqueeze(1).int()", "pass", CUT | DAPO
    ),
    # Scoring.
    "temperature-missing": Mistake(HEAD, HEAD.replace("self.temperature", "1.0")),
    "temperature-twice": Mistake(HEAD, HEAD.replace("self.temperature", "self.temperature**2")),
    "labels-shifted": after(SCORED, "logps = torch.nn.functional.pad(logps[:, 1:], (0, 1))"),
    "left-padding-attended": Mistake(
        ATTENDED, ATTENDED.replace("attention_mask_batch", "torch.ones_like(attention_mask_batch)")
    ),
    "log-probs-in-bfloat16": after(SCORED, "logps = logps.bfloat16().float()"),
    "old-without-temperature": Mistake(
        OLD, f"            old_per_token_logps = sampling_per_token_logps\n{OLD}", {"sampler": 1.0}
    ),
    "sampler-without-temperature": Mistake(OLD, f"            pass\n{OLD}", {"sampler": 1.0}),
    "old-shifted": Mistake(OLD, f"            old_per_token_logps = {RIGHT.format('old_per_token_logps')}\n{OLD}"),
    "reference-is-policy": Mistake(REFERENCE, REFERENCE.replace("ref_model", "model")),
    # The ratio.
    "ratio-always-1": Mistake(RATIO, "log_ratio = per_token_logps - per_token_logps.detach()"),
    "ratio-inverted": Mistake(RATIO, "log_ratio = old_per_token_logps - per_token_logps"),
    "ratio-of-row-is-product": Mistake(LEVEL, LEVEL.partition(" / ")[0], GSPO),
    # The KL term.
    "kl-sign": Mistake(TERM, TERM.replace("+ self", "- self")),
    "kl-coefficient-squared": Mistake(TERM, TERM.replace("self.beta", "self.beta**2")),
    "kl-coefficient-missing": Mistake(TERM, TERM.replace("self.beta * ", "")),
    "kl-direction": Mistake(
        K3, "torch.exp(per_token_logps - ref_per_token_logps) - (per_token_logps - ref_per_token_logps) - 1"
    ),
    "kl-is-k1": Mistake(K3, "per_token_logps - ref_per_token_logps"),
    "kl-ratio-missing": Mistake(KL_RATIO, "pass"),
    "kl-detached": Mistake(TERM, TERM.replace("per_token_kl", "per_token_kl.detach()")),
    "kl-over-tokens": Mistake(
        BY_ROW,
        "loss = (((per_token_loss - self.beta * per_token_kl) * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() + "
        "self.beta * (per_token_kl * mask).sum() / mask.sum()",
    ),
    "kl-in-the-reward-too": Mistake(
        WEIGHED,
        f"{WEIGHED}\n            rewards = rewards - 0.1 * ((old_per_token_logps - ref_per_token_logps) * "
        "completion_mask).sum(1)",
    ),
    # The policy loss.
    "clips-exchanged": Mistake(
        CLIPS, CLIPS.replace("epsilon_low", "x").replace("epsilon_high", "epsilon_low").replace("x,", "epsilon_high,")
    ),
    "upper-clip-forgotten": Mistake(CLIPS, CLIPS.replace("epsilon_high", "epsilon_low")),
    "clipped-term-alone": Mistake(LESSER, "per_token_loss = -per_token_loss2"),
    "greater-for-lesser": Mistake(LESSER, LESSER.replace("min", "max")),
    "delta-ignored": Mistake(DELTA, "pass", {"delta": 1.1}),
    "cispo-differentiated": Mistake(CAPPED, CAPPED.replace(".detach()", ""), CISPO),
    "loss-sign": Mistake(LESSER, LESSER.replace("-torch", "torch")),
    # Rewards and advantages.
    "groups-of-the-batch": Mistake(
        GROUP_MEAN,
        GROUP_MEAN.replace(
            "rewards.view(-1, num_generations)",
            "rewards.mean().expand(len(rewards) // num_generations, num_generations)",
        ),
    ),
    "groups-interleaved": Mistake(
        WEIGHED, f"{WEIGHED}\n            rewards = rewards.view(num_generations, -1).T.reshape(-1)"
    ),
    "groups-interleaved-both-ways": Mistake(
        SCALED,
        "groups = rewards.view(num_generations, -1)\n            advantages = ((groups - groups.mean(0)) / "
        "(groups.std(0) + 1e-4)).reshape(-1)\n            is_std_zero",
    ),
    "whitened-twice": Mistake(
        SCALED,
        SCALED.removesuffix("is_std_zero")
        + "advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-4)\n            is_std_zero",
    ),
    "biased-deviation": Mistake(GROUP_STD, "std_rewards = rewards.view(-1, num_generations).std(1, correction=0)"),
    "epsilon-of-deviation": Mistake(SCALED, SCALED.replace("1e-4", "1e-2")),
    "advantages-not-shuffled": Mistake(
        SHUFFLED,
        f'kept_order = generation_batch["advantages"]\n                {SHUFFLED}\n                '
        'generation_batch["advantages"] = kept_order',
    ),
    "advantages-of-other-rows": Mistake(WEIGHED, f"{WEIGHED}\n            rewards = rewards.roll(1)"),
    # The reduction.
    "rows-first": Mistake("loss = (per_token_loss * mask).sum() / normalizer", BY_ROW, DAPO),
    "tokens-first": Mistake(BY_ROW, "loss = (per_token_loss * mask).sum() / mask.sum()"),
    "divisor-of-dr-grpo": Mistake(CONSTANT, "mask.sum()", DR_GRPO),
    "padding-counted": Mistake(BY_ROW, "loss = ((per_token_loss * mask).sum(-1) / mask.size(1)).mean()"),
    "cut-rows-counted": Mistake(
        COUNTED, "num_items_in_batch = torch.tensor(sum(map(len, completion_ids_list)))", CUT | DAPO
    ),
    "window-of-the-generation": Mistake(
        SHARE, "pass", TWO | DAPO | {"steps_per_generation": 4, "max_steps": 8, "per_device_train_batch_size": 4}
    ),
    "accumulation-missing": Mistake(ACCUMULATED, ACCUMULATED.replace("loss / normalizer", "loss"), TWO),
    "accumulation-twice": Mistake(ACCUMULATED, ACCUMULATED.replace("loss / normalizer", "loss / normalizer**2"), TWO),
    "loss-doubled": Mistake(END, f"        loss = 2 * loss\n{END}"),
    # Entropy.
    "entropy-sign": Mistake(BONUS, BONUS.replace("- apply", "+ apply"), {"entropy_coef": 0.02}),
    "low-entropy-trained": Mistake(HIGH, HIGH.replace(">=", "<="), {"top_entropy_quantile": 0.3}),
    # With TRL's default precision.
    "bf16-temperature-missing": Mistake(HEAD, HEAD.replace("self.temperature", "1.0"), {"bf16": True}),
    "bf16-labels-shifted": after(SCORED, "logps = torch.nn.functional.pad(logps[:, 1:], (0, 1))", bf16=True),
    "bf16-reference-is-policy": Mistake(REFERENCE, REFERENCE.replace("ref_model", "model"), {"bf16": True}),
    "bf16-kl-sign": Mistake(TERM, TERM.replace("+ self", "- self"), {"bf16": True}),
    # Behind the loss, which no dump shows.
    "learning-rate": Mistake(
        "output = super().training_step",
        "self.optimizer.param_groups[0]['lr'] = 1e-4\n        output = super().training_step",
    ),
}


def rollouts(prompts: Sequence[str], trainer: Any, tools: bool, temperature: float) -> dict[str, Any]:
    """Samples completions of several lengths from the policy, some of them cut at the limit, or with a tool's answer.

    Args:
      temperature: of the log-probs that the sampler returns.
    """
    generator = torch.Generator().manual_seed(len(prompts) + trainer.state.global_step)
    limit, model, drawn = trainer.max_completion_length, trainer.accelerator.unwrap_model(trainer.model), []
    for prompt in prompts:
        ids = trainer.processing_class(prompt)["input_ids"]
        size = int(torch.randint(2, limit + 4, (1,), generator=generator))
        completion: list[int] = []
        scores: list[float] = []
        answer = range(1, 3) if tools and size % 2 else ()
        for position in range(min(size, limit)):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids + completion])).logits[0, -1].float()
            token = int(torch.multinomial((logits / trainer.temperature).softmax(-1), 1, generator=generator))
            token = batch.EOS if position == size - 1 else 5 if position in answer else 2 if token < 2 else token
            completion.append(token)
            scores.append(float((logits / temperature).log_softmax(-1)[token]))
        drawn.append((ids, completion, scores, [int(i not in answer) for i in range(len(completion))]))
    names = ("prompt_ids", "completion_ids", "logprobs", *(["env_mask"] if tools else []))
    return {name: [row[column] for row in drawn] for column, name in enumerate(names)}


@contextlib.contextmanager
def patched(mistake: Mistake | None) -> Iterator[None]:
    """Puts TRL's trainer, loaded again with a mistake, in the place of the installed one."""
    if mistake is None:
        with trl_side.unrecorded_afterwards():
            yield
        return
    source = pathlib.Path(grpo_trainer.__file__).read_text()
    if source.count(mistake.old) != 1:
        raise ValueError(f"{mistake.old!r} stands {source.count(mistake.old)} times in grpo_trainer.py of this release")
    module = types.ModuleType(grpo_trainer.__name__)
    module.__dict__.update(__package__="trl.trainer", __file__=grpo_trainer.__file__)
    exec(compile(source.replace(mistake.old, mistake.new), grpo_trainer.__file__, "exec"), module.__dict__)
    with (
        mock.patch.dict(sys.modules, {grpo_trainer.__name__: module}),
        mock.patch.object(trl, "GRPOTrainer", module.GRPOTrainer),
        mock.patch.object(sys.modules["trl.trainer"], "grpo_trainer", module, create=True),
    ):
        yield


def record(path: pathlib.Path, mistake: Mistake | None, options: dict[str, Any]) -> None:
    """Trains for two batches of two updates with the recorder of the page in place."""
    tools, temperature = options.pop("tools", False), options.pop("sampler", COMMON["temperature"])
    transformers.set_seed(0)
    with tempfile.TemporaryDirectory() as folder, patched(mistake), recorder("TRL", path):
        rollout = functools.partial(rollouts, tools=tools, temperature=temperature)
        trl_side.make_trainer(folder, rollout_func=rollout, **{**COMMON, **options}).train()


def main() -> None:
    """Writes a dump of each run, or of the named ones; the last line lists the ones that failed."""
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    folder, wanted = pathlib.Path(sys.argv[1]), sys.argv[2:]
    runs = {name: (None, options) for name, options in CLEAN.items()}
    runs |= {name: (mistake, mistake.options) for name, mistake in MISTAKES.items()}
    failed = []
    for name, (mistake, options) in runs.items():
        if not wanted or name in wanted:
            try:
                record(folder / f"{name}.npz", mistake, dict(options))
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
                print(failed[-1], flush=True)
    print(f"{len(runs)} runs, failed: {json.dumps(failed)}")


if __name__ == "__main__":
    main()
