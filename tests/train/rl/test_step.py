"""The compiled functions of a step: split, donated, traced once, silent, and of the same numbers as each other."""

import contextlib
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kljax
from tests import rounding, tiny
from train.config.plan import Layout, Plan
from train.models.head import head
from train.models.sharding import batch_sharding
from train.rl.keys import purpose_key
from train.rl.metrics import single
from train.rl.objective import coefficients, make_objective
from train.rl.optimizer import make_optimizer
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.rl.reference import reference_head
from train.rl.state import policy_of
from train.rl.step import make_control, make_prepare, make_score, make_update, update_rows
from train.rl.terms import make_weighting
from train.rollouts.collect import collect
from train.sequences.batch import Batch

MODEL = tiny.model_of(tiny.config_of())
ALL_ROWS = np.arange(tiny.ROWS)


@functools.cache
def moved_reference() -> ScoredPolicy:
    """A reference some way off the policy."""
    return ScoredPolicy(MODEL, kljax.Policy(tiny.moved(tiny.host_params(), 0.05)))


TERMS = ("kl.loss.coef=0.3", "kl.rollout.coef=0.2", "loss.entropy_coef=0.05")
VALUE = ("advantage.type=gae", "loss.value_coef=0.5")


@functools.cache
def off_policy_batch() -> Batch:
    """A batch whose ratios differ from 1, so that clips are active; with rejected tokens, and weights of the others."""
    # Log-probs of 264 tokens are about -5.6.
    batch = tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), -5.6))
    drawn = np.random.default_rng(0).uniform(0.5, 1.5, batch.tokens.shape)
    selected = np.asarray(batch.completion_mask) & (drawn > 0.7)
    weights = jnp.asarray(np.where(selected, drawn, 0), jnp.float32)
    return dataclasses.replace(batch, kept_mask=jnp.asarray(selected), correction_weights=weights)


PARTS = {number: f"optim.micro_batches={number}" for number in (2, 4)}
ALONE = "optim.share_prompts=false"
REJECTING = "correction=[{type: rejection_mask, lower: 0.75, upper: 1.25}]"
OFF_POLICY = (*TERMS, *VALUE, REJECTING, "loss.aggregation=seq_mean_token_mean")


@pytest.mark.parametrize(
    ("settings", "in_x64", "tolerance"),
    [
        pytest.param([(ALONE,), (PARTS[4],)], True, 1e-12, id="float64"),
        pytest.param([(), (PARTS[2],), (PARTS[4],)], False, 1e-6, id="float32", marks=pytest.mark.thorough),
    ],
)
def test_micro_batches_and_shared_prompts_change_nothing(settings, in_x64, tolerance):
    results = []
    state, batch = tiny.state_of(tiny.config_of(*OFF_POLICY), tiny.keep_gradient()), off_policy_batch()
    with jax.enable_x64(in_x64):
        start, data = (tiny.wide(state), tiny.wide(batch)) if in_x64 else (state, batch)
        for options in settings:
            config = tiny.config_of(*OFF_POLICY, *options)
            assert Layout.of(config).group == (1 if ALONE in options else tiny.SAMPLES)
            update = make_update(Plan.of(config), tiny.model_of(config), tiny.keep_gradient(), start, tiny.mesh_of())
            after, metrics = update(tiny.copied(start), None, data, ALL_ROWS, coefficients(config))
            results.append(jax.device_get((after.opt_state, {name: m.value() for name, m in metrics.items()})))
    gradient, metrics = results[0]
    assert float(metrics["grad_norm"]) > 0.01
    assert 0 < float(metrics["clip_fraction"]) < 1
    if in_x64:
        chex.assert_tree_all_finite(gradient)
        assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {np.dtype(np.float64)}
    for other_gradient, other_metrics in results[1:]:
        chex.assert_trees_all_close(other_gradient, gradient, rtol=tolerance, atol=tolerance * metrics["grad_norm"])
        chex.assert_trees_all_close(other_metrics, metrics, rtol=tolerance, atol=tolerance)


