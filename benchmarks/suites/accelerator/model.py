"""Sampling and updates of a random model on one device, by the trainer's own programs."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import machine
from benchmarks.harness.learner import Learner, bare_context, grpo
from benchmarks.harness.measure import Clock
from benchmarks.suites.accelerator import work
from benchmarks.suites.accelerator.work import UpdateWork
from train.config.schema import Config
from train.models.devices import find_device
from train.models.parameters import init_params
from train.models.shard_rows import shard_rows
from train.plan.local import StepTokens, step_work
from train.plan.shapes import planned_model
from train.rl.keys import purpose_key
from train.rl.state import policy_of
from train.rollouts.jax_source import sampling_programs
from train.sequences.batch import Batch

ROUNDS = 2
LORA = {"rank": work.RANK, "alpha": float(work.ALPHA), "targets": list(work.PROJECTIONS)}


def config_of(batch: UpdateWork, *, lora: bool) -> Config:
    """Returns the config of GRPO with a KL to the base in the loss, reduced as TRL's `loss_type="grpo"` does."""
    model: Any = {"path": batch.name, "dtype": "bfloat16", "param_dtype": "bfloat16" if lora else "float32"}
    adapter: dict[str, Any] = {"lora": LORA} if lora else {}
    return grpo(
        *(batch.prompt_length, batch.completion_length, batch.prompts, batch.samples),
        model=batch.name if batch.name == work.TINY.name else model,
        optim={"micro_batches": batch.micro_batches, "learning_rate": work.LEARNING_RATE},
        loss={"type": "ppo", "aggregation": "seq_mean_token_mean"},
        kl={"loss": {"coef": work.KL_COEF}},
        **adapter,
    )


@functools.cache
def learner_of(batch: UpdateWork, *, lora: bool) -> Learner:
    """Makes the learner of a random model."""
    config = config_of(batch, lora=lora)
    context = bare_context(config, *planned_model(config))
    with jax.set_mesh(context.mesh):
        return Learner.of(context, init_params(context.model, purpose_key(0, "params"), context.mesh))


@functools.cache
def sampler_of(batch: UpdateWork, *, lora: bool) -> Any:
    """Makes the sampler of a learner, which compiles at its first call."""
    return sampling_programs(learner_of(batch, lora=lora).context, "rollout")[batch.prompt_length]


class TrainerContender:
    """Runs one model: "NAME lora" or "NAME full"."""

    def versions(self) -> dict[str, str]:
        return machine.versions()

    def describe(self) -> dict[str, Any]:
        """Describes the machine, with the platform and the number of its devices."""
        device = jax.devices()[0]
        return machine.describe(device) | {"platform": device.platform, "devices": jax.device_count()}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Samples a batch and updates on it, until the fastest of some rounds is known or the seconds are over.

        The name of the model may have a title before it.
        """
        until = time.monotonic() + seconds
        name, weights = of.rpartition(": ")[2].split()
        batch = work.work_of(name)
        learner = learner_of(batch, lora=weights == "lora")
        device = jax.devices()[0]
        peaks: dict[str, int | None] = {}
        rounds = list[dict[str, float]]()
        with jax.set_mesh(learner.context.mesh):
            sampler = sampler_of(batch, lora=weights == "lora")
            for index in range(ROUNDS + 1):
                clock = Clock()
                with clock.part("rollout"):
                    samples = jax.block_until_ready(draw(learner, sampler, index))
                peaks["rollout"] = _peak(device)
                sampled = int(samples.completion_mask.sum())
                with clock.part("update"):
                    learner.update(_batch(learner, samples))
                peaks["update"] = _peak(device)
                # The first round compiles.
                rounds += [{part: wall for part, (wall, _) in clock.parts.items()}] if index else []
                if rounds and time.monotonic() + 1.5 * sum(rounds[-1].values()) > until:
                    break
        best = {part: min(seconds[part] for seconds in rounds) for part in peaks}
        row = {"name": of, **work.measured(batch, best, sampled, peaks)}
        known = find_device(device.device_kind)
        context = learner.context
        prompts = batch.prompts * batch.prompt_length
        completions = {"rollout": sampled, "update": batch.rows * batch.completion_length}
        for part, count in completions.items():
            flops = step_work(context.plan, context.model, StepTokens(prompts, count, 0))[part].flops
            row[f"{part}_mfu"] = known and flops / best[part] / known.flops
        return [row]


def random_prompts(learner: Learner) -> np.ndarray:
    """Draws `[prompts, prompt_length]` ids, of which none is padding."""
    config = learner.context.config
    shape = (config.rollout.prompts_per_step, config.data.max_prompt_length)
    return np.random.default_rng(0).integers(0, learner.context.model.config.vocab_size, shape, np.int32)


def random_batch(learner: Learner) -> Batch:
    """Draws a batch of full length in place of sampling it."""
    config = learner.context.config
    completion = config.data.max_completion_length
    rng = np.random.default_rng(1)
    prompts = random_prompts(learner).repeat(config.rollout.samples_per_prompt, axis=0)
    drawn = rng.integers(0, learner.context.model.config.vocab_size, (len(prompts), completion), np.int32)
    tokens = jnp.asarray(np.concatenate([prompts, drawn], axis=1))
    columns = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    in_completion = columns >= config.data.max_prompt_length
    # About the log-prob of a random model.
    log_probs = jnp.where(in_completion, -np.log(learner.context.model.config.vocab_size), 0.0).astype(jnp.float32)
    return _as_batch(learner, tokens, columns >= 0, in_completion, log_probs)


def draw(learner: Learner, program: Any, index: int) -> Any:
    """Completes random prompts as the trainer does."""
    prompts = jnp.asarray(random_prompts(learner))
    policy = policy_of(learner.state.trainable, learner.frozen.base)
    layout = learner.context.layout
    mask = jnp.ones(prompts.shape, bool)
    key = purpose_key(0, "sample", index)
    with layout.active():
        samples = program(layout.weights(policy), prompts, mask, key)
    if learner.frozen.base is None:
        layout.release()
    return samples


def _batch(learner: Learner, samples: Any) -> Batch:
    """Returns the batch of samples."""
    log_probs = samples.fields["rollout_log_probs"]
    return _as_batch(learner, samples.tokens, samples.token_mask, samples.completion_mask, log_probs)


def _as_batch(
    learner: Learner, tokens: jax.Array, token_mask: jax.Array, completion_mask: jax.Array, log_probs: jax.Array
) -> Batch:
    """Returns a batch with rewards from its last tokens."""
    rollout = learner.context.config.rollout
    groups = np.repeat(np.arange(rollout.prompts_per_step, dtype=np.int32), rollout.samples_per_prompt)
    arrays = {
        "tokens": tokens,
        "token_mask": token_mask,
        "completion_mask": completion_mask,
        "rewards": (tokens[:, -1] % 2).astype(jnp.float32),
        "group_ids": groups,
        "rollout_log_probs": log_probs,
    }
    return Batch(**shard_rows(arrays, learner.context.mesh))


def _peak(device: jax.Device) -> int | None:
    stats = device.memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


load = TrainerContender
