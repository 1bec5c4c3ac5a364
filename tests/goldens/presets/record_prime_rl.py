"""prime-rl: advantages by its algorithms, samples and packing by its orchestrator, then the loop of its `train`.

RELEASE is a checkout of commit 559b447: the trainer is not on PyPI. Needs msgspec, pydantic, prime-pydantic-config,
jaxtyping and beartype; what else is not installed is replaced. The statements of `train` over the micro-batches of a
step run as they stand, on "cpu" in place of "cuda", with a forward pass of transformers under the mask of packed
sequences. Recorded are the log-probs of the sampler; the trace of the row without a token has none, as that of a failed
rollout.
"""

import asyncio
import contextlib
import pathlib
import sys
import tempfile
import types
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.goldens.presets import batch, model, record, stubs
from tests.goldens.systems import release

ABOUT = {"version": "prime-rl 0.8.0 (559b447)", "dtype": "float64"}
# The algorithm of the orchestrator, and the settings of `trainer.loss`: trust regions that are active on the batch.
REGION: dict[str, Any] = {"type": "default", "dppo_mask_low": 0.02, "dppo_mask_high": 0.03}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", REGION),
    "ipo": ("grpo", {"type": "ipo", "ipo_threshold": 0.03}),
    "max_rl": ("max_rl", REGION),
}


def source(path: str) -> pathlib.Path:
    """A file of the release."""
    return pathlib.Path(sys.modules["prime_rl"].__path__[0]) / path


class Branch(types.SimpleNamespace):
    """A branch of one prompt and one completion, with the flat streams that a branch of `verifiers` has."""

    reference_logprobs = multi_modal_data = routed_experts = None

    def flat(self, name: str) -> list[Any]:
        """The values of all nodes."""
        return [value for node in self.nodes for value in getattr(node, name)]

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""
        return self.flat("token_ids")

    @property
    def logprobs(self) -> list[float]:
        """The log-probs of the sampler."""
        return self.flat("logprobs")

    @property
    def advantages(self) -> list[float]:
        """The advantages, which are those of the sampled tokens."""
        return [0.0] * len(self.nodes[0].token_ids) + self.nodes[1].advantages


def make_trace(recorded: batch.Recorded, row: int) -> Any:
    """A trace of one turn."""
    prompt = recorded.prompts[row][recorded.prompt_mask[row]].tolist()
    length = int(recorded.mask[row].sum())
    context = types.SimpleNamespace(
        token_ids=prompt, mask=[False] * len(prompt), logprobs=[0.0] * len(prompt), sampled=False, loss_weights=None
    )
    sampled = types.SimpleNamespace(
        token_ids=recorded.completions[row, :length].tolist(),
        mask=[True] * length,
        logprobs=recorded.rollout_log_probs[row, :length].tolist(),
        sampled=True,
        loss_weights=None,
    )
    nodes = [context, sampled]
    return types.SimpleNamespace(
        id=str(row),
        nodes=nodes,
        branches=[Branch(nodes=nodes)],
        reward=float(recorded.rewards[row]),
        has_error=False,
        agent=types.SimpleNamespace(trainable=True, name="agent"),
    )


def samples_of(recorded: batch.Recorded, algorithm: Any) -> list[Any]:
    """The samples of a batch, as the orchestrator ships them."""
    from prime_rl.orchestrator.algo.base import iter_trainable_traces
    from prime_rl.orchestrator.algo.routing import stamp_loss_routing
    from prime_rl.orchestrator.trajectories import trace_to_samples

    prune = release.function_from(source("orchestrator/train_sink.py"), "_prune_zero_advantages", {})
    samples = []
    for group in range(batch.PROMPTS):
        rows = np.flatnonzero(recorded.groups == group)
        episodes = [types.SimpleNamespace(traces=[make_trace(recorded, int(row))]) for row in rows]
        asyncio.run(algorithm.finalize_group(episodes))
        for _, trace in iter_trainable_traces(episodes):
            samples += trace_to_samples(trace, env_name="recorded")
    for sample in samples:
        sample.temperatures = [batch.TEMPERATURE] * len(sample.token_ids)
        stamp_loss_routing(sample, algorithm.action_loss_type)
    return [sample for sample in samples if prune(sample)]


