"""Compares runs in one and in several processes: `python -m tests.exactness [--quick] [--only NAME]`.

Each config runs through the real command, for ten steps: on one device of one process, and on meshes of eight virtual
CPU devices that belong to one, two or four processes. The sampled tokens and rewards have to be the same, losses and
weights to agree to 2e-6 relative in float32, and KLs, which are differences of log-probs, to 1e-6 nats.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from tests import peers
from tests.integration.command import environment, records, state_arrays
from train.config.load import load
from train.data.tokenizers import ByteTokenizer
from train.models.parameters import abstract_adapter
from train.models.sharding import make_mesh
from train.weights.model import make_model
from train.weights.peft import save_adapter

STEPS = 10
TOLERANCE = 2e-6
KL_TOLERANCE = 1e-6
COMMON = (
    "configs/quickstart.yaml",
    "model={layers: 2, width: 16, heads: 4, kv_heads: 2, head_dim: 8, mlp_width: 32}",
    "warm_start={steps: 60, batch_size: 16, learning_rate: 1e-2}",
    "rollout={prompts_per_step: 8, samples_per_prompt: 4}",
    "eval={prompts: 8, batch_size: 8}",
    "data.max_operand=4",
    "data.solutions=1",
    "seed=1",
    f"steps={STEPS}",
    f"eval.every={STEPS}",
    f"checkpoint={{every: {STEPS}, keep: 10}}",
    # The reasons are in tests/integration/test_mesh.py: returns of one sign, and no division by a gradient of zero.
    "advantage={type: reinforce_plus_plus}",
    "optim={learning_rate: 1e-3, optimizer: {type: adamw, eps: 1e-5}, updates_per_batch: 2, micro_batches: 2}",
)
OWN_MESH = "rollout.mesh"
"""Stands for a mesh for sampling over the devices of the layout, with tensor of size 2; one device has none."""
EXPERT_AXIS = "mesh.expert"
"""Stands for axis expert in place of axis fsdp."""
CONFIGS: dict[str, tuple[str, ...]] = {
    "all weights, EMA reference, KL in the loss": (
        "loss.aggregation=token_mean",
        "kl={loss: {coef: 0.1, estimator: k3, aggregation: seq_mean_token_mean}}",
        "reference={source: ema, decay: 0.9}",
    ),
    "sampled on a mesh of its own": (
        OWN_MESH,
        "loss.aggregation=token_mean",
        "kl={loss: {coef: 0.1, estimator: k3}}",
        "reference={source: step, step: 0}",
    ),
    "LoRA, KL in the reward and to the sampler": (
        # The adapter does not start at 0: B would be its changes alone, the remainder of gradients that cancel. The
        # order of sums then shows at 8e-6 on a mesh, and at 3e-6 on one device with one micro-batch in place of two.
        "lora={rank: 2, alpha: 4.0, path: ADAPTER}",
        "loss.aggregation=prompt_mean",
        "kl={reward: {coef: 0.05, estimator: k1, controller: {type: adaptive, target: 0.05, horizon: 100}}, "
        "loss: {coef: 0.01, aggregation: token_sum}, rollout: {coef: 0.01}}",
    ),
    "value head, KL in the advantage": (
        "advantage={type: gae, gamma: 1.0, lam: 0.95}",
        "loss.value_coef=0.5",
        "loss.aggregation=seq_mean_token_sum_norm",
        "loss.max_length=3",
        "kl={advantage: {coef: 0.05, estimator: k1}, loss: {coef: 0.1, aggregation: seq_mean_token_sum}}",
        "rollout.policy_lag=1",
    ),
    "experts over devices, routes replayed": (
        EXPERT_AXIS,
        # The supervised steps alone, on two devices of axis tensor, would be 2.3e-6 away, at o_proj.
        "optim.optimizer.eps=1e-4",
        "model.experts={count: 8, active: 2, width: 16}",
        "routing={verify: true, balance_coef: 0.1, z_coef: 0.01}",
        "loss.aggregation=token_mean",
        "kl={loss: {coef: 0.1, estimator: k3}}",
        "reference={source: ema, decay: 0.9}",
    ),
}


class ProcessLayout(NamedTuple):
    """Processes, devices of each, and the sizes of the mesh axes data, fsdp (or expert) and tensor."""

    processes: int
    devices: int
    mesh: tuple[int, int, int]

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.mesh))
        return f"{self.processes} x {self.devices} | {shape}"


ONE = ProcessLayout(1, 1, (1, 1, 1))
LAYOUTS = (
    *(ProcessLayout(1, 8, mesh) for mesh in ((8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2))),
    *(ProcessLayout(2, 4, mesh) for mesh in ((2, 2, 2), (1, 8, 1))),
    ProcessLayout(4, 2, (2, 2, 2)),
)
# Axis tensor of the first spans both processes, so that they hold the same rows.
QUICK = (ProcessLayout(2, 2, (1, 2, 2)), ProcessLayout(2, 1, (1, 1, 2)))


@dataclasses.dataclass(frozen=True)
class Distance:
    """How far a run is from that of one device.

    Attributes:
      loss: largest relative difference of a loss, by the norm over all steps: the terms of one step may cancel to
        almost 0, and a relative error of that says nothing.
      weights: largest relative difference of a trained array, by norm, before and after RL.
      farthest: the name of that array.
      kl: largest difference of a KL, nats per token.
      same_tokens: whether all sampled tokens, rewards and lengths are the same.
      seconds: of the run.
    """

    loss: float
    weights: float
    farthest: str
    kl: float
    same_tokens: bool
    seconds: float

    @property
    def exact(self) -> bool:
        """Whether the run is within the tolerances."""
        return self.same_tokens and max(self.loss, self.weights) <= TOLERANCE and self.kl <= KL_TOLERANCE


def run(
    layout: ProcessLayout,
    changes: tuple[str, ...],
    output: pathlib.Path,
    env: Mapping[str, str],
    *,
    common: tuple[str, ...] = COMMON,
) -> pathlib.Path:
    """Runs a config; returns the run directory, with the recorded rollouts in `rollouts` beside it."""
    data, second, tensor = layout.mesh
    name, size = "expert" if EXPERT_AXIS in changes else "fsdp", data * second * tensor
    mesh = f"mesh={{data: {data}, {name}: {second}, tensor: {tensor}}}"
    own_mesh = (f"{OWN_MESH}={{data: {size // 2}, tensor: 2}}",) if OWN_MESH in changes and size > 1 else ()
    changes = tuple(change for change in changes if change not in (OWN_MESH, EXPERT_AXIS))
    arguments = (
        *common,
        *changes,
        *own_mesh,
        mesh,
        "name=run",
        f"output={output}",
        f"rollout.record={output / 'rollouts'}",
    )
    ended = peers.run("train", *arguments, processes=layout.processes, devices=layout.devices, env=env, seconds=900)
    for number, (code, out, err) in enumerate(ended):
        if code:
            raise RuntimeError(f"process {number} of {layout} ended with {code}\n{out}\n{err}")
    return output / "run"


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of the array."""
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(got.astype(np.float64) - expected)) / norm if norm else float(np.abs(got).max())


