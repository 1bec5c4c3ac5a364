"""Corrections for the mismatch of trainer and sampler: slime, OpenRLHF, TRL, ART. `r` is trainer / sampler."""

from functools import partial

from kljax.systems._data.corrections_verl_family import ARRAYS, DATA, SAFETY
from kljax.systems._row import Call, Row, on

slime = partial(Row, "slime", "correction", gradient=DATA)
NO_PYPI = "slime is not on PyPI and its recorded cases hold no correction; tested by formula"
MIS = "--custom-tis-function-path mis.py"
BOUNDS = {"lower": "tis_lower_bound, or 1 / tis_upper_bound", "upper": "tis_upper_bound"}
KEPT = "the numerator only: the denominators stay those of the rollout"


def _mis(level: str, mode: str) -> Row:
    over = {"token": "r of each token", "sequence": "product of r over the row", "geometric": "geometric mean of r"}
    what = {"truncate": "at most the bound", "clip": "clipped to the bounds", "mask": "0 outside the bounds"}
    return slime(
        f"mis:{level}+{mode}",
        Call("importance_weights", {"level": level, "mode": mode, "log_ratio_clip": 20.0}),
        f"weights: {over[level]}, {what[mode]}",
        option=f"{MIS}, tis_level {level}, tis_mode {mode}",
        given=ARRAYS | ({"upper": "tis_upper_bound"} if mode == "truncate" else BOUNDS),
        clamps=SAFETY,
        defaults="an example script, not a default",
        note=KEPT if mode == "mask" else "",
        reason=NO_PYPI,
    )


def _mis_rejection(level: str) -> Row:
    return slime(
        f"mis:rs_level={level}",
        Call("rejection_mask", {"level": level}),
        "keeps what has r within bounds",
        option=f"{MIS}, use_rs, rs_level {level}",
        given=ARRAYS | {"lower": "rs_lower_bound", "upper": "rs_upper_bound"},
        clamps=SAFETY,
        note=f"{KEPT}; bounds trainer / sampler, unlike the k1 names of verl",
        reason=NO_PYPI,
    )


LEVELS = ("token", "sequence", "geometric")
SLIME = (
    slime(
        "vanilla_tis",
        Call("importance_weights", {"level": "token", "mode": "clip", "lower": 0.0, "upper": 2.0}),
        "weights: r of each token, clipped",
        option="--use-tis",
        given=ARRAYS | {"lower": "--tis-clip-low", "upper": "--tis-clip"},
        defaults="off; 0, 2.0",
        reason=NO_PYPI,
    ),
    slime(
        "icepop",
        Call("importance_weights", {"level": "token", "mode": "mask", "lower": 0.0, "upper": 2.0}),
        "weights: r of each token, 0 outside the bounds",
        option="--custom-tis-function-path icepop_function",
        given=ARRAYS | {"lower": "--tis-clip-low", "upper": "--tis-clip"},
        defaults="off; 0, 2.0",
        reason=NO_PYPI,
    ),
    slime(
        "opsm",
        Call("off_policy_sequence_mask", {"max_kl": 1e-4}),
        "drops tokens of A < 0 in rows whose mean of old - new exceeds delta",
        option="--use-opsm",
        given={"behaviour_log_probs": "old log-probs", "max_kl": "--opsm-delta"},
        divisors="max(n_i, 1)",
        defaults="off; 1e-4",
        note=f"{KEPT}; 0.1 in Trinity",
        reason=NO_PYPI,
    ),
    *(_mis(level, mode) for level in LEVELS for mode in ("truncate", "clip", "mask")),
    *(_mis_rejection(level) for level in LEVELS),
    slime(
        "mis:rs_veto_threshold",
        Call("veto_mask"),
        "drops rows that hold a token with r below the threshold",
        option=f"{MIS}, rs_veto_threshold",
        given=ARRAYS | {"min_ratio": "rs_veto_threshold"},
        note=KEPT,
        reason=NO_PYPI,
    ),
    slime(
        "mis:tis_batch_normalize",
        Call("importance_weights", {"level": "token", "normalize": "tokens", "log_ratio_clip": 20.0}),
        "weights over their mean: over tokens at token level, over rows (normalize='rows') at sequence level",
        option=f"{MIS}, tis_batch_normalize",
        given=ARRAYS | {"upper": "tis_upper_bound"},
        clamps=SAFETY,
        divisors="the mean weight",
        note="raises ValueError there at geometric level",
        reason=NO_PYPI,
    ),
)

openrlhf = partial(Row, "openrlhf", "correction", gradient=DATA)
LEVEL, MODE, GATING = (f"is_correction_{name}" for name in ("level", "mode", "gating"))
OPENRLHF_BOUNDS = {"lower": "is_correction_threshold", "upper": "is_correction_threshold"}
RATIO = Call("token_ratios")
SURVIVORS = "survivors keep their unclamped r; rejected tokens count as zero loss. GSPO ignores it"


def _gate(level: str, gating: str) -> Row:
    divergence = {"binary_kl": "kl", "tv": "tv"}[gating]
    ours = {"token": "token", "seq": "sequence"}[level]
    over = "of each token" if level == "token" else "averaged over the row"
    return openrlhf(
        f"{level}+mask+{gating}",
        Call(
            "divergence_mask",
            {"divergence": divergence, "level": ours},
            times=(RATIO,),
        ),
        f"weights: r of each token, 0 where the {gating} of the sampled token, {over}, exceeds the threshold",
        option=f"--algo.advantage.{LEVEL} {level}, {MODE} mask, {GATING} {gating}",
        given=ARRAYS | {"max_divergence": "is_correction_threshold, one number"},
        clamps="probabilities to [1e-6, 1 - 1e-6]",
        defaults="off",
        note=SURVIVORS,
        goldens=(on("PolicyLoss", is_correction_level=level, is_correction_mode="mask", is_correction_gating=gating),),
    )


