"""Sampling alone, with the flags of its process: what the launches of a decode step cost."""

import time
from typing import Any

import jax

from benchmarks.harness import machine
from benchmarks.suites.accelerator import work
from benchmarks.suites.accelerator.model import draw, learner_of, sampler_of

ROUNDS = 3


class DecodeContender:
    """Samples with one model, of which a request has a title before it."""

    def versions(self) -> dict[str, str]:
        return machine.versions()

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Returns the fastest of some rounds, over its decode steps."""
        until = time.monotonic() + seconds
        name, weights = of.rpartition(": ")[2].split()
        lora = weights == "lora"
        batch = work.work_of(name)
        learner = learner_of(batch, lora=lora)
        walls = list[float]()
        with jax.set_mesh(learner.context.mesh):
            sampler = sampler_of(batch, lora=lora)
            for index in range(ROUNDS + 1):
                start = time.perf_counter()
                samples = jax.block_until_ready(draw(learner, sampler, index))
                # The first round compiles.
                walls += [time.perf_counter() - start] if index else []
                if walls and time.monotonic() + 1.5 * walls[-1] > until:
                    break
        best = min(walls)
        sampled = int(samples.completion_mask.sum())
        step = best / max(batch.completion_length - 1, 1)
        return [{"name": of, "rollout_s": best, "step_ms": 1e3 * step, "rollout_rate": sampled / best}]


load = DecodeContender
