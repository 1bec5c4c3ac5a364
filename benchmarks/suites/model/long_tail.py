"""Completions with a long tail of lengths: continuous batching against batches that wait for their longest row.

    python -m benchmarks.suites.model.long_tail [--json PATH]

Both complete the same rows in the same number of slots and have to draw the same tokens. Their programs differ in the
queue alone. Lengths are forced (`limits`), so that they have a long tail whatever the weights.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import kljax
from benchmarks.harness import cli
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import Check, Report, ratio, table
from benchmarks.suites.model.kljax import model_of
from benchmarks.suites.model.problem import ModelWork
from train.models import Decoder
from train.models.sharding import make_mesh
from train.rl.policy import init_params
from train.rollouts.sampler import Samples, Sampling, sample

TARGET = 1.5
UNITS = {"tokens_per_second": "wall", "tokens_per_cpu_second": "cpu"}
TITLES = {"continuous": "continuous batching", "static": "static batches"}
# The measured values of a row, with their columns.
COLUMNS = {
    "tokens_per_second": ("tokens/s", ",.0f"),
    "tokens_per_cpu_second": ("tokens/CPU s", ",.0f"),
    "steps": ("decode steps", ",.0f"),
    "occupancy": ("busy slots", ".0%"),
}


@dataclasses.dataclass(frozen=True)
class Tail:
    """Completions with lognormal lengths of this median and spread, at most `max_new_tokens`; `group` per prompt."""

    rows: int = 64
    slots: int = 8
    group: int = 4
    prompt_length: int = 64
    max_new_tokens: int = 256
    median: float = 24.0
    sigma: float = 1.0
    vocab: int = 4096
    layers: int = 4

    def lengths(self) -> np.ndarray:
        """Returns `[rows]` int32, the tokens of each completion."""
        drawn = self.median * np.exp(self.sigma * np.random.default_rng(0).normal(size=self.rows))
        return np.clip(np.rint(drawn), 1, self.max_new_tokens).astype(np.int32)

    def prompts(self) -> np.ndarray:
        """Draws `[rows / group, prompt_length]` int32 ids."""
        shape = (self.rows // self.group, self.prompt_length)
        return np.random.default_rng(1).integers(0, self.vocab, shape, np.int32)

    def model(self) -> tuple[Decoder, Mesh, Any]:
        """Returns the decoder, a mesh of one device and the weights."""
        model, mesh = model_of(ModelWork(vocab=self.vocab, layers=self.layers)), make_mesh(1, 1, 1)
        return model, mesh, init_params(model, jax.random.key(0), mesh)


TAIL = Tail()


def programs_of(tail: Tail) -> dict[str, Callable[[], list[Samples]]]:
    """Returns the contenders: "continuous" is one call for all rows, "static" one for each batch of `slots` rows."""
    model, _, params = tail.model()
    lengths, prompts = tail.lengths(), tail.prompts()
    ids = np.repeat(np.arange(len(prompts), dtype=np.int32), tail.group)
    key = jax.random.key(2)

    @jax.jit
    def draw(policy: kljax.Policy, prompts: jax.Array, **rows: np.ndarray) -> Samples:
        mask, sampling = jnp.ones(prompts.shape, bool), Sampling(1.0)
        return sample(model, policy, prompts, mask, key=key, max_new_tokens=tail.max_new_tokens, sampling=sampling,
                      eos_ids=(), slots=tail.slots, **rows)  # type: ignore[arg-type]  # fmt: skip

    def complete(rows: slice) -> Samples:
        first, last = ids[rows][0], ids[rows][-1] + 1
        named = {"prompt_ids": ids[rows] - first, "row_ids": np.arange(tail.rows)[rows], "limits": lengths[rows]}
        return draw(kljax.Policy(params), jnp.asarray(prompts[first:last]), **named)

    batches = [slice(begin, begin + tail.slots) for begin in range(0, tail.rows, tail.slots)]
    return {
        "continuous": lambda: [complete(slice(0, tail.rows))],
        "static": lambda: [complete(rows) for rows in batches],
    }


def measure(tail: Tail, rounds: int) -> dict[str, Any]:
    """Measures tokens per second in the fastest of `rounds` interleaved rounds, decode steps, occupancy and gains."""
    programs = programs_of(tail)
    done = {name: jax.device_get(program()) for name, program in programs.items()}
    tokens = {name: np.concatenate([part.tokens for part in parts]) for name, parts in done.items()}
    if (tokens["continuous"] != tokens["static"]).any():
        raise RuntimeError("long tail: the tokens of continuous and static batching differ")
    results = race_programs(programs, rounds)
    drawn = int(tail.lengths().sum())
    rows: dict[str, dict[str, float]] = {}
    for name, parts in done.items():
        steps = sum(int(part.steps) for part in parts)
        rows[name] = {unit: ratio(drawn, results[name].best(clock)) or 0.0 for unit, clock in UNITS.items()}
        rows[name] |= {"steps": steps, "occupancy": drawn / ((steps + len(parts)) * tail.slots)}
    gains = {unit: rows["continuous"][unit] / rows["static"][unit] for unit in UNITS}
    return {**rows, "gain": gains, "target": TARGET}


def report(fields: Mapping[str, Any]) -> Report:
    """Compares the two ways; the target stands in a sentence."""
    rows = [[title, *(fields[name][key] for key in COLUMNS)] for name, title in TITLES.items()]
    wall, cpu = (fields["gain"][unit] for unit in UNITS)
    verdict = Check("gain", fields["target"], cpu, at_least=True).verdict
    text = (
        f"Continuous batching is faster by {cpu:.2f} in CPU seconds and by {wall:.2f} in wall-clock seconds; the "
        f"target is {fields['target']:g} in CPU seconds: {verdict}."
    )
    columns = [("kljax, 8 slots", ""), *COLUMNS.values()]
    return Report(["### A long tail of lengths", table(columns, rows), text])


main = cli.command(
    "suites.model.long_tail", __doc__, lambda options: measure(TAIL, options.rounds), report, cli.rounds(5)
)

if __name__ == "__main__":
    sys.exit(main())
