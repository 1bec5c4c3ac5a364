"""Distillation from a teacher. `x = log pi - log teacher` at a token that was sampled."""

from functools import partial

from kljax.systems._data.kl_verl_family import SATURATED, SIGN, TOWARDS_REF
from kljax.systems._row import Call, Row, on

trinity = partial(Row, "trinity", "distillation", option="algorithm.advantage_fn", gradient="data")
TEACHER = {"log_probs": "old_log_probs", "teacher_log_probs": "teacher_logprobs"}
TRINITY = (
    trinity(
        "on_policy_distill",
        Call("distillation_advantages", {"coef": 1.0}),
        "A = kl_coef * (log teacher - log old)",
        given={**TEACHER, "advantages": "zeros", "coef": "kl_coef"},
        defaults="kl_coef 1.0; with the policy loss ppo",
        goldens=(on("OnPolicyDistillAdvantage"),),
    ),
    trinity(
        "jsd",
        Call("jsd_advantages", {"beta": 0.5, "coef": 1.0}),
        "A = -kl_coef * (beta (t - m) + (1 - beta) (s - m)), s and t the two log-probs, m that of their mixture",
        given={**TEACHER, "beta": "lambda_coef", "coef": "kl_coef"},
        divisors="temperature, of both log-probs",
        defaults="lambda_coef 0.5, kl_coef 1.0, temperature 1.0",
        note="not a Jensen-Shannon divergence: the mean over sampled tokens lacks the teacher's own weights, and A is "
        "at least 0 between the ends; at lambda_coef 1 it pushes away from the teacher",
        goldens=(on("JSDAdvantage"),),
    ),
)

slime = partial(Row, "slime", "distillation", gradient="data")
SLIME = (
    slime(
        "use_opd",
        Call("distillation_advantages", {"coef": 1.0}),
        "A - opd_kl_coef * (log student - log teacher), on top of any estimator",
        option="--use-opd",
        given={
            "teacher_log_probs": "teacher log-probs",
            "log_probs": "log-probs, or rollout log-probs",
            "coef": "--opd-kl-coef",
        },
        defaults="off; 1.0",
        note="neither centred nor masked there",
        reason="slime is not on PyPI and its recorded cases hold no distillation; tested by formula",
    ),
)

verl = partial(Row, "verl", "distillation", option="distillation_loss.loss_mode")
VERL_CLIP = {"value_clip": "loss_max_clamp"}
AS_ADVANTAGE = "-estimate as the advantage of the policy loss vanilla"
AS_LOSS = "the estimate is the loss itself"
# loss_mode -> estimator here, its formula, and its gradient where it is the loss.
ESTIMATORS = {
    "kl": ("k1", "x", "1; in expectation over sampled tokens 0"),
    "k1": ("k1", "x", "1; in expectation over sampled tokens 0"),
    "abs": ("abs", "|x|", SIGN),
    "mse": ("k2", "x^2 / 2", TOWARDS_REF),
    "k2": ("k2", "x^2 / 2", TOWARDS_REF),
    "low_var_kl": ("low_var_kl", "exp(-x) - 1 + x, clamped twice", SATURATED),
    "k3": ("low_var_kl", "exp(-x) - 1 + x, clamped twice", SATURATED),
}
RECORDED = {True: ("k1", "k3"), False: ("kl", "k2", "k3")}
SAME = "kl_penalty of the same name, whose cases check it"


def _verl_reward(name: str) -> Row:
    """The default: the estimate is a cost of the policy gradient."""
    estimator, formula, _ = ESTIMATORS[name]
    recorded = name in RECORDED[True]
    return verl(
        name,
        Call("distillation_rewards", {"estimator": estimator, "value_clip": 10.0}),
        f"{formula}: {AS_ADVANTAGE}, each token charged with its own alone",
        given=VERL_CLIP,
        clamps="the estimate to [-loss_max_clamp, loss_max_clamp]",
        gradient="data; the policy gradient of -estimate, towards the teacher for k1",
        defaults=f"{'the default; ' if name == 'k3' else ''}use_policy_gradient true, loss_max_clamp 10",
        note="the docs recommend k1 for it, the default is k3" if name in ("k1", "k3") else "",
        goldens=(on("distillation_loss", loss_mode=name, use_policy_gradient=True),) if recorded else (),
        reason="" if recorded else SAME,
    )


