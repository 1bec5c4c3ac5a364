"""Corrections for the mismatch of trainer and sampler on recorded cases."""

from functools import partial
from typing import Any

import jax.numpy as jnp

import kljax
from kljax.systems import Entry
from kljax.systems._call import run
from tests.goldens import epsilon
from tests.goldens.cases import Case
from tests.kljax.systems.exercises import call_of, exercise, options


def pair_of(entry: Entry, now: dict[str, Any]) -> dict[str, Any]:
    """The two policies that a correction compares: old and sampler, or this one and the one that drew the tokens."""
    old, sampler = now.get("old_log_probs"), now.get("rollout_log_probs")
    if call_of(entry).function == "off_policy_sequence_mask" or old is None:
        return {"sampling_log_probs": old if sampler is None else sampler}
    if sampler is None:
        return {"sampling_log_probs": old}  # ART without log-probs of its sampler
    return {"log_probs": old, "sampling_log_probs": sampler, "old_log_probs": sampler}


def correction_options(entry: Entry, case: Case) -> dict[str, Any]:
    """The bounds of a correction as the case has them."""
    actual, params = options(entry, case), case.params
    for argument, value in list(actual.items()):
        bounds = [float(bound) for bound in value.split("_")] if isinstance(value, str) else value
        if isinstance(bounds, (list, tuple)):
            actual[argument] = bounds[0] if argument == "lower" else bounds[-1]
    if params.get("rollout_rs", "").endswith("k1"):
        low, high = (float(bound) for bound in params["rollout_rs_threshold"].split("_"))
        actual |= {"lower": jnp.log(low), "upper": jnp.log(high)}
    if "max_divergence" in entry.sources and "is_correction_threshold" in params:
        actual["max_divergence"] = params["is_correction_threshold"][1]
    if entry.key == "art/truncated_importance_sampling":
        actual["upper"] = params["truncated_importance_sampling"]
    return actual


def corrected(entry: Entry, case: Case) -> Any:
    """The weights or the mask of an entry."""
    now = {name: case.given(name) for name in case.inputs}
    if "row_advantages" in now:
        now["advantages"] = kljax.broadcast_to_tokens(now["row_advantages"], now["mask"])
    return run(call_of(entry), {**now, **pair_of(entry, now)}, **correction_options(entry, case))


@exercise(("verl", "compute_rollout_correction_weights"))
def verl_weights(entry: Entry, case: Case) -> None:
    # verl's mean weight has an epsilon in its divisor: over tokens, or over the rows' tokens and then not.
    weights, mask = corrected(entry, case), case.given("mask")
    if case.params.get("rollout_is_batch_normalize"):
        over = "batch" if case.params["rollout_is"] == "token" else "row"
        n = mask.sum(None if over == "batch" else -1, keepdims=True).astype(jnp.float64)
        row_weights = jnp.where(mask, corrected_unnormalized(entry, case), 0)
        means = row_weights.sum(None if over == "batch" else -1, keepdims=True) / (n + epsilon.EPS)
        mean = means.sum() / (1.0 if over == "batch" else mask.any(-1).sum().astype(jnp.float64))
        plain = kljax.masked_mean(means * (n + epsilon.EPS) / jnp.where(n > 0, n, 1), n > 0)
        weights = weights * plain / mean
    case.assert_matches(weights, case.result("weights"))


def corrected_unnormalized(entry: Entry, case: Case) -> Any:
    """The weights before they are divided by their mean."""
    now = {name: case.given(name) for name in case.inputs}
    arrays = {**now, **pair_of(entry, now)}
    return run(call_of(entry), arrays, **correction_options(entry, case), normalize="none")


@exercise(("verl", "compute_rollout_rejection_mask"))
def verl_rejection(entry: Entry, case: Case) -> None:
    case.assert_matches(corrected(entry, case).astype(jnp.float64), case.result("kept"))


@exercise(("verl", "compute_rollout_correction_and_rejection_mask"))
def verl_weights_and_rejection(entry: Entry, case: Case) -> None:
    """The two steps are the rows that the options of the case name."""
    names = f"rollout_is={case.params['rollout_is']}", case.params["rollout_rs"]
    rows = [kljax.systems.entries(system="verl", kind="correction", name=name)[0] for name in names]
    now = {name: case.given(name) for name in case.inputs}

    def step(of: Entry, log_probs: Any, rollout: Any, mask: Any) -> Any:
        arrays = {"log_probs": log_probs, "sampling_log_probs": rollout, "mask": mask}
        return run(call_of(of), arrays, **correction_options(of, case))

    both = run(call_of(entry), now, steps=[partial(step, of) for of in rows])
    case.assert_matches(both.kept.astype(jnp.float64), case.result("kept"))
    case.assert_matches(both.weights, case.result("weights") * case.result("kept"))


@exercise(("skyrl", "compute_off_policy_correction"))
def skyrl_correction(entry: Entry, case: Case) -> None:
    result = corrected(entry, case)
    if result.dtype == bool:
        case.assert_matches(result.astype(jnp.float64), case.result("kept"))
    else:
        # verl has one weight a row where the level is a row's, at masked positions too.
        mask = case.given("mask")
        case.assert_matches(result, jnp.where(mask, jnp.broadcast_to(case.result("weights"), mask.shape), 0))


@exercise(("trl", "vllm_importance_sampling"))
def trl_weights(entry: Entry, case: Case) -> None:
    # Masked tokens have the weight 1 in TRL, 0 here.
    mask = case.given("mask")
    case.assert_matches(
        corrected(entry, case), jnp.where(mask, jnp.broadcast_to(case.result("weights"), mask.shape), 0)
    )


@exercise(("trl", "get_off_policy_mask"))
def trl_off_policy_mask(entry: Entry, case: Case) -> None:
    mask = case.given("mask")
    selected = jnp.where(mask, jnp.broadcast_to(case.result("kept"), mask.shape), 0)
    case.assert_matches(corrected(entry, case).astype(jnp.float64), selected)
