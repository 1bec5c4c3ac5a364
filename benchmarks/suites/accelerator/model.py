"""Sampling and updates of a random model on one device, by the trainer's own programs."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import machine
from benchmarks.harness.learner import Learner, bare_context, grpo
from benchmarks.harness.measure import Clock
from train.config.schema import Config
from train.models.config import PROJECTIONS
from train.models.devices import find_device
from train.models.parameters import init_params
from train.plan.local import StepTokens, step_work
from train.plan.shapes import planned_model
from train.rl.keys import purpose_key
from train.rl.state import policy_of
from train.rollouts.jax_source import rollout_programs
from train.sequences.batch import Batch

ROUNDS = 2
LORA = {"rank": 32, "alpha": 64.0, "targets": list(PROJECTIONS)}


def config_of(name: str, *, lora: bool) -> Config:
    """Returns the config of GRPO with a KL to the base in the loss; "tiny" is the model for a laptop."""
    raw: dict[str, Any] = {"kl": {"loss": {"coef": 0.04}}, **({"lora": LORA} if lora else {})}
    if name == "tiny":
        return grpo(8, 8, 2, 2, model=name, **raw)
    model = {"path": name, "dtype": "bfloat16", "param_dtype": "bfloat16" if lora else "float32"}
    return grpo(256, 768, 16, 8, model=model, optim={"micro_batches": 4}, **raw)


class TrainerContender:
    """Runs one model: "NAME lora" or "NAME full"."""

    def versions(self) -> dict[str, str]:
        return machine.versions()

    def describe(self) -> dict[str, Any]:
        """Describes the machine, with the platform and the number of its devices."""
        device = jax.devices()[0]
        return machine.describe(device) | {"platform": device.platform, "devices": jax.device_count()}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Samples a batch and updates on it, until the fastest of some rounds is known or the seconds are over."""
        until = time.monotonic() + seconds
        name, weights = of.split()
        config = config_of(name, lora=weights == "lora")
        device = jax.devices()[0]
        context = bare_context(config, *planned_model(config))
        base = init_params(context.model, purpose_key(0, "params"), context.mesh)
        with jax.set_mesh(context.mesh):
            learner = Learner.of(context, base)
            sampler = rollout_programs(context)[config.data.max_prompt_length]
            # Ids of which none is padding.
            shape = (config.rollout.prompts_per_step, config.data.max_prompt_length)
            ids = np.random.default_rng(0).integers(0, context.model.config.vocab_size, shape, np.int32)
            row: dict[str, Any] = {"name": of}
            rounds = list[dict[str, float]]()
            for index in range(ROUNDS + 1):
                clock = Clock()
                with clock.part("rollout"):
                    samples = jax.block_until_ready(_sample(learner, sampler, jnp.asarray(ids), index))
                row["rollout_bytes"] = _peak(device)
                batch = _batch(config, samples)
                sampled = int(samples.completion_mask.sum())
                with clock.part("update"):
                    learner.update(batch)
                row["update_bytes"] = _peak(device)
                # The first round compiles.
                rounds += [{part: wall for part, (wall, _) in clock.parts.items()}] if index else []
                if rounds and time.monotonic() + 1.5 * sum(rounds[-1].values()) > until:
                    break
        known = find_device(device.device_kind)
        prompts = config.rollout.prompts_per_step * config.data.max_prompt_length
        completions = config.rows_per_batch() * config.data.max_completion_length
        counted = {"rollout": StepTokens(prompts, sampled, 0), "update": StepTokens(prompts, completions, 0)}
        for part, tokens in counted.items():
            best = min(seconds[part] for seconds in rounds)
            flops = step_work(context.plan, context.model, tokens)[part].flops
            rate = (sampled if part == "rollout" else prompts + completions) / best
            row |= {f"{part}_s": best, f"{part}_rate": rate, f"{part}_mfu": known and flops / best / known.flops}
        return [row]


def _sample(learner: Learner, program: Any, prompts: jax.Array, index: int) -> Any:
    """Completes the prompts as the trainer does."""
    policy = policy_of(learner.state.trainable, learner.frozen.base)
    layout = learner.context.layout
    mask = jnp.ones(prompts.shape, bool)
    key = purpose_key(0, "sample", index)
    with layout.active():
        samples = program(layout.weights(policy), prompts, mask, key)
    if learner.frozen.base is None:
        layout.release()
    return samples


def _batch(config: Config, samples: Any) -> Batch:
    """Returns the batch of samples, with rewards from their last tokens."""
    groups = np.repeat(np.arange(config.rollout.prompts_per_step, dtype=np.int32), config.rollout.samples_per_prompt)
    return Batch(
        tokens=samples.tokens,
        token_mask=samples.token_mask,
        completion_mask=samples.completion_mask,
        rewards=(samples.tokens[:, -1] % 2).astype(jnp.float32).reshape(config.rows_per_batch()),
        group_ids=jnp.asarray(groups),
        rollout_log_probs=samples.fields["log_probs"],
    )


def _peak(device: jax.Device) -> int | None:
    stats = device.memory_stats()
    return None if not stats else stats.get("peak_bytes_in_use")


load = TrainerContender
