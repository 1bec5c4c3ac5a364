"""`python -m train.eval RUN_OR_CONFIG`: a policy on the held-out prompts, sampled at the temperature and greedily."""

import argparse
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from train.config.errors import UserError
from train.config.installation import recipe_path
from train.config.load import LoadedConfig, load
from train.config.storage import is_address
from train.process.console import (
    add_process_flags,
    check_output,
    joined_processes,
    make_parser,
    run_command,
    show_warnings,
    write_file,
)
from train.process.interrupt import exit_with
from train.process.xla_flags import set_flags
from train.storage.paths import stored_argument

if TYPE_CHECKING:
    import kljax
    from train.config.schema import Config
    from train.context import RunContext
    from train.run.saved_run import SavedRun

EXAMPLES = """\
examples:
  python -m train.eval runs/lora                                 # the last step saved
  python -m train.eval runs/lora --step 0 eval.prompts=1000      # the policy before RL, on more prompts
  python -m train.eval configs/gsm8k.yaml model.path=exports/merged --json accuracy.json
"""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    command = make_parser(
        "train.eval",
        "Evaluate a step of a run, or the model that a config starts from, on the held-out prompts.",
        EXAMPLES,
    )
    add_policy_arguments(command)
    command.add_argument(
        "--json", metavar="FILE", type=stored_argument, help="also write the numbers and some completions"
    )
    add_process_flags(command)
    return command


def add_policy_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments that name a policy: a run or a config, overrides of its fields, and a step."""
    command.add_argument("what", metavar="RUN_OR_CONFIG", type=run_or_config, help="directory of a run, or a config")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="dotted path of a field and its YAML value")
    command.add_argument("--step", metavar="N", type=int, help="step of the run; the last one saved if left out")


def run_or_config(text: str) -> Path:
    """Reads the name of a recipe, a path, or the address of a run."""
    path = stored_argument(text)
    return path if is_address(path) else recipe_path(text)


def load_if_config(options: argparse.Namespace) -> LoadedConfig | None:
    """Loads the config that a command line names, before JAX starts, so that its errors show first; None for a run.

    Raises:
      UserError: there is neither a run nor a config, or it is wrong.
    """
    if not options.what.exists():
        raise UserError(no_such_run(options.what))
    return None if options.what.is_dir() else load(options.what, options.overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, 2 for an error that the user can fix, 130 for Ctrl-C."""
    options = parser().parse_intermixed_args(arguments)

    def command() -> None:
        loaded = load_if_config(options)
        with joined_processes(options):
            if loaded is not None:
                show_warnings(loaded)
            show(options, loaded)

    return run_command(command)


def no_such_run(what: Path) -> str:
    """Writes that there is neither a run nor a config, with the runs beside it or in `runs/`."""
    here = is_address(what) or (what.parent.is_dir() and what.parent != Path())
    folder = what.parent if here else Path("runs")
    runs = sorted(str(path.parent) for path in folder.glob("*/config.yaml"))
    there = f"there are {', '.join(runs)}" if runs else f"{folder} has none"
    return f"{what}: no such run or config, expected a directory of a run ({there}), or a YAML file"


def open_policy(options: argparse.Namespace, loaded: LoadedConfig | None) -> tuple["SavedRun | None", "Config"]:
    """Opens the run that a command line names, if it names one; returns the config for the devices that are here.

    Raises:
      UserError: there is no run, or a step of a config is asked for.
    """
    from train.distributed.compile_cache import start_compile_cache
    from train.run.saved_run import SavedRun, fitting
    from train.run.setup import with_local_model
    from train.storage.copies import with_local_copies

    if loaded is not None and options.step is not None:
        raise UserError(f"--step: got {options.step}, but {options.what} is no directory of a run")
    saved = None if loaded is not None else SavedRun.at(options.what, options.overrides)
    start = saved or loaded
    assert start is not None
    set_flags(start.config.xla_flags)
    config = with_local_copies(with_local_model(fitting(start.config)))
    start_compile_cache(config.compile_cache)
    return saved, config


def load_policy(context: "RunContext", saved: "SavedRun | None", step: int | None) -> tuple["kljax.Policy", int | None]:
    """Loads the policy of a run after a step, None for the last one, and returns the step; or that of a config.

    Raises:
      UserError: there is no such step, a config starts from no saved policy, or the weights do not fit.
    """
    if saved is None:
        return initial_policy(context), None
    chosen = saved.step(step)
    return saved.policy(context.model, context.mesh, chosen), chosen


def show(options: argparse.Namespace, loaded: LoadedConfig | None) -> None:
    """Evaluates the policy that a command line names; prints the table, and writes a file if one is named.

    Raises:
      UserError: something cannot be read or does not fit.
    """
    # Imported late, so that an error on the command line shows before JAX starts.
    import jax

    from train.distributed.exchange import agree
    from train.distributed.peers import is_leader
    from train.run.directory import flat_fields
    from train.run.display import default_console, print_evaluation, summary_text
    from train.run.setup import make_context

    if options.json is not None:
        check_output("--json", options.json, inputs=[] if loaded is None else [loaded.source])
    saved, config = open_policy(options, loaded)
    agree("command", {**flat_fields(config), "--step": options.step})
    context = make_context(config)
    if not context.held_out:
        raise UserError("eval.prompts: got 0, so nothing is held out; set it, and a task with its data")
    with jax.set_mesh(context.mesh):
        policy, step = load_policy(context, saved, options.step)
        metrics = measure(context, policy, step or 0)
    if not is_leader():
        return
    what = str(options.what)
    name = what if step is None else f"{what} after step {step}"
    print_evaluation(default_console(), f"{name}: {len(context.held_out)} prompts", metrics, config.temperature)
    if options.json is not None:
        about = {"of": what, "step": step, "prompts": len(context.held_out), "temperature": config.temperature}
        write_file("--json", options.json, summary_text(about | metrics))


def measure(context: "RunContext", policy: "kljax.Policy", step: int = 0) -> dict[str, Any]:
    """Evaluates the policy after some steps on the held-out prompts, sampled and greedily, with the keys of a run.

    Returns:
      `sampled` and `greedy`: mean of each reward, and `accuracy` in percent; `samples`: the first completions.
    """
    from train.rl.keys import purpose_key
    from train.rollouts.open import open_evaluation
    from train.run.evaluate import evaluate

    key = purpose_key(context.config.seed, "held_out")
    with closing(open_evaluation(context)) as stream:
        sampled = evaluate(context, stream, policy, key, step=step)
        greedy = evaluate(context, stream, policy, key, step=step, greedy=True)
    return {"sampled": sampled.metrics, "greedy": greedy.metrics, "samples": sampled.samples}


def initial_policy(context: "RunContext") -> "kljax.Policy":
    """Loads the saved policy that the config starts from.

    Raises:
      UserError: it starts from none, or its weights do not fit.
    """
    import kljax
    from train.run.base_weights import load_initial_base
    from train.run.setup import check_start, load_initial_adapter

    config = context.config
    model = context.model
    mesh = context.mesh
    check_start(config, model)
    base = load_initial_base(config, model, mesh)
    if base is None:
        raise UserError("nothing to evaluate: name a run, or set model.path or warm_start.checkpoint")
    return kljax.Policy(base, None if config.lora is None else load_initial_adapter(config, model, mesh))


if __name__ == "__main__":
    exit_with(main())
