"""The stages of an update in the order of the data, and which of them a dump has the inputs for."""

from functools import partial

from kljax.tools.parity import advantages, losses, policies
from kljax.tools.parity.dump import METRIC
from kljax.tools.parity.replay import MissingFields, Replay, Stage
from kljax.tools.parity.report import COUNTED, StageCount

_LOSS = ("mask", "ratio", "correction", "kl", "kl_mask", "advantage", "loss", "entropy")
_REDUCED = (*_LOSS, "reduction", "kl_reduction")
STAGES: dict[str, Stage] = {
    "mask": Stage(policies.mask, ("mask_rule",)),
    "log_probs": Stage(partial(policies.log_probs, side=""), ("log_probs",)),
    "ref_log_probs": Stage(partial(policies.log_probs, side="ref_"), ("reference",)),
    "ratio": Stage(policies.ratio, ("ratio",)),
    "weights": Stage(policies.weights, ("mask", "correction")),
    "kl": Stage(policies.kl_per_token, ("mask", "ratio", "kl")),
    "advantages": Stage(advantages.advantages, ("mask", "ratio", "kl", "kl_mask", "advantage")),
    "token_loss": Stage(losses.token_loss, _LOSS),
    "loss": Stage(losses.loss, _REDUCED),
    "grad_log_probs": Stage(losses.gradient, (*_REDUCED, "gradient")),
    **{METRIC + name: Stage(partial(losses.mean, name=name), _REDUCED) for name in losses.METRICS},
}


def recorded_results(replay: Replay) -> dict[str, str]:
    """Lists the recorded results in the order of the data, each with why it cannot be recomputed; empty if it can."""
    others = {name: None for name in replay.arrays if name.startswith(METRIC)}
    reasons = {name: "" for name in (STAGES | others) if name in replay.arrays}
    for name in reasons:
        if name not in STAGES:
            reasons[name] = f"no such metric here; known are {', '.join(losses.METRICS)}"
            continue
        try:
            next(replay.parts()).predict(name, replay.recipe)
        except MissingFields as error:
            reasons[name] = str(error)
    return reasons


def count_stages(replay: Replay, judged: set[str], reasons: dict[str, str]) -> StageCount:
    """Counts the stages of the update that a dump shows."""
    applies = {
        "old log-probs": "old_log_probs" in replay.arrays,
        "sampler": "rollout_log_probs" in replay.arrays,
        "reference": bool(replay.recipe.kl.place) and replay.recipe.kl.reference == "ref_log_probs",
        "correction": "correction" in replay.recipe.calls,
    }
    compared = []
    missing = []
    claimed = []
    for stage, (fields, section) in COUNTED.items():
        if not applies.get(stage, True):
            continue
        if judged & set(fields):
            compared.append(stage)
            continue
        absent = fields[0] not in replay.arrays
        reason = f"needs {fields[0]}" if absent else next((reasons[name] for name in fields if name in reasons), "")
        missing.append((stage, reason or "needs first_log_probs"))
        if section in replay.dump.header:
            claimed.append(stage)
    return StageCount(tuple(compared), tuple(missing), tuple(claimed))
