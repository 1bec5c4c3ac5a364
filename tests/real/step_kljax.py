"""Steps of the recipe of `make real` by kljax, for tests/real/step.py."""

import dataclasses
import os
from typing import Any

import jax

from benchmarks.harness.learner import Learner
from benchmarks.harness.measure import Clock, resident
from train import real
from train.config.load import load as load_config
from train.models import Decoder
from train.rollouts.open import open_stream
from train.run.loop import rl_step
from train.run.setup import make_context
from train.weights.huggingface import load_params


class KljaxSteps:
    """A learner and its source of completions."""

    def __init__(self, model: str, prompts: int, micro_batches: int) -> None:
        config = load_config(
            real.ROOT / real.CONFIG,
            [
                *(f"model.path={model}", f"rollout.prompts_per_step={prompts}", "reference.monitor=true"),
                *(f"optim.micro_batches={micro_batches}", "optim.warmup_steps=0"),
            ],
        ).config
        context = make_context(config)
        bare = Decoder(dataclasses.replace(context.model.config, lora=None))
        self.learner = Learner.of(context, load_params(model, bare, context.mesh))
        self.source, self.done = open_stream(context), 0

    def step(self) -> dict[str, Any]:
        """Makes a step; returns its wall and CPU seconds, and the mean length of the replies."""
        mine, clock = self.learner, Clock()
        with clock.part("step"), jax.set_mesh(mine.context.mesh):
            mine.state, values, _ = rl_step(
                mine.context, mine.programs, self.source, mine.frozen, mine.state, step=self.done
            )
            jax.block_until_ready(mine.state)
        self.done += 1
        return {"seconds": clock.parts["step"], "length": values["completion_length"]}

    def peak(self) -> int:
        """Returns the largest resident set of this process so far, in bytes."""
        return resident("VmHWM")

    def versions(self) -> dict[str, str]:
        """Returns the versions of the libraries."""
        return {"jax": jax.__version__}


def load(**options: Any) -> KljaxSteps:
    """Makes the contender."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return KljaxSteps(**options)