def _verl_loss(name: str) -> Row:
    """With use_policy_gradient=false the gradient goes through the estimate."""
    estimator, formula, gradient = ESTIMATORS[name]
    recorded = name in RECORDED[False]
    return verl(
        f"{name}+use_policy_gradient=false",
        # `distillation_loss` refuses the value and the gradient of k1, which leads nowhere.
        Call(
            "estimate_kl" if estimator == "k1" else "distillation_loss",
            {"estimator": estimator, "gradient": "value", "value_clip": 10.0},
        ),
        f"{formula}: {AS_LOSS}",
        given={"ref_log_probs" if estimator == "k1" else "teacher_log_probs": "teacher_logprobs", **VERL_CLIP},
        clamps="the estimate to [-loss_max_clamp, loss_max_clamp]",
        gradient=f"{gradient}; 0 where it is clamped",
        defaults="loss_max_clamp 10",
        note="verl refuses k1 here, whose gradient leads nowhere, but not this spelling of it" if name == "kl" else "",
        goldens=(on("distillation_loss", loss_mode=name, use_policy_gradient=None),) if recorded else (),
        reason="" if recorded else SAME,
    )


VERL = (
    *(_verl_reward(name) for name in ESTIMATORS),
    *(_verl_loss(name) for name in ESTIMATORS if name != "k1"),
    verl(
        "k1+use_policy_gradient=false",
        None,
        "x as the loss itself",
        reason="verl refuses it: the expected gradient is 0; use_policy_gradient=true is kljax.distillation_rewards",
    ),
    verl(
        "forward_kl_topk",
        Call("top_k_forward_kl", {"min_log_prob": -10.0}),
        "sum over the teacher's top tokens of q (log q - log p), at least 0; nothing renormalised",
        given={
            "top_log_probs": "log-probs of the student at teacher_ids",
            "teacher_top_log_probs": "teacher_logprobs, topk of them",
            "min_log_prob": "log_prob_min_clamp",
        },
        clamps="log-probs from below at log_prob_min_clamp, the sum at 0, the estimate at loss_max_clamp",
        gradient="-q at each token of the top, without use_policy_gradient; 0 where a clamp is active",
        defaults="topk 128, log_prob_min_clamp -10, loss_max_clamp 10; use_policy_gradient true, with a warning",
        note="least where the student has more than the teacher at every token of the top",
        goldens=(on("compute_forward_kl_topk"),),
    ),
)

trl = partial(Row, "trl", "distillation")
JSD = (
    "beta KL(teacher || m) + (1 - beta) KL(student || m), m the mixture; KL(teacher || pi) at 0, KL(pi || teacher) at 1"
)
BOTH = {"vocab_log_probs": "log_softmax(logits)", "teacher_vocab_log_probs": "those of the teacher"}
EXACT = "exact over the vocabulary, given the sampled prefix"


def _trl_jsd(name: str, beta: float, trainer: str, *, note: str = "", recorded: bool = False) -> Row:
    return trl(
        name,
        Call("generalized_jsd", {"beta": beta}),
        JSD,
        option=f"{trainer}Config.beta",
        given={**BOTH, "beta": "beta"},
        divisors="number of tokens of the batch",
        gradient=EXACT,
        defaults=f"beta {beta:g}",
        note=note,
        goldens=(on("generalized_jsd_loss"),) if recorded else (),
        reason="" if recorded else "the formula of gkd, written a second time",
    )