def test_shared_prompts_reduce_the_tokens_of_the_model():
    flops = {}
    for options in ((), (ALONE,)):
        config = tiny.config_of(*OFF_POLICY, *options)
        batch = make_weighting(Plan.of(config))(off_policy_batch())
        trainable = tiny.state_of(config, tiny.keep_gradient()).trainable
        objective = jax.jit(make_objective(Plan.of(config), tiny.model_of(config)))
        flops[options] = objective.lower(trainable, None, batch, coefficients(config)).cost_analysis()["flops"]
    shared, alone = flops.values()
    # Of 9 columns, 5 are the prompt, which two rows share: 6.5 are left; the head's share of the work stays.
    assert shared < 0.9 * alone


LOOP = tiny.config_of(*TERMS, "optim.updates_per_batch=2", "optim.micro_batches=2", "optim.learning_rate=1e-2")


@pytest.fixture(scope="module")
def looped():
    """A state, a batch, and an update that the tests below share: it may be traced once in all of them."""
    # Many tests fill JAX's cache of programs, shared by all functions of the process: in a full one, 0.10.2 charges an
    # eviction to the function that comes in, and `_cache_size` of a compiled function stays 0.
    jax.clear_caches()
    exact_programs.cache_clear()
    optimizer, model = make_optimizer(LOOP.optim), tiny.model_of(LOOP)
    state = tiny.state_of(LOOP, optimizer)
    batch = jax.device_put(tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), -5.6)), batch_sharding(tiny.mesh_of()))
    return state, batch, make_update(Plan.of(LOOP), model, optimizer, state, tiny.mesh_of())


def test_step_donates_compiles_once_and_stays_on_device(looped):
    state, batch, update = tiny.copied(looped[0]), *looped[1:]
    rows = update_rows(LOOP, purpose_key(0, "rows", 0))
    coefs = coefficients(LOOP)
    losses, before = [], jax.tree.map(np.array, state.trainable)
    for step in range(3):
        old = jax.tree.leaves(state)
        placed_inputs = jax.device_put((rows[step % 2], coefs), jax.devices()[0])
        guard = jax.transfer_guard("disallow") if step else contextlib.nullcontext()
        with guard:  # the first call brings the constants of the program
            state, metrics = update(state, None, batch, *placed_inputs)
        assert all(leaf.is_deleted() for leaf in old if leaf.ndim), "the buffers of the old state are given away"
        losses.append(float(metrics["loss"].value()))
        # A coefficient is an argument: another value is the same program.
        coefs = {**coefs, "kl_loss": coefs["kl_loss"] + 1}
    assert update._cache_size() == 1
    assert len({round(loss, 6) for loss in losses}) == 3
    changed = jax.tree.map(lambda a, b: bool((a != np.asarray(b)).any()), before, state.trainable)
    assert all(jax.tree.leaves(changed)), "every weight was trained"
    text = update.lower(state, None, batch, *placed_inputs).as_text()
    assert not [name for name in ("callback", "infeed", "outfeed") if name in text]


def test_passed_coefficient_is_used(looped):
    state, batch, update = looped
    rows, coefs = update_rows(LOOP, purpose_key(0, "rows", 0))[0], coefficients(LOOP)

    def loss(kl: float) -> tuple[float, float]:
        placed_inputs = jax.device_put((rows, {**coefs, "kl_loss": jnp.float32(kl)}), jax.devices()[0])
        _, metrics = update(tiny.copied(state), None, batch, *placed_inputs)
        return float(metrics["loss"].value()), float(metrics["kl_loss"].value())

    (none, kl), (single, same) = loss(0.0), loss(1.0)
    assert kl == same > 0
    np.testing.assert_allclose(single - none, kl, rtol=1e-4)


EXACT = (
    *("kl.loss={coef: 0.3, estimator: exact}", "kl.reward={coef: 0.1, estimator: exact}", "reference.monitor=true"),
    *("kl.rollout.coef=0.2", "loss.entropy_coef=0.05", "temperature=0.7"),
)


@functools.cache
def exact_programs(config, shape):
    """First state, score, preparation and update with the exact KL, on a mesh of this shape."""
    mesh, model = tiny.mesh_of(*shape), tiny.model_of(config)
    state = tiny.state_of(config, tiny.keep_gradient(), mesh)
    update = make_update(Plan.of(config), model, tiny.keep_gradient(), state, mesh)
    return state, make_score(Plan.of(config), model, mesh), make_prepare(Plan.of(config), mesh), update


