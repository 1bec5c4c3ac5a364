"""Corrections for the mismatch of trainer and sampler: verl, SkyRL, Trinity-RFT. `r` is trainer / sampler."""

from functools import partial
from typing import Any

from kljax.systems._row import Call, Golden, Row, on

SAFE = {"log_ratio_clip": 20.0}
SAFETY = "log-ratios to [-20, 20]"
ARRAYS = {"log_probs": "old log-probs of the trainer", "behaviour_log_probs": "rollout log-probs"}
DATA = "data"


def weights(level: str, mode: str, **bounds: Any) -> Call:
    """Importance weights with the safety bound of the verl family."""
    return Call("importance_weights", {"level": level, "mode": mode, **bounds, **SAFE})


verl = partial(Row, "verl", "correction", gradient=DATA)
IS_OPTION, RS_OPTION = "rollout_correction.rollout_is", "rollout_correction.rollout_rs"
THRESHOLD = {"upper": "rollout_is_threshold"}
KEPT = "rejected tokens leave the mask, so the denominators of the loss shrink with it"


def _verl_weights(level: str, *, icepop: bool = False, normalize: bool = False) -> Row:
    name = f"rollout_is={level}{'+icepop' if icepop else ''}{'+rollout_is_batch_normalize' if normalize else ''}"
    bounds: dict[str, Any] = {"lower": 0.5, "upper": 5.0} if icepop else {"upper": 2.0}
    if normalize:
        bounds["normalize"] = "tokens" if level == "token" else "rows"
    ratio = "r of each token" if level == "token" else "product of r over the row"
    what = "0 outside [lower, upper]" if icepop else "at most the threshold"
    params = {"rollout_is": level, "rollout_is_batch_normalize": True if normalize else None}
    thresholds = ("0.7_1.5",) if icepop else (1.5,) if normalize else (1.05, 1.5, 2.0)
    return verl(
        name,
        weights(level, "mask" if icepop else "truncate", **bounds),
        f"weights: {ratio}, {what}{', over their mean' if normalize else ''}",
        option=f"{IS_OPTION}{' with a threshold lower_upper' if icepop else ''}",
        given=ARRAYS | THRESHOLD | ({"lower": "rollout_is_threshold"} if icepop else {}),
        clamps=f"{SAFETY}, of the sum for a row",
        divisors=("the mean weight over tokens" if level == "token" else "the mean weight over rows with a token")
        if normalize
        else "",
        defaults="sequence, threshold 2.0" if level == "sequence" and not (icepop or normalize) else "",
        goldens=tuple(on("compute_rollout_correction_weights", **params, rollout_is_threshold=t) for t in thresholds),
    )


def _verl_rejection(reduction: str, estimator: str) -> Row:
    name = f"{reduction}_{estimator}"
    statistic = {"k1": "-log r", "k2": "(log r)^2 / 2", "k3": "r - 1 - log r"}[estimator]
    over = {"token": "of each token", "seq_sum": "summed over the row", "seq_mean": "averaged over the row"}
    bounds = {"upper": "rollout_rs_threshold"}
    note = KEPT
    if estimator == "k1":
        bounds = {name: f"log of the {name} part of rollout_rs_threshold" for name in ("lower", "upper")}
        note = (
            f"bounds sampler / trainer, the inverse of what other systems bound: 0.9_10 keeps r in [0.1, 1.11]; {KEPT}"
        )
    return verl(
        name,
        Call(
            "kl_rejection_mask",
            {"estimator": estimator, "reduction": reduction.removeprefix("seq_"), **SAFE},
        ),
        f"keeps where {statistic}, {over.get(reduction, 'the highest of the row')}, is within its threshold",
        option=RS_OPTION,
        given=ARRAYS | bounds,
        clamps=SAFETY,
        divisors="n_i + 1e-8" if reduction == "seq_mean" else "",
        defaults="no threshold: it has to be given",
        note=note,
        goldens=(on("compute_rollout_rejection_mask", rollout_rs=name),),
    )


