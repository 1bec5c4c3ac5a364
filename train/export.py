"""`python -m train.export RUN --to FOLDER`: a step of a run as a Hugging Face, a PEFT or an orbax folder.

With `--push org/name` the folder is uploaded to the Hugging Face Hub.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, get_args

from train.config.errors import UserError, warn
from train.config.model import DType
from train.process.console import add_process_flags, joined_processes, make_parser, run_command
from train.process.interrupt import exit_with
from train.storage.paths import stored_argument

if TYPE_CHECKING:
    import kljax
    from train.config.schema import Config
    from train.data.tokenizers import Tokenizer
    from train.models import Decoder

FORMATS = ("hf", "peft", "orbax")
DTYPES = get_args(DType)
# A merged adapter that rounding changes by more than this is worth a warning.
ROUNDING = 0.1
EXAMPLES = """\
examples:
  python -m train.export runs/lora --to exports/adapter                # the adapter, for PEFT and vLLM
  python -m train.export runs/lora --to exports/merged --merge         # whole weights, for transformers and vLLM
  python -m train.export runs/lora --to exports/merged --merge --dtype float32
  python -m train.export runs/full --to exports/step-200 --step 200
  python -m train.export runs/lora --to exports/adapter --format orbax # for reference.path of another run
  python -m train.export runs/lora --push org/name                     # to the Hub, as private if it is new
"""


def parser() -> argparse.ArgumentParser:
    """Makes the parser of the command line."""
    command = make_parser(
        "train.export", "Write the policy of a run as a folder that others load. Nothing is ever overwritten.", EXAMPLES
    )
    command.add_argument("run", metavar="RUN", type=stored_argument, help="directory of a run, such as runs/quickstart")
    command.add_argument("--to", metavar="FOLDER", type=stored_argument, help="where to write; must not exist yet")
    command.add_argument(
        "--push",
        metavar="ORG/NAME",
        help="upload the folder to this repository of the Hugging Face Hub, as one commit; a new one is private. "
        "Without --to the folder is exports/NAME",
    )
    command.add_argument("--step", metavar="N", type=int, help="step of the run; the last one saved if left out")
    command.add_argument(
        "--format",
        choices=FORMATS,
        help="hf: whole weights; peft: the adapter; orbax: either, for this trainer. "
        "Left out: peft for a run with LoRA, else hf",
    )
    command.add_argument("--merge", action="store_true", help="add the adapter to the weights and write those")
    command.add_argument(
        "--dtype", choices=DTYPES, help="hf: dtype of the weights in the files; that of the run's weights if left out"
    )
    command.add_argument(
        "--drop-router-bias",
        action="store_true",
        help="hf: leave out the biases of routing.bias_update_rate, for which the format has no tensor; the routers "
        "then choose other experts",
    )
    command.add_argument("--base", metavar="NAME", help="peft: the name of the base model, else model.path of the run")
    add_process_flags(command)
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; the exit code is 0, 2 for an error that the user can fix, 130 for Ctrl-C."""
    options = parser().parse_args(arguments)

    def command() -> None:
        if options.to is None and options.push is None:
            raise UserError("--to: got nothing, expected a folder to write; or give --push org/name")
        with joined_processes(options):
            export(
                options.run,
                options.to or Path("exports", options.push.rpartition("/")[2]),
                push_to=options.push,
                step=options.step,
                form=options.format,
                merge=options.merge,
                dtype=options.dtype,
                base_name=options.base,
                drop_router_bias=options.drop_router_bias,
            )

    return run_command(command)


def export(
    root: Path,
    target: Path,
    *,
    step: int | None,
    form: str | None,
    merge: bool,
    dtype: str | None = None,
    base_name: str | None = None,
    drop_router_bias: bool = False,
    push_to: str | None = None,
) -> None:
    """Writes a step of the run at `root` to `target`, completely or not at all, pushes it, and prints a line.

    Raises:
      UserError: something cannot be read, or options contradict each other; nothing was written. Or the Hub refused
        the folder, which stays.
    """
    # Imported late, so that an error on the command line shows before JAX starts.
    import jax

    from train.data.tokenizers import load_tokenizer
    from train.distributed.exchange import agree, on_leader, run_together
    from train.distributed.peers import is_leader
    from train.run.saved_run import SavedRun, fitting
    from train.run.setup import config_mesh
    from train.storage.copies import with_local_copies
    from train.weights import hub
    from train.weights.files import check_free
    from train.weights.model import make_model

    saved = SavedRun.at(root)
    config = with_local_copies(fitting(saved.config))
    form = _format(form, lora=config.lora is not None, merge=merge, dtype=dtype)
    _check_router_bias(config, form, drop=drop_router_bias)
    step = saved.step(step)
    flags = {"--to": str(target), "--format": form, "--merge": merge, "--dtype": dtype, "--push": push_to}
    agree("command", {**flags, "--step": step})
    try:
        on_leader("--to", lambda: check_free(target))
    except FileExistsError as error:
        raise UserError(f"--to: {error}") from error
    if push_to is not None:
        on_leader("--push", lambda: hub.make_repository(push_to))
    tokenizer = load_tokenizer(config)
    mesh = config_mesh(config)
    model = make_model(config, tokenizer)
    with jax.set_mesh(mesh):
        policy = saved.policy(model, mesh, step)
        source = config.model.path
        name = saved.config.model.path
        options = _Options(form, merge, dtype, base_name or name, source, drop_router_bias)
        run_together("--to", lambda: _write(target, model, policy, tokenizer, options))
    if not is_leader():
        return
    what = "weights" if merge or policy.adapter is None else "adapter"
    print(f"{target}: the {what} of {root} after step {step}, {form}")
    if form == "hf" and source is None and config.data.tokenizer is not None:
        print(f"The folder has no tokenizer: its ids are those of data.tokenizer, {config.data.tokenizer}.")
    if merge and config.model.quantization is not None:
        quantization = config.model.quantization
        print(
            f"The base was held in {quantization}: these are the weights that it stands for, which the adapter was "
            "trained on."
        )
    if push_to is not None:
        print(hub.push(target, push_to, f"Step {step} of {root.name}, {form}"))


