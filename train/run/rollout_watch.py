"""Warnings about the rollouts of a run: no reward to learn from, copies, missing log-probs, another distribution."""

import math
from collections import deque
from collections.abc import Iterator, Mapping

from train.config.errors import warn
from train.config.plan import Plan
from train.process.repeated_warnings import Warnings
from train.rl.kl_metrics import SAMPLING_BIAS, SAMPLING_BIAS_Z

BIASED_STEPS = 10
"""Steps whose z-scores are added up: a bias grows with them, chance does not."""
LEAST_BIASED_STEPS = 3
MOST_BIAS = 6.0
"""Standard deviations of a sum that chance reaches once in a billion."""


class RolloutWatch:
    """Warns of rollouts that train on something else than they should, each kind at most once in 50 steps."""

    def __init__(self, plan: Plan) -> None:
        self._samples = plan.config.rollout.samples_per_prompt
        self._in_groups = plan.advantage is not None and "group_ids" in plan.advantage
        self._server = plan.config.rollout.source.type == "openai"
        self._kinds: dict[str, Warnings] = {}
        self._biases: deque[tuple[float, float]] = deque(maxlen=BIASED_STEPS)

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Warns by the metrics of a step."""
        for kind, text in self._problems(values):
            shown, before = self._kinds.setdefault(kind, Warnings()).count(step, 1.0)
            if shown:
                more = f"; so were {before} steps since the last such warning" if before else ""
                warn(f"step {step}: {text}{more}")

    def _problems(self, values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        if self._in_groups and values.get("groups_with_spread") == 0:
            copies = math.isclose(values.get("repeated_completions", 0.0), 1 - 1 / self._samples)
            equal = ", as all completions of a group are equal" if copies else ""
            yield (
                "spread",
                f"the rewards of no group differ{equal}, so that nothing is learned; take easier or harder problems, "
                "or raise rollout.samples_per_prompt",
            )
        if copied := values.get("copied_groups", 0.0):
            yield (
                "copies",
                f"in {copied:.0%} of the groups all completions are equal, which is no chance; likely causes: one "
                "seed for all of them, answers from a cache, or a watermark",
            )
        if missing := values.get("log_probs_missing", 0.0):
            yield (
                "missing",
                f"{missing:.2%} of the sampled tokens have no log-prob of the sampler (null, or a floor such as "
                "-9999), and are left out of the loss",
            )
        if SAMPLING_BIAS_Z in values and math.isfinite(values[SAMPLING_BIAS_Z]):
            self._biases.append((values[SAMPLING_BIAS_Z], values[SAMPLING_BIAS]))
            yield from self._bias()

    def _bias(self) -> Iterator[tuple[str, str]]:
        """Yields a warning if the z-scores of the last steps add up to more than chance does."""
        count = len(self._biases)
        total = sum(score for score, _ in self._biases) / math.sqrt(count)
        if count < LEAST_BIASED_STEPS or abs(total) <= MOST_BIAS:
            return
        nats = sum(bias for _, bias in self._biases) / count
        less, causes = ("less", "a penalty, a bias") if total < 0 else ("more", "a cut, a low temperature")
        where = ", in the server's defaults or the model's generation_config.json" if self._server else ""
        yield (
            "bias",
            f"in the last {count} steps tokens were {abs(nats):.2g} nats {less} probable than draws of the policy, "
            f"{abs(total):.0f} standard deviations ({SAMPLING_BIAS_Z}): the sampler has another distribution than its "
            f"log-probs; look for {causes} or other weights{where}",
        )
