"""KL estimators and reductions on recorded cases."""

from typing import Any

import jax.numpy as jnp

import kljax
from kljax.systems import Entry
from tests.goldens import batches, compare, epsilon
from tests.goldens.cases import Case
from tests.goldens.compare import Reduction
from tests.kljax.systems.exercises import exercise


@exercise(
    ("trinity", "calculate_kl"),
    ("verl", "kl_penalty"),
    ("skyrl", "compute_approx_kl"),
    ("openrlhf", "compute_approx_kl"),
    ("slime", "compute_approx_kl"),
)
def kl(entry: Entry, case: Case) -> None:
    arguments = kljax.systems.arguments(entry.key, kind=entry.kind)
    if "sampling_log_probs" in entry.sources and case.params.get("old", "old_log_probs" in case.inputs):
        arguments["sampling_log_probs"] = case.given("old_log_probs")
    else:
        arguments.pop("max_ratio", None)  # without an old policy the systems take no ratio
    mask = case.given("mask") if "mask" in case.inputs else None
    ref = case.given("ref_log_probs")
    case.assert_value_and_grad(lambda lp: kljax.estimate_kl(lp, ref, mask, **arguments), "log_probs")


EPSILONS = {
    ("trinity", "token-mean"): ("batch", 1e-8),
    ("trinity", "seq-mean-token-mean"): ("row", 1e-8),
    ("verl", "seq-mean-token-mean"): ("row", 1e-8),
    ("openrlhf", "seq-mean-token-mean"): ("row", 1e-8),
    ("art", "mean"): ("batch", 1e-6),
}


def reduction(entry: Entry, case: Case) -> Reduction:
    """The entry's reduction, with the epsilon of the system and the numbers of a batch that is spread over devices."""
    arguments, params = kljax.systems.arguments(entry.key, kind="reduction"), case.params
    mode, scale = arguments["mode"], params.get("dp_size", 1) * _accumulation(entry, case)
    if mode == "seq_mean_token_sum_norm":
        arguments["max_length"] = _length(entry, case)
    if (entry.system, entry.name) == ("trinity", "seq-mean-token-sum-norm"):
        scale *= batches.LENGTH / (batches.LENGTH + epsilon.EPS)
    counted = {"token_mean": "batch_num_tokens", "token_sum": ""}.get(mode, "global_batch_size")
    if params.get(counted) is not None:
        arguments["denominator"] = params[counted]
    if mode == "prompt_mean":
        arguments |= _groups_of_rows(case)
    return Reduction(arguments, *EPSILONS.get((entry.system, entry.name), (None, 1e-8)), scale=scale)


def _length(entry: Entry, case: Case) -> float:
    if entry.system == "trl":
        return 16.0  # max_completion_length of the recorded trainer
    return case.params.get("loss_scale_factor", case.params.get("max_seq_len", batches.LENGTH))


def _accumulation(entry: Entry, case: Case) -> float:
    """TRL divides for the accumulation of gradients; its token means are over the whole accumulation."""
    steps = case.params.get("gradient_accumulation_steps", 1)
    return case.params.get("steps_per_generation", 1) / steps if entry.name in ("dapo", "cispo", "vespo") else 1 / steps


def _groups_of_rows(case: Case) -> dict[str, Any]:
    if "group_ids" in case.inputs:
        return {"group_ids": case.given("group_ids"), "num_groups": compare.NUM_GROUPS}
    size = case.params["micro_batch_size"]
    return {"group_ids": jnp.arange(batches.ROWS) // size, "num_groups": batches.ROWS // size}


@exercise(("trinity", "aggregate_loss"), ("verl", "agg_loss"), ("openrlhf", "aggregate_loss"))
def reduce_values(entry: Entry, case: Case) -> None:
    reduced = reduction(entry, case)
    mask = case.given("mask")
    case.assert_value_and_grad(lambda values: compare.reduced(values, mask, reduced), "advantages")


@exercise(("skyrl", "apply_loss_reduction_to_advantages_minibatch"))
def scale_advantages(entry: Entry, case: Case) -> None:
    mask, advantages = case.given("mask"), case.given("advantages")
    weights = kljax.token_weights(mask, **reduction(entry, case).arguments)
    # SkyRL leaves masked positions as they are scaled and drops them in the loss; here their weight is exactly 0.
    case.assert_matches(advantages * weights, jnp.where(mask, case.result("value"), 0))
    if "grad" in case.outputs:
        case.assert_matches(case.given("cotangent") * weights, jnp.where(mask, case.result("grad"), 0))
