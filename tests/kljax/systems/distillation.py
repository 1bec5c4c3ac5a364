"""Distillation and the filters of tokens on recorded cases."""

from typing import Any

import jax
import jax.numpy as jnp

import kljax
from kljax.systems import Entry
from kljax.systems._call import run
from tests.goldens import compare
from tests.goldens.cases import Case
from tests.kljax.systems.advantages import estimator
from tests.kljax.systems.exercises import call_of, exercise, options


def everywhere(case: Case) -> jax.Array:
    return jnp.ones(case.given("logits").shape[:-1], bool)


def both(case: Case, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the student and of the teacher over the vocabulary."""
    pair = (logits, case.given("teacher_logits"))
    student, teacher = (jax.nn.log_softmax(x / case.params.get("temperature", 1.0), axis=-1) for x in pair)
    return student, teacher


def divergence(entry: Entry, case: Case, pair: tuple[jax.Array, jax.Array], mask: jax.Array) -> jax.Array:
    arrays = {"vocab_log_probs": pair[0], "teacher_vocab_log_probs": pair[1], "mask": mask}
    return run(call_of(entry), arrays, **options(entry, case))


@exercise(("trl", "generalized_jsd_loss"))
def generalized_jsd(entry: Entry, case: Case) -> None:
    mask = case.given("mask")

    def loss(logits: jax.Array) -> jax.Array:
        return compare.reduced(divergence(entry, case, both(case, logits), mask), mask, compare.TOKEN_MEAN)

    case.assert_value_and_grad(loss, "logits")


@exercise(("trl", "compute_divergence"))
def over_the_vocabulary(entry: Entry, case: Case) -> None:
    alpha = {"beta": case.params["alpha"]}  # the parameter that distillation_alpha is given to
    arrays = {"mask": everywhere(case)}

    def loss(logits: jax.Array) -> jax.Array:
        student, teacher = both(case, logits)
        now = {**arrays, "vocab_log_probs": student, "teacher_vocab_log_probs": teacher}
        return run(call_of(entry), now, **alpha)

    assert entry.sources["beta"] == "distillation_alpha"
    case.assert_value_and_grad(loss, "logits")


@exercise(("trl", "compute_topk_self_distillation_loss"))
def over_the_top_tokens(entry: Entry, case: Case) -> None:
    mask = everywhere(case)

    def loss(logits: jax.Array) -> jax.Array:
        _, indices = jax.lax.top_k(logits, case.params["distillation_topk"])
        if entry.name.endswith("+distillation_add_tail"):
            student, teacher = (kljax.top_k_with_tail(x, indices) for x in both(case, logits))
        else:
            picked = (jnp.take_along_axis(x, indices, axis=-1) for x in both(case, logits))
            student, teacher = (jax.nn.log_softmax(x, axis=-1) for x in picked)
        return divergence(entry, case, (student, teacher), mask)

    case.assert_value_and_grad(loss, "logits")


@exercise(("trl", "add_tail_bucket"))
def tail(entry: Entry, case: Case) -> None:
    def last(logits: jax.Array) -> jax.Array:
        top = jax.nn.log_softmax(logits, axis=-1)[..., : case.params["first"]]
        return run(call_of(entry), {"top_log_probs": top})[..., -1]

    case.assert_value_and_grad(last, "logits")


@exercise(("trl", "apply_importance_sampling_clipping"))
def weights_of_the_loss(entry: Entry, case: Case) -> None:
    log_probs, old = case.given("log_probs"), case.given("old_log_probs")
    arrays = {"log_probs": log_probs, "sampling_log_probs": old, "mask": jnp.ones(log_probs.shape, bool)}
    weights = run(call_of(entry), arrays, upper=case.params["clip_coeff"])
    case.assert_value_and_grad(lambda loss: weights * loss, "advantages")


@exercise(("verl", "compute_forward_kl_topk"))
def over_the_tokens_of_the_teacher(entry: Entry, case: Case) -> None:
    bound = {"min_log_prob": case.params["log_prob_min_clamp"]}

    def loss(logits: jax.Array) -> jax.Array:
        student, teacher = both(case, logits)
        top, indices = jax.lax.top_k(teacher, case.params["topk"])
        picked = jnp.take_along_axis(student, indices, axis=-1)
        arrays = {"top_log_probs": picked, "teacher_top_log_probs": top, "mask": everywhere(case)}
        return run(call_of(entry), arrays, **bound)

    case.assert_value_and_grad(loss, "logits")


@exercise(("verl", "distillation_loss"))
def of_sampled_tokens(entry: Entry, case: Case) -> None:
    clip = {"value_clip": case.params["loss_max_clamp"]}
    arrays = {name: case.given(name) for name in ("log_probs", "teacher_log_probs", "mask")}
    arrays["ref_log_probs"] = arrays["teacher_log_probs"]

    def loss(lp: jax.Array) -> jax.Array:
        if call_of(entry).function != "distillation_rewards":
            return run(call_of(entry), {**arrays, "log_probs": lp}, **clip)
        rewards = run(call_of(entry), arrays, **clip)
        now: dict[str, Any] = {"log_probs": lp, "old_log_probs": case.given("old_log_probs"), "mask": arrays["mask"]}
        return run(kljax.systems.get("verl/vanilla"), {**now, "advantages": rewards})

    compare.assert_loss(case, loss, compare.VERL["token-mean"])


@exercise(("trinity", "OnPolicyDistillAdvantage"), ("trinity", "JSDAdvantage"))
def advantages_from_a_teacher(entry: Entry, case: Case) -> None:
    temperature, mask = case.params.get("temperature", 1.0), case.given("mask")
    old, teacher = (case.given(name) / temperature for name in ("old_log_probs", "teacher_log_probs"))
    arrays = {"log_probs": old, "teacher_log_probs": teacher, "mask": mask, "advantages": jnp.zeros_like(old)}
    advantages = run(call_of(entry), arrays, **options(entry, case))
    for name in ("advantages", "returns"):
        case.assert_matches(advantages, jnp.where(mask, case.result(name), 0))


@exercise(("trinity", "ClipBAdvantageFn"), ("trinity", "ClipVAdvantageFn"))
def advantages_and_their_filter(entry: Entry, case: Case) -> None:
    """The advantages of the estimator, or the mask of tokens of the correction of the same name."""
    if entry.kind == "advantage":
        estimator(entry, case)
        return
    mask = case.given("mask")
    arrays = {name: case.given(name) for name in ("log_probs", "entropies")}
    arrays |= {"advantages": jnp.where(mask, case.result("advantages"), 0), "mask": mask}
    if "necs" in case.inputs:
        arrays["expected_scores"] = case.given("necs")
    case.assert_matches(run(call_of(entry), arrays, **options(entry, case)).astype(jnp.float64), case.result("kept"))


@exercise(("trinity", "DPOLossFn"))
def preferences(entry: Entry, case: Case) -> None:
    """Rows of the preferred answers joined into one sequence, and those of the rejected ones into another."""
    ref, mask = case.given("ref_log_probs"), case.given("mask")

    def loss(lp: jax.Array) -> jax.Array:
        names = {"log_probs": lp, "ref_log_probs": ref, "mask": mask}
        chosen = {name: x[0::2].reshape(-1) for name, x in names.items()}
        rejected = {f"rejected_{name}": x[1::2].reshape(-1) for name, x in names.items()}
        number = {name: value for name, value in options(entry, case).items() if name in ("coef", "label_smoothing")}
        return run(call_of(entry), chosen, **rejected, **number)

    case.assert_value_and_grad(loss, "log_probs")