VERL = (
    *(
        _verl_weights(level, icepop=icepop, normalize=normalize)
        for level in ("token", "sequence")
        for icepop in (False, True)
        for normalize in (False, True)
    ),
    *(
        _verl_rejection(reduction, estimator)
        for reduction in ("token", "seq_sum", "seq_mean", "seq_max")
        for estimator in ("k1", "k2", "k3")
        if (reduction, estimator) != ("seq_max", "k1")
    ),
)

skyrl = partial(Row, "skyrl", "correction", gradient=DATA)


def _alone(**params: object) -> tuple[Golden, ...]:
    """The cases of one correction without the others."""
    options = (
        "tis_ratio_type",
        "sequence_mask_metric",
        "outlier_token_is_threshold_low",
        "outlier_token_is_threshold_high",
        "token_mask_is_threshold_low",
    )
    return (on("compute_off_policy_correction", **{**dict.fromkeys(options), **params}),)


SKYRL_OPTION = "off_policy_correction"
NUMERATOR = "a masked token counts as zero loss: the weights of the reduction are made before"
SKYRL = (
    skyrl(
        "tis_ratio_type=token",
        weights("token", "truncate", upper=2.0),
        "weights: r of each token, at most the threshold",
        option=f"{SKYRL_OPTION}.tis_ratio_type",
        given=ARRAYS | {"upper": "token_tis_ratio_clip_high"},
        clamps=SAFETY,
        defaults="off; 2.0",
        goldens=_alone(tis_ratio_type="token"),
    ),
    skyrl(
        "tis_ratio_type=sequence",
        weights("sequence", "truncate", upper=5.0),
        "weights: product of r over the row, at most the threshold",
        option=f"{SKYRL_OPTION}.tis_ratio_type",
        given=ARRAYS | {"upper": "sequence_tis_ratio_clip_high"},
        clamps=f"{SAFETY}, of the sum",
        defaults="off; 5.0",
        goldens=_alone(tis_ratio_type="sequence"),
    ),
    skyrl(
        "sequence_mask_metric=geometric",
        Call("rejection_mask", {"level": "geometric", "lower": 0.99, "upper": 1.01}),
        "keeps rows whose geometric mean of r is within bounds",
        option=f"{SKYRL_OPTION}.sequence_mask_metric",
        given=ARRAYS | {"lower": "geo_mask_low", "upper": "geo_mask_high"},
        clamps=SAFETY,
        defaults="off; 0.99, 1.01",
        note=NUMERATOR,
        goldens=_alone(sequence_mask_metric="geometric"),
    ),
    skyrl(
        "sequence_mask_metric=product",
        Call("rejection_mask", {"level": "sequence", "lower": 0.5, "upper": 2.0}),
        "keeps rows whose product of r is within bounds",
        option=f"{SKYRL_OPTION}.sequence_mask_metric",
        given=ARRAYS | {"lower": "product_mask_low", "upper": "product_mask_high"},
        clamps=SAFETY,
        defaults="off; 0.5, 2.0",
        note=NUMERATOR,
        goldens=_alone(sequence_mask_metric="product"),
    ),
    skyrl(
        "outlier_token_is_threshold",
        Call("veto_mask", {"min_ratio": 1e-4, "max_ratio": 100.0}),
        "drops rows that hold a token with r outside bounds",
        option=f"{SKYRL_OPTION}.outlier_token_is_threshold_low, _high",
        given=ARRAYS | {"min_ratio": "outlier_token_is_threshold_low", "max_ratio": "outlier_token_is_threshold_high"},
        clamps=SAFETY,
        defaults="off; 1e-4 and 100 are suggested",
        note="the first step: token mask, weights and sequence mask see what it leaves",
        goldens=(
            *_alone(outlier_token_is_threshold_low=0.6, outlier_token_is_threshold_high=1.7),
            *_alone(outlier_token_is_threshold_high=1.5),
        ),
    ),
    skyrl(
        "token_mask_is_threshold",
        Call("rejection_mask", {"level": "token"}),
        "drops tokens with r outside bounds",
        option=f"{SKYRL_OPTION}.token_mask_is_threshold_low, _high",
        given=ARRAYS | {"lower": "token_mask_is_threshold_low", "upper": "token_mask_is_threshold_high"},
        clamps=SAFETY,
        defaults="off; needs both",
        goldens=_alone(token_mask_is_threshold_low=0.8),
    ),
)
ORDER = (
    Row(
        "skyrl",
        "correction",
        "off_policy_correction",
        Call("correct_rollout"),
        "several of them: outlier rows, then token mask, then weights, then sequence mask; each sees the mask so far",
        option="trainer.algorithm.off_policy_correction",
        gradient=DATA,
        given={"log_probs": "old_log_probs", "steps": "the calls of those that are on, in this order"},
        defaults="all off",
        note="is_ratio_min, the metric, is 0 whenever anything is masked",
        reason="no case has several; tests/kljax/ratios compares the order with SkyRL's written as loops",
    ),
    Row(
        "verl",
        "correction",
        "rollout_correction",
        Call("correct_rollout"),
        "weights and rejection together, neither seeing the other; several options of rollout_rs must all pass",
        option="rollout_correction",
        given={"log_probs": "old_log_probs", "steps": "the weights, then the rejection masks joined with & into one"},
        gradient=DATA,
        defaults="decoupled; with bypass_mode the old policy is the sampler",
        note=f"the presets (decoupled_seq_is_rs, bypass_pg_geo_rs, ...) are combinations of these names; {KEPT}",
        goldens=(on("compute_rollout_correction_and_rejection_mask"),),
    ),
)

