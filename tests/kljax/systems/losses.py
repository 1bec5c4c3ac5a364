"""Policy losses on recorded cases, with the corrections, the KL term and the reduction that the case has besides."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from kljax.systems import Call, Entry
from kljax.systems._call import run
from tests.goldens import compare, epsilon
from tests.goldens.cases import Case
from tests.goldens.compare import Reduction
from tests.kljax.systems.corrections import correction_options, pair_of
from tests.kljax.systems.estimators import reduction
from tests.kljax.systems.exercises import call_of, exercise, options, part

ARRAYS = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "mask", "advantages")


def arrays_of(case: Case) -> dict[str, Any]:
    """The arrays of a policy loss by this library's names; advantages of rows are given to their tokens."""
    arrays = {name: case.given(name) for name in ARRAYS if name in case.inputs}
    if "row_advantages" in case.inputs:
        arrays["advantages"] = kljax.broadcast_to_tokens(case.given("row_advantages"), arrays["mask"])
    return {**arrays, "key": jax.random.key(0)}


MODES = {
    "verl": lambda case: case.params["loss_agg_mode"],
    "trinity": lambda case: case.params.get("loss_agg_mode", "token-mean"),
    "openrlhf": lambda case: "token-mean" if _token_level(case) else "seq-mean-token-mean",
    "art": lambda case: case.params["reduction"],
    "trl": lambda case: case.params.get("loss_type", "async_grpo"),
}
ALWAYS = {
    ("verl", "sapo"): compare.VERL["seq-mean-token-mean"],
    ("verl", "geo_mean"): Reduction(compare.ROW_MEAN.arguments, "row"),
    ("trl", "gmpo"): compare.ROW_MEAN,
    ("trl", "rloo"): compare.ROW_MEAN,
}


def _token_level(case: Case) -> bool:
    return case.params.get("token_level_loss", case.params.get("policy_loss_type") != "gspo")


def reduction_of(entry: Entry, loss_entry: Entry, case: Case) -> Reduction:
    """How the loss of a case is reduced: by the entry, or by the one that the case names."""
    if entry.kind == "reduction":
        return reduction(entry, case)
    if loss_entry.name == "rec+clip_mode=gspo-one-side":
        return compare.TRINITY["seq-mean-token-mean"]
    if (case.system, loss_entry.name) in ALWAYS:
        return ALWAYS[case.system, loss_entry.name]
    if case.system in ("skyrl", "prime-rl"):
        return compare.TOKEN_SUM
    name = MODES[case.system](case)
    return reduction(kljax.systems.entries(system=case.system, kind="reduction", name=name)[0], case)


