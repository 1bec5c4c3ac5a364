"""Distillation in TRL and verl, over the vocabulary, over its top tokens and of sampled tokens: value and gradient.

`test_systems` compares the same values and gradients with the calls of the table; here the arguments are written out.
"""

import jax
import jax.numpy as jnp
import pytest

import kljax
from tests.goldens import cases, compare
from tests.goldens.cases import GENERATED

pytestmark = pytest.mark.thorough


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


@cases.parametrize(("verl", "compute_forward_kl_topk"), file=GENERATED)
def test_forward_kl_over_the_tokens_of_the_teacher(case: cases.Case) -> None:
    everything, bound = jnp.ones(case.given("logits").shape[:-1], bool), case.params["log_prob_min_clamp"]

    def loss(logits: jax.Array) -> jax.Array:
        student, teacher = both(case, logits)
        top, indices = jax.lax.top_k(teacher, case.params["topk"])
        picked = jnp.take_along_axis(student, indices, axis=-1)
        return kljax.top_k_forward_kl(picked, top, everything, min_log_prob=bound)

    case.assert_value_and_grad(loss, "logits")
    case.assert_outputs()


@cases.parametrize(("verl", "distillation_loss"), file=GENERATED)
def test_distillation_of_sampled_tokens(case: cases.Case) -> None:
    log_probs, teacher, mask = (case.given(name) for name in ("log_probs", "teacher_log_probs", "mask"))
    names = {"kl": "k1", "k1": "k1", "k2": "k2", "k3": "low_var_kl"}
    options = {"estimator": names[case.params["loss_mode"]], **compare.renamed(case, value_clip="loss_max_clamp")}
    if case.params["use_policy_gradient"]:
        rest = case.given("old_log_probs"), kljax.distillation_rewards(log_probs, teacher, mask, **options), mask

        def loss(lp: jax.Array) -> jax.Array:
            return kljax.ppo_clip_loss(lp, *rest, dual_clip=3.0, log_ratio_clip=20.0)

    else:

        def loss(lp: jax.Array) -> jax.Array:
            # The library has no loss with the value and the gradient of k1, which leads nowhere; verl does.
            estimate = kljax.estimate_kl if options["estimator"] == "k1" else kljax.distillation_loss
            return estimate(lp, teacher, mask, **options, gradient="value")

    compare.assert_loss(case, loss, compare.VERL["token-mean"])
    case.assert_outputs()
