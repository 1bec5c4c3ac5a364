"""Training in bfloat16: what is computed in it, what stays float32, and what its rounding does to a gradient.

Once with weights held in float32, once with an adapter on a base held in bfloat16.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.plan import Plan
from train.rl.objective import coefficients, make_objective
from train.rl.optimizer import make_optimizer
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.rl.state import policy_of
from train.rl.step import make_prepare, make_score, make_update
from train.rl.terms import make_token_weights
from train.run.setup import first_state

pytestmark = pytest.mark.slow
# Every term of the loss. No clip is near: at one, rounding moves a whole token from one side to the other.
COMMON = (
    "model={layers: 2, width: 32, heads: 4, kv_heads: 2, head_dim: 8, mlp_width: 48, tie_embeddings: false}",
    "warm_start.steps=0",
    "kl.loss={coef: 0.3, estimator: k3, gradient: k2}",
    "kl.rollout.coef=0.2",
    "loss.entropy_coef=0.05",
    "reference.monitor=true",
    "optim={updates_per_batch: 2, micro_batches: 2, learning_rate: 1e-5, max_grad_norm: 1e9, optimizer: {b2: 0.99}}",
)
CASES = {
    "full": COMMON,
    "lora": (
        *COMMON,
        "lora={rank: 4, targets: [q_proj, o_proj, down_proj]}",
        "model.param_dtype=bfloat16",
    ),
}
UPDATED = np.arange(tiny.ROWS // 2)
HALF_ULP = 2.0**-9  # what rounding to the 8 digits of bfloat16 changes at most, relatively
# Of a layer, in the forward pass: 7 products round their weights and their results; besides them two norms (two each),
# two rotations, the weights of the attention and what it gives, the activation, the gate and two sums round once. The
# backward pass rounds the slope of each of these, as it is made and as it is used with a weight.
PRODUCTS = 7
ROUNDINGS = 2 * (2 * PRODUCTS + 2 * 2 + 2 + 2 + 1 + 1 + 2)


def config_of(case, dtype="bfloat16", *more):
    return tiny.config_of(*CASES[case], f"model.dtype={dtype}", *more)


def weights_of(config):
    """Base weights as the config holds them; the residual stream is of size 1, as it is after training."""
    params = tiny.drawn(tiny.model_of(config), jax.random.key(0))
    table = params["embed_tokens"]["embedding"]
    return {**params, "embed_tokens": {"embedding": table * jnp.asarray(50, table.dtype)}}


def trainable_of(config, base):
    """A new adapter, or the weights, in buffers that may be given away."""
    state = first_state(Plan.of(config), tiny.model_of(config), tiny.mesh_of(), base, make_optimizer(config.optim))
    return tiny.copied(state)


def nudged(tree, by, seed=1):
    """Every weight of a tree some way off, relatively, and in the type that it is held in."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (x + by * rng.normal(size=x.shape)).astype(x.dtype), tree)


@dataclasses.dataclass(frozen=True)
class UpdateRecord:
    """The inputs and results of an update on the first rows."""

    scored: object
    prepared: object
    before: object
    after: object
    metrics: dict


@pytest.fixture(scope="module", params=[pytest.param("full", marks=pytest.mark.thorough), "lora"])
def case(request):
    return request.param


@pytest.fixture(scope="module")
def steps(case):
    """An update of an unchanged policy, and one of a policy that has moved from its reference, by the same programs."""
    config, mesh = config_of(case), tiny.mesh_of()
    model, base = tiny.model_of(config), weights_of(config)
    under = base if config.lora else None
    score, prepare = make_score(Plan.of(config), model, mesh), make_prepare(Plan.of(config), mesh)
    update = make_update(Plan.of(config), model, make_optimizer(config.optim), trainable_of(config, base), mesh)

    def step(by):
        state, before = trainable_of(config, base), trainable_of(config, base)
        if by:
            moved = nudged(state.trainable, by)
            state, before = (dataclasses.replace(x, trainable=tiny.copied(moved)) for x in (state, before))
        reference = ScoredPolicy(model, kljax.Policy(None if config.lora else base))
        scored = score(state.trainable, under, reference, tiny.rollout_batch())
        prepared, _, _ = prepare(scored, state.controllers)
        after, metrics = update(state, under, prepared, UPDATED, coefficients(config))
        return UpdateRecord(scored, prepared, before, after, metrics)

    return {"unchanged": step(0), "moved": step(0.02)}


