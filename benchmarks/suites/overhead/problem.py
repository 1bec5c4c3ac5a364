"""The run whose steps are timed: a small decoder, GRPO with a KL to the base, completions of one length."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from benchmarks.harness.learner import Learner, grpo
from benchmarks.harness.race import log
from train.config.schema import Config
from train.rl.keys import purpose_key
from train.rl.policy import init_params
from train.run.setup import make_context

QUICK = {"width": 16, "completion_length": 4}
"""A smoke test: steps of milliseconds."""
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """Sizes of the model and of a batch."""

    width: int = 256
    prompts: int = 8
    samples: int = 4
    completion_length: int = 32

    @property
    def rows(self) -> int:
        """Returns the completions of a batch."""
        return self.prompts * self.samples


def config_of(work: StepSizes, **more: Any) -> Config:
    """Returns the config of a run that neither evaluates nor ends by itself."""
    heads = {"layers": 4, "width": work.width, "heads": 4, "kv_heads": 2, "head_dim": work.width // 4}
    raw = {
        "steps": 10**6,
        "model": {**heads, "mlp_width": 3 * work.width},
        "warm_start": {"steps": 0},
        "kl": {"loss": {"coef": 0.04}},
        "optim": {"epochs": 2},
        "eval": {"every": 10**6, "prompts": 1, "batch_size": 1},
    }
    return grpo(16, work.completion_length, work.prompts, work.samples, **raw | more)


def learner_of(config: Config) -> Learner:
    """Draws the weights; the programs compile at their first use."""
    context = make_context(config)
    return Learner.of(context, init_params(context.model, purpose_key(config.seed, "params"), context.mesh))


def interleaved(contenders: Mapping[str, Callable[[], Value]], rounds: int) -> Iterator[dict[str, Value]]:
    """Yields the results of each round by contender; the first round, which compiles, comes first."""
    for number in range(rounds + 1):
        yield {name: run() for name, run in contenders.items()}
        log(f"round {number} of {rounds}")
