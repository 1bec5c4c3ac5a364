"""An update on completions with a long tail of lengths: packed rows against padded ones.

    python -m benchmarks.suites.model.packed [--json PATH] [--markdown PATH]

The mean length is a quarter of the longest. Both do the same update, with prompts shared, and have to have the same
gradient norm. A third update, on padded rows whose completions all have the longest length, tells the cost of a token:
packed rows should cost the share of its tokens that the long tail has.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.harness import cli
from benchmarks.harness.learner import Learner, bare_context, grpo
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import Check, Report, ratio, table
from benchmarks.suites.model.long_tail import Tail
from train.rl.batch import Batch
from train.rl.packing import StepPacking

TAIL = Tail(rows=32, group=8, prompt_length=64, max_new_tokens=512, median=100.0, sigma=1.2)
TITLES = {"padded": "padded rows", "packed": "packed rows", "full": "padded rows, all of the longest length"}
LIMITS = {"padded": 0.45, "share": 1.15}
COLUMNS = (("update", ""), ("CPU s", ".2f"), ("wall s", ".2f"), ("real tokens", ",.0f"), ("of its slots", ".0%"))


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
        sizes = tail.prompt_length, tail.max_new_tokens, tail.rows // tail.group, tail.group
        config = grpo(*sizes, optim={"packing": name == "packed", "learning_rate": 1e-4})
        learner = Learner.of(bare_context(config, model), params)
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
    """Measures the seconds of each update in the fastest of `rounds` interleaved rounds, and compares them."""
    programs, shares = programs_of(tail)
    norms = {name: float(program()[1]) for name, program in programs.items()}
    if not np.isclose(norms["packed"], norms["padded"], rtol=1e-5):
        raise RuntimeError(f"packed: the gradient has norm {norms['packed']}, that of padded rows {norms['padded']}")
    results = race_programs(programs, rounds)
    fields: dict[str, Any] = {
        name: {
            **{clock: results[name].best(clock) for clock in ("cpu", "wall")},
            "tokens": int(tail.prompts().size + lengths_of(tail, name).sum()),
            "share": float(shares[name]),
        }
        for name in TITLES
    }
    share, ratios = fields["packed"]["tokens"] / fields["full"]["tokens"], {}
    for clock in ("cpu", "wall"):
        padded, packed, full = (fields[name][clock] for name in TITLES)
        of_full = ratio(packed, full)
        ratios[clock] = {"padded": ratio(packed, padded), "share": of_full and of_full / share}
    return {**fields, "real_share": share, "ratios": ratios}


def report(fields: Mapping[str, Any]) -> Report:
    """Compares the ratios of CPU seconds with their limits."""
    rows = [
        [title, *(fields[name][key] for key in ("cpu", "wall", "tokens", "share"))] for name, title in TITLES.items()
    ]
    share = f"{fields['real_share']:.0%}, the share of tokens, of rows of the longest length"
    over = {"padded": "padded rows", "share": share}
    cpu, wall = (fields["ratios"][clock] for clock in ("cpu", "wall"))
    checks = [
        Check(f"CPU seconds of packed rows over {over[name]}", limit, cpu[name], other=wall[name])
        for name, limit in LIMITS.items()
    ]
    return Report(["### Packed and padded rows", table(COLUMNS, rows)], checks, "by the wall clock")


main = cli.command("suites.model.packed", __doc__, lambda options: measure(TAIL, options.rounds), report, cli.rounds(5))

if __name__ == "__main__":
    sys.exit(main())