LOSSES = (
    *(("verl", f"compute_policy_loss_{name}") for name in ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg")),
    *(("verl", f"compute_policy_loss_{name}") for name in ("clip_cov", "kl_cov", "geo_mean", "dro", "cispo")),
    *(("verl", f"compute_policy_loss_{name}") for name in ("bypass_mode", "reinforce")),
    *(("skyrl", f"{name}_policy_loss") for name in ("ppo", "gspo", "rollout_is", "dppo", "sapo")),
    *(("skyrl", f"compute_policy_loss_{name}") for name in ("cispo", "clip_cov", "kl_cov")),
    *(("skyrl", f"{name}_loss") for name in ("cross_entropy", "importance_sampling")),
    *(("trinity", f"{name}PolicyLossFn") for name in ("PPO", "CISPO", "SAPO", "TOPR", "OPMD", "sPPO", "REC")),
    *(("trinity", f"{name}LossFn") for name in ("GSPO", "ImportanceSampling", "SFT", "SFTIS", "SFTPhi")),
    *(("trl", f"{name}Trainer._compute_loss") for name in ("GRPO", "GMPO", "RLOO")),
    ("trl", "AsyncGRPOTrainer.compute_loss"),
    ("openrlhf", "PolicyLoss"),
    ("art", "loss_fn"),
    ("prime-rl", "default_loss_fn"),
    ("prime-rl", "ref_kl_loss_fn"),
)


@exercise(*LOSSES)
def policy_loss(entry: Entry, case: Case) -> None:
    """The whole loss of a case: policy loss, weights and masks, KL term, reduction, each from its entry."""
    arrays, mask = arrays_of(case), case.given("mask")
    loss_entry = part("policy_loss", entry, case)
    assert loss_entry is not None
    selected = _verl_rejected(case) if "rollout_rs" in case.params else mask

    def per_token(lp: jax.Array) -> jax.Array:
        now = _changed(loss_entry, case, {**arrays, "log_probs": lp, "mask": selected})
        value, weights = _policy_term(entry, loss_entry, case, now), _weights(entry, case, {**now, "log_probs": lp})
        return jnp.where(weights == 0, 0, weights * value) + _kl_term(entry, case, now)

    compare.assert_loss(case, per_token, reduction_of(entry, loss_entry, case), selected)


def _policy_term(entry: Entry, loss_entry: Entry, case: Case, now: dict[str, Any]) -> jax.Array:
    call, keywords = call_of(loss_entry), options(loss_entry, case)
    if loss_entry.key == "trl/vespo" and "is_weights" in case.inputs:
        keywords["weights"] = case.given("is_weights")
    if loss_entry.system == "prime-rl":
        call = dataclasses.replace(call, plus=(_drift(entry, call, case),))
    if entry.kind == "correction" and entry.key in IN_THE_LOSS:
        call = dataclasses.replace(call, times=(call_of(entry),))
        keywords |= correction_options(entry, case)
    if call.function == "rec_loss":
        keywords |= {"ring_low": 0.4, "ring_high": 0.4}  # recorded with the defaults of the constructor
        keywords |= {
            name: str(keywords[name]).replace("-", "_") for name in ("weight", "regularizer") if name in keywords
        }
        if "regularizer_coef" in case.params:
            keywords["coef"] = case.params["regularizer_coef"] * (2 if keywords["regularizer"] == "k2" else 1)
    if loss_entry.name == "ppo+max_negative_advantage_importance_sampling_weight":
        bound = case.params["max_negative_advantage_importance_sampling_weight"]
        keywords |= {"max_ratio": bound, "clip_high": min(case.params["epsilon_high"], bound - 1)}
    return run(call, now, **keywords)


def _drift(entry: Entry, loss: Call, case: Case) -> Call:
    """prime-rl's squared log-ratio times kl_tau: of an entry of its own, or of the policy loss."""
    if entry.kind in ("kl", "placement"):
        call = call_of(entry)
        return dataclasses.replace(call, scale=call.scale * case.params.get("kl_tau", 1e-3))
    (drift,) = loss.plus
    return dataclasses.replace(drift, scale=2 * case.params["kl_tau"]) if "kl_tau" in case.params else drift


def _changed(loss_entry: Entry, case: Case, now: dict[str, Any]) -> dict[str, Any]:
    """The arrays under the names that the `sources` of the entry."""
    lp, source = now["log_probs"], loss_entry.sources.get("old_log_probs", "")
    if "sampling_log_probs" in loss_entry.sources:
        now["sampling_log_probs"] = now.get("rollout_log_probs", now.get("old_log_probs"))
    if _is_to_sampler(loss_entry, case):
        now["old_log_probs"] = now["rollout_log_probs"]
    if source == "stop_gradient(log_probs)":
        now["old_log_probs"] = jax.lax.stop_gradient(lp)
    if loss_entry.key == "prime-rl/ref_kl":
        now["advantages"] = jax.lax.stop_gradient(now["ref_log_probs"] - lp)
    if loss_entry.key == "trinity/gspo":
        # Trinity's epsilon in the mean log-ratio of a row moves the row towards the old policy by as much.
        n = now["mask"].sum(-1, keepdims=True).astype(jnp.float64)
        now["log_probs"] = lp - jax.lax.stop_gradient((lp - now["old_log_probs"]) * epsilon.EPS / (n + epsilon.EPS))
    return _adjusted(case, now) if case.system == "art" else now


def _is_to_sampler(loss_entry: Entry, case: Case) -> bool:
    """Whether the ratio is to the policy that drew the tokens, as far as the case has its log-probs."""
    names_it = re.search("rollout|sampler|inference", loss_entry.sources.get("old_log_probs", ""))
    if "rollout_log_probs" not in case.inputs or not names_it:
        return False
    return loss_entry.key != "openrlhf/gspo" or "is_correction_level" in case.params


def _adjusted(case: Case, now: dict[str, Any]) -> dict[str, Any]:
    """ART's shifts of the advantages, which are constants."""
    lp, mask, params = jax.lax.stop_gradient(now["log_probs"]), now["mask"], case.params
    arrays = {**now, "log_probs": lp}
    for entry in kljax.systems.entries(system="art"):
        if (
            entry.name in ("kimi_k2_tau", "kl_penalty_coef")
            and entry.kind in ("advantage", "placement")
            and params.get(entry.name)
        ):
            more = options(entry, case)
            if entry.name == "kl_penalty_coef":
                n = mask.sum().astype(jnp.float64)
                # What is written out here is not rounded to the type of narrow inputs.
                kl = lp.astype(jnp.float64) - now["ref_log_probs"].astype(jnp.float64)
                more["mean_kl"] = kljax.masked_mean(kl, mask) * n / (n + 1e-6)
            shifted = run(call_of(entry), arrays, **more)
            arrays["advantages"] = shifted[0] if isinstance(shifted, tuple) else shifted
    return {**arrays, "log_probs": now["log_probs"]}


# Corrections that are a flag of a policy loss, or verl's rejection, which changes the mask: applied elsewhere.
IN_THE_LOSS = {"trinity/enable_sequence_masking"}


def _weights(entry: Entry, case: Case, now: dict[str, Any]) -> jax.Array:
    """The weights and masks of the corrections that the case switches on."""
    weights = jnp.ones_like(now["log_probs"])
    if "is_weights" in case.inputs and case.params.get("loss_type") != "vespo":
        weights = weights * _given_weights(case)
    correction = part("correction", entry, case)
    if correction is not None and correction.call is not None and correction.key not in IN_THE_LOSS:
        data = jax.lax.stop_gradient({**now, **pair_of(correction, now)})
        weights = weights * run(correction.call, data, **correction_options(correction, case)).astype(weights.dtype)
    if case.function == "ppo_policy_loss" and case.params.get("tis_ratio_type"):
        pair = now["old_log_probs"], now["rollout_log_probs"], now["mask"]
        bounds = {"lower": case.params["geo_mask_low"], "upper": case.params["geo_mask_high"]}
        weights = kljax.importance_weights(*pair, upper=case.params["token_tis_ratio_clip_high"])
        weights = jnp.where(kljax.rejection_mask(*pair, level="geometric", **bounds), weights, 0)
    return weights


def _given_weights(case: Case) -> jax.Array:
    """The weights that the system was given; verl's geo_mean takes their geometric mean over a row."""
    weights, mask = case.given("is_weights"), case.given("mask")
    if case.function != "compute_policy_loss_geo_mean":
        return weights
    n = mask.sum(-1, keepdims=True).astype(jnp.float64)
    logs = kljax.masked_mean(jnp.log(weights + 1e-10), mask, axis=-1)[:, None]
    return jnp.broadcast_to(jnp.exp(logs * n / (n + epsilon.EPS)), mask.shape)


def _verl_rejected(case: Case) -> jax.Array:
    """The mask that verl's bypass mode leaves."""
    rows = kljax.systems.entries(system="verl", kind="correction", name=case.params["rollout_rs"])
    arrays = {name: case.given(name) for name in ("log_probs", "mask")}
    arrays["sampling_log_probs"] = case.given("rollout_log_probs")
    return run(call_of(rows[0]), arrays, **correction_options(rows[0], case))


def _kl_term(entry: Entry, case: Case, now: dict[str, Any]) -> jax.Array | float:
    """TRL's KL to the reference, beside the policy loss."""
    if not case.params.get("beta") or case.system != "trl":
        return 0.0
    kl_entry = part("kl", entry, case)
    lp, old, ref, mask = (now[name] for name in ("log_probs", "old_log_probs", "ref_log_probs", "mask"))
    if entry.kind == "placement":
        sampling = {"sampling_log_probs": old} if case.params.get("use_bias_correction_kl") else {}
        return case.params["beta"] * run(call_of(entry), now, **sampling)
    if kl_entry is None or kl_entry.call is None:
        plain = kljax.estimate_kl(lp, ref, mask, estimator="k3")
        weighted = case.params.get("use_bias_correction_kl")
        return case.params["beta"] * (kljax.geometric_ratios(lp, old, mask)[:, None] * plain if weighted else plain)
    sampling = {"sampling_log_probs": old} if "sampling_log_probs" in kl_entry.sources else {}
    return case.params["beta"] * run(kl_entry.call, now, **sampling)
