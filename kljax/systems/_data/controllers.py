"""KL coefficients over time, and references that follow the policy."""

from kljax.systems._row import Call, Row, on

ZIEGLER = "coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * n / horizon"
FIXED = "the coefficient stays what it is"
NEVER_NEGATIVE = "n > 5 horizon makes the coefficient negative there; here it stops at 0"

VERL = (
    Row(
        "verl",
        "controller",
        "fixed",
        Call("fixed_kl", {"coef": 0.001}),
        FIXED,
        option="algorithm.kl_ctrl.type",
        given={"coef": "algorithm.kl_ctrl.kl_coef"},
        defaults="the default; 0.001, of the KL in the reward",
        goldens=(on("FixedKLController"), on("apply_kl_penalty", type="fixed")),
    ),
    Row(
        "verl",
        "controller",
        "adaptive",
        Call("adaptive_kl", {"coef": 0.001, "target": 0.1, "horizon": 10_000}),
        f"{ZIEGLER}, n the rows of the batch",
        option="algorithm.kl_ctrl.type",
        given={
            "coef": "algorithm.kl_ctrl.kl_coef",
            "target": "algorithm.kl_ctrl.target_kl",
            "horizon": "algorithm.kl_ctrl.horizon",
        },
        clamps="the relative error to [-0.2, 0.2]",
        defaults="target 0.1, horizon 10000; of the KL in the reward only",
        note=NEVER_NEGATIVE,
        goldens=(on("AdaptiveKLController"), on("apply_kl_penalty", type="adaptive")),
    ),
)

SKYRL = (
    Row(
        "skyrl",
        "controller",
        "fixed",
        Call("fixed_kl", {"coef": 0.001}),
        FIXED,
        option="trainer.algorithm.kl_ctrl.type",
        given={"coef": "trainer.algorithm.kl_loss_coef"},
        defaults="the default",
        goldens=(on("FixedKLController"),),
    ),
    Row(
        "skyrl",
        "controller",
        "adaptive",
        Call("adaptive_kl", {"coef": 0.001, "target": 0.1, "horizon": 10_000}),
        f"{ZIEGLER}, n the rows of the batch",
        option="trainer.algorithm.kl_ctrl.type",
        given={
            "coef": "trainer.algorithm.kl_loss_coef",
            "target": "trainer.algorithm.kl_ctrl.kl_target",
            "horizon": "trainer.algorithm.kl_ctrl.horizon",
        },
        clamps="the relative error to [-0.2, 0.2]; the coefficient to at least 0 where it is used",
        defaults="target 0.1, horizon 10000; only with use_kl_in_reward",
        goldens=(on("AdaptiveKLController"),),
    ),
)

OPENRLHF = (
    Row(
        "openrlhf",
        "controller",
        "fixed",
        Call("fixed_kl", {"coef": 0.01}),
        FIXED,
        option="--algo.kl.target absent",
        given={"coef": "--algo.kl.init_coef"},
        defaults="the default; of the KL in the reward and of the KL loss",
        goldens=(on("FixedKLController"),),
    ),
    Row(
        "openrlhf",
        "controller",
        "adaptive",
        Call("adaptive_kl", {"coef": 0.01, "horizon": 10_000}),
        f"{ZIEGLER}, n = rollout.batch_size * n_samples_per_prompt",
        option="--algo.kl.target",
        given={"coef": "--algo.kl.init_coef", "target": "--algo.kl.target", "horizon": "--algo.kl.horizon"},
        clamps="the relative error to [-0.2, 0.2]; the coefficient to at least 0 where it is used",
        defaults="no target, horizon 10000",
        note="multiplies the KL loss as well",
        goldens=(on("AdaptiveKLController"),),
    ),
)

TRINITY = (
    Row(
        "trinity",
        "controller",
        "fixed",
        Call("fixed_kl", {"coef": 0.001}),
        FIXED,
        option="algorithm.kl_penalty_fn_args.adaptive false",
        given={"coef": "kl_coef"},
        defaults="the default",
        goldens=(on("apply_kl_penalty_to_reward", adaptive=False),),
    ),
    Row(
        "trinity",
        "controller",
        "adaptive",
        Call("adaptive_kl", {"coef": 0.001}),
        f"{ZIEGLER}, n the rows of the batch",
        option="algorithm.kl_penalty_fn_args.adaptive",
        given={"coef": "kl_coef", "target": "target_kl", "horizon": "horizon"},
        clamps="the relative error to [-0.2, 0.2]",
        defaults="no target and no horizon; both have to be given",
        note="raises TypeError in 0.6.0 on the first update (torch.clip of a Python float); the recorded cases give it "
        f"a tensor; {NEVER_NEGATIVE}",
        goldens=(on("apply_kl_penalty_to_reward", adaptive=True),),
    ),
)

NO_CASE = "a constant: there is nothing to record"
CONSTANTS = tuple(
    Row(
        system,
        "controller",
        "fixed",
        Call("fixed_kl", {"coef": coef}),
        FIXED,
        option=option,
        given={"coef": option},
        defaults=f"{coef}; the only kind",
        reason=NO_CASE,
    )
    for system, option, coef in (
        ("slime", "--kl-coef, --kl-loss-coef", 0.0),
        ("trl", "beta", 0.0),
        ("prime-rl", "trainer.loss.kl_tau", 0.001),
        ("art", "kl_penalty_coef", 0.0),
    )
)

REFERENCES = (
    Row(
        "trl",
        "controller",
        "sync_ref_model",
        Call("ema_reference", {"decay": 0.4}),
        "ref = alpha * policy + (1 - alpha) * ref",
        option="GRPOConfig.sync_ref_model",
        given={"decay": "1 - ref_model_mixup_alpha", "step": "every ref_model_sync_steps, see refreshed_reference"},
        defaults="off; alpha 0.6, every 512 steps",
        reason="a weighted sum of parameters: tested by formula",
    ),
    Row(
        "slime",
        "controller",
        "ref_update_interval",
        Call("refreshed_reference"),
        "ref = policy every so many rollout steps",
        option="--ref-update-interval",
        given={"every": "--ref-update-interval"},
        defaults="None: never",
        reason="a copy of parameters: tested by formula",
    ),
)

ROWS = (*VERL, *SKYRL, *OPENRLHF, *TRINITY, *CONSTANTS, *REFERENCES)
