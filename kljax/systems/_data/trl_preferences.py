"""The preference losses of TRL: pairs of completions, and completions that are wanted or not."""

from functools import partial
from typing import Any

from kljax.systems._entry import Entry, call, recorded

# Each entry is a paragraph: its name and call, its meaning, then the details; the formatter would make it a column.
# fmt: off
SUMS = {"preferred": "sum of log pi - log ref over the chosen completion", "rejected": "the same of the rejected one"}
MEANS = {"preferred": "mean of log pi - log ref over the chosen completion", "rejected": "the same of the rejected one"}
NO_REF = {"preferred": "sum of log pi over the chosen completion", "rejected": "the same of the rejected one"}
NO_REF_MEANS = {"preferred": "mean of log pi over the chosen completion", "rejected": "the same of the rejected one"}
POLICY_AND_REF = {
    "preferred": "sum of log pi over the chosen completion, less the sum over the rejected one",
    "rejected": "the same of the reference"
}
BETA_OF_EPOCH = {"coef": "beta, else that of the epoch in the list"}
BETA = {"coef": "beta"}
SMOOTHING = {"label_smoothing": "label_smoothing"}
SCORES = "scores w and l of the chosen and the rejected completion, m = beta (w - l), S the logistic function"

policy_loss = partial(Entry, "trl", "policy_loss", divisors="all pairs", gradient="to both scores, that of the formula")


def dpo(name: str, meaning: str, **details: Any) -> Entry:
    """Makes a row of DPOConfig.loss_type."""
    loss = details.pop("loss", name)
    sources = {**details.pop("scores", SUMS), **BETA, **details.pop("sources", {})}
    params = {"loss_type": name, **details.pop("params", {})}
    return policy_loss(f"dpo+loss_type={name}", call("preference_loss", loss=loss, coef=0.1), meaning,
        option="DPOConfig.loss_type", sources=sources, defaults=details.pop("defaults", "beta 0.1"),
        goldens=recorded("DPOTrainer._compute_loss", **params), **details)


