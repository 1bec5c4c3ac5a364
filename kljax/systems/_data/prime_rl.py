"""The names of prime-rl."""

from functools import partial

from kljax.systems._call import Call
from kljax.systems._entry import OF_LAYERS, TO_ROUTER, Entry, System, call, recorded

# Each entry is a paragraph: its name and call, its meaning, then the details; the formatter would make it a column.
# fmt: off
SYSTEM = System("prime-rl", "prime-rl", "0.8.0, commit 559b447", "squared log-ratio to the sampler, coefficient 0.001")

EXAMPLES = {"rewards": "trace.reward", "group_ids": "the example"}
NOT_RECORDED = "prime-rl's orchestrator is not on PyPI; tested by formula"
DRIFT = Call("rollout_kl_loss", {"estimator": "k2"}, scale=0.002)
SINCE_AUGUST = "main of 2026-08-27, pull request 3418"
EPS = "eps, ipo_threshold before 2026-08-27"

kl = partial(Entry, "prime-rl", "kl")
advantage = partial(Entry, "prime-rl", "advantage", option="orchestrator.algo.type", gradient="constant")
policy_loss = partial(Entry, "prime-rl", "policy_loss",
    divisors="a sum over tokens, over those of the component in the step")
mask = partial(Entry, "prime-rl", "correction", gradient="constant",
    note="dropped tokens lose the KL term too", version="main of 2026-01; the trust region default replaced it",
    reason="prime-rl is not on PyPI and its recorded cases are of later code")
RATIO = {"log_probs": "trainer_logprobs", "sampling_log_probs": "inference_logprobs"}

