"""Updates of TRL, OpenRLHF, SkyRL, Trinity-RFT and ART by their own functions, in float32, for dumps of the loss."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tests.goldens.parity import batch, verl_update
from tests.goldens.parity.faults import DumpFault
from tests.goldens.systems import art, openrlhf, release, skyrl, trinity, trl
from tests.goldens.systems.record import Call, InputTensors

Calls = Mapping[str, Call]
COEF = 0.05


@dataclasses.dataclass(frozen=True)
class UpdateCase:
    """A dump: the header that it declares, what is run, and the fault if what is run differs."""

    name: str
    header: dict[str, Any]
    params: dict[str, Any]
    fault: DumpFault | None = None


def arrays_of(functional: Any) -> dict[str, np.ndarray]:
    """The batch as the runners of the systems take it, float32: log-probs by a real head, advantages per row."""
    drawn = batch.draw()
    scored = {
        f"{name}_log_probs": verl_update.score(
            functional, torch.from_numpy(drawn[f"{name}_hidden"]), drawn, verl_update.Scoring()
        )
        for name in ("old", "rollout", "ref")
    }
    scored["log_probs"] = verl_update.score(functional, torch.from_numpy(drawn["hidden"]), drawn, verl_update.Scoring())
    arrays = {name: tensor.numpy() for name, tensor in scored.items()}
    mask = batch.completion_mask(drawn).astype(np.float32)
    rng = np.random.default_rng(9)
    rows = rng.normal(size=batch.ROWS).astype(np.float32)
    arrays |= {"mask": mask, "row_advantages": rows, "rewards": drawn["rewards"]}
    arrays["advantages"] = (rows[:, None] * np.ones_like(mask)).astype(np.float32)
    arrays["group_ids"] = np.arange(batch.ROWS) // 2
    return arrays


def replace(given: InputTensors, **tensors: torch.Tensor) -> None:
    """Gives the runners other tensors under a name."""
    vars(given)["_tensors"].update(tensors)


def run_trl(calls: Calls, given: InputTensors, params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The loss of GRPOTrainer, its advantages and its KL metric."""
    settings = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": params["scale_rewards"]}
    rows = calls["advantages"](given, settings)["advantages"].float()
    replace(given, row_advantages=rows)
    result = calls["GRPOTrainer._compute_loss"](given, params)
    metrics = {"metric/kl": torch.tensor(result["metric_kl"])} if "metric_kl" in result else {}
    return {"loss": result["value"], "advantages": rows, **metrics}


