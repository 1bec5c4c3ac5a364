"""The arithmetic that chooses the recomputation, against compiled updates; in the environment of the compilers."""

import json
import subprocess

import pytest

from benchmarks.harness import environments
from benchmarks.harness.process import ROOT
from benchmarks.suites import compiler
from tests.train.weights.test_remat import CONFIGS
from train.config.load import dump_yaml

PROGRAM = """
import json, sys
from train.plan.compiler.topology import load_compilers, parse_topology
load_compilers()
from train.config.load import load
from train.plan.compiler.lowering import compile_program
from train.plan.search import abstract_run
from train.rollouts.make_layout import resident_bytes
from train.weights.remat import update_bytes
run = abstract_run(load(sys.argv[1], [f"model.remat={sys.argv[3]}"]).config, parse_topology(sys.argv[2]))
context = run.context
resident = resident_bytes(context.plan, context.model, context.mesh, context.optimizer)
bound = resident + update_bytes(context.plan, context.model, context.mesh, sys.argv[3])
update = next(program for program in run.lower() if program.name == "update")
print(json.dumps({"bound": bound, "planned": update.beside + compile_program(update.lowered, effort=-1.0).needed}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "dots"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bound_lies_a_little_above_the_compiled_update(tmp_path, name, form):
    reason = compiler.missing(compiler.DEFAULT, "cuda")
    if reason is not None:
        pytest.skip(reason)
    config = CONFIGS[name]()
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    topology = f"h100:{config.mesh.parts().count}"
    command = [str(environments.interpreter(compiler.DEFAULT)), "-c", PROGRAM, tmp_path / "config.yaml", topology, form]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout.splitlines()[-1])
    assert 1 <= sizes["bound"] / sizes["planned"] <= 1.25, sizes
