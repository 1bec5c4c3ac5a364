"""KL estimators of slime, OpenRLHF, TRL, ART and prime-rl. `x = log pi - log ref`, `w = pi / old`."""

from functools import partial

from kljax.systems._data.kl_verl_family import K1, K2, K3, NOISE, OTHER_DIRECTION, OVERFLOW, TOWARDS_REF
from kljax.systems._row import Call, Row, on

OUTPUT = "the value to [-10, 10]"
W_IS = {"sampling_log_probs": "old log-probs (rollout log-probs with --use-rollout-logprobs)"}
CLAMPED = {"value_clip": 10.0}

slime = partial(
    Row,
    "slime",
    "kl",
    option="--kl-loss-type",
    defaults="k1; kl_coef 0 and kl_loss_coef 0, and not both above 0",
)
CASTS = "both log-probs are cast to float32 first"
SLIME = (
    slime(
        "k1",
        K1,
        "x",
        gradient=NOISE,
        note=CASTS,
        goldens=(on("compute_approx_kl", kl_loss_type="k1", importance_ratio=None),),
    ),
    slime(
        "k2",
        K2,
        "x^2 / 2",
        gradient=TOWARDS_REF,
        note=CASTS,
        goldens=(on("compute_approx_kl", kl_loss_type="k2", importance_ratio=None),),
    ),
    slime(
        "k3",
        K3,
        "exp(-x) - 1 + x, nothing clamped",
        gradient=OTHER_DIRECTION,
        note=f"{OVERFLOW}; {CASTS}",
        goldens=(on("compute_approx_kl", kl_loss_type="k3", importance_ratio=None),),
    ),
    slime(
        "low_var_kl",
        Call("estimate_kl", {"estimator": "k3", **CLAMPED}),
        "exp(-x) - 1 + x, clamped at the end only",
        clamps=OUTPUT,
        gradient="1 - exp(-x), 0 where the clamp is active",
        note="x itself is not clamped, unlike in verl and Trinity: below -88.7 slime's gradient is NaN, here it is 0",
        goldens=(on("compute_approx_kl", kl_loss_type="low_var_kl", importance_ratio=None),),
    ),
)


def _unbiased(base: str, meaning: str, gradient: str, *, clamped: bool = False) -> Row:
    """With --use-unbiased-kl the estimate is multiplied by the ratio, which carries a gradient."""
    estimator = "k3" if base == "low_var_kl" else base
    return slime(
        f"{base}+use_unbiased_kl",
        Call("estimate_kl", {"estimator": estimator, **(CLAMPED if clamped else {})}),
        f"w * ({meaning}), w differentiated and not clamped",
        option="--kl-loss-type with --use-unbiased-kl",
        given=W_IS,
        clamps=f"{OUTPUT}, after the product" if clamped else "none",
        gradient=gradient,
        note="in the loss only; the KL in the reward has no ratio",
        goldens=(on("compute_approx_kl", kl_loss_type=base, importance_ratio="exp(log_probs-old_log_probs)"),),
    )


SLIME_WITH_RATIO = (
    _unbiased("k1", "x", "w (x + 1): in expectation over the old policy that of KL(pi || ref)"),
    _unbiased("k2", "x^2 / 2", "w (x^2 / 2 + x)"),
    _unbiased("k3", "exp(-x) - 1 + x", "w x: that of KL(pi || ref), off-policy too"),
    _unbiased("low_var_kl", "exp(-x) - 1 + x", "w x, 0 where the clamp is active", clamped=True),
)

openrlhf = partial(
    Row,
    "openrlhf",
    "kl",
    option="--algo.kl.estimator",
    defaults="k1; init_coef 0.01, in the reward unless --algo.kl.use_loss",
)
OPENRLHF = (
    openrlhf(
        "k1",
        Call("estimate_kl", {"estimator": "k1", **CLAMPED}),
        "x, clamped",
        clamps=OUTPUT,
        gradient="1 for |x| <= 10, else 0",
        note="the only system that clamps k1; both log-probs are cast to float32 first",
        goldens=(on("compute_approx_kl", kl_estimator="k1", unbiased_gradient=None),),
    ),
    openrlhf(
        "k2",
        Call("estimate_kl", {"estimator": "k2", **CLAMPED}),
        "x^2 / 2, clamped",
        clamps=OUTPUT,
        gradient="x for |x| <= 4.47, else 0",
        note="the only system that clamps k2",
        goldens=(on("compute_approx_kl", kl_estimator="k2", unbiased_gradient=None),),
    ),
    openrlhf(
        "k3",
        Call("estimate_kl", {"estimator": "k3", **CLAMPED}),
        "exp(-x) - 1 + x, clamped",
        clamps=f"x from below at -10 (since 0.11), {OUTPUT}",
        gradient="1 - exp(-x), 0 for x < -2.61 or x > 11",
        note="before 0.11 the gradient was NaN for x < -88.7",
        goldens=(on("compute_approx_kl", kl_estimator="k3", unbiased_gradient=None),),
    ),
)