def distance(root: pathlib.Path, expected: pathlib.Path, seconds: float, *, steps: int = STEPS) -> Distance:
    """Compares the files of two runs of this many steps."""
    got, want = ({phase: records(item, phase) for phase in ("warm_start", "train")} for item in (root, expected))
    losses = [("warm_start", "loss"), *(("train", name) for name in ("loss", "policy_loss", "entropy", "value_loss"))]
    series = [
        [np.array([record[name] for record in item[phase]]) for item in (got, want)]
        for phase, name in losses
        if any(name in record for record in want[phase][:1])
    ]
    kls = [name for name in want["train"][0] if name in ("kl_reference", "rollout_kl")]
    pairs = list(zip(got["train"], want["train"], strict=True))
    same = all(
        first[name] == second[name] for first, second in pairs for name in ("reward", "completion_length", "finished")
    )
    weights = []
    for step in (0, steps):
        state, reference = state_arrays(root, step), state_arrays(expected, step)
        trained = [name for name in reference if name.startswith("trainable.")]
        weights += [(relative(state[name], reference[name]), name) for name in trained]
    far, farthest = max(weights)
    return Distance(
        loss=max(relative(*pair) for pair in series),
        weights=far,
        farthest=farthest,
        kl=max((abs(first[name] - second[name]) for first, second in pairs for name in kls), default=0.0),
        same_tokens=same and recorded_tokens(root) == recorded_tokens(expected),
        seconds=seconds,
    )


def recorded_tokens(root: pathlib.Path) -> list[list[int]]:
    """Reads the completions of all steps, in order."""
    files = sorted((root.parent / "rollouts").glob("*.jsonl"))
    return [json.loads(line)["completion_ids"] for file in files for line in file.read_text().splitlines()]


def write_adapter(path: pathlib.Path) -> None:
    """Draws an adapter for the model of `COMMON`, with both matrices away from 0, and writes it as a PEFT folder."""
    config = load(COMMON[0], [*COMMON[1:], "lora={rank: 2, alpha: 4.0}"]).config
    model = make_model(config, ByteTokenizer())
    rng = np.random.default_rng(0)
    shapes = abstract_adapter(model, make_mesh())
    adapter = jax.tree.map(lambda leaf: rng.normal(scale=0.1, size=leaf.shape).astype(leaf.dtype), shapes)
    save_adapter(path, model, adapter, base_name=None)


def measure(
    names: list[str], layouts: tuple[ProcessLayout, ...], scratch: pathlib.Path
) -> Iterator[tuple[str, ProcessLayout, Distance]]:
    """Runs every config on one device and on every layout, and yields the distances."""
    env = environment(scratch)
    for number, name in enumerate(names):
        changes = tuple(change.replace("ADAPTER", str(scratch / "adapter")) for change in CONFIGS[name])
        if changes != CONFIGS[name]:
            write_adapter(scratch / "adapter")
        expected = run(ONE, changes, scratch / f"{number}", env)
        for index, layout in enumerate(layouts):
            began = time.monotonic()
            root = run(layout, changes, scratch / f"{number}-{index}", env)
            yield name, layout, distance(root, expected, time.monotonic() - began)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a run is not exact."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.exactness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two processes of two devices and of one, instead of all")
    parser.add_argument("--only", default="", help="only configs with this text in their name")
    parser.add_argument("--layouts", default="", help="only layouts with this text, as '2 x 4'")
    options = parser.parse_args(arguments)
    names = [name for name in CONFIGS if options.only in name]
    layouts = tuple(layout for layout in (QUICK if options.quick else LAYOUTS) if options.layouts in str(layout))
    wrong = 0
    print("| config | processes x devices | mesh | losses | weights | KL | tokens |\n|---|---|---|--:|--:|--:|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for name, layout, far in measure(names, layouts, pathlib.Path(scratch)):
            wrong += not far.exact
            tokens = "same" if far.same_tokens else "other"
            numbers = f"{far.loss:.1e} | {far.weights:.1e} | {far.kl:.1e}"
            print(f"| {name} | {layout} | {numbers} | {tokens} |", flush=True)
            load = f"{far.seconds:.0f} s, {os.getloadavg()[0]:.0f} processes ready"
            print(f"farthest is {far.farthest}; {load}", file=sys.stderr, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
