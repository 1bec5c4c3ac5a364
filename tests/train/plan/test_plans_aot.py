"""Plans of the compilers of TPUs and GPUs for the programs of a step, of a small decoder with a large vocabulary.

The command runs in an environment of its own, which `make test-aot` makes; its plans and programs are read here.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
import subprocess
import tempfile
from typing import Any

import jax
import pytest

from benchmarks.harness import environments
from benchmarks.suites import compiler
from train.config.load import load
from train.models.sharding import make_mesh
from train.plan.compiler import hlo
from train.plan.compiler.collectives import collectives
from train.plan.programs import AbstractRun

ROOT = pathlib.Path(__file__).parents[3]
CONFIG = ROOT / "tests" / "train" / "plan" / "tiny.yaml"
pytestmark = pytest.mark.slow
# Topology, slices, and overrides of the config.
TARGETS = {
    "v5e": ("v5e:4x4", 1, ()),
    "two slices": ("v5e:4x4", 2, ()),
    "v5p": ("v5p:2x2x4", 1, ()),
    "v6e": ("v6e:4x4", 1, ("optim.host_memory=true",)),
    "h200": ("h200:2x8", 1, ()),
}
BUDGET_MIB = 256
"""The most that a device may need; all logits of a micro-batch alone would be 96 MiB, with their gradient 192."""
MIB = 2**20
VOCAB, WIDTH, TENSOR = 65_536, 256, 4


def reason_to_skip(platform: str) -> str | None:
    return compiler.missing(compiler.DEFAULT, platform)


def planned(
    config: pathlib.Path, topology: str, slices: int = 1, overrides: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, str]]:
    """The plan of a config on a topology, and its compiled programs by name."""
    reason = reason_to_skip("cuda" if topology.startswith("h") else "tpu")
    if reason is not None:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "plan.json"
        command = [environments.interpreter(compiler.DEFAULT), "-m", "train.plan", config, *overrides]
        command += ["--topology", topology, "--slices", str(slices), "--json", file, "--keep", directory]
        done = subprocess.run(
            list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stderr[-3000:]
        (plan,) = json.loads(file.read_text())["plans"]
        texts = {path.name.split(".")[0]: path.read_text() for path in pathlib.Path(directory).glob("*.hlo.txt")}
    return plan, texts


def program(plan: dict[str, Any], name: str) -> dict[str, Any]:
    return next(program for program in plan["programs"] if program["name"] == name)


@functools.cache
def abstract_run() -> AbstractRun:
    config = load(CONFIG, ["mesh.fsdp=2"]).config
    return AbstractRun.of(config, make_mesh(**config.mesh.model_dump()))


def check_memory_stays_below_its_budget(target: str, plan: dict[str, Any], texts: dict[str, str]) -> None:
    assert plan["fits"]
    assert plan["peak"]["bytes"] <= BUDGET_MIB * MIB, plan["peak"]


def check_no_array_has_all_logits(target: str, plan: dict[str, Any], texts: dict[str, str]) -> None:
    rows = 128 // 4 // 4 // TARGETS[target][1]
    logits = rows * 192 * VOCAB // TENSOR
    for name, text in texts.items():
        for instructions in hlo.parse(text).computations.values():
            for entry in instructions:
                sizes = [math.prod(sizes) for _, sizes in hlo.array_sizes(entry.shape)]
                assert max(sizes, default=0) < logits, f"{name}: {entry.line[:300]}"


def check_the_whole_state_is_donated(target: str, plan: dict[str, Any], texts: dict[str, str]) -> None:
    state = dataclasses.replace(abstract_run().state, past=None, reference=None)
    header = texts["update"].partition("\n")[0]
    donated = re.search(r"input_output_alias=\{(.*?)\}, [a-z_]+=", header)
    assert donated is not None
    # An update does not read `guard.nonfinite`, a number that it writes anew.
    assert len(re.findall(r"(?:may|must)-alias", donated[1])) == len(jax.tree.leaves(state)) - 1
    assert program(plan, "update")["aliased"] >= plan["resident"]["parameters"] + plan["resident"]["optimizer"]


def check_each_pass_gathers_the_head_once(target: str, plan: dict[str, Any], texts: dict[str, str]) -> None:
    # Two micro-batches, forward and backward; and four parts with the policy and the reference.
    for name, passes in (("update", 2 * 2), ("score", 4 * 2)):
        module = hlo.parse(texts[name])
        # Bytes of a column, in float32; the columns of a chunk, or several chunks, and all of the width.
        actual = [
            operation
            for operation in collectives(module, {"token_tiles": 6})
            if operation.kind == "all-gather" and re.search(rf"f32\[{WIDTH},(?!{VOCAB}\b)\d+\]", operation.shape)
        ]
        gathered = sum(entry.total for entry in actual)
        full = 4 * WIDTH * VOCAB // TENSOR
        assert 0 < gathered <= 1.01 * passes * full, (name, actual)


def check_moments_are_where_the_config_has_them(target: str, plan: dict[str, Any], texts: dict[str, str]) -> None:
    in_host = bool(TARGETS[target][2])
    actual = plan["host" if in_host else "resident"]["optimizer"]
    assert 2 * plan["resident"]["parameters"] <= actual <= 2 * plan["resident"]["parameters"] + 64
    # Arguments: weights, batch, and moments that are on the devices.
    on_device = program(plan, "update")["arguments"] - plan["resident"]["parameters"]
    assert (on_device < actual) == in_host


def check_only_several_islands_use_the_network(target: str, plan: dict[str, Any], texts: dict[str, str]) -> None:
    update = program(plan, "update")["work"]
    islands = target in ("two slices", "h200")
    assert (update["network"] > 0) == islands
    assert update["links"] > 0

    if target == "two slices":
        # The gradients of all weights, in float32, reduced once for every micro-batch at most.
        assert update["network"] < 4 * 3 * plan["resident"]["parameters"]


@pytest.mark.parametrize("target", TARGETS)
def test_planned_programs_keep_their_properties(target):
    """One test for each target, so that its programs are compiled once."""
    plan, texts = planned(CONFIG, *TARGETS[target])
    for check in (
        check_memory_stays_below_its_budget,
        check_no_array_has_all_logits,
        check_the_whole_state_is_donated,
        check_each_pass_gathers_the_head_once,
        check_moments_are_where_the_config_has_them,
        check_only_several_islands_use_the_network,
    ):
        check(target, plan, texts)


def test_gpt_oss_plans_over_experts_and_heads(tmp_path):
    """Sinks, biases of experts and their clamped activation compile for devices that share experts and heads."""
    shape = json.loads((ROOT / "tests/goldens/models/gpt_oss/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"num_local_experts": 8}))
    mesh = ("mesh={expert: 4, tensor: 2}", "rollout.slots=null", f"model.path={tmp_path}", "optim.updates_per_batch=1")
    plan, _ = planned(CONFIG, "v5p:2x2x2", 1, mesh)
    assert plan["fits"]
    exchanged = program(plan, "update")["exchanged"]
    # Tokens of the devices of axis expert, and sums over those that share heads.
    assert {"all-gather", "all-reduce"} <= set(exchanged), exchanged


def test_part_of_a_torus_gathers_weights():
    """Over a whole cube of chips libtpu makes all-reduces of gathers, which send twice the bytes."""
    options = ("mesh={data: 4, fsdp: 16}", "rollout.slots=null", "optim.updates_per_batch=1", "optim.micro_batches=1")
    plan, _ = planned(CONFIG, "v5p:4x4x4", 1, (*options, "rollout.prompts_per_step=64", "eval.batch_size=64"))
    exchanged = program(plan, "score")["exchanged"]
    assert "all-gather" in exchanged
    assert "all-reduce" not in exchanged, exchanged