def _unbiased_gradient(base: str, meaning: str) -> Row:
    return openrlhf(
        f"{base}+unbiased_gradient",
        Call("estimate_kl", {"estimator": base, **CLAMPED, "gradient": "weighted_k2", "max_ratio": 10.0}),
        f"value of {base} ({meaning}, clamped), gradient of w_const x^2 / 2",
        option="--algo.kl.estimator with --algo.kl.unbiased_gradient",
        given={"sampling_log_probs": "old log-probs"},
        clamps=f"{OUTPUT}; w to at most 10",
        gradient="min(w, 10) x for every x: that of KL(pi || ref), off-policy too",
        note="the ratio enters the gradient only; in slime, TRL and Trinity it multiplies the value as well",
        goldens=(on("compute_approx_kl", kl_estimator=base, unbiased_gradient=True),),
    )


OPENRLHF_UNBIASED = (
    _unbiased_gradient("k1", "x"),
    _unbiased_gradient("k2", "x^2 / 2"),
    _unbiased_gradient("k3", "exp(-x) - 1 + x"),
)

trl = partial(Row, "trl", "kl")
TRL = (
    trl(
        "k1",
        Call("estimate_kl", {"estimator": "k1", "gradient": "none"}),
        "x, summed over a completion and subtracted from its reward",
        option="RLOOConfig.beta",
        defaults="beta 0.05",
        gradient="none: it is part of the reward",
        note="TRL has no option for the estimator: RLOO uses this one, GRPO k3",
        goldens=(on("rloo_advantages", beta=0.1),),
    ),
    trl(
        "k3",
        K3,
        "exp(-x) - 1 + x, nothing clamped",
        option="GRPOConfig.beta with use_bias_correction_kl false",
        defaults="beta 0.0; not the default since 1.16",
        gradient=OTHER_DIRECTION,
        note=OVERFLOW,
        goldens=(on("GRPOTrainer._compute_loss", beta=0.1, use_bias_correction_kl=None),),
    ),
    trl(
        "k3+use_bias_correction_kl",
        K3,
        "w * (exp(-x) - 1 + x), w differentiated and not clamped",
        option="GRPOConfig.beta with use_bias_correction_kl",
        given={"sampling_log_probs": "old_per_token_logps"},
        defaults="the default since 1.16, off before; beta 0.0",
        gradient="w x: that of KL(pi || ref), off-policy too",
        note="w is taken before `delta` caps the ratio of the policy loss",
        goldens=(
            on("GRPOTrainer._compute_loss", beta=0.1, use_bias_correction_kl=True, importance_sampling_level=None),
        ),
    ),
    trl(
        "k3+use_bias_correction_kl+sequence",
        None,
        "s * (exp(-x) - 1 + x) with the length-normalised ratio s of the row",
        option="use_bias_correction_kl with importance_sampling_level sequence",
        gradient="through s as well: every token's log-prob moves the weight of all",
        note="the ratio of a whole row on the KL of one token is no correction of anything; token level is",
        goldens=(
            on(
                "GRPOTrainer._compute_loss",
                beta=0.1,
                use_bias_correction_kl=True,
                importance_sampling_level="sequence",
            ),
        ),
        reason="a product of two calls: geometric_ratios(...)[..., None] * estimate_kl(..., estimator='k3')",
    ),
)

ART = (
    Row(
        "art",
        "kl",
        "k1",
        Call("estimate_kl", {"estimator": "k1", "gradient": "none"}),
        "x, as a constant: it only shifts advantages, see kl_penalty_coef",
        option="TrainConfig.kl_penalty_coef",
        defaults="coefficient 0.0",
        gradient="none",
        goldens=(on("loss_fn", kl_penalty_coef=0.3),),
    ),
)

PRIME_RL = (
    Row(
        "prime-rl",
        "kl",
        "kl_tau",
        Call("rollout_kl_loss", {"estimator": "k2"}, scale=2.0),
        "x^2 with the sampler in place of a reference, no half",
        option="trainer.loss.kl_tau",
        given={"rollout_log_probs": "inference_logprobs"},
        defaults="0.001",
        gradient="2 x",
        note="over all loss tokens, also those that the trust region drops from the policy loss",
        goldens=(on("default_loss_fn"),),
    ),
    Row(
        "prime-rl",
        "kl",
        "mismatch_kl",
        Call("rollout_kl", {"estimator": "k3"}),
        "r - 1 - log r with r = trainer / sampler: k3 of KL(sampler || trainer), a metric",
        option="the metric mismatch_kl",
        given={"rollout_log_probs": "inference_logprobs"},
        gradient="none",
        note="the other direction from a reference KL: the tokens come from the sampler",
        reason="a metric that no case recorded",
    ),
)

ROWS = (*SLIME, *SLIME_WITH_RATIO, *OPENRLHF, *OPENRLHF_UNBIASED, *TRL, *ART, *PRIME_RL)