PREFERENCES = (
    # Scores w and l of the chosen and the rejected completion, m = beta (w - l), S the logistic function.
    dpo("sigmoid", f"-log S(m): DPO; {SCORES}", defaults="the loss_type of DPOConfig; beta 0.1",
        note="label_smoothing is not read; robust is its unbiased form"),
    dpo("hinge", "max(1 - m, 0): SLiC"),
    dpo("ipo", "(w - l - 1 / (2 beta))^2: IPO, of means over the tokens", scores=MEANS,
        divisors="max(n_i, 1) of each completion, then all pairs", note="the paper has sums"),
    dpo("exo_pair", "KL of the coins S(m) and 1 - label_smoothing: EXO", sources=SMOOTHING,
        defaults="beta 0.1; label_smoothing 0.0, with which it is infinite: it has to be given"),
    dpo("nca_pair", "-log S(beta w) - (log S(-beta w) + log S(-beta l)) / 2: NCA"),
    dpo("robust", "(-(1 - s) log S(m) + s log S(-m)) / (1 - 2 s) with s = label_smoothing", sources=SMOOTHING,
        defaults="beta 0.1, label_smoothing 0.0"),
    dpo("bco_pair", "-log S(beta w) - log S(-beta l): BCO, without the running mean of the rewards"),
    dpo("sppo_hard", "(w - 1 / (2 beta))^2 + (l + 1 / (2 beta))^2: SPPO with a probability of 1"),
    dpo("aot", "-log S of beta times the differences of sorted margins: of the policy and of the reference",
        scores=POLICY_AND_REF, sources=SMOOTHING, defaults="beta 0.1, label_smoothing 0.0",
        note="sorted in the micro-batch of a device there; in the whole batch here, with axis_name over devices"),
    dpo("aot_unpaired", "as aot, of the sorted w and the sorted l", loss="aot", sources=SMOOTHING,
        defaults="beta 0.1, label_smoothing 0.0", note="sorted in the micro-batch of a device there"),
    dpo("apo_zero", "1 - S(beta w) + S(beta l): APO"),
    dpo("apo_down", "S(beta w) + 1 - S(m): APO"),
    dpo("discopop", "-(1 - S(m / tau)) log S(m) + S(m / tau) exp(-m): DiscoPOP", sources={"tau": "discopop_tau"},
        defaults="beta 0.1, discopop_tau 0.05"),
    policy_loss("dpo+loss_type=sft", call("cross_entropy_loss"),
        "-log pi of the chosen completions", option="DPOConfig.loss_type",
        sources={"log_probs": "of the chosen completions"}, divisors="all tokens of the chosen completions",
        gradient="-1", goldens=recorded("DPOTrainer._compute_loss", loss_type="sft")),
    dpo("sigmoid_norm", "-log S(m) of means over the tokens", loss="sigmoid", scores=MEANS,
        divisors="max(n_i, 1) of each completion, then all pairs"),
    policy_loss("online_dpo", call("preference_loss", loss="sigmoid", coef=0.1),
        "-log S(m): DPO of two completions of the policy, the one of the higher reward chosen",
        option="OnlineDPOConfig.loss_type sigmoid (experimental)", sources=SUMS | BETA_OF_EPOCH, defaults="beta 0.1",
        note="the first is chosen where the rewards are equal; log-probs are of temperature 1, whatever the sampler's; "
        "each batch is trained on once: there are no old log-probs and no correction",
        goldens=recorded("OnlineDPOTrainer.training_step", loss_type="sigmoid")),
    policy_loss("online_dpo+loss_type=ipo", call("preference_loss", loss="ipo", coef=0.1),
        "(w - l - 1 / (2 beta))^2, of sums over the tokens", option="OnlineDPOConfig.loss_type (experimental)",
        sources=SUMS | BETA_OF_EPOCH, defaults="beta 0.1", note="DPOTrainer takes means over the tokens",
        goldens=recorded("OnlineDPOTrainer.training_step", loss_type="ipo")),
    policy_loss("kto", call("kto_loss", coef=0.1, desirable_weight=1.0, undesirable_weight=1.0),
        "w (1 - S(beta (h - kl))) of wanted completions, w (1 - S(beta (kl - h))) of others: KTO",
        option="KTOConfig.loss_type", sources={"scores": "sum of log pi - log ref", "desirable": "label",
            "kl": "the mean of h over mismatched completions, at least 0", "coef": "beta",
            "desirable_weight": "desirable_weight", "undesirable_weight": "undesirable_weight"},
        divisors="the completions of the micro-batch", gradient="to h; kl is a constant",
        defaults="beta 0.1, weights 1", goldens=recorded("KTOTrainer._compute_loss", loss_type="kto")),
    policy_loss("kto+loss_type=apo_zero_unpaired",
        call("kto_loss", coef=0.1, kl=0.0, desirable_weight=1.0, undesirable_weight=1.0),
        "as kto with kl 0", option="KTOConfig.loss_type", sources={"scores": "sum of log pi - log ref",
            "desirable": "label", "coef": "beta", "desirable_weight": "desirable_weight",
            "undesirable_weight": "undesirable_weight"}, divisors="the completions of the micro-batch",
        defaults="beta 0.1, weights 1", goldens=recorded("KTOTrainer._compute_loss", loss_type="apo_zero_unpaired")),
    policy_loss("cpo", call("preference_loss", loss="sigmoid", coef=0.1),
        "-(1 - s) log S(m) - s log S(-m) of log-probs without a reference", option="CPOConfig.loss_type sigmoid",
        sources=NO_REF | BETA | SMOOTHING, defaults="beta 0.1, label_smoothing 0.0",
        part="the loss of the pair; cpo_alpha times the cross-entropy of the chosen completions is added",
        goldens=recorded("cpo_loss", loss_type="sigmoid")),
    policy_loss("cpo+loss_type=hinge", call("preference_loss", loss="hinge", coef=0.1),
        "max(1 - m, 0) of log-probs without a reference", option="CPOConfig.loss_type", sources=NO_REF | BETA,
        defaults="beta 0.1", part="the loss of the pair", goldens=recorded("cpo_loss", loss_type="hinge")),
    policy_loss("cpo+loss_type=ipo", call("preference_loss", loss="ipo", coef=0.1),
        "(w - l - 1 / (2 beta))^2 of mean log-probs", option="CPOConfig.loss_type", sources=NO_REF_MEANS | BETA,
        divisors="n_i of each completion, then all pairs", defaults="beta 0.1", part="the loss of the pair",
        goldens=recorded("cpo_loss", loss_type="ipo")),
    policy_loss("cpo+loss_type=simpo", call("preference_loss", loss="sigmoid", coef=0.1, margin=0.5),
        "-log S(m - gamma) of mean log-probs: SimPO", option="CPOConfig.loss_type",
        sources=NO_REF_MEANS | BETA | SMOOTHING | {"margin": "simpo_gamma"},
        divisors="n_i of each completion, then all pairs", defaults="beta 0.1, simpo_gamma 0.5, label_smoothing 0.0",
        note="without cpo_alpha: SimPO has no cross-entropy; the paper's beta is 2 to 2.5",
        goldens=recorded("cpo_loss", loss_type="simpo")),
    policy_loss("orpo", call("preference_loss", loss="odds_ratio", coef=0.1),
        "-beta log S(log odds of the chosen - log odds of the rejected), of mean log-probs", option="ORPOTrainer",
        sources=NO_REF_MEANS | BETA, clamps="computed in float32", divisors="n_i of each completion, then all pairs",
        defaults="beta 0.1", part="the odds ratio; the cross-entropy of the chosen completions is added",
        goldens=recorded("odds_ratio_loss")),
    policy_loss("tpo", call("preference_loss", loss="sigmoid", coef=0.01),
        "-(1 - s) log S(m) - s log S(-m) of log-probs without a reference", option="TPOConfig.loss_type sigmoid",
        sources=NO_REF | BETA | SMOOTHING, defaults="beta 0.01, label_smoothing 0.0",
        part="the loss of the pair; tpo_alpha times the cross-entropy of a third, best completion is added",
        goldens=recorded("TPOTrainer._compute_loss", loss_type="sigmoid")),
    policy_loss("tpo+loss_type=hinge", call("preference_loss", loss="hinge", coef=0.01),
        "max(1 - m, 0) of log-probs without a reference", option="TPOConfig.loss_type", sources=NO_REF | BETA,
        defaults="beta 0.01", part="the loss of the pair",
        goldens=recorded("TPOTrainer._compute_loss", loss_type="hinge")),
    policy_loss("tpo+loss_type=ipo", call("preference_loss", loss="ipo", coef=0.01),
        "(w - l - 1 / (2 beta))^2 of mean log-probs", option="TPOConfig.loss_type", sources=NO_REF_MEANS | BETA,
        divisors="max(n_i, 1) of each completion, then all pairs", defaults="beta 0.01", part="the loss of the pair",
        goldens=recorded("TPOTrainer._compute_loss", loss_type="ipo")),
    policy_loss("tpo+loss_type=tpo-l", call("preference_loss", loss="sigmoid", coef=0.01, margin=0.5),
        "-log S(m - gamma) of mean log-probs", option="TPOConfig.loss_type",
        sources=NO_REF_MEANS | BETA | SMOOTHING | {"margin": "tpo_l_gamma"},
        divisors="max(n_i, 1) of each completion, then all pairs",
        defaults="beta 0.01, tpo_l_gamma 0.5, label_smoothing 0.0", part="the loss of the pair",
        goldens=recorded("TPOTrainer._compute_loss", loss_type="tpo-l")),
)