ENTRIES = (
    # KL estimators. x = log pi - log ref.
    kl("kl_tau", Call("rollout_kl_loss", {"estimator": "k2"}, scale=2.0),
        "x^2 with the sampler in place of a reference, no half", option="trainer.loss.kl_tau",
        sources={"rollout_log_probs": "inference_logprobs"}, gradient="2 x", defaults="0.001",
        note="over all loss tokens, also those that the trust region drops from the policy loss",
        goldens=recorded("default_loss_fn")),
    kl("mismatch_kl", call("rollout_kl", estimator="k3"),
        "r - 1 - log r with r = trainer / sampler: k3 of KL(sampler || trainer), a metric",
        option="the metric mismatch_kl", sources={"rollout_log_probs": "inference_logprobs"}, gradient="none",
        note="the other direction from a reference KL: the tokens come from the sampler",
        reason="a metric that no case recorded"),
    # Reductions. n_i is the number of tokens of row i.
    Entry("prime-rl", "reduction", "token", call("token_weights", mode="token_mean"),
        "each component (rl, ce, ref_kl) is a sum over its tokens, over their number in the whole step",
        option="not an option", divisors="max(tokens of the component in the step, 1)", gradient="the token weights",
        reason="the recorded cases are sums over one sample; the division is done by the trainer around them"),
    # Advantages. r is the reward of a row, mean and std are of its group.
    advantage("grpo", call("grpo_advantages", scale="none"),
        "r - mean, no division",
        sources={"rewards": "trace.reward, less the length penalty", "group_ids": "the example"},
        defaults="the default", note="what other systems call Dr.GRPO", reason=NOT_RECORDED),
    advantage("hierarchical_grpo", call("grpo_advantages", scale="none"),
        "r - mean of the agent's peers: within the episode for solvers, within the group for the proposer",
        sources={"rewards": "trace.reward", "group_ids": "(agent, episode) or (agent, group)"}, reason=NOT_RECORDED),
    advantage("max_rl", call("maxrl_advantages"),
        "(r - mean) / mean, 0 where the mean is at most 0", sources=EXAMPLES, divisors="mean; no epsilon",
        note="SkyRL's maxrl divides by a negative mean too", reason=NOT_RECORDED),
    advantage("rae", call("rae_advantages", decay=0.95),
        "r - running mean of the agent's rewards",
        sources={"rewards": "trace.reward", "baselines": "kept by the orchestrator", "group_ids": "the agent",
            "decay": "decay"},
        defaults="decay 0.95", reason=NOT_RECORDED),
    advantage("echo", call("grpo_advantages", scale="none"),
        "grpo on sampled tokens, and cross-entropy on tokens of the environment", sources=EXAMPLES,
        defaults="alpha 0.1 on tool responses", note="the cross-entropy is the policy loss ce", reason=NOT_RECORDED),
    advantage("topd", call("topd_advantages"),
        "TOP-D: z over the group's tokens of R_t = r_t + mean of later r, r = log(alpha rho + 1 - alpha), rho = "
        "teacher / sampler", sources={"log_probs": "inference_logprobs", "teacher_log_probs": "of the teacher",
            "group_ids": "the example", "alpha": "alpha, which has to be given"},
        divisors="max(std, 1e-6), with n - 1", version="pull request 2966, open", reason=NOT_RECORDED),
    advantage("turn_credit", call("turn_credit_advantages"),
        "A + beta (c_turn - c_mean): progress of the scores of turns, shared backward by gamma^distance",
        sources={"rewards": "trace.reward", "turn_scores": "info.turn_rewards", "scored": "which are not None",
            "turn_ids": "the sampled node of each token", "group_ids": "the example", "coef": "beta of the algorithm",
            "gamma": "gamma of the algorithm"},
        note="A is of the reward and the progress; a branching trace is credited branch by branch there",
        version="main of 2026-09", reason=NOT_RECORDED),
    advantage("opd", None,
        "no advantage: the policy loss ref_kl", reason="the signal is in the policy loss ref_kl"),
    advantage("opsd", None,
        "no advantage: the policy loss ref_kl", reason="the signal is in the policy loss ref_kl"),
    advantage("sft", None,
        "no advantage: the policy loss ce", reason="cross-entropy has no advantage; see the policy loss ce"),
    # Policy losses. d = log pi - log old, r = exp(d), A is the advantage, sg() a constant.
    policy_loss("default",
        Call("dppo_loss", {"divergence": "tv", "clip_low": 0.2, "clip_high": 0.2, "through": "ratio"}, plus=(DRIFT,)),
        "-A r where the probability has not moved too far, + kl_tau d^2 everywhere; r and d are to the sampler",
        option="trainer.loss.type default, until 2026-08-27",
        sources={"old_log_probs": "inference_logprobs", "rollout_log_probs": "inference_logprobs",
            "clip_low": "dppo_mask_low", "clip_high": "dppo_mask_high", "scale": "2 kl_tau",
            "advantages": "adv_tau * A"}, gradient="-A r on kept tokens + 2 kl_tau d",
        defaults="the default until 2026-08-27; 0.2, 0.2, adv_tau 1.0, kl_tau 1e-3",
        note="pull request 3418 removed it, ipo is the default since; the documentation bounds r, the code does not; a "
        "token of A = 0 is tested as a negative one",
        goldens=recorded("default_loss_fn")),
    policy_loss("ipo",
        Call("dppo_loss", {"divergence": "tv", "clip_low": 0.1, "clip_high": 0.1, "symmetric": True,
            "through": "ratio"}, plus=(DRIFT,)),
        "-A r where |pi - sampler| is at most eps, whatever the sign of A, + kl_tau d^2 everywhere",
        option="trainer.loss.type ipo",
        sources={"old_log_probs": "inference_logprobs", "rollout_log_probs": "inference_logprobs",
            "clip_low": EPS, "clip_high": EPS, "scale": "2 kl_tau"},
        gradient="-A r on kept tokens + 2 kl_tau d", defaults="the default; 0.1, kl_tau 1e-3", version=SINCE_AUGUST,
        note="pull request 3586 (2026-09-18) makes the defaults 0.3 and kl_tau 0: no KL at all",
        reason="prime-rl is not on PyPI and its recorded cases hold the loss default only; a preset records a step"),
    policy_loss("ref_kl",
        Call("dppo_loss", {"divergence": "tv", "clip_low": 0.2, "clip_high": float("inf"), "symmetric": True,
            "through": "ratio"}, plus=(DRIFT,)),
        "on-policy distillation: sg(log ref - log pi) in place of A, tokens dropped whose probability fell by over 0.2",
        option="the algorithms opd and opsd",
        sources={"old_log_probs": "inference_logprobs", "rollout_log_probs": "inference_logprobs",
            "advantages": "stop_gradient(ref_log_probs - log_probs)"},
        gradient="(log pi - log ref) r on kept tokens + 2e-3 d", defaults="0.2 and 1e-3 are written into the code",
        goldens=recorded("ref_kl_loss_fn")),
    policy_loss("ce", call("cross_entropy_loss"),
        "-log pi", option="the algorithms sft and echo", gradient="-1",
        reason="prime-rl is not on PyPI and its recorded cases do not hold it; tested by formula"),
    # Corrections. r = trainer / sampler.
    mask("token_mask", call("rejection_mask", level="token", lower=0.125, upper=8.0),
        "drops tokens with r outside the bounds", option="trainer.loss.token_mask_low, token_mask_high",
        sources=RATIO | {"lower": "token_mask_low", "upper": "token_mask_high"}, defaults="0.125, 8.0"),
    mask("geo_mask", call("rejection_mask", level="geometric", lower=0.1, upper=10.0),
        "drops rows with a geometric mean of r outside the bounds",
        option="trainer.loss.geo_mask_low, geo_mask_high",
        sources=RATIO | {"lower": "geo_mask_low", "upper": "geo_mask_high"}, defaults="0.1, 10.0"),
    mask("sequence_mask", call("veto_mask", max_ratio=100.0),
        "drops rows that hold a token with r outside the bounds",
        option="trainer.loss.sequence_mask_low, sequence_mask_high",
        sources=RATIO | {"min_ratio": "sequence_mask_low", "max_ratio": "sequence_mask_high"}, defaults="0, 100"),
    Entry("prime-rl", "correction", "enable_router_replay", None,
        "the experts of the sampler in updates, `routing.replay: rollout`",
        option="trainer.enable_router_replay, which sets inference.enable_return_routed_experts",
        gradient=TO_ROUTER, defaults="off", reason=OF_LAYERS),
    # KL coefficients over time, and references that follow the policy.
    Entry("prime-rl", "controller", "fixed", call("fixed_kl", coef=0.001),
        "the coefficient stays what it is", option="trainer.loss.kl_tau", sources={"coef": "trainer.loss.kl_tau"},
        defaults="0.001; the only kind", reason="a constant: there is nothing to record"),
    # Where the KL enters.
    Entry("prime-rl", "placement", "kl_tau", Call("rollout_kl_loss", {"estimator": "k2"}, scale=2.0),
        "policy loss + kl_tau * (log trainer - log sampler)^2", option="trainer.loss.kl_tau",
        sources={"rollout_log_probs": "inference_logprobs"}, divisors="the tokens of the component in the step",
        gradient="2 x", defaults="0.001", goldens=recorded("default_loss_fn") + recorded("ref_kl_loss_fn")),
    # Metrics and masked statistics.
    Entry("prime-rl", "statistic", "mismatch_kl", call("rollout_kl", estimator="k3"),
        "mean of r - 1 - log r with r = trainer / sampler", option="a metric",
        sources={"rollout_log_probs": "inference_logprobs"}, divisors="max(n, 1)", gradient="none",
        reason="a metric that no case recorded"),
)
