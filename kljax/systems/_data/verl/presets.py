"""verl's presets of rollout_correction: `RolloutCorrectionConfig.NAME()`."""

import dataclasses
import math
from typing import Any

from kljax.systems._call import Call
from kljax.systems._entry import Entry

# Each entry is a paragraph: its name and call, its meaning, then the details; the formatter would make it a column.
# fmt: off
DECOUPLED = {"log_probs": "old log-probs of the trainer", "sampling_log_probs": "rollout log-probs"}
BYPASS = {"rollout_log_probs": "rollout log-probs"}
OF_ROLLOUT = {"sampling_log_probs": "rollout_log_probs"}
REJECTED = {"lower": "rs_lower", "upper": "rs_upper"}
COMBINED = "a combination of names whose recorded cases check them one by one"
DENOMINATORS = "rejected tokens leave the mask, so the denominators of the loss shrink with it; 0 here"


def weights(level: str, *, upper: float = 2.0, lower: float | None = None, **steps: Any) -> Call:
    """Makes truncated weights of a level, or with a lower bound IcePop's."""
    bounds = {"mode": "truncate", "upper": upper} if lower is None else {"mode": "mask", "lower": lower, "upper": upper}
    return Call("importance_weights", {"level": level, **bounds, "log_ratio_clip": 20.0}, **steps)


def rejection(estimator: str, reduction: str, upper: float, lower: float | None = None) -> Call:
    """Makes the mask of rows by a divergence; its bounds are called `rs_lower` and `rs_upper`."""
    bounds = {"upper": upper} if lower is None else {"lower": lower, "upper": upper}
    settings = {"estimator": estimator, "reduction": reduction, **bounds, "log_ratio_clip": 20.0}
    return Call("kl_rejection_mask", settings, renamed=REJECTED)


SEQUENCE = rejection("k1", "sum", math.log(2.0), math.log(0.5))
GEOMETRIC = rejection("k1", "mean", math.log(1.001), math.log(0.999))
K3 = rejection("k3", "mean", 0.01)


def decoupled(name: str, call: Call, meaning: str) -> Entry:
    """Makes the row of a preset with an old policy between the sampler and the policy."""
    return Entry("verl", "correction", f"decoupled_{name}", call, meaning,
        option=f"RolloutCorrectionConfig.decoupled_{name}", sources=DECOUPLED, clamps="log-ratios to [-20, 20]",
        gradient="constant", note=DENOMINATORS, reason=COMBINED)


def bypass(name: str, times: tuple[Call, ...], meaning: str, *, ppo: bool = False) -> Entry:
    """Makes the row of a preset whose old policy is the sampler; weights and masks are of the policy being trained."""
    times = tuple(dataclasses.replace(factor, renamed={**factor.renamed, **OF_ROLLOUT}) for factor in times)
    clipped = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "log_ratio_clip": 20.0}
    if ppo:
        call = Call("ppo_clip_loss", clipped, times=times, renamed={"old_log_probs": "rollout_log_probs"})
        clips = {"clip_low": "actor.clip_ratio_low", "clip_high": "actor.clip_ratio_high",
            "dual_clip": "actor.clip_ratio_c"}
    else:
        call = Call("reinforce_loss", times=times)
        clips = {}
    return Entry("verl", "policy_loss", f"bypass_{name}", call, meaning,
        option=f"RolloutCorrectionConfig.bypass_{name}", sources=BYPASS | clips, clamps="log-ratios to [-20, 20]",
        divisors="actor.loss_agg_mode", gradient="-A r inside the bound that applies, else 0" if ppo else "-A w",
        note=DENOMINATORS, reason=COMBINED)


PRESETS = (
    decoupled("token_is", weights("token"), "weights: r of each token, at most 2"),
    decoupled("seq_is", weights("sequence"), "weights: product of r over the row, at most 2"),
    decoupled("token_icepop", weights("token", lower=0.5, upper=5.0), "weights: r of each token, 0 outside [0.5, 5]"),
    decoupled("seq_is_rs", weights("sequence", times=(SEQUENCE,)),
        "weights: product of r over the row, at most 2, 0 outside [0.5, 2]"),
    decoupled("geo_rs", GEOMETRIC, "keeps rows whose geometric mean of r is in [1 / 1.001, 1 / 0.999]"),
    decoupled("geo_rs_seq_tis", weights("sequence", times=(GEOMETRIC,)), "the weights of seq_is, the rows of geo_rs"),
    decoupled("geo_rs_token_tis", weights("token", times=(GEOMETRIC,)), "the weights of token_is, the rows of geo_rs"),
    decoupled("k3_rs", K3, "keeps rows whose mean of r - 1 - log r is at most 0.01"),
    decoupled("k3_rs_seq_tis", weights("sequence", times=(K3,)), "the weights of seq_is, the rows of k3_rs"),
    decoupled("k3_rs_token_tis", weights("token", times=(K3,)), "the weights of token_is, the rows of k3_rs"),
    bypass("ppo_clip", (), "PPO whose ratio is to the sampler", ppo=True),
    bypass("ppo_clip_geo_rs", (GEOMETRIC,), "as bypass_ppo_clip, on the rows of geo_rs", ppo=True),
    bypass("ppo_clip_k3_rs", (K3,), "as bypass_ppo_clip, on the rows of k3_rs", ppo=True),
    bypass("pg_is", (weights("sequence"),), "-A sg(w) log pi, w the product of r over the row, at most 2"),
    bypass("pg_token_icepop", (weights("token", lower=0.5, upper=5.0),),
        "-A sg(w) log pi, w = r of the token, 0 outside [0.5, 5]"),
    bypass("pg_geo_rs", (GEOMETRIC,), "-A log pi on the rows of geo_rs"),
    bypass("pg_geo_rs_seq_tis", (weights("sequence"), GEOMETRIC), "as bypass_pg_is, on the rows of geo_rs"),
    bypass("pg_geo_rs_token_tis", (weights("token"), GEOMETRIC),
        "-A sg(w) log pi, w = r of the token, at most 2, on the rows of geo_rs"),
)