def exact_update(config, shape, reference):
    """Scored batch, gradient and metrics of one update with the exact KL, on a mesh of this shape."""
    mesh, model = tiny.mesh_of(*shape), tiny.model_of(config)
    with jax.set_mesh(mesh):
        first, score, prepare, update = exact_programs(config, shape)
        state = tiny.copied(first)
        placed_inputs = jax.tree.map(lambda x: x.sharding, state.trainable["params"])
        reference = ScoredPolicy(model, kljax.Policy(jax.tree.map(jax.device_put, reference, placed_inputs)))
        batch = jax.device_put(tiny.rollout_batch(), batch_sharding(mesh))
        batch = score(state.trainable, None, reference, batch)
        prepared, _, _ = prepare(batch, state.controllers)
        ref_head = reference_head(Plan.of(config), reference)
        after, metrics = update(state, None, prepared, ALL_ROWS, coefficients(config), ref_head=ref_head)
    return jax.device_get((batch, after.opt_state, {name: m.value() for name, m in metrics.items()}))


@pytest.fixture(scope="module")
def exact_once():
    return exact_update(tiny.config_of(*EXACT), (1, 1, 1), moved_reference().policy.params)


def test_exact_kl_is_scored_once_for_all_updates(exact_once):
    batch, _, metrics = exact_once
    mask = np.asarray(batch.completion_mask)
    assert batch.ref_hidden.shape == (tiny.ROWS, tiny.LENGTH, 16)
    assert (batch.ref_exact_kl[mask] > 0).all()
    assert not batch.ref_exact_kl[~mask].any()
    # Before the first update, the policy that is scored is the one that is updated.
    np.testing.assert_allclose(metrics["kl_reference_exact"], batch.ref_exact_kl[mask].mean(dtype=float), rtol=1e-5)
    np.testing.assert_allclose(metrics["kl_loss"], metrics["kl_reference_exact"], rtol=1e-6)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 2, 2), (PARTS[2],)),
        pytest.param((1, 1, 1), (PARTS[2],), marks=pytest.mark.thorough),
        pytest.param((2, 2, 2), (), marks=pytest.mark.thorough),
        pytest.param((8, 1, 1), (), marks=pytest.mark.thorough),
        pytest.param((1, 4, 2), (), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_mesh_and_micro_batches_leave_exact_kl_unchanged(exact_once, shape, options):
    batch, gradient, metrics = exact_update(tiny.config_of(*EXACT, *options), shape, moved_reference().policy.params)
    np.testing.assert_allclose(batch.ref_exact_kl, exact_once[0].ref_exact_kl, rtol=1e-4, atol=1e-7)
    # The exact KL is a sum over the vocabulary.
    vocabulary = tiny.model_of(tiny.config_of()).config.vocab_size
    bound = rounding.of_decoder(layers=tiny.LAYERS, longest_sum=vocabulary, passes=3)
    rounding.assert_close_by_norm(gradient, exact_once[1], roundings=bound)
    with pytest.raises(AssertionError):
        rounding.assert_close_by_norm(rounding.planted(gradient, roundings=10 * bound), exact_once[1], roundings=bound)
    chex.assert_trees_all_close(metrics, exact_once[2], rtol=1e-5, atol=1e-6)


STEERED = (
    *("loss.entropy_coef=0.01", "loss.entropy_controller={type: adaptive, target: 6.0, delta: 0.02}"),
    *("advantage.scale_by_mean=true", "advantage.balance=0.5", "loss.aggregation=seq_mean_token_mean"),
)


def steered_update(shape, *options):
    """Advantages, gradient and controllers of an update whose entropy bonus has the coefficient of its controller."""
    config, mesh = tiny.config_of(*STEERED, *options), tiny.mesh_of(*shape)
    plan = Plan.of(config)
    with jax.set_mesh(mesh):
        state, control = tiny.state_of(config, tiny.keep_gradient(), mesh), make_control(plan, mesh)
        batch = jax.device_put(tiny.full_batch(np.full((tiny.ROWS, tiny.LENGTH), -5.6)), batch_sharding(mesh))
        prepared, controllers, _ = make_prepare(plan, mesh)(batch, state.controllers)
        controllers = control(controllers, {"entropy": single(jnp.float32(5.5))}, batch.completion_mask)
        coefs = coefficients(config, controllers)
        update = make_update(plan, tiny.model_of(config), tiny.keep_gradient(), state, mesh)
        after, metrics = update(state, None, prepared, ALL_ROWS, coefs)
        controllers = control(controllers, {"entropy": metrics["entropy"]}, batch.completion_mask)
    return jax.device_get((prepared.advantages, after.opt_state, coefs["entropy"], controllers["entropy"]))


def test_mesh_and_micro_batches_leave_steered_terms_unchanged():
    advantages, gradient, coef, state = steered_update((1, 1, 1))
    assert coef == np.float32(0.03), "the bonus is on"
    assert state.coef == np.float32(0.03) + np.float32(0.02)
    other_advantages, other_gradient, other_coef, other_state = steered_update((2, 2, 2), PARTS[2])
    np.testing.assert_allclose(other_advantages, advantages, rtol=1e-6)
    bound = rounding.of_decoder(
        layers=tiny.LAYERS, longest_sum=tiny.model_of(tiny.config_of()).config.vocab_size, passes=3
    )
    rounding.assert_close_by_norm(other_gradient, gradient, roundings=bound)
    chex.assert_trees_all_equal((other_coef, other_state), (coef, state))


@pytest.mark.parametrize(("shape", "options"), [((1, 1, 1), ()), ((2, 2, 2), (PARTS[2],))], ids=str)
def test_unchanged_policy_has_ratio_1_and_no_kl(shape, options):
    batch, _, metrics = exact_update(tiny.config_of(*EXACT, *options), shape, tiny.host_params())
    # The two programs may differ in the last bit of a log-prob of about -5, which is 5e-7.
    assert abs(metrics["ppo_kl"]) <= 5e-7
    assert metrics["clip_fraction"] == 0
    assert metrics["kl_reference"] <= 1e-12
    assert metrics["kl_reference_exact"] < 1e-12
    assert batch.ref_exact_kl.max() < 1e-12
    assert metrics["entropy"] > 1, "means over tokens, not over none"
    mask = batch.completion_mask
    assert (batch.old_log_probs[mask] < 0).all()
    assert not batch.old_log_probs[~mask].any()


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_measured_exact_kl_equals_loss_without_gradient(exact_once, loss):
    """`ppo` is fused with the LM head; `gspo` reads whole completions."""
    reference = moved_reference().policy.params
    base = (f"loss={{type: {loss}}}", "kl.loss={coef: 0.3, estimator: k3}", "temperature=0.7")
    _, alone, plain = exact_update(tiny.config_of(*base), (1, 1, 1), reference)
    _, gradient, metrics = exact_update(tiny.config_of(*base, "reference.monitor=exact"), (1, 1, 1), reference)
    trained = exact_once[2]  # of the same policy: no loss has moved it yet
    np.testing.assert_allclose(metrics["kl_reference_exact"], trained["kl_reference_exact"], rtol=1e-6)
    assert metrics["kl_reference_exact"] > 0
    assert "kl_reference_exact" not in plain
    roundings = rounding.of_decoder(layers=tiny.LAYERS, longest_sum=256, passes=3)
    rounding.assert_close_by_norm(gradient, alone, roundings=roundings)


def model_applications(jaxpr: jax.extend.core.Jaxpr) -> int:
    """How often the scan over the layers of the model stands in a program."""
    actual = 0
    for equation in jaxpr.eqns:
        actual += equation.primitive.name == "scan" and equation.params["length"] == tiny.LAYERS
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            actual += model_applications(inner) if hasattr(inner, "eqns") else 0
    return actual


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("needed", [False, True])
def test_unneeded_scores_are_not_computed(needed, updates):
    """The log-probs of a reference without a term; those of a policy whose only update computes them itself."""
    config = tiny.config_of(f"kl.loss.coef={0.1 if needed else 0.0}", f"optim.updates_per_batch={updates}")
    score = make_score(Plan.of(config), tiny.model_of(config), tiny.mesh_of())
    reference = moved_reference() if needed else None
    arguments = ({"params": tiny.host_params()}, None, reference, tiny.rollout_batch())
    assert model_applications(jax.make_jaxpr(score)(*arguments).jaxpr) == needed + (updates > 1)
    shapes = jax.eval_shape(score, *arguments)
    assert (shapes.ref_log_probs is not None) == needed
    assert (shapes.old_log_probs is not None) == (updates > 1)
    assert shapes.values is None


SCORED = (*TERMS, *VALUE, "kl.reward.coef=0.1")


def scored(*options: str) -> Batch:
    """The tiny batch with everything that is scored."""
    config = tiny.config_of(*SCORED, *options)
    state = tiny.state_of(config, optax.identity())
    score = make_score(Plan.of(config), tiny.model_of(config), tiny.mesh_of())
    return jax.device_get(score(state.trainable, None, moved_reference(), tiny.rollout_batch()))


def test_scores_are_independent_of_chunks_and_shared_prompts():
    batch = scored("optim.updates_per_batch=2", PARTS[2])
    chex.assert_trees_all_close(scored(ALONE), batch, rtol=1e-5, atol=1e-6)
    mask = batch.completion_mask
    for name in ("old_log_probs", "ref_log_probs", "values"):
        field = getattr(batch, name)
        assert not field[~mask].any()
        assert field[mask].all()
    assert np.abs(batch.old_log_probs - batch.ref_log_probs).max() > 1e-3
    np.testing.assert_array_equal(batch.tokens, tiny.rollout_batch().tokens)


def test_completions_on_a_device_share_their_prompt():
    def shared(*options: str) -> int:
        base = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=6")
        return Layout.of(tiny.config_of(*base, *options)).group

    assert shared() == 6
    assert shared("optim.share_prompts=false") == 1
    assert shared("optim.micro_batches=4") == 6
    assert shared("optim.micro_batches=8") == 3
    assert shared("optim.micro_batches=2", "optim.updates_per_batch=2", "mesh.data=2") == 3
    assert shared("mesh.tensor=2", "model.kv_heads=2") == 6
    assert shared("optim.micro_batches=3") == 2
    assert shared("optim.micro_batches=24") == 1


@pytest.mark.parametrize(("updates", "together"), [(2, 2), (4, 2), (8, 1)])
def test_update_has_complete_prompts_where_possible(updates, together):
    config = tiny.config_of(f"optim.updates_per_batch={updates}", "optim.share_prompts=false")
    for part in update_rows(config, purpose_key(5, "rows", 7)):
        runs = np.asarray(part).reshape(-1, together)
        np.testing.assert_array_equal(runs, runs[:, :1] + np.arange(together))
        np.testing.assert_array_equal(runs // tiny.SAMPLES, runs[:, :1] // tiny.SAMPLES + np.zeros(together, int))


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_every_epoch_goes_once_over_all_rows(updates):
    config = tiny.config_of(f"optim.updates_per_batch={updates}", "optim.epochs=3")
    rows = [np.asarray(part) for part in update_rows(config, purpose_key(5, "rows", 7))]
    assert [len(part) for part in rows] == [tiny.ROWS // updates] * (3 * updates)
    epochs = [np.concatenate(rows[e * updates : (e + 1) * updates]) for e in range(3)]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(tiny.ROWS))
    if updates > 1:
        assert len({tuple(epoch.tolist()) for epoch in epochs}) == 3, "each epoch has its own order"


def test_the_rows_depend_on_seed_and_step_alone():
    config = tiny.config_of("optim.updates_per_batch=2")

    def rows(seed: int, step: int) -> list[list[int]]:
        return [part.tolist() for part in update_rows(config, purpose_key(seed, "rows", step))]

    assert rows(1, 2) == rows(1, 2)
    assert rows(1, 2) != rows(1, 3)
    assert rows(1, 2) != rows(2, 2)


def optimizer_of(*overrides: str) -> optax.GradientTransformation:
    """The optimizer of a config, its update compiled as one program."""
    optimizer = make_optimizer(tiny.config_of(*overrides).optim)
    return optax.GradientTransformation(jax.jit(optimizer.init), jax.jit(optimizer.update))


@pytest.mark.parametrize(("norm", "kept"), [(10.0, 2.0), (0.5, 0.5)])
def test_gradients_are_clipped_to_the_global_norm(norm, kept):
    optimizer = optimizer_of("optim.max_grad_norm=2.0", "optim.optimizer.b1=0.9")
    weights = {"a": jnp.zeros(4), "b": jnp.zeros((2, 2))}
    gradient = jax.tree.map(lambda x: x + norm / 8**0.5, weights)
    _, state = optimizer.update(gradient, optimizer.init(weights), weights)
    moments = next(
        part.mu for part in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")
    )
    np.testing.assert_allclose(optax.tree.norm(moments), 0.1 * kept, rtol=1e-5)


def test_learning_rate_warms_up_and_weights_decay():
    weights, gradient = {"w": jnp.full(3, 10.0)}, {"w": jnp.full(3, 0.1)}
    optimizer = optimizer_of("optim.learning_rate=0.3", "optim.warmup_steps=3", "optim.optimizer.weight_decay=0.01")
    state, sizes = optimizer.init(weights), []
    for _ in range(5):
        change, state = optimizer.update(gradient, state, weights)
        sizes.append(-float(change["w"][0]))
    # Adam turns a constant gradient into a step of 1; the decay adds 0.01 times the weight.
    np.testing.assert_allclose(sizes, np.array([0.075, 0.15, 0.225, 0.3, 0.3]) * (1 + 0.1), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("warmup", [0, 2])
def test_learning_rate_falls_to_a_tenth_and_stays(warmup):
    weights, gradient = {"w": jnp.full(3, 10.0)}, {"w": jnp.full(3, 0.1)}
    optimizer = optimizer_of(
        "optim.learning_rate=0.3", f"optim.warmup_steps={warmup}", "optim.schedule={type: linear, decay_steps: 3}"
    )
    state, sizes = optimizer.init(weights), []
    for _ in range(warmup + 6):
        change, state = optimizer.update(gradient, state, weights)
        sizes.append(-float(change["w"][0]))
    rise = [0.1, 0.2] if warmup else []
    np.testing.assert_allclose(sizes, [*rise, 0.3, 0.21, 0.12, 0.03, 0.03, 0.03], rtol=1e-4)


def test_first_update_without_warm_up_has_full_rate():
    weights = {"w": jnp.ones(2)}
    optimizer = optimizer_of("optim.learning_rate=0.3")
    change, _ = optimizer.update({"w": jnp.full(2, 0.1)}, optimizer.init(weights), weights)
    np.testing.assert_allclose(change["w"], -0.3, rtol=1e-5)


def test_kept_tokens_renormalise_every_policy():
    """Score, reference and update use the sampler's set; the ratio to the sampler is 1 on the first update."""
    options = ("kl.loss.coef=0.3", "kl.rollout.coef=0.2", "optim.updates_per_batch=2", "temperature=0.8")
    config = tiny.config_of(*options, "rollout.top_k=5", "rollout.top_p=0.7", "rollout.record_kept_tokens=true")
    context, state = tiny.context_of(config), tiny.state_of(config, tiny.keep_gradient())
    stream = tiny.stream_of(context)
    stream.update(policy_of(state.trainable, None), 0)
    batch = collect(context, stream, 0).batch
    mask = np.asarray(batch.completion_mask)
    assert ((np.asarray(batch.fields["kept_ids"])[mask] >= 0).sum(-1) > 1).any()
    scored = make_score(Plan.of(config), MODEL, tiny.mesh_of())(state.trainable, None, moved_reference(), batch)
    np.testing.assert_allclose(scored.old_log_probs, np.where(mask, batch.rollout_log_probs, 0), atol=2e-5)
    hidden = jax.jit(hidden_states)(
        ScoredPolicy(MODEL, moved_reference().policy), Sequences.rows(batch.tokens, batch.token_mask)
    )
    logits = np.asarray(hidden, np.float64) @ np.asarray(head(MODEL, moved_reference().policy.params), np.float64) / 0.8
    for row, column in zip(*np.nonzero(mask), strict=True):
        before, ids = logits[row, column - 1], np.asarray(batch.fields["kept_ids"][row, column])
        expected = before[batch.tokens[row, column]] - np.logaddexp.reduce(before[ids[ids >= 0]])
        np.testing.assert_allclose(scored.ref_log_probs[row, column], expected, atol=2e-5)
    prepared, _, _ = make_prepare(Plan.of(config), tiny.mesh_of())(scored, state.controllers)
    update = make_update(Plan.of(config), MODEL, tiny.keep_gradient(), state, tiny.mesh_of())
    _, metrics = update(state, None, prepared, ALL_ROWS[: tiny.ROWS // 2], coefficients(config))
    assert float(metrics["rollout_log_prob_error"].value()) < 2e-5
    assert abs(float(metrics["ppo_kl"].value())) < 1e-6
