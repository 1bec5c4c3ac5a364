"""The arrays and arguments that the sections of a header take, and the results that lack some."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from kljax.__main__ import main
from kljax.tools.parity.comparison import compare_field
from kljax.tools.parity.dump import DumpError, open_dump
from kljax.tools.parity.recipe import read_recipe
from kljax.tools.parity.replay import Replay
from kljax.tools.parity.report import Difference
from kljax.tools.parity.stages import STAGES, recorded_results
from tests.parity import write_dump

ROWS = 4
REWARDS, GROUPS = np.random.default_rng(0).normal(size=ROWS), np.array([0, 0, 1, 1])


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def batch(length: int = 3) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    policy = -1 - rng.random((ROWS, length))
    near = {f"{name}_log_probs": policy + 0.3 * rng.normal(size=policy.shape) for name in ("old", "rollout", "ref")}
    # Rows of unequal length, one of them with a masked token at its start.
    mask = np.arange(length) < np.array([length, 1, length, 2])[:, None]
    mask[2, 0] = False
    return {"log_probs": policy, **near, "mask": mask, "rewards": REWARDS, "group_ids": GROUPS}


def replay_of(path: pathlib.Path, header: dict[str, Any], arrays: dict[str, Any]) -> Replay:
    write_dump(path / "dump.npz", {"dtype": "float64", **header}, arrays)
    dump = open_dump(path / "dump.npz")
    return Replay(dump, read_recipe(dump), STAGES)


def compared(path: pathlib.Path, header: dict[str, Any], arrays: dict[str, Any], name: str) -> Difference:
    replay = replay_of(path, header, arrays)
    assert recorded_results(replay)[name] == ""
    return compare_field(replay, name, replay.recipe)


def row_advantages(system: str, mask: np.ndarray) -> np.ndarray:
    """The advantage of each row: less the group's mean, or the other row's reward, or whitened over the tokens."""
    if system == "openrlhf":
        return REWARDS - REWARDS[[1, 0, 3, 2]]
    centered = REWARDS - REWARDS.reshape(2, 2).mean(1).repeat(2)
    if system == "slime":
        return centered
    tokens = np.repeat(centered, mask.sum(1))
    return (centered - tokens.mean()) / np.sqrt(tokens.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("length", [3, ROWS], ids=["B x T", "B x B"])
@pytest.mark.parametrize(
    ("system", "name"),
    [("openrlhf", "rloo"), ("slime", "reinforce_plus_plus_baseline"), ("verl", "reinforce_plus_plus_baseline")],
)
def test_advantages_per_row_of_a_function_per_token(
    system: str, name: str, length: int, tmp_path: pathlib.Path
) -> None:
    header, arrays = {"system": system, "advantage": {"name": name}}, batch(length)
    arrays["advantages"] = row_advantages(system, arrays["mask"])
    agreeing = compared(tmp_path, header, arrays, "advantages")
    assert agreeing.agrees
    assert agreeing.compared == ROWS
    arrays["advantages"] = arrays["advantages"] + np.array([0, 0, 0.5, 0])
    differing = compared(tmp_path, header, arrays, "advantages")
    assert differing.at == (2,)
    assert differing.absolute == pytest.approx(0.5)


def test_differing_advantages_within_a_row_are_refused(tmp_path: pathlib.Path) -> None:
    # A discount makes the returns of the tokens of a row differ.
    header = {"system": "openrlhf", "advantage": {"name": "rloo", "gamma": 0.5}}
    arrays = batch() | {"advantages": REWARDS}
    with pytest.raises(DumpError, match=r"advantages: got one number per row, .* at \(row, token\) \(0, 1\)"):
        compared(tmp_path, header, arrays, "advantages")
    steps = np.arange(3)[None] - (arrays["mask"].argmax(1) + arrays["mask"].sum(1) - 1)[:, None]
    arrays["advantages"] = np.where(
        arrays["mask"], row_advantages("openrlhf", arrays["mask"])[:, None] * 0.5**-steps, 0
    )
    assert compared(tmp_path, header, arrays, "advantages").agrees


@pytest.mark.parametrize(
    ("header", "name", "reason"),
    [
        ({"system": "slime", "advantage": {"name": "ppo"}}, "advantages", "needs values"),
        ({"system": "prime-rl", "advantage": {"name": "rae"}}, "advantages", "needs baselines"),
        ({"system": "trinity", "advantage": {"name": "step_wise_grpo"}}, "advantages", "needs run_ids, num_runs"),
        (
            {"system": "art", "advantage": {"name": "kimi_k2_tau"}},
            "advantages",
            "needs advantages before kimi_advantages, header.advantage.tau",
        ),
        (
            {"system": "verl", "advantage": {"name": "gdpo"}},
            "advantages",
            "needs rewards of each reward function",
        ),
        (
            {"system": "verl", "correction": {"name": "rollout_correction"}},
            "weights",
            "needs steps, a function of log_probs and sampling_log_probs",
        ),
        ({"system": "verl", "loss": {"name": "dro"}}, "token_loss", "needs header.loss.coef"),
        (
            {"system": "trinity", "loss": {"name": "dpo"}},
            "token_loss",
            "needs rejected_log_probs, rejected_ref_log_probs, rejected_mask",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_missing_arrays_and_arguments_are_named(
    header: dict[str, Any], name: str, reason: str, tmp_path: pathlib.Path
) -> None:
    replay = replay_of(tmp_path, header, batch() | {"advantages": REWARDS, name: batch()["ref_log_probs"]})
    assert recorded_results(replay)[name] == reason


def test_the_rest_of_the_dump_is_compared(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrays = batch() | {"advantages": REWARDS}
    arrays["ratio"] = np.exp(arrays["log_probs"] - arrays["old_log_probs"])
    write_dump(tmp_path / "dump.npz", {"system": "verl", "advantage": {"name": "gae"}}, arrays)
    assert main(["parity", str(tmp_path / "dump.npz"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [field["field"] for field in report["fields"]] == ["ratio"]
    assert report["not_compared"]["advantages"] == "needs values"
    assert report["stages"]["claimed"] == ["advantages"]


def test_a_loss_without_advantages_needs_their_section(tmp_path: pathlib.Path) -> None:
    replay = replay_of(tmp_path, {"loss": {"function": "ppo_clip_loss"}}, batch() | {"token_loss": np.zeros((ROWS, 3))})
    assert recorded_results(replay)["token_loss"] == "needs header.advantage"


def test_arguments_reach_the_functions_of_a_loss(tmp_path: pathlib.Path) -> None:
    # REINFORCE times a mask of the importance ratio to the sampler; `upper` is an argument of the mask.
    arrays = batch() | {"advantages": REWARDS}
    ratio = np.exp(arrays["log_probs"] - arrays["rollout_log_probs"])
    selected = (ratio >= 0.8) & (ratio <= 3)
    assert (selected & (ratio > 1.2) & arrays["mask"]).any()
    arrays["token_loss"] = np.where(selected, -ratio * REWARDS[:, None] * arrays["log_probs"], 0)
    header = {"system": "skyrl", "loss": {"name": "rollout_is", "upper": 3.0}}
    assert compared(tmp_path, header, arrays, "token_loss").agrees


def test_sections_take_the_arrays_of_their_system(tmp_path: pathlib.Path) -> None:
    arrays = batch() | {"advantages": REWARDS}
    policy, old, rollout = (arrays[f"{name}log_probs"] for name in ("", "old_", "rollout_"))
    # Between the new and the old policy, not the old one and the sampler.
    arrays["weights"] = np.minimum(np.exp(policy - old), 1.1)
    correction = {"name": "distillation_is_clip", "upper": 1.1}
    assert compared(tmp_path, {"system": "trl", "correction": correction}, arrays, "weights").agrees
    # The header names others; those of the loss stay.
    arrays["weights"] = np.minimum(np.exp(rollout - policy), 1.1)
    correction |= {"arrays": {"log_probs": "rollout_log_probs", "sampling_log_probs": "log_probs"}}
    arrays["token_loss"] = -REWARDS[:, None] * arrays["weights"] * np.ones_like(policy)
    header = {"system": "trl", "correction": correction}
    header["loss"] = {"function": "importance_sampling_loss", "arrays": {"old_log_probs": "log_probs"}}
    assert compared(tmp_path, header, arrays, "weights").agrees
    assert compared(tmp_path, header, arrays, "token_loss").agrees
    header["loss"]["arrays"] = {"old_logprobs": "log_probs"}
    with pytest.raises(ValueError, match=r"header.loss.arrays: got 'old_logprobs'.*did you mean 'old_log_probs'"):
        compared(tmp_path, header, arrays, "token_loss")


def test_policy_gradient_fallback_takes_the_policy_as_old(tmp_path: pathlib.Path) -> None:
    arrays = batch() | {"advantages": REWARDS, "token_loss": np.broadcast_to(-REWARDS[:, None], (ROWS, 3))}
    header = {"system": "trinity", "loss": {"name": "ppo+fallback_to_policy_gradient"}}
    assert compared(tmp_path, header, arrays, "token_loss").agrees


def test_rewards_stand_for_the_advantages_of_reinforce(tmp_path: pathlib.Path) -> None:
    header = {"system": "trinity", "advantage": {"name": "reinforce"}}
    assert compared(tmp_path, header, batch() | {"advantages": REWARDS}, "advantages").agrees


def test_a_refusal_names_the_section_of_the_header(tmp_path: pathlib.Path) -> None:
    header = {"system": "verl", "correction": {"name": "token_k1"}}
    with pytest.raises(DumpError, match=r"header\.correction: lower, upper: got None for both"):
        compared(tmp_path, header, batch() | {"weights": np.ones((ROWS, 3))}, "weights")
