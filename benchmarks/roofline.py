"""What programs of the trainer move and compute on hardware that is not here, by the plans of its compilers.

    .venv-aot/bin/python -m benchmarks.roofline [--programs update,score,sample]

Compiles the update, the scoring and the sampling of Qwen3-0.6B with LoRA and with all weights: 16 prompts of 256
tokens, each with 8 completions of 768, in 4 micro-batches. Seconds are a sum over kernels, each of which takes its
operations or its bytes at published rates, whichever is longer. A program takes a minute or two. `python -m
tests.train.plan.table roofline --write` puts the table into docs/accelerators.md.
"""

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.harness import cli
from train.plan.compiler.topology import load_compilers, parse_topology

PROGRAMS = ("update", "score", "sample")
MODEL = "Qwen3-0.6B"
LAYERS, MICRO_BATCHES = 28, 4
CONFIG = f"""
steps: 1
model: {{path: {MODEL}, dtype: bfloat16}}
data: {{max_prompt_length: 256, max_completion_length: 768}}
rollout: {{prompts_per_step: 16, samples_per_prompt: 8}}
optim: {{micro_batches: {MICRO_BATCHES}}}
kl: {{loss: {{coef: 0.04}}}}
eval: {{prompts: 0}}
"""
PROJECTIONS = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
LORA = (f"lora={{rank: 32, alpha: 64, targets: [{PROJECTIONS}]}}", "model.param_dtype=bfloat16")
WEIGHTS = {"LoRA": LORA, "all weights": ()}


@dataclasses.dataclass(frozen=True)
class ProgramWork:
    """The work of a compiled program.

    Attributes:
      moved: bytes of the memory, read and written.
      flops: operations of its products.
      seconds: by the name of a device.
      launches: of kernels.
      temporary: bytes.
      layer: bytes of a layer's forward pass, of the loop over layers that moves least.
      decode: kernels of a decode step.
    """

    moved: float
    flops: float
    seconds: dict[str, float]
    launches: float
    temporary: int
    layer: float
    decode: int


def plan(program: str, overrides: Sequence[str] = (), topology: str = "h100:1") -> ProgramWork:
    """Compiles a program of a step: "update", "score" or "sample"."""
    load_compilers()
    from train.config.load import load
    from train.models.devices import DEVICES
    from train.plan.compiler import flops, hlo, lowering
    from train.plan.compiler.traffic import Kernels
    from train.plan.search import abstract_run

    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "config.yaml"
        file.write_text(CONFIG)
        config = load(file, overrides).config
    lowered = next(p for p in abstract_run(config, parse_topology(topology)).lower() if p.name == program)
    compiled = lowering.compile_program(lowered.lowered)
    module = hlo.parse(compiled.text)
    kernels = Kernels(module)
    rows = list[tuple[str, float, float, float]]()
    for name, times in hlo.executions(module, kernels=False, expected=lowered.loops).items():
        shapes = {instruction.name: instruction.shape for instruction in module.computations[name]}
        for instruction in module.computations[name] if times else ():
            if instruction.opcode not in hlo.CONTROL:
                moved = kernels.moved(instruction, shapes)
                done = flops.kernel_flops(module, instruction, shapes)
                if moved or done:
                    rows.append((name, times, moved, done))
    devices = {device: DEVICES[device] for device in ("h100", "h200")}
    layers: dict[str, float] = {}
    for name, times, size, _ in rows:
        if times == LAYERS * MICRO_BATCHES:
            layers[name] = layers.get(name, 0.0) + size
    steps = max((times for _, times, *_ in rows), default=0)
    return ProgramWork(
        moved=sum(times * moved for _, times, moved, _ in rows),
        flops=sum(times * done for _, times, _, done in rows),
        seconds={
            name: sum(times * max(done / x.flops, moved / x.bandwidth) for _, times, moved, done in rows)
            for name, x in devices.items()
        },
        launches=sum(times for _, times, *_ in rows),
        temporary=compiled.temporary,
        # A loop of one small kernel is none over layers.
        layer=min((moved for moved in layers.values() if moved > 1e9), default=0.0),
        decode=max((sum(x[:2] == (name, steps) for x in rows) for name, *_ in rows), default=0),
    )


TITLE = """\
| program | GB | TFLOP | ms H100 / H200 | launches | temporaries GiB | a layer forward GB | kernels a layer |
|---|--:|--:|--:|--:|--:|--:|--:|"""


def row(program: str, weights: str, work: ProgramWork) -> str:
    """Shows a plan as a row of the table."""
    cells = [f"{program}, {weights}", f"{work.moved / 1e9:,.0f}", f"{work.flops / 1e12:.0f}"]
    cells.append(" / ".join(f"{1e3 * seconds:,.0f}" for seconds in work.seconds.values()))
    cells += [f"{work.launches:,.0f}", f"{work.temporary / 2**30:.1f}"]
    samples = program == "sample"
    cells += ["" if samples else f"{work.layer / 1e9:.2f}", f"{work.decode / LAYERS:.1f}" if samples else ""]
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table as its rows are known."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument(
        "--programs", type=cli.some_of(PROGRAMS), default=PROGRAMS, metavar="NAMES", help=f"out of {','.join(PROGRAMS)}"
    )
    options = parser.parse_args(arguments)
    print(TITLE, flush=True)
    for program in options.programs:
        for weights, overrides in WEIGHTS.items():
            print(row(program, weights, plan(program, overrides)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