SDPO = "SDPOConfig.distillation_mode, SDFTConfig.distillation_mode"
ALPHA = "distillation_alpha"
TOP_K = "of the student's top tokens of both"
TRL = (
    _trl_jsd("gkd", 0.5, "GKD", note="its temperature, 0.9, is of the sampling alone", recorded=True),
    _trl_jsd("gold", 0.5, "GOLD", note="where the tokenizers are the same; its loss across tokenizers is another"),
    _trl_jsd(
        "distillation",
        1.0,
        "Distillation",
        note="computed in chunks; of logits / temperature, with the softcap of each model",
    ),
    _trl_jsd(
        "server_distillation", 1.0, "ServerDistillation", note="of the tokens that the server sends, and a tail bucket"
    ),
    _trl_jsd(
        "async_distillation", 0.0, "AsyncDistillation", note="of the tokens that the server sends, and a tail bucket"
    ),
    trl(
        "iw_opd",
        Call("iw_opd_advantages", {"gamma": 0.5}),
        "A = (log teacher - log rollout) * (1 + gamma (1 - share of |A| before the token)), then -A log pi",
        option="IWOPDConfig.distillation_objective",
        given={"log_probs": "rollout log-probs, else the detached ones of the policy", "gamma": "iw_opd_gamma"},
        divisors="sum of |A| of the row, at least 1e-8",
        gradient="-A",
        defaults="the default; gamma 0.5",
        note="the other objective, jsd, is gkd with beta 1",
        reason="part of a trainer that takes logits of a model; tested by formula",
    ),
    trl(
        "sampled_token",
        Call("distillation_loss", {"estimator": "k1", "gradient": "k2"}),
        "sg(x) log pi",
        option=SDPO,
        gradient=TOWARDS_REF.replace("ref", "teacher"),
        defaults="the default of SDPO; distillation_alpha must be 1",
        note="the gradient is this; the value there is sg(x) log pi, here x",
        reason="one product of two log-probs; no case recorded it",
    ),
    trl(
        "full_logits",
        Call("generalized_jsd", {"beta": 1.0}),
        JSD,
        option=SDPO,
        given={**BOTH, "beta": ALPHA},
        gradient=EXACT,
        defaults="distillation_alpha 1 in SDPO, 0.5 in SDFT",
        goldens=(on("compute_divergence"),),
    ),
    trl(
        "topk_logits",
        Call("generalized_jsd", {"beta": 0.5}),
        f"the same {TOP_K}, each renormalised",
        option=SDPO,
        given={"vocab_log_probs": f"log_softmax {TOP_K}", "teacher_vocab_log_probs": "likewise", "beta": ALPHA},
        divisors="the mass of the top tokens, each its own",
        gradient="of the divergence given the top tokens: it does not see how much mass they have",
        defaults="the default of SDFT: 100 tokens, distillation_alpha 0.5",
        goldens=(on("compute_topk_self_distillation_loss", distillation_add_tail=None),),
    ),
    trl(
        "topk_logits+distillation_add_tail",
        Call("generalized_jsd", {"beta": 0.5}),
        f"the same {TOP_K}, with one more token for the rest",
        option="distillation_add_tail",
        given={
            "vocab_log_probs": "top_k_with_tail(log-probs, indices of the student's top tokens)",
            "teacher_vocab_log_probs": "likewise, at the same indices",
            "beta": ALPHA,
        },
        gradient="a lower bound of the divergence over the vocabulary, and its gradient",
        defaults="off",
        goldens=(on("compute_topk_self_distillation_loss", distillation_add_tail=True),),
    ),
    trl(
        "add_tail_bucket",
        Call("append_tail", {"min_mass": 1e-7}),
        "one more token with the probability that the others leave",
        option="trl.experimental.sdpo.loss_utils",
        clamps="the mass of the tail from below at 1e-7",
        gradient="-p / (1 - sum p) at each of the others; 0 where the clamp is active",
        note="top_k_with_tail has the exact tail, from the whole vocabulary",
        goldens=(on("add_tail_bucket"),),
    ),
)

ROWS = (*TRINITY, *SLIME, *VERL, *TRL)
