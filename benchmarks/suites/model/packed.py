"""An update on completions with a long tail of lengths: packed rows against padded ones.

    python -m benchmarks.suites.model.packed [--json PATH] [--markdown PATH]

The mean length is a quarter of the longest. Both do the same update, with prompts shared, and have to have the same
gradient norm. A third update, on padded rows whose completions all have the longest length, tells the cost of a token:
packed rows should cost the share of its tokens that the long tail has.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.harness import cli
from benchmarks.harness.learner import Learner, bare_context
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import Report, join, table, targets
from benchmarks.harness.results import Check, ratio
from benchmarks.suites.model.long_tail import Tail
from train.config.load import parse
from train.config.schema import Config
from train.rl.batch import Batch
from train.rl.packing import StepPacking

TAIL = Tail(rows=32, group=8, prompt_length=64, max_new_tokens=512, median=100.0, sigma=1.2)
TITLES = {"padded": "padded rows", "packed": "packed rows", "full": "padded rows, all of the longest length"}
LIMITS = {"padded": 0.45, "share": 1.15}
COLUMNS = (("update", ""), ("CPU s", ".2f"), ("wall s", ".2f"), ("real tokens", ",.0f"), ("of its slots", ".0%"))


def config_of(tail: Tail, packing: bool) -> Config:
    """Returns the config of one update of GRPO on all rows."""
    raw = {
        "steps": 1,
        "data": {"max_prompt_length": tail.prompt_length, "max_completion_length": tail.max_new_tokens},
        "rollout": {"prompts_per_step": tail.rows // tail.group, "samples_per_prompt": tail.group},
        "optim": {"packing": packing, "learning_rate": 1e-4},
    }
    return parse(raw)[0]


def lengths_of(tail: Tail, name: str) -> np.ndarray:
    """Returns the tokens of the completions of an update."""
    return np.full(tail.rows, tail.max_new_tokens) if name == "full" else tail.lengths()


def batch_of(tail: Tail, lengths: np.ndarray) -> Batch:
    """Draws a prepared batch with completions of these lengths."""
    rng = np.random.default_rng(3)
    column = np.arange(tail.prompt_length + tail.max_new_tokens)
    token_mask = column < tail.prompt_length + lengths[:, None]
    completion_mask = token_mask & (column >= tail.prompt_length)
    tokens = rng.integers(0, tail.vocab, token_mask.shape)
    tokens[:, : tail.prompt_length] = np.repeat(tail.prompts(), tail.group, axis=0)
    return Batch(
        tokens=jnp.asarray(tokens, jnp.int32),
        token_mask=jnp.asarray(token_mask),
        completion_mask=jnp.asarray(completion_mask),
        rewards=jnp.asarray(rng.normal(size=tail.rows), jnp.float32),
        group_ids=jnp.asarray(np.arange(tail.rows) // tail.group, jnp.int32),
        advantages=jnp.asarray(np.where(completion_mask, rng.normal(size=(tail.rows, 1)), 0), jnp.float32),
    )


def programs_of(tail: Tail) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Returns the updates by name, each of which returns its gradient norm; and the share of slots with a token."""
    (model, _, params), rows, shares = tail.model(), np.arange(tail.rows), dict[str, float]()

    def update_of(name: str) -> Callable[[], Any]:
        learner = Learner.of(bare_context(config_of(tail, name == "packed"), model), params)
        lengths, pack = lengths_of(tail, name), learner.programs.pack
        batch, prompts = batch_of(tail, lengths), tail.prompts().size
        shares[name] = (prompts + lengths.sum()) / (prompts + tail.rows * tail.max_new_tokens)

        def run() -> Any:
            packing = StepPacking.off([rows]) if pack is None else pack(batch, [rows])
            shares.update({name: packing.metrics["packed_share"]} if packing.metrics else {})
            ((order, packed),) = packing.updates
            state, metrics = learner.update_on(batch, order, packed)
            return state, metrics["grad_norm"].value()

        return run

    return {name: update_of(name) for name in TITLES}, shares


def measure(tail: Tail, rounds: int) -> dict[str, Any]:
    """Measures the seconds of each update in the fastest of `rounds` interleaved rounds, and compares them.

    Raises:
      RuntimeError: if the gradients of padded and of packed rows have other norms.
    """
    programs, shares = programs_of(tail)
    norms = {name: float(program()[1]) for name, program in programs.items()}
    if not np.isclose(norms["packed"], norms["padded"], rtol=1e-5):
        raise RuntimeError(f"packed: the gradient has norm {norms['packed']}, that of padded rows {norms['padded']}")
    results = race_programs(programs, rounds)
    fields: dict[str, Any] = {
        name: {
            **{clock: results[name].best(clock) for clock in ("cpu", "wall")},
            "tokens": int(tail.prompts().size + lengths_of(tail, name).sum()),
            "share": shares[name],
        }
        for name in TITLES
    }
    share = fields["packed"]["tokens"] / fields["full"]["tokens"]

    def compared(clock: str) -> dict[str, float | None]:
        padded, packed, full = (fields[name][clock] for name in TITLES)
        of_full = ratio(packed, full)
        return {"padded": ratio(packed, padded), "share": None if of_full is None else of_full / share}

    return {**fields, "real_share": share, "ratios": {clock: compared(clock) for clock in ("cpu", "wall")}}


def checks(fields: Mapping[str, Any]) -> list[Check]:
    """Compares the ratios of CPU seconds with their limits."""
    share = f"{fields['real_share']:.0%}, the share of tokens, of rows of the longest length"
    titles = {
        "padded": "CPU seconds of packed rows over padded rows",
        "share": f"CPU seconds of packed rows over {share}",
    }
    cpu, wall = (fields["ratios"][clock] for clock in ("cpu", "wall"))
    return [Check(titles[name], limit, cpu[name], other=wall[name]) for name, limit in LIMITS.items()]


def markdown(fields: Mapping[str, Any]) -> str:
    """Returns the comparison as Markdown."""
    keys = ("cpu", "wall", "tokens", "share")
    rows = [[title, *(fields[name][key] for key in keys)] for name, title in TITLES.items()]
    return join(["### Packed and padded rows", table(COLUMNS, rows), targets(checks(fields), "by the wall clock")])


def _report(options: argparse.Namespace) -> Report:
    fields = measure(TAIL, options.rounds)
    return Report(fields, markdown(fields))


main = cli.command("suites.model.packed", __doc__, _report, cli.rounds(5))

if __name__ == "__main__":
    sys.exit(main())