def micro_batches_of(samples: list[Any], accumulation: int) -> list[Any]:
    """The samples packed into rows, one for each micro-batch."""
    from prime_rl.trainer.batch import prepare_batch
    from prime_rl.trainer.rl.data import DataLoader

    tokens = sum(len(sample.token_ids) for sample in samples)
    max_new_tokens = tokens if accumulation == 1 else tokens // accumulation + batch.PROMPT_LENGTH
    (packed,) = prepare_batch(samples, max_new_tokens, 1, sum)
    assert len(packed) == accumulation
    return [DataLoader._micro_batch_to_tensor(None, row) for row in packed]


def forward(trained: torch.nn.Module, tokens: torch.Tensor, _: torch.Tensor, **inputs: Any) -> dict[str, Any]:
    """The logits of packed sequences."""
    return {"logits": model.packed_logits(trained, tokens, inputs["seq_lens"].tolist())}


@contextlib.contextmanager
def on_cpu() -> Iterator[pathlib.Path]:
    """The file of `train` with its device replaced."""
    text = source("trainer/rl/train.py").read_text()
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "train.py"
        path.write_text(text.replace('"cuda"', '"cpu"'))
        yield path


def update(trained: torch.nn.Module, micro_batches: list[Any], settings: Any) -> float:
    """The statements of `train` from the divisors to the gradients; returns the sum of the losses."""
    from prime_rl.trainer import utils
    from prime_rl.trainer.rl import loss

    names = {name: getattr(loss, name) for name in dir(loss)} | {name: getattr(utils, name) for name in dir(utils)}
    config = types.SimpleNamespace(
        enable_router_replay=False,
        enable_token_export=False,
        loss=settings,
        model=types.SimpleNamespace(vlm=None, lora=None, ac_offloading=None, cp_style=None),
    )
    parallel_dims = mock.MagicMock(cp_enabled=False, cp=1, fsdp_gradient_divide_factor=1.0)
    tensors: dict[str, list[torch.Tensor]] = defaultdict(list)
    names |= {
        "batch_size": len(micro_batches),
        "config": config,
        "dist": mock.MagicMock(),
        "forward": forward,
        "gradient_manager": None,
        "is_tt_moe_model": lambda _: False,
        "logger": mock.MagicMock(),
        "maybe_activation_offloading": lambda *_: contextlib.nullcontext(),
        "maybe_record_function": lambda *_: contextlib.nullcontext(),
        "micro_batches": micro_batches,
        "model": trained,
        "parallel_dims": parallel_dims,
        "progress": mock.MagicMock(),
        "rl_loss_fn": loss.setup_rl_loss_fn(settings),
        "Tensors": lambda: tensors,
        "token_exporter": mock.MagicMock(),
    }
    with on_cpu() as path:
        run_loop = release.statements_from(path, "train", "local_rl_scale = 0", "if gradient_manager is None")
    run_loop(**names)
    return sum(float(value) for value in tensors["loss"])


def run(algorithm: str, accumulation: int, recorded: batch.Recorded) -> record.Step:
    """One optimizer step of the trainer."""
    from prime_rl.configs import trainer
    from prime_rl.orchestrator.algo.grpo import GRPOAlgorithm
    from prime_rl.orchestrator.algo.max_rl import MaxRLAlgorithm

    name, settings = ALGORITHMS[algorithm]
    made = {"grpo": GRPOAlgorithm, "max_rl": MaxRLAlgorithm}[name](types.SimpleNamespace(length_penalty=None), None)
    kinds = {"default": trainer.DefaultLossConfig, "ipo": trainer.IPOLossConfig}
    trained = model.load()
    with mock.patch.object(torch, "float", torch.get_default_dtype()):
        micro_batches = micro_batches_of(samples_of(recorded, made), accumulation)
    loss = update(trained, micro_batches, kinds[settings["type"]](**settings))
    return record.Step(algorithm, accumulation, {"algo": name, "loss": settings}, loss, record.gradients_of(trained))


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two micro-batches."""
    root = root.resolve()
    release.bare(root / "src", "prime_rl.orchestrator.algo")
    sys.modules["prime_rl"].__path__.append(str(root / "packages/prime-rl-configs/src/prime_rl"))
    # The settings of the algorithms need their environments; those of the loss are prime-rl's own.
    sys.modules["prime_rl.configs.algorithm"] = stubs.Anything("prime_rl.configs.algorithm")
    with release.uncompiled(), stubs.missing_replaced(root):
        import prime_rl.orchestrator.algo.grpo
        import prime_rl.orchestrator.trajectories
        import prime_rl.trainer.rl.data
        import prime_rl.trainer.rl.loss
        import prime_rl.trainer.utils  # noqa: F401
    yield from model.float64_steps(run, ALGORITHMS)