TRINITY = (
    Row(
        "trinity",
        "correction",
        "enable_sequence_masking",
        Call("off_policy_sequence_mask", {"max_kl": 0.1, **SAFE}),
        "drops tokens of A < 0 in rows whose mean of old - new exceeds the threshold",
        option="policy_loss_fn_args.enable_sequence_masking",
        given={"behaviour_log_probs": "old_logprob", "max_kl": "delta_sequence_masking"},
        clamps=SAFETY,
        divisors="n_i + 1e-10",
        gradient=DATA,
        defaults="off; 0.1",
        note="the numerator only: denominators stay; 1e-4 in slime",
        goldens=(on("PPOPolicyLossFn", enable_sequence_masking=True),),
    ),
    Row(
        "trinity",
        "correction",
        "clipb",
        Call("clip_b_mask", {"mu": 2.5}),
        "drops tokens of A < 0 whose S = p (entropy + log p) lies mu std below the mean of S",
        option="algorithm.advantage_fn clipb",
        given={"advantages": "those of the token", "entropies": "entropys", "mu": "mu"},
        divisors="mean and population std over the tokens of the batch",
        gradient=DATA,
        defaults="mu 2.5",
        note="the mask of the advantage estimator of the same name",
        goldens=(on("ClipBAdvantageFn"),),
    ),
    Row(
        "trinity",
        "correction",
        "clipv",
        Call("clip_v_mask", {"mu": 8.5, "max_fraction": 1e-4}),
        "drops tokens of A < 0 whose S lies mu std below its expectation over the vocabulary",
        option="algorithm.advantage_fn clipv",
        given={
            "advantages": "those of the token",
            "entropies": "entropys",
            "expected_scores": "necs",
            "mu": "mu",
            "max_fraction": "max_frac",
        },
        divisors="population std of E[S] - S over the tokens of the batch",
        gradient=DATA,
        defaults="mu 8.5 (2.0 in the constructor), max_frac 1e-4: at most that share of the tokens, but one may go",
        note="the mask of the advantage estimator of the same name",
        goldens=(on("ClipVAdvantageFn"),),
    ),
    Row(
        "trinity",
        "correction",
        "rollout_correction",
        None,
        "verl's rollout_correction, passed through",
        option="algorithm.rollout_correction",
        gradient=DATA,
        defaults="None",
        reason="it is verl's: see the corrections of verl",
    ),
)

ROWS = (*VERL, *SKYRL, *ORDER, *TRINITY)
