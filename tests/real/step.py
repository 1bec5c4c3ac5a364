"""A step of the recipe of `make real`, rollout and update, by kljax and by TRL: CPU seconds and memory.

    python -m tests.real.step --torch-env ENV [--prompts 6]      # ENV has torch, transformers, peft and trl

Each has a process with one thread, and they take turns. Both sample with the same prompts and lengths, recompute the
activations of a layer for its gradient, and train in micro-batches of 16 rows. The first step of each, which compiles,
does not count. Memory is the largest resident set of the process, its libraries included.
"""

import argparse
import contextlib
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import process
from tests.real.trl_update import recipe, trl_options
from train import real
from train.process.console import run_command

ROWS = 16
ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
    "NPROC": "1",
    "OMP_NUM_THREADS": "1",
}


def options_of(folder: Path, prompts: int, steps: int) -> dict[str, dict[str, Any]]:
    """Returns the arguments of the contenders."""
    config = recipe(folder)
    samples = config.rollout.samples_per_prompt
    micro_batches = max(prompts * samples // ROWS, 1)
    trl = {
        **trl_options(config, prompts=steps * prompts),
        **{"model": str(folder), "micro_batches": micro_batches, "threads": 1},
        **{"per_device_train_batch_size": prompts * samples // micro_batches, "num_generations": samples},
        **{
            "beta": config.kl.loss.coef,
            "num_iterations": 1,
            "max_steps": steps,
            "max_completion_length": config.data.max_completion_length,
        },
    }
    return {"kljax": {"model": str(folder), "prompts": prompts, "micro_batches": micro_batches}, "trl": trl}


def race(folder: Path, torch_env: Path, prompts: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Lets both make steps by turns; returns steps, largest memory and versions of each."""
    pythons = {"kljax": None, "trl": torch_env / "bin/python"}
    with contextlib.ExitStack() as stack:
        remotes = {
            name: stack.enter_context(
                process.start(f"tests.real.step_{name}", python=python, settings=ONE_THREAD, quiet=True)
            )
            for name, python in pythons.items()
        }
        for name, options in options_of(folder, prompts, rounds + 1).items():
            remotes[name].ask(do="load", **options)
        rounds_made = [{name: remote.ask(do="step") for name, remote in remotes.items()} for _ in range(rounds + 1)]
        return {
            name: {
                "steps": [made[name] for made in rounds_made[1:]],
                "peak": remote.ask(do="peak"),
                "versions": remote.ask(do="versions"),
            }
            for name, remote in remotes.items()
        }


def table(measured: dict[str, dict[str, Any]]) -> str:
    """Returns a table in Markdown; the ratios are of each turn, and their median counts."""
    lines = ["| | CPU s a step | tokens of a reply | peak memory, GiB |", "|---|--:|--:|--:|"]
    for name, result in measured.items():
        cpu, lengths = ([step["seconds"][1] for step in result["steps"]], [step["length"] for step in result["steps"]])
        memory = f"{result['peak'] / 2**30:.2f}"
        lines.append(f"| {name} | {statistics.median(cpu):.1f} | {statistics.mean(lengths):.1f} | {memory} |")
    pairs = zip(*(result["steps"] for result in measured.values()), strict=True)
    ratios = [trl["seconds"][1] / kljax["seconds"][1] for kljax, trl in pairs]
    memory = measured["trl"]["peak"] / measured["kljax"]["peak"]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return "\n".join(
        [*lines, "", f"TRL over kljax: CPU {statistics.median(ratios):.2f} ({spread}), memory {memory:.2f}"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, or 2 for an error that the user can fix."""
    command = argparse.ArgumentParser(prog="python -m tests.real.step", description=str(__doc__).partition("\n")[0])
    command.add_argument("--torch-env", type=Path, required=True, help="with torch, transformers, peft and trl")
    command.add_argument("--prompts", type=int, default=2, metavar="N", help="of a step, 8 replies each; default: 2")
    command.add_argument("--rounds", type=int, default=2, metavar="N", help="steps that count; default: 2")
    options = command.parse_args(arguments)

    def run() -> None:
        measured = race(real.fetch(), options.torch_env, options.prompts, options.rounds)
        print(table(measured))
        print(json.dumps(measured["trl"]["versions"] | measured["kljax"]["versions"]))

    return run_command(run)


if __name__ == "__main__":
    raise SystemExit(main())