def _check_router_bias(config: "Config", form: str, *, drop: bool) -> None:
    """Raises `UserError` if the format has no place for a bias of the routers, or `--drop-router-bias` drops none."""
    if form == "hf" and config.routing.bias_update_rate > 0 and not drop:
        raise UserError(
            "--format: got hf, which has no tensor for the bias that the routers of the run have "
            "(routing.bias_update_rate); use --format orbax, or leave it out with --drop-router-bias: the routers then "
            "choose other experts"
        )
    if drop and (form != "hf" or config.routing.bias_update_rate == 0):
        why = f"the format is {form}" if form != "hf" else "the routers of the run have no bias"
        raise UserError(f"--drop-router-bias: only --format hf drops a bias, but {why}; leave the flag out")


class _Options(NamedTuple):
    """How a policy is written; `source` is the Hugging Face folder that it came from, if any."""

    form: str
    merge: bool
    dtype: str | None
    base_name: str | None
    source: str | None
    drop_router_bias: bool


def _write(target: Path, model: "Decoder", policy: "kljax.Policy", tokenizer: "Tokenizer", options: _Options) -> None:
    """Writes a policy in the chosen format; raises `UserError` if that is not possible."""
    try:
        if options.form == "peft":
            from train.weights.peft import save_adapter

            save_adapter(target, model, policy.adapter, base_name=options.base_name, source=options.source)
            _warn_of_ends(tokenizer, options.source)
        elif options.form == "hf":
            from train.weights.huggingface import save_folder

            lost = save_folder(
                target,
                model,
                policy,
                source=options.source,
                tokenizer=tokenizer,
                dtype=options.dtype,
                drop_router_bias=options.drop_router_bias,
            )
            _warn_of_rounding(lost)
        else:
            _save_orbax(target, model, policy, merge=options.merge)
    except OSError as error:
        raise UserError(f"--to: cannot write {target}: {error.strerror or error}") from error
    except ValueError as error:  # a shape that no family of Hugging Face has
        raise UserError(f"--format: got {options.form}, but {error}") from error


def _save_orbax(target: Path, model: "Decoder", policy: "kljax.Policy", *, merge: bool) -> None:
    """Writes the merged weights, the adapter or the weights of a policy."""
    from train.models.merge import merge as merged
    from train.weights.orbax import save_base

    if merge:
        save_base(target, merged(model, policy.params, policy.adapter))
    else:
        save_base(target, policy.params if policy.adapter is None else policy.adapter)


def _warn_of_rounding(lost: float | None) -> None:
    """Warns if rounding changed the update of a merged adapter; `lost` is the error relative to the update."""
    if lost is not None and lost > ROUNDING:
        warn(
            f"--merge: rounding the sum to the dtype of the files made an error of {100 * lost:.0f} % of the adapter's "
            "update; use --dtype float32, or export the adapter without --merge"
        )


def _warn_of_ends(tokenizer: "Tokenizer", source: str | None) -> None:
    """Warns of ids that ended completions in training, but do not end `generate` of the base of an adapter."""
    from train.weights.huggingface.save import missing_ends

    missing = missing_ends(source, tokenizer.eos_ids) if source is not None else []
    if missing:
        warn(
            f"--format: a peft folder has no generation_config.json, and that of {source} lacks the ids {missing}, "
            f"which ended completions in training; pass eos_token_id={list(tokenizer.eos_ids)} to `generate`, or "
            "stop_token_ids to vLLM"
        )


def _format(form: str | None, *, lora: bool, merge: bool, dtype: str | None) -> str:
    """Chooses the format; raises `UserError` if options contradict each other."""
    if merge and not lora:
        raise UserError("--merge: the run has no adapter, its weights are whole; leave the flag out")
    if form == "peft" and (merge or not lora):
        why = "merged weights are no adapter; use --format hf" if merge else "the run has no adapter; use hf or orbax"
        raise UserError(f"--format: got peft, but {why}")
    if form == "hf" and lora and not merge:
        raise UserError("--format: got hf, which holds whole weights, but the run trains an adapter; add --merge")
    chosen = form or ("peft" if lora and not merge else "hf")
    if dtype is not None and chosen != "hf":
        raise UserError(f"--dtype: got {dtype}, but only --format hf reads it; the format is {chosen}")
    return chosen


if __name__ == "__main__":
    exit_with(main())
