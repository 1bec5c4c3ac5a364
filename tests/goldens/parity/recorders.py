"""Runs the recorders of docs/parity.md, as they stand there, around the systems' own functions."""

import atexit
import json
import pathlib
import types
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.goldens.parity import other_updates as others
from tests.goldens.parity.page import SHARED, blocks
from tests.goldens.systems import art, openrlhf, release, skyrl, trinity, trl, verl
from tests.goldens.systems.record import InputTensors

Run = Callable[[], torch.Tensor]


def run_verl(root: pathlib.Path, given: InputTensors) -> Run:
    """verl's loss and KL term through its registry, as `workers/utils/losses.py` calls them."""
    core, _, _ = verl.load(root)
    config = verl.VerlConfig(**{**verl.actor_defaults(root), "clip_ratio_high": 0.28}, global_batch_info={})

    def run() -> torch.Tensor:
        loss, _ = core.get_policy_loss_fn("vanilla")(
            old_log_prob=given.old_log_probs,
            log_prob=given.log_probs,
            advantages=given.advantages,
            response_mask=given.mask,
            loss_agg_mode="token-mean",
            config=config,
            rollout_is_weights=None,
        )
        names = {"logprob": given.log_probs, "ref_logprob": given.ref_log_probs, "kl_penalty": "low_var_kl"}
        return loss + others.COEF * core.agg_loss(core.kl_penalty(**names), given.mask, "token-mean")

    return run


def run_trl(root: pathlib.Path, given: InputTensors) -> Run:
    """The `_compute_loss` of GRPOTrainer, a method of a class again."""
    method = trl.calls(root)["GRPOTrainer._compute_loss"].args[0]  # type: ignore[attr-defined]
    scored = given.log_probs, -given.log_probs.detach(), None
    methods = {"_compute_loss": method, "_get_per_token_logps_and_entropies": lambda *_, **__: scored}
    trainer = type("GRPOTrainer", (), methods)
    release.stub("trl", GRPOTrainer=trainer)

    def run() -> torch.Tensor:
        self = trainer()
        fields = vars(trl.trainer(given, others.TRL_PARAMS))
        vars(self).update({name: value for name, value in fields.items() if name not in methods})
        return self._compute_loss(None, trl.inputs(given, others.TRL_PARAMS))

    return run


def runner(system: str) -> Callable[[pathlib.Path, InputTensors], Run]:
    """The composed update of a system whose functions are attributes of its modules."""
    make_calls, compose, _ = others.SYSTEMS[system]
    params: dict[str, Any] = {
        "openrlhf": others.OPENRLHF_PARAMS,
        "skyrl": others.SKYRL_PARAMS,
        "trinity": others.deep(others.TRINITY_PARAMS, "kl.estimator", "low_var_kl"),
        "art": others.ART_PARAMS,
    }

    def prepare(root: pathlib.Path, given: InputTensors) -> Run:
        calls = make_calls(root)
        return lambda: compose(calls, given, params[system])["loss"]

    return prepare


SYSTEMS: Mapping[str, tuple[str, types.ModuleType, Callable[[pathlib.Path, InputTensors], Run]]] = {
    "verl": ("verl", verl, run_verl),
    "TRL": ("trl", trl, run_trl),
    "OpenRLHF": ("openrlhf", openrlhf, runner("openrlhf")),
    "SkyRL": ("skyrl", skyrl, runner("skyrl")),
    "Trinity-RFT": ("trinity", trinity, runner("trinity")),
    "ART": ("art", art, runner("art")),
}


def record(releases: pathlib.Path, functional: Any) -> list[tuple[str, dict[str, Any], dict[str, np.ndarray]]]:
    """Runs each recorder; returns names, headers and fields."""
    arrays = others.arrays_of(functional)
    code = blocks()
    done = []
    for title, (system, _, prepare) in SYSTEMS.items():
        with release.isolated(), mock.patch.object(atexit, "register"):
            inputs = InputTensors(arrays, "log_probs")
            run = prepare(releases / system, inputs)
            scope: dict[str, Any] = {}
            exec(code[SHARED], scope)
            exec(code[title], scope)
            run().backward()
            header = json.loads(json.dumps(scope["header"]))
            done.append((f"{system}-recorder", {"dtype": "float32", **header}, scope["fields"]()))
    return done