def floats(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def types(tree):
    return {str(leaf.dtype) for leaf in floats(tree)}


def test_parameters_are_float32_except_a_frozen_base(case, steps):
    step, config = steps["moved"], config_of(case)
    assert types(weights_of(config)) == {config.model.param_dtype}
    assert types((step.after.trainable, step.after.opt_state, step.metrics)) == {"float32"}
    fields = ("old_log_probs", "ref_log_probs", "advantages")
    assert types([getattr(step.prepared, name) for name in fields]) == {"float32"}


def test_statistics_are_not_rounded(case, steps):
    """Against float64, from the hidden states in bfloat16 that the decoder gives."""
    config, step = config_of(case), steps["moved"]
    batch, mask = step.prepared, np.asarray(step.prepared.completion_mask)
    weights = make_token_weights(Plan.of(config))(batch)
    assert weights.dtype == jnp.float32
    assert abs(np.asarray(weights, np.float64).sum() - 1) < 1e-6, "20 times 1/20, which bfloat16 does not hold"
    policy = policy_of(step.before.trainable, weights_of(config))
    scored = ScoredPolicy(tiny.model_of(config), policy)
    hidden = jax.jit(hidden_states)(scored, Sequences.rows(batch.tokens, batch.token_mask))
    assert hidden.dtype == jnp.bfloat16
    logits = np.asarray(hidden, np.float64)[:, :-1] @ np.asarray(policy.params["lm_head"]["kernel"], np.float64)
    exact = np.pad(logits - np.log(np.exp(logits).sum(-1, keepdims=True)), ((0, 0), (1, 0), (0, 0)))
    chosen = np.take_along_axis(exact, np.asarray(batch.tokens)[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.asarray(batch.old_log_probs)[mask], chosen[mask], rtol=2e-6)
    first = len(UPDATED)
    entropy = -(np.exp(exact) * exact).sum(-1)[:first][mask[:first]].mean()
    np.testing.assert_allclose(float(step.metrics["entropy"].value()), entropy, rtol=2e-6)


def test_metrics_are_sums_in_float32(steps):
    """Metrics of the first update, whose log-probs are the ones that were scored."""
    step = steps["moved"]
    batch = jax.tree.map(lambda x: np.asarray(x, np.float64)[: len(UPDATED)], step.prepared)
    mask = batch.completion_mask > 0
    change = (batch.ref_log_probs - batch.old_log_probs)[mask]
    rollout = (batch.old_log_probs - batch.rollout_log_probs)[mask]
    expected = {
        "kl_reference": np.mean(np.expm1(change) - change),
        "policy_loss": -np.mean(batch.advantages[mask]),
        "rollout_kl_loss": np.mean(rollout**2 / 2),
        "rollout_log_prob_error": np.abs(rollout).max(),
    }
    assert expected["kl_reference"] > 1e-5
    actual = {name: float(step.metrics[name].value()) for name in expected}
    # The change of a log-prob of 6 is known to half a unit in its last place, 2.4e-7, twice.
    slack = 5e-7 * np.abs(change).mean() / expected["kl_reference"]
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5 + (slack if name == "kl_reference" else 0))
    assert float(step.metrics["ppo_kl"].weight) == mask.sum()


def test_update_moves_weights_below_bfloat16_resolution(case, steps):
    config, step = config_of(case), steps["moved"]
    moments = next(part for part in step.after.opt_state[1] if hasattr(part, "mu"))
    smaller = total = 0
    trees = (step.before.trainable, step.after.trainable, moments.mu, moments.nu)
    for leaves in zip(*map(jax.tree.leaves, trees), strict=True):
        before, after, mean, square = (np.asarray(leaf, np.float64) for leaf in leaves)
        gradient = mean / (1 - config.optim.optimizer.b1)
        np.testing.assert_allclose(square, (1 - config.optim.optimizer.b2) * gradient**2, rtol=1e-5, atol=1e-30)
        # Adam's first step has the size of the learning rate wherever there is a gradient.
        felt = np.abs(gradient) > 1e3 * config.optim.optimizer.eps
        np.testing.assert_allclose(
            (before - after)[felt], config.optim.learning_rate * np.sign(gradient[felt]), rtol=2e-2
        )
        smaller += np.sum(np.abs(before - after)[felt] < HALF_ULP / 2 * np.abs(before[felt]))
        total += felt.sum()
    assert total > 1000
    assert smaller > total / 2, "weights in bfloat16 would have stayed where they are"


def test_an_unchanged_policy_is_exactly_its_base(steps):
    """Hidden states are the same bits in both programs, as the sums before they are rounded are nearly the same."""
    step = steps["unchanged"]
    mask = np.asarray(step.prepared.completion_mask)
    assert (np.asarray(step.prepared.old_log_probs)[mask] < 0).all()
    np.testing.assert_array_equal(step.prepared.old_log_probs, step.prepared.ref_log_probs)
    names = ["ppo_kl", "kl_reference", "kl_loss", "clip_fraction"]
    assert {name: float(step.metrics[name].value()) for name in names} == dict.fromkeys(names, 0)
    assert float(steps["moved"].metrics["ppo_kl"].value()) == 0
    assert float(steps["moved"].metrics["kl_reference"].value()) > 0


def gradient_of(config):
    """`(trainable, base) -> gradient` of the loss, compiled, on a batch in which no clip is near."""
    objective = make_objective(Plan.of(config), tiny.model_of(config))
    batch = tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), -6.0))
    # Without old log-probs they are the loss's own, and every ratio is 1.
    batch = dataclasses.replace(batch, old_log_probs=None, token_weights=make_token_weights(Plan.of(config))(batch))
    return jax.jit(jax.grad(lambda trainable, base: objective(trainable, base, batch, coefficients(config), None)[0]))


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)])