OPENRLHF = (
    openrlhf(
        "token+clip+ratio",
        Call("importance_weights", {"level": "token", "mode": "clip", "lower": 0.5, "upper": 5.0}),
        "weights: r of each token, clipped: TIS",
        option=f"--algo.advantage.{LEVEL} token, {MODE} clip",
        given=ARRAYS | OPENRLHF_BOUNDS,
        defaults="off; 0.5, 5.0",
        note="GSPO ignores it, and compares with the sampler in place of the old policy",
        goldens=(on("PolicyLoss", is_correction_level="token", is_correction_mode="clip"),),
    ),
    openrlhf(
        "token+mask+ratio",
        Call("importance_weights", {"level": "token", "mode": "mask", "lower": 0.5, "upper": 5.0}),
        "weights: r of each token, 0 outside the bounds: IcePop",
        option=f"--algo.advantage.{LEVEL} token",
        given=ARRAYS | OPENRLHF_BOUNDS,
        defaults="off; 0.5, 5.0",
        note="a single threshold is an upper bound",
        goldens=(
            on("PolicyLoss", is_correction_level="token", is_correction_mode="mask", is_correction_gating="ratio"),
        ),
    ),
    openrlhf(
        "seq+mask+ratio",
        Call("rejection_mask", {"level": "geometric", "lower": 0.5, "upper": 5.0}, times=(RATIO,)),
        "weights: r of each token, 0 in rows whose geometric mean of r is outside the bounds: seq-mask-tis",
        option=f"--algo.advantage.{LEVEL} seq",
        given=ARRAYS | OPENRLHF_BOUNDS,
        defaults="off; 0.5, 5.0",
        note=SURVIVORS,
        goldens=(on("PolicyLoss", is_correction_level="seq", is_correction_mode="mask", is_correction_gating="ratio"),),
    ),
    *(_gate(level, gating) for level in ("token", "seq") for gating in ("binary_kl", "tv")),
)

trl = partial(Row, "trl", "correction", gradient=DATA, option="GRPOConfig.vllm_importance_sampling_mode")
TRL_BOUNDS = {"lower": "vllm_importance_sampling_clip_min", "upper": "vllm_importance_sampling_clip_max"}


def _trl(level: str, mode: str) -> Row:
    name = f"{level}_{mode}"
    over = "r of each token" if level == "token" else "product of r over the row"
    what = "clipped to the bounds" if mode == "truncate" else "0 outside the bounds"
    return trl(
        name,
        Call("importance_weights", {"level": level, "mode": "clip" if mode == "truncate" else "mask", "upper": 3.0}),
        f"weights: {over}, {what}",
        given=ARRAYS | TRL_BOUNDS,
        defaults="the default with vLLM; no lower bound, 3.0" if name == "sequence_mask" else "no lower bound, 3.0",
        note="a token that vLLM gave no log-prob has r = 1; not applied to the KL term",
        goldens=(on("vllm_importance_sampling", vllm_importance_sampling_mode=name),),
    )


TRL = (
    *(_trl(level, mode) for level in ("token", "sequence") for mode in ("truncate", "mask")),
    trl(
        "off_policy_mask_threshold",
        Call("off_policy_sequence_mask"),
        "drops tokens of A < 0 in rows whose mean of behaviour - new exceeds the threshold",
        option="GRPOConfig.off_policy_mask_threshold",
        given={
            "behaviour_log_probs": "vLLM's log-probs, else the old ones",
            "max_kl": "off_policy_mask_threshold, else off_policy_threshold",
        },
        divisors="max(n_i, 1)",
        defaults="None: off",
        note="the KL term is added after it: a dropped sequence still pays its KL",
        goldens=(on("get_off_policy_mask"), on("GRPOTrainer._compute_loss", off_policy_mask_threshold=0.02)),
    ),
    trl(
        "distillation_is_clip",
        Call("importance_weights", {"level": "token", "mode": "truncate", "upper": 2.0, "log_ratio_clip": 20.0}),
        "weights of the self-distillation loss: new / old of each token, at most the bound",
        option="SDPOConfig.distillation_is_clip, SDFTConfig.distillation_is_clip",
        given={"behaviour_log_probs": "old log-probs", "upper": "distillation_is_clip"},
        clamps=SAFETY,
        defaults="2.0",
        goldens=(on("apply_importance_sampling_clipping"),),
    ),
)

art = partial(Row, "art", "correction", gradient=DATA)
ART = (
    art(
        "truncated_importance_sampling",
        Call("importance_weights", {"level": "token", "mode": "truncate"}),
        "weights: old / original, at most the bound",
        option="TrainConfig.truncated_importance_sampling",
        given={"log_probs": "old log-probs", "behaviour_log_probs": "original log-probs", "upper": "the option"},
        defaults="None: off",
        note="without original log-probs it takes new / old, which CISPO has in already: counted twice",
        goldens=(on("loss_fn", truncated_importance_sampling=1.2),),
    ),
)

ROWS = (*SLIME, *OPENRLHF, *TRL, *ART)
