"""KL estimators of Trinity-RFT, SkyRL and verl, which share an origin. `x = log pi - log ref`."""

from functools import partial

from kljax.systems._row import Call, Row, on

NONE, K1, ABS, K2, K3, CLAMPED_K3 = (
    Call("estimate_kl", {"estimator": name}) for name in ("none", "k1", "abs", "k2", "k3", "low_var_kl")
)
NOISE = "1; in expectation over sampled tokens 0: as a loss term it only adds noise"
SIGN = "sign(x), 0 at x = 0"
TOWARDS_REF = "x: over tokens drawn from pi the gradient of KL(pi || ref)"
OTHER_DIRECTION = "1 - exp(-x): in expectation that of KL(ref || pi)"
SATURATED = "1 - exp(-x), and exactly 0 once a clamp is active: x < -2.61 (ref / pi > 13.6) or x > 11"
STRAIGHT = "x for every x, no clamp touches it: the gradient of KL(pi || ref)"
TWO_CLAMPS = "x to [-20, 20], then the value to [-10, 10]"
OVERFLOW = "infinite, with an infinite gradient, where exp(-x) overflows: x < -88.7 in float32"

trinity = partial(
    Row,
    "trinity",
    "kl",
    option="algorithm.kl_loss_fn, algorithm.kl_penalty_fn",
    defaults="kl_coef 0.001; kl_loss_fn k2, kl_penalty_fn none",
)
TRINITY = (
    trinity(
        "none",
        NONE,
        "0 for every token",
        gradient="none",
        note="as a loss it is a constant on the CPU, whatever the device of the model",
        goldens=(on("calculate_kl", estimator="dummy"),),
    ),
    trinity("k1", K1, "x", gradient=NOISE, goldens=(on("calculate_kl", estimator="k1"),)),
    trinity("k2", K2, "x^2 / 2", gradient=TOWARDS_REF, goldens=(on("calculate_kl", estimator="k2"),)),
    trinity(
        "k3",
        K3,
        "exp(-x) - 1 + x, nothing clamped",
        gradient=OTHER_DIRECTION,
        note=OVERFLOW,
        goldens=(on("calculate_kl", estimator="k3"),),
    ),
    trinity(
        "low_var_kl",
        CLAMPED_K3,
        "exp(-x) - 1 + x of the clamped x, clamped again",
        clamps=TWO_CLAMPS,
        gradient=SATURATED,
        goldens=(on("calculate_kl", estimator="low_var_kl"),),
    ),
    trinity("abs", ABS, "|x|", gradient=SIGN, goldens=(on("calculate_kl", estimator="abs"),)),
    trinity(
        "corrected_k3",
        Call("estimate_kl", {"estimator": "k3", "max_ratio": 2.0}),
        "min(w, 2) * (exp(-x) - 1 + x) with w = pi / old",
        given={"sampling_log_probs": "old_log_probs"},
        clamps="w to [0, 2]",
        gradient="w x where w < 2, which is that of KL(pi || ref) off-policy; 2 (1 - exp(-x)) where w > 2",
        note="plain k3 in the reward, which has no old policy; NaN in Trinity where w is 0 and k3 infinite, not here",
        goldens=(on("calculate_kl", estimator="corrected_k3"),),
    ),
)

skyrl = partial(
    Row,
    "skyrl",
    "kl",
    option="trainer.algorithm.kl_estimator_type",
    defaults="k3; kl_loss_coef 0.001, in the loss (use_kl_loss true)",
)
SKYRL = (
    skyrl("k1", K1, "x", gradient=NOISE, goldens=(on("compute_approx_kl", kl_estimator_type="k1"),)),
    skyrl("abs", ABS, "|x|", gradient=SIGN, goldens=(on("compute_approx_kl", kl_estimator_type="abs"),)),
    skyrl(
        "k2",
        K2,
        "x^2 / 2",
        gradient=TOWARDS_REF,
        note="its gradient is NaN in SkyRL where a masked position holds -inf in both policies; 0 here",
        goldens=(on("compute_approx_kl", kl_estimator_type="k2"),),
    ),
    skyrl(
        "k3",
        CLAMPED_K3,
        "exp(-x) - 1 + x of the clamped x, clamped again: what verl and Trinity call low_var_kl",
        clamps=TWO_CLAMPS,
        gradient=SATURATED,
        note="the same letters are unclamped in Trinity, slime and TRL",
        goldens=(on("compute_approx_kl", kl_estimator_type="k3"),),
    ),
)

verl = partial(
    Row,
    "verl",
    "kl",
    option="actor.kl_loss_type, algorithm.kl_penalty, distillation_loss.loss_mode",
    defaults="kl_loss_type low_var_kl (coef 0.001), kl_penalty kl",
)


def _plus(base: str, value: Call, meaning: str, clamps: str = "none") -> Row:
    """The name with a plus: the value of `base`, the gradient of k2."""
    same = {"kl": "k1+", "mse": "k2", "k2": "k2"}.get(base)
    return verl(
        f"{base}+",
        Call("estimate_kl", {**value.arguments, "gradient": "k2"}),
        f"value of {base} ({meaning}), straight-through gradient of k2",
        clamps=clamps,
        gradient=STRAIGHT,
        note="raised NotImplementedError before 0.9, although documented",
        goldens=() if same else (on("kl_penalty", kl_penalty=f"{base}+"),),
        reason=f"the branch of verl's code that {same} takes, whose cases check it" if same else "",
    )


NOT_WRITTEN = "verl raises NotImplementedError; the exact KL over the vocabulary is kljax.generalized_jsd with beta=1"
VERL = (
    verl("kl", K1, "x", gradient=NOISE, goldens=(on("kl_penalty", kl_penalty="kl"),)),
    verl("k1", K1, "x, another spelling of kl", gradient=NOISE, goldens=(on("kl_penalty", kl_penalty="k1"),)),
    verl("abs", ABS, "|x|", gradient=SIGN, goldens=(on("kl_penalty", kl_penalty="abs"),)),
    verl("mse", K2, "x^2 / 2", gradient=TOWARDS_REF, goldens=(on("kl_penalty", kl_penalty="mse"),)),
    verl("k2", K2, "x^2 / 2", gradient=TOWARDS_REF, goldens=(on("kl_penalty", kl_penalty="k2"),)),
    verl(
        "low_var_kl",
        CLAMPED_K3,
        "exp(-x) - 1 + x of the clamped x, clamped again",
        clamps=TWO_CLAMPS,
        gradient=SATURATED,
        goldens=(on("kl_penalty", kl_penalty="low_var_kl"),),
    ),
    verl(
        "k3",
        CLAMPED_K3,
        "another spelling of low_var_kl: clamped",
        clamps=TWO_CLAMPS,
        gradient=SATURATED,
        note="the same letters are unclamped in Trinity, slime and TRL",
        goldens=(on("kl_penalty", kl_penalty="k3"),),
    ),
    _plus("kl", K1, "x"),
    _plus("k1", K1, "x"),
    _plus("abs", ABS, "|x|"),
    _plus("mse", K2, "x^2 / 2"),
    _plus("k2", K2, "x^2 / 2"),
    _plus("low_var_kl", CLAMPED_K3, "clamped k3", TWO_CLAMPS),
    _plus("k3", CLAMPED_K3, "clamped k3", TWO_CLAMPS),
    verl("full", None, "not written: the KL over the whole vocabulary", reason=NOT_WRITTEN),
)

ROWS = (*TRINITY, *SKYRL, *VERL)