def run_openrlhf(calls: Calls, given: InputTensors, params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """PolicyLoss, and the KL term over tokens that the actor adds."""
    loss = calls["PolicyLoss"](given, params["loss"])["value"]
    kl = calls["compute_approx_kl"](given, params["kl"])["value"]
    term = (kl * given.mask).sum() / given.mask.sum()
    return {"loss": loss + COEF * term, "kl": kl.detach(), "metric/kl": term.detach()}


def run_skyrl(calls: Calls, given: InputTensors, params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A policy loss over advantages with the reduction folded in, and the KL term over sequences."""
    raw = given.advantages
    folded = calls["apply_loss_reduction_to_advantages_minibatch"](given, params["reduction"])["value"]
    replace(given, advantages=folded)
    loss = calls["ppo_policy_loss"](given, params["loss"])["value"]
    replace(given, advantages=raw)
    kl = calls["compute_approx_kl"](given, params["kl"])["value"]
    mean = (kl * given.mask).sum(-1) / given.mask.sum(-1).clamp(min=1.0)
    return {"loss": loss + COEF * mean.mean(), "kl": kl.detach()}


def run_trinity(calls: Calls, given: InputTensors, params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The policy loss and the KL loss of the registry."""
    loss = calls["PPOPolicyLossFn"](given, params["loss"])["value"]
    kl = calls["calculate_kl_loss"](given, params["kl"])["value"]
    per_token = calls["calculate_kl"](given, params["kl"])["value"]
    return {"loss": loss + kl, "kl": per_token.detach()}


def run_art(calls: Calls, given: InputTensors, params: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The loss, whose advantages have the centred KL inside."""
    return {"loss": calls["loss_fn"](given, params)["value"]}


TRL_PARAMS = {"epsilon": 0.2, "epsilon_high": 0.28, "loss_type": "dapo", "beta": COEF, "scale_rewards": "group"}
TRL_HEADER = {
    "system": "trl",
    "loss": {"name": "grpo", "clip_high": 0.28},
    "reduction": {"name": "dapo"},
    "kl": {"name": "k3+use_bias_correction_kl", "coef": COEF},
    "advantage": {"name": "scale_rewards=group"},
}
OPENRLHF_PARAMS: dict[str, Any] = {
    "loss": {"policy_loss_type": "ppo", "clip_eps_low": 0.2, "clip_eps_high": 0.28},
    "kl": {"kl_estimator": "k2"},
}
OPENRLHF_HEADER = {
    "system": "openrlhf",
    "loss": {"name": "ppo", "clip_high": 0.28},
    "reduction": {"name": "token-mean"},
    "kl": {"name": "k2", "coef": COEF},
}
SKYRL_PARAMS: dict[str, Any] = {
    "loss": {"name": "dual_clip", "eps_clip_low": 0.2, "eps_clip_high": 0.28, "clip_ratio_c": 3.0},
    "kl": {"kl_estimator_type": "k3"},
    "reduction": {"loss_reduction": "token_mean", "max_seq_len": 16},
}
SKYRL_HEADER = {
    "system": "skyrl",
    "loss": {"name": "dual_clip", "clip_high": 0.28, "dual_clip": 3.0},
    "reduction": {"name": "token_mean"},
    "kl": {"name": "k3", "coef": COEF},
}
TRINITY_PARAMS: dict[str, Any] = {
    "loss": {"clip_range": 0.2, "loss_agg_mode": "token-mean"},
    "kl": {"estimator": "k3", "loss_agg_mode": "token-mean", "kl_coef": COEF},
}
TRINITY_HEADER = {
    "system": "trinity",
    "loss": {"name": "ppo"},
    "reduction": {"name": "token-mean"},
    "kl": {"name": "k3", "coef": COEF},
}
ART_PARAMS = {"epsilon": 1.0, "epsilon_high": 4.0, "ppo": False, "kl_penalty_coef": 0.3, "reduction": "mean"}
ART_HEADER = {
    "system": "art",
    "loss": {"name": "cispo"},
    "reduction": {"name": "mean"},
    "kl": {"name": "k1", "coef": 0.3, "place": "advantage"},
}


def deep(params: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The params with one of them changed, by its dotted path."""
    first, _, rest = path.partition(".")
    return {**params, first: deep(params[first], rest, value) if rest else value}


def cases(system: str, header: dict[str, Any], params: dict[str, Any], changes: Mapping[str, Any]) -> list[UpdateCase]:
    """The clean case, then one for each change of a path, with the causes that name it."""
    result = [UpdateCase(f"{system}-clean", header, params)]
    for path, (value, *causes) in changes.items():
        fault = DumpFault(f"{path} {value}", {}, tuple(causes))
        result.append(UpdateCase(f"{system}-{path}-{value}", header, deep(params, path, value), fault))
    return result


Runner = Callable[[Calls, InputTensors, Mapping[str, Any]], dict[str, torch.Tensor]]
SYSTEMS: dict[str, tuple[Callable[[pathlib.Path], Calls], Runner, list[UpdateCase]]] = {
    "trl": (
        trl.calls,
        run_trl,
        [
            *cases(
                "trl",
                TRL_HEADER,
                TRL_PARAMS,
                {
                    "loss_type": ("grpo", "reduction: sequence mean of token means"),
                    "epsilon_high": (0.2, "loss: clip_high 0.2"),
                    "use_bias_correction_kl": (False, "kl: importance ratio left out"),
                    "scale_rewards": ("none", "advantage: scale none"),
                    "beta": (0.0, "kl: term missing"),
                },
            ),
            UpdateCase(
                "trl-clean-grpo", {**TRL_HEADER, "reduction": {"name": "grpo"}}, {**TRL_PARAMS, "loss_type": "grpo"}
            ),
            UpdateCase(
                "trl-clean-dr-grpo",
                {**TRL_HEADER, "reduction": {"name": "dr_grpo", "max_length": trl.MAX_LENGTH}},
                {**TRL_PARAMS, "loss_type": "dr_grpo"},
            ),
        ],
    ),
    "openrlhf": (
        openrlhf.calls,
        run_openrlhf,
        cases(
            "openrlhf",
            OPENRLHF_HEADER,
            OPENRLHF_PARAMS,
            {
                "kl.kl_estimator": ("k3", "kl: estimator k3 with its value clipped at 10"),
                "loss.token_level_loss": (False, "reduction: sequence mean of token means, policy loss alone"),
                "loss.clip_eps_high": (0.2, "loss: clip_high 0.2"),
            },
        ),
    ),
    "skyrl": (
        skyrl.calls,
        run_skyrl,
        cases(
            "skyrl",
            SKYRL_HEADER,
            SKYRL_PARAMS,
            {
                "loss.name": ("regular", "loss: no dual clip"),
                "kl.kl_estimator_type": ("k1", "kl: estimator k1"),
                "reduction.loss_reduction": ("sequence_mean", "reduction: sequence mean of token means"),
            },
        ),
    ),
    "trinity": (
        trinity.calls,
        run_trinity,
        cases(
            "trinity",
            TRINITY_HEADER,
            TRINITY_PARAMS,
            {
                "kl.estimator": ("abs", "kl: estimator abs"),
                "loss.loss_agg_mode": (
                    "seq-mean-token-mean",
                    "reduction: sequence mean of token means, policy loss alone",
                ),
            },
        ),
    ),
    "art": (
        art.calls,
        run_art,
        cases("art", ART_HEADER, ART_PARAMS, {"reduction": ("sum", "reduction: token sum")}),
    ),
}


def update(system: str, calls: Calls, arrays: Mapping[str, np.ndarray], case: UpdateCase) -> dict[str, np.ndarray]:
    """Runs a case; returns the fields of its dump."""
    inputs = InputTensors(arrays, "log_probs")
    results = SYSTEMS[system][1](calls, inputs, case.params)
    results["loss"].backward()
    fields = {name: arrays[name] for name in ("log_probs", "old_log_probs", "ref_log_probs", "mask", "advantages")}
    if system == "trl":
        fields |= {"rewards": arrays["rewards"], "group_ids": arrays["group_ids"]}
    fields |= {name: value.detach().numpy() for name, value in results.items()}
    fields["grad_log_probs"] = inputs.log_probs.grad.numpy()
    full = ("group_ids",)
    return {name: np.asarray(value, None if name in full else np.float32) for name, value in fields.items()}


def record(releases: pathlib.Path, functional: Any) -> list[tuple[UpdateCase, dict[str, np.ndarray]]]:
    """Runs every case of every system."""
    arrays = arrays_of(functional)
    done = []
    for system, (make_calls, _, planned) in SYSTEMS.items():
        with release.isolated():
            calls = make_calls(releases / system)
            done += [(case, update(system, calls, arrays, case)) for case in planned]
    return done
