"""slime: training data by its rollout manager, its advantages, then `loss_function` on each micro-batch.

RELEASE is a checkout of commit 624b824. Needs what its loss imports; Megatron and what else is not installed are
replaced. Megatron's part is here: it divides the loss of a micro-batch by their number, or, with a loss per token, the
gradients by the number of tokens, and it sees sequences packed into one row. slime counts a token for a sample without
one where the loss is per token, and refuses such a sample for REINFORCE++: these two are recorded without that sample.
"""

import argparse
import functools
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.goldens.presets import batch, model, record, stubs
from tests.goldens.systems import release

ABOUT = {"version": "slime 0.3.1 (624b824)", "dtype": "float64"}
KL_LOSS: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"}
# Arguments of the command line.
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage_estimator": "grpo", **KL_LOSS},
    "grpo_tis": {"advantage_estimator": "grpo", "use_tis": True, "tis_clip": 1.1},
    "dr_grpo": {"advantage_estimator": "grpo", "grpo_std_normalization": False},
    "dapo": {"advantage_estimator": "grpo", "calculate_per_token_loss": True, "eps_clip_high": 0.28},
    "gspo": {"advantage_estimator": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0, "eps_clip_high": 4.0},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.01},
    "reinforce++_baseline": {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True},
    "ppo": {"advantage_estimator": "ppo", "kl_coef": 0.01},
}
DEFAULTS: dict[str, Any] = {
    "allgather_cp": False,
    "calculate_per_token_loss": False,
    "custom_advantage_function_path": None,
    "custom_tis_function_path": None,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_c": None,
    "eps_clip_high": 0.2,
    "gamma": 1.0,
    "get_mismatch_metrics": False,
    "grpo_std_normalization": True,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "lambd": 1.0,
    "log_probs_chunk_size": -1,
    "loss_type": "policy_loss",
    "n_samples_per_prompt": batch.SAMPLES,
    "normalize_advantages": False,
    "recompute_loss_function": False,
    "reward_key": None,
    "rewards_normalization": True,
    "rollout_batch_size": batch.PROMPTS,
    "rollout_temperature": batch.TEMPERATURE,
    "rollout_top_p": 1.0,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "use_kl_loss": False,
    "use_opd": False,
    "use_opsm": False,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "use_unbiased_kl": False,
}


def make_parallel_state() -> types.ModuleType:
    """`megatron.core.mpu` of one process."""
    state = types.ModuleType("megatron.core.mpu")
    for name in ("context", "tensor_model", "data"):
        vars(state)[f"get_{name}_parallel_world_size"] = lambda **_: 1
        vars(state)[f"get_{name}_parallel_rank"] = lambda **_: 0
        vars(state)[f"get_{name}_parallel_group"] = lambda **_: None
    vars(state)["is_pipeline_last_stage"] = lambda: True
    return state


def train_data(root: pathlib.Path, recorded: batch.Recorded, arguments: argparse.Namespace) -> dict[str, Any]:
    """The training data of a batch, as the rollout manager converts its samples."""
    from slime.utils.types import Sample

    names = {"torch": torch, "Sample": Sample}
    rewards, convert = (
        release.function_from(root / "slime/ray/rollout.py", name, names)
        for name in ("_post_process_rewards", "_convert_samples_to_train_data")
    )
    manager = types.SimpleNamespace(
        args=arguments, custom_reward_post_process_func=None, custom_convert_samples_to_train_data_func=None
    )
    manager._post_process_rewards = functools.partial(rewards, manager)
    lengths = (recorded.completions != batch.PAD).sum(1)
    samples = [
        Sample(
            index=row,
            tokens=recorded.prompts[row][recorded.prompt_mask[row]].tolist()
            + recorded.completions[row, : lengths[row]].tolist(),
            response_length=int(lengths[row]),
            reward=float(recorded.rewards[row]),
            remove_sample=row == batch.EMPTY_ROW,
            metadata=None,
        )
        for row in range(batch.ROWS)
    ]
    with mock.patch.object(torch, "float", torch.get_default_dtype()):
        data = convert(manager, samples)
    data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
    for name, values in (
        ("log_probs", recorded.old_log_probs),
        ("ref_log_probs", recorded.ref_log_probs),
        ("rollout_log_probs", recorded.rollout_log_probs),
        ("values", recorded.old_values),
    ):
        data[name] = [torch.from_numpy(values[row, : lengths[row]]) for row in range(batch.ROWS)]
    data["tokens"] = [torch.tensor(tokens) for tokens in data["tokens"]]
    data["loss_masks"] = [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]]
    return data


def part_of(data: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Some samples of the training data."""
    return {name: [values[row] for row in rows] for name, values in data.items() if len(values) == len(data["tokens"])}


def run(root: pathlib.Path, algorithm: str, accumulation: int, recorded: batch.Recorded) -> record.Step:
    """One optimizer step of the actor."""
    from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function

    arguments = argparse.Namespace(**{**DEFAULTS, **ALGORITHMS[algorithm]})
    data = train_data(root, recorded, arguments)
    rows = list(range(batch.ROWS))
    if arguments.calculate_per_token_loss or arguments.advantage_estimator == "reinforce_plus_plus":
        rows.remove(batch.EMPTY_ROW)
    data = part_of(data, rows)
    compute_advantages_and_returns(arguments, data)
    trained, loss, tokens = model.load(), 0.0, 0
    half = -(-len(rows) // accumulation)
    for start in range(0, len(rows), half):
        part = part_of(data, list(range(start, min(start + half, len(rows)))))
        part["unconcat_tokens"] = part["tokens"]
        part["rollout_mask_sums"] = torch.tensor(part["rollout_mask_sums"], dtype=torch.float32)
        logits = model.packed_logits(trained, torch.cat(part["tokens"])[None], part["total_lengths"])
        scaled, counted, _ = loss_function(arguments, part, accumulation, len(rows), logits)
        scaled = scaled if arguments.calculate_per_token_loss else scaled / accumulation
        scaled.backward()
        loss, tokens = loss + scaled.item(), tokens + int(counted)
    if arguments.calculate_per_token_loss:
        loss /= tokens
        for weight in trained.parameters():
            weight.grad /= tokens
    return record.Step(algorithm, accumulation, ALGORITHMS[algorithm], loss, record.gradients_of(trained))


def steps(root: pathlib.Path) -> Iterator[record.Step]:
    """Every algorithm with one and with two micro-batches."""
    root = root.resolve()
    for package in ("slime.backends.megatron_utils", "slime.utils", "megatron.core"):
        release.bare(root, package)
    state = make_parallel_state()
    sys.modules["megatron.core.mpu"] = state
    vars(sys.modules["megatron.core"])["mpu"] = state
    with release.uncompiled(), stubs.missing_replaced(root):
        import slime.backends.megatron_utils.loss
        import slime.utils.types  # noqa: F401
    with model.one_process():
        yield from model.float64_steps(functools.partial(run, root), ALGORITHMS)