def test_gradient_is_within_rounding_of_float32(case):
    """The effect of one rounding of every weight is measured in float32; the other roundings are as large.

    `ROUNDINGS` of them, which are independent, add up to the square root of `ROUNDINGS / PRODUCTS` times that.
    """
    grads, configs = {}, {dtype: config_of(case, dtype) for dtype in ("float32", "bfloat16")}
    base = weights_of(configs["bfloat16"])
    trainable = trainable_of(configs["bfloat16"], base).trainable
    if case == "lora":
        trainable = nudged(trainable, 0.1)
    # Held in float32, the numbers of the base are the same.
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), base)
    for dtype, config in configs.items():
        gradient = gradient_of(config)
        grads[dtype] = gradient(trainable, base if dtype == "bfloat16" else wide)
        assert types(grads[dtype]) == {"float32"}
        if dtype == "float32":
            exact = flat(grads[dtype])
            rounded = [flat(gradient(*rough((trainable, wide), seed))) for seed in range(4)]
    once = max(np.linalg.norm(item - exact) for item in rounded) / np.linalg.norm(exact)
    actual = flat(grads["bfloat16"])
    error = np.linalg.norm(actual - exact) / np.linalg.norm(exact)
    cosine = actual @ exact / np.linalg.norm(actual) / np.linalg.norm(exact)
    assert HALF_ULP / 4 < error < (ROUNDINGS / PRODUCTS) ** 0.5 * once < 0.05
    # No vector that is as near has a larger angle.
    assert cosine > (1 - error**2) ** 0.5
    assert abs(np.linalg.norm(actual) / np.linalg.norm(exact) - 1) < 2 * HALF_ULP + once


def rough(tree, seed):
    """Every weight changed by as much as rounding it to bfloat16 does at most."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x * (1 + HALF_ULP * rng.uniform(-1, 1, x.shape).astype(np.float32)), tree)
