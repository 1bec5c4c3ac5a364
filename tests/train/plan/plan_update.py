"""Compiles the update of Qwen3-0.6B for GPUs that are not here: its bytes, and its collectives by kind.

python -m tests.train.plan.plan_update OUTPUT TOPOLOGY [key=value ...]
"""

import json
import pathlib
import sys
import tempfile

from train.plan.compiler.topology import load_compilers, parse_topology

load_compilers()

from train.config.load import load  # noqa: E402
from train.plan.compiler import hlo, lowering  # noqa: E402
from train.plan.compiler.collectives import collectives  # noqa: E402
from train.plan.compiler.traffic import count_traffic  # noqa: E402
from train.plan.search import abstract_run  # noqa: E402

CONFIG = """
steps: 1
model: {path: Qwen3-0.6B, dtype: bfloat16}
data: {max_prompt_length: 256, max_completion_length: 768}
rollout: {prompts_per_step: 16, samples_per_prompt: 8}
optim: {micro_batches: 4}
kl: {loss: {coef: 0.04}}
eval: {prompts: 0}
"""


def main(output: str, topology: str, *overrides: str) -> None:
    """Writes the plan as JSON."""
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "config.yaml"
        file.write_text(CONFIG)
        config = load(file, overrides).config
    program = next(p for p in abstract_run(config, parse_topology(topology)).lower() if p.name == "update")
    module = hlo.parse(lowering.compile_program(program.lowered).text)
    found = collectives(module, program.loops)
    plan = {"bytes": count_traffic(module, program.loops), "collectives": sorted({x.kind for x in found})}
    pathlib.Path(output).write_text(json.dumps(plan))


if __name__ == "__main__":
    main(*sys.argv[1:])
