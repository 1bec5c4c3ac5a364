"""The stages of an update in the order of the data, and which of them a dump has the inputs for."""

from kljax.tools.parity import advantages, losses, policies
from kljax.tools.parity.comparison import StageCount
from kljax.tools.parity.dump import Dump
from kljax.tools.parity.fields import METRIC, ORDER
from kljax.tools.parity.header import RecipeCalls
from kljax.tools.parity.replay import MissingFields, Replay, Stage

STAGES: dict[str, Stage] = {
    "mask": policies.mask,
    "log_probs": policies.log_probs,
    "ref_log_probs": policies.ref_log_probs,
    "ratio": policies.ratio,
    "weights": policies.weights,
    "kl": policies.kl_per_token,
    "advantages": advantages.advantages,
    "token_loss": losses.token_loss,
    "loss": losses.loss,
    "grad_log_probs": losses.gradient,
    **{METRIC + name: metric for name, metric in losses.METRICS.items()},
}
# The stages that the verdict counts: the fields of which one is compared, and the section of the header that claims it.
COUNTED: dict[str, tuple[tuple[str, ...], str]] = {
    "mask": (("mask",), "mask"),
    "log-probs": (("log_probs",), "log_probs"),
    "old log-probs": (("old_log_probs",), ""),
    "sampler": (("rollout_log_probs",), ""),
    "reference": (("ref_log_probs",), "reference"),
    "correction": (("weights",), "correction"),
    "advantages": (("advantages",), "advantage"),
    # Its derivative shows the loss.
    "loss": (("loss", "token_loss", "grad_log_probs"), "loss"),
    "gradient": (("grad_log_probs",), "gradient"),
}


def make_replay(dump: Dump, plan: RecipeCalls) -> Replay:
    """Makes a replay of all stages and rows."""
    return Replay(dump, plan, STAGES)


def recorded(replay: Replay) -> list[str]:
    """Lists the recorded results, in the order of the data."""
    names = [*ORDER, *(name for name in replay.arrays if name.startswith(METRIC))]
    return [name for name in names if name in replay.arrays]


def comparable(replay: Replay) -> list[str]:
    """Lists the recorded results that can be recomputed, in the order of the data."""
    return [name for name in recorded(replay) if reason_not_compared(replay, name) is None]


def reason_not_compared(replay: Replay, name: str) -> str | None:
    """Returns why a result cannot be recomputed, or None if it can."""
    if name not in STAGES:
        known = [stage.removeprefix(METRIC) for stage in STAGES if stage.startswith(METRIC)]
        return f"no such metric here; known are {', '.join(known)}"
    try:
        next(replay.parts()).predict(name, replay.plan.recipe)
    except MissingFields as error:
        return str(error)
    return None


def count_stages(replay: Replay, judged: set[str], reasons: dict[str, str]) -> StageCount:
    """Counts the stages of the update that a dump shows."""
    recipe, header = replay.plan.recipe, replay.dump.header
    applies = {
        "old log-probs": "old_log_probs" in replay.arrays,
        "sampler": "rollout_log_probs" in replay.arrays,
        "reference": recipe.kl is not None and recipe.kl.reference == "ref_log_probs",
        "correction": recipe.correction is not None,
    }
    compared, missing, claimed = [], [], []
    for stage, (fields, section) in COUNTED.items():
        if not applies.get(stage, True):
            continue
        if judged & set(fields):
            compared.append(stage)
            continue
        absent = fields[0] not in replay.arrays
        reason = f"needs {fields[0]}" if absent else next((reasons[name] for name in fields if name in reasons), "")
        missing.append((stage, reason or "needs first_log_probs"))
        if section in header:
            claimed.append(stage)
    return StageCount(tuple(compared), tuple(missing), tuple(claimed))
