"""Preference losses on recorded cases: the first half of the rows is preferred, or wanted."""

from typing import Any

import jax
import jax.numpy as jnp

import kljax
from kljax.systems import Entry
from kljax.systems._call import run
from tests.goldens.cases import Case
from tests.kljax.systems.exercises import call_of, exercise, options

PAIRS = (
    *("DPOTrainer._compute_loss", "OnlineDPOTrainer.training_step"),
    *("cpo_loss", "odds_ratio_loss", "TPOTrainer._compute_loss"),
)
SUMMED = ("cpo_loss", "odds_ratio_loss")


def scores(text: str, lp: jax.Array, case: Case) -> jax.Array:
    """The score of each row that the source of an argument describes."""
    reduce = kljax.masked_mean if text.startswith("mean of") else kljax.masked_sum
    return reduce(lp - case.given("ref_log_probs") if "log ref" in text else lp, case.given("mask"), axis=-1)


@exercise(*(("trl", name) for name in PAIRS))
def pairs(entry: Entry, case: Case) -> None:
    mask, call = case.given("mask"), call_of(entry)

    def loss(lp: jax.Array) -> jax.Array:
        half = len(mask) // 2
        if call.function == "cross_entropy_loss":
            arrays = {"log_probs": lp[:half], "mask": mask[:half]}
            return kljax.aggregate(run(call, arrays), mask[:half], mode="token_mean")
        value = scores(entry.sources["preferred"], lp, case)
        preferred, rejected = value[:half], value[half:]
        if entry.name == "dpo+loss_type=aot":  # the margins of the policy, and of the reference
            reference = kljax.masked_sum(case.given("ref_log_probs"), mask, axis=-1)
            preferred, rejected = preferred - rejected, reference[:half] - reference[half:]
        losses = run(call, {"preferred": preferred, "rejected": rejected}, **options(entry, case))
        return losses.sum() if case.function in SUMMED else losses.mean()

    case.assert_value_and_grad(loss, "log_probs")


@exercise(("trl", "KTOTrainer._compute_loss"))
def kto(entry: Entry, case: Case) -> None:
    keywords: dict[str, Any] = options(entry, case)
    if "kl" in entry.sources:
        keywords["kl"] = jnp.maximum((case.given("row_advantages") - case.given("baselines")).mean(), 0)

    def loss(lp: jax.Array) -> jax.Array:
        value = scores(entry.sources["scores"], lp, case)
        arrays = {"scores": value, "desirable": jnp.arange(len(value)) < len(value) // 2}
        return run(call_of(entry), arrays, **keywords).sum()

    case.assert_value_and_grad(loss, "log_probs")


@exercise(("trl", "A2POTrainer.compute_loss"))
def a2po(entry: Entry, case: Case) -> None:
    mask = case.given("mask")
    advantages = kljax.broadcast_to_tokens(case.given("rewards") - case.given("baselines"), mask)
    arrays = {"ref_log_probs": case.given("ref_log_probs"), "advantages": advantages, "mask": mask}

    def loss(lp: jax.Array) -> jax.Array:
        losses = run(call_of(entry), {**arrays, "log_probs": lp}, **options(entry, case))
        return kljax.aggregate(losses, mask, mode="seq_mean_token_mean")

    case.assert_value_and_grad(loss, "log_probs")
