"""Peak memory of a recipe on a CPU, phase by phase: load, sample, score, prepare, update, evaluate.

    python -m benchmarks.memory                           Qwen3-0.6B with LoRA, random weights
    python -m benchmarks.memory --folder DIR              keeps the checkpoint, or takes the one that is there
    python -m benchmarks.memory rollout.slots=8           overrides of the config

The peak is that of the resident set of the process, libraries and compilers included, over the bytes of the weights as
they are stored. The batch is small: with the lengths and rows of the recipe, KV caches and activations come on top.
"""

import argparse
import contextlib
import json
import multiprocessing
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, cast

import jax
import tokenizers

import kljax
from benchmarks.harness import cli, machine
from benchmarks.harness.measure import begin_peak, known, resident
from benchmarks.harness.race import log
from benchmarks.harness.report import Report, table
from train.config.load import load
from train.config.plan import Plan
from train.models import Decoder
from train.models.parameters import init_params
from train.models.sharding import make_mesh
from train.plan.shapes import PUBLISHED
from train.references.load import load_reference
from train.rl.keys import purpose_key
from train.rl.objective import coefficients
from train.rl.reference import reference_head
from train.rl.state import policy_of
from train.rl.step import update_rows
from train.rollouts.collect import collect
from train.rollouts.lag import sampling_policy
from train.rollouts.open import open_evaluation, open_stream
from train.run.base_weights import load_initial_base
from train.run.evaluate import evaluate
from train.run.programs import Programs
from train.run.setup import first_state, make_context
from train.weights import tensor_digests
from train.weights.huggingface.config import decoder_config
from train.weights.huggingface.save import save_folder

CONFIG, MODEL = "configs/gsm8k_qwen3_0_6b_lora.yaml", "Qwen3-0.6B"
SMALL = (
    "data.template_arguments={}",  # for a chat template, which the random folder has not
    "data.max_prompt_length=64",
    "data.max_completion_length=32",
    "rewards.overlong_buffer=8",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.slots=4",
    "optim.updates_per_batch=1",
    "optim.micro_batches=2",
    "eval.prompts=4",
    "eval.batch_size=4",
)
COLUMNS = (("phase", ""), ("peak MiB", "MiB"), ("of the weights", ".2f"))


def make_folder(folder: pathlib.Path) -> None:
    """Writes random bfloat16 weights of the model, with a tokenizer of bytes and a few problems."""
    model = Decoder(decoder_config(PUBLISHED[MODEL], dtype="bfloat16", param_dtype="bfloat16"))
    save_folder(folder, model, kljax.Policy(init_params(model, jax.random.key(0), make_mesh())))
    shape = json.loads((folder / "config.json").read_text())
    end = "<end>"
    alphabet = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), end]
    tokenizer = tokenizers.ByteLevelBPETokenizer({text: n for n, text in enumerate(alphabet)}, [])
    tokenizer.add_special_tokens([end])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(shape | {"eos_token_id": len(alphabet) - 1}))
    # The digests are those of an export, whose config has no end.
    (folder / tensor_digests.FILE_NAME).unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
    problems = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(8)]
    (folder / "problems.jsonl").write_text("".join(f"{json.dumps(problem)}\n" for problem in problems))


def peaks_of(folder: pathlib.Path, overrides: Sequence[str]) -> dict[str, int]:
    """Runs the phases one after the other; returns the peak of each in bytes."""
    peaks = {"libraries": begin_peak()}

    @contextlib.contextmanager
    def phase(name: str) -> Iterator[None]:
        begin_peak()
        yield
        peaks[name] = resident("VmHWM")
        log(f"{name}: {peaks[name] / 2**20:,.0f} MiB")

    files = (f"model.path={folder}", f"data.train={folder}/problems.jsonl", f"data.eval={folder}/problems.jsonl")
    config = load(CONFIG, [*SMALL, *files, *overrides]).config
    context = make_context(config)
    plan = Plan.of(config)
    none = cast(Any, None)
    model, mesh = context.model, context.mesh
    with jax.set_mesh(mesh):
        with phase("load"):
            base = load_initial_base(config, model, mesh)
            state = first_state(plan, model, mesh, base, context.optimizer)
            reference = load_reference(plan, model, mesh, saved=None, read_base=lambda: base, checkpoints=none)
            jax.block_until_ready((base, state, reference))
        stream = open_stream(context)
        programs = Programs.of(context, state)
        with phase("sample"):
            stream.update(*sampling_policy(state, base))
            batch = jax.block_until_ready(collect(context, stream, 0).batch)
        with phase("score"):
            batch = jax.block_until_ready(programs.score(state.trainable, base, reference, batch))
        with phase("prepare"):
            batch, controllers, _ = jax.block_until_ready(programs.prepare(batch, state.controllers))
        with phase("update"):
            (rows,) = update_rows(config, purpose_key(config.seed, "rows", 0))
            coefs, head = coefficients(config, controllers), reference_head(plan, reference)
            state = jax.block_until_ready(programs.update(state, base, batch, rows, coefs, ref_head=head)[0])
        with phase("evaluate"):
            policy = policy_of(state.trainable, base)
            evaluate(context, open_evaluation(context), policy, purpose_key(config.seed, "held_out"), step=1)
    return peaks


def report(fields: Mapping[str, Any]) -> Report:
    """Makes the table of the phases."""
    weights = fields["weights"]
    rows = [[name, peak, peak / weights] for name, peak in fields["peaks"].items()]
    how = f"{CONFIG} with a small batch; {weights / 2**20:,.0f} MiB of weights in bfloat16"
    return Report([table(COLUMNS, rows)], fields=fields, how=[how])


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    if not known():
        raise cli.EndError("this system does not tell the peak memory of a process")
    fields = machine.conditions()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or pathlib.Path(scratch, MODEL)
        if not folder.exists():
            # In a process of its own, whose memory does not count.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                pool.submit(make_folder, folder).result()
        peaks = peaks_of(folder, options.overrides)
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return fields | {"weights": weights, "peaks": peaks}


main = cli.command(
    "memory",
    __doc__,
    _measure,
    report,
    cli.option("overrides", nargs="*", metavar="key=value", help="of the config"),
    cli.option("--folder", type=pathlib.Path, metavar="DIR", help="of the checkpoint; made where it is missing"),
)

if __name__ == "__main__":
    sys.exit(main())
