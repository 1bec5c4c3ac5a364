"""An update on completions with a long tail of lengths: packed rows against padded ones.

    python -m benchmarks.suites.model.packed [--json PATH] [--markdown PATH]

The mean length is a quarter of the longest. Both do the same update, with prompts shared, and have to have the same
gradient norm. A third update, on padded rows whose completions all have the longest length, tells the cost of a token:
packed rows should cost the share of its tokens that the long tail has.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import cli
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import join, table
from benchmarks.harness.results import Check, ratio
from benchmarks.suites.model.kljax import model_of
from benchmarks.suites.model.long_tail import Tail
from benchmarks.suites.model.problem import Work
from train.config.load import parse
from train.config.schema import Config
from train.models.sharding import make_mesh
from train.rl.algorithms import make_optimizer
from train.rl.batch import Batch
from train.rl.objective import coefficients
from train.rl.packing import StepPacking, make_packer
from train.rl.policy import init_params
from train.rl.step import make_update
from train.run.setup import first_state

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


def real_tokens(tail: Tail, lengths: np.ndarray) -> int:
    """Counts the tokens of a batch, each prompt once."""
    return int(tail.prompts().size + lengths.sum())


def programs_of(tail: Tail) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Returns the updates by name, each of which returns its gradient norm; and the share of slots with a token."""
    model, mesh = model_of(Work(vocab=tail.vocab, layers=tail.layers)), make_mesh()
    params, rows, shares = init_params(model, jax.random.key(0), mesh), np.arange(tail.rows), dict[str, float]()

    def update_of(name: str) -> Callable[[], Any]:
        config = config_of(tail, name == "packed")
        optimizer, packer = make_optimizer(config.optim), make_packer(config, model, mesh)
        state = first_state(config, model, mesh, jax.tree.map(jnp.copy, params), optimizer)
        lengths = np.full(tail.rows, tail.max_new_tokens) if name == "full" else tail.lengths()
        update, batch = make_update(config, model, optimizer, state, mesh), batch_of(tail, lengths)
        slots = tail.prompts().size + tail.rows * tail.max_new_tokens
        shares[name] = real_tokens(tail, lengths) / slots

        def run() -> Any:
            nonlocal state
            places = StepPacking.off([rows]) if packer is None else packer(batch, [rows])
            shares.update({name: places.metrics["packed_share"]} if places.metrics else {})
            ((order, packed),) = places.updates
            state, metrics = update(state, None, batch, order, coefficients(config), packed=packed)
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
    tokens = {name: real_tokens(tail, tail.lengths()) for name in TITLES}
    tokens["full"] = real_tokens(tail, np.full(tail.rows, tail.max_new_tokens))
    found: dict[str, Any] = {
        name: {
            "cpu": results[name].best("cpu"),
            "wall": results[name].best("wall"),
            "tokens": tokens[name],
            "share": shares[name],
        }
        for name in TITLES
    }
    share = tokens["packed"] / tokens["full"]

    def compared(clock: str) -> dict[str, float | None]:
        padded, packed, full = (found[name][clock] for name in TITLES)
        whole = ratio(packed, full)
        return {"padded": ratio(packed, padded), "share": None if whole is None else whole / share}

    return {**found, "real_share": share, "ratios": {clock: compared(clock) for clock in ("cpu", "wall")}}


def checks(report: Mapping[str, Any]) -> list[Check]:
    """Compares the ratios of CPU seconds with their limits."""
    titles = {
        "padded": "packed rows over padded rows",
        "share": f"packed rows over {report['real_share']:.0%}, the share of tokens, of rows of the longest length",
    }
    cpu, wall = (report["ratios"][clock] for clock in ("cpu", "wall"))
    return [Check(titles[name], limit, cpu[name], other=wall[name]) for name, limit in LIMITS.items()]


def markdown(report: Mapping[str, Any]) -> str:
    """Returns the comparison as Markdown."""
    rows = [
        [title, *(report[name][key] for key in ("cpu", "wall", "tokens", "share"))] for name, title in TITLES.items()
    ]
    verdicts = [[one.title, one.value, one.other, f"at most {one.limit:g}", one.verdict] for one in checks(report)]
    columns = (("in CPU seconds", ""), ("measured", ".2f"), ("wall clock", ".2f"), ("target", ""), ("", ""))
    return join(["### Packed and padded rows", table(COLUMNS, rows), table(columns, verdicts)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = cli.make_parser("suites.model.packed", __doc__)
    parser.add_argument("--rounds", type=cli.positive, default=5)
    cli.add_outputs(parser)
    options = parser.parse_args(arguments)
    report = measure(TAIL, options.rounds)
    return cli.finish(options, markdown(report), report, [])


if __name__ == "__main__":
    sys.exit(main())
