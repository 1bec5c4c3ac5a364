"""TRL's divergences between a student and a teacher over the vocabulary: value and gradient to the logits."""

import jax
import jax.numpy as jnp

import kljax
from tests.goldens import cases, compare
from tests.goldens.cases import GENERATED


def both(case: cases.Case, logits: jax.Array, temperature: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Log-probs of the student and of the teacher over the vocabulary."""
    pair = logits, case.given("teacher_logits")
    student, teacher = (jax.nn.log_softmax(each / temperature, axis=-1) for each in pair)
    return student, teacher


@cases.parametrize(("trl", "generalized_jsd_loss"), file=GENERATED)
def test_generalized_jsd(case: cases.Case) -> None:
    mask, params = case.given("mask"), case.params

    def loss(logits: jax.Array) -> jax.Array:
        divergence = kljax.generalized_jsd(*both(case, logits, params["temperature"]), mask, beta=params["beta"])
        return compare.reduced(divergence, mask, compare.TOKEN_MEAN)

    case.assert_value_and_grad(loss, "logits")
    case.assert_outputs()


@cases.parametrize(("trl", "compute_divergence"), file=GENERATED)
def test_divergence_per_token(case: cases.Case) -> None:
    everything = jnp.ones(case.given("logits").shape[:-1], bool)
    alpha = case.params["alpha"]
    case.assert_value_and_grad(lambda x: kljax.generalized_jsd(*both(case, x), everything, beta=alpha), "logits")
    case.assert_outputs()


@cases.parametrize(("trl", "compute_topk_self_distillation_loss"), file=GENERATED)
def test_divergence_of_the_top_tokens(case: cases.Case) -> None:
    params, everything = case.params, jnp.ones(case.given("logits").shape[:-1], bool)

    def loss(logits: jax.Array) -> jax.Array:
        _, indices = jax.lax.top_k(logits, params["distillation_topk"])
        pair = both(case, logits)
        if params["distillation_add_tail"]:
            student, teacher = (kljax.top_k_with_tail(each, indices) for each in pair)
        else:
            picked = (jnp.take_along_axis(each, indices, axis=-1) for each in pair)
            student, teacher = (jax.nn.log_softmax(each, axis=-1) for each in picked)
        return kljax.generalized_jsd(student, teacher, everything, beta=params["distillation_alpha"])

    case.assert_value_and_grad(loss, "logits")
    case.assert_outputs()


@cases.parametrize(("trl", "add_tail_bucket"), file=GENERATED)
def test_tail(case: cases.Case) -> None:
    def tail(logits: jax.Array) -> jax.Array:
        return kljax.append_tail(jax.nn.log_softmax(logits, axis=-1)[..., : case.params["first"]])[..., -1]

    case.assert_value_and_grad(tail, "logits")
    case.assert_outputs()


@cases.parametrize(("trl", "apply_importance_sampling_clipping"), file=GENERATED)
def test_loss_under_a_truncated_weight(case: cases.Case) -> None:
    log_probs, old = case.given("log_probs"), case.given("old_log_probs")
    everything = jnp.ones(log_probs.shape, bool)
    bound = {"upper": case.params["clip_coeff"], "log_ratio_clip": 20.0}
    weights = kljax.importance_weights(log_probs, old, everything, **bound)
    case.assert_value_and_grad(lambda loss: weights * loss, "advantages")
    case.assert_outputs()
