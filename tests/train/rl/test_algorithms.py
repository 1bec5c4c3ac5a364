"""The functions that a config selects: what they are given, what they measure, and how coefficients and rates move."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kljax
from tests import tiny
from train.config.algorithms import ADVANTAGES, LOSSES, OPTIMIZERS
from train.config.optim import DEFAULT_SCHEDULE
from train.config.plan import Plan
from train.rl.algorithms import make_controllers, make_estimator, make_policy_loss
from train.rl.loss_metrics import make_measure
from train.rl.metrics import Metrics
from train.rl.objective import coefficients
from train.rl.optimizer import learning_rate, make_optimizer, next_learning_rate
from train.rl.preparation import make_control, make_preparation
from train.sequences.batch import Batch

LOG_PROBS = np.random.default_rng(3).uniform(-3, -0.1, (tiny.ROWS, tiny.LENGTH)).astype(np.float32)
REQUIRED = {"dro": ["loss.coef=0.5"]}
KEY = jax.random.key(7)
EPISODES = "environment={name: 'train.data.environments.calculator:Calculator', max_turns: 3}"
ENTROPY = "loss.entropy_controller={{type: adaptive, {}}}"


def batch_of() -> Batch:
    return dataclasses.replace(tiny.full_batch(LOG_PROBS), sum_squared_probs=jnp.full(LOG_PROBS.shape, 0.3))


def turns_of() -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, jax.Array]]:
    """Scores of three turns of each row, which of them there are, and the turn of each token; and both as fields."""
    rng = np.random.default_rng(5)
    scored = rng.random((tiny.ROWS, 3)) < 0.7
    scores = np.where(scored, rng.normal(size=scored.shape), 0).astype(np.float32)
    # Ids are -1 on observations and padding; a score is on the last token of its turn.
    turn_ids = np.sort(rng.integers(0, 3, (tiny.ROWS, tiny.LENGTH)), -1)
    on_tokens = np.full(turn_ids.shape, -np.inf, np.float32)
    for row in range(tiny.ROWS):
        for turn in np.flatnonzero(scored[row]):
            tokens = np.flatnonzero(turn_ids[row] == turn)
            scored[row, turn] = len(tokens) > 0
            on_tokens[row, tokens[-1:]] = scores[row, turn]
    scores = np.where(scored, scores, 0)
    return scores, scored, turn_ids, {"turn_ids": jnp.asarray(turn_ids, jnp.int32), "turn_scores": on_tokens}


def stats_of() -> kljax.TokenStats:
    return SimpleNamespace(log_prob=jnp.asarray(LOG_PROBS), entropy=jnp.ones(LOG_PROBS.shape), kl=None)


def loss_of(config, batch: Batch) -> jax.Array:
    return make_policy_loss(Plan.of(config))(stats_of(), batch, KEY)


def measured(config, batch: Batch) -> Metrics:
    return make_measure(Plan.of(config), 256)(stats_of(), batch, batch, KEY)


def assert_same(ours: Callable[[], Any], expected: Callable[[], Any]) -> None:
    """Compares two computations in one program."""
    chex.assert_trees_all_equal(*jax.jit(lambda: (ours(), expected()))())


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_gets_the_arrays_in_its_signature(name: str) -> None:
    config, batch = tiny.config_of(f"loss={name}", *REQUIRED.get(name, [])), batch_of()
    function = getattr(kljax, LOSSES[name].function.rpartition(":")[2])
    arrays = {
        "gpg": (LOG_PROBS, batch.advantages, batch.completion_mask),
        "reinforce": (LOG_PROBS, batch.advantages, batch.completion_mask),
        "opmd": (LOG_PROBS, batch.advantages, batch.completion_mask),
        "cross_entropy": (LOG_PROBS, batch.completion_mask),
        "clip_cov": (LOG_PROBS, batch.old_log_probs, batch.advantages, batch.completion_mask, KEY),
        "a2po": (LOG_PROBS, batch.ref_log_probs, batch.advantages, batch.completion_mask),
        "gvpo": (LOG_PROBS, batch.old_log_probs, batch.advantages, batch.completion_mask, batch.group_ids),
        "flowrl": (*(LOG_PROBS, batch.old_log_probs, batch.ref_log_probs, batch.advantages, batch.completion_mask),),
    }.get(name, (LOG_PROBS, batch.old_log_probs, batch.advantages, batch.completion_mask))
    options = {"dro": {"coef": 0.5}, "gvpo": {"num_groups": 4}}.get(name, {})
    options |= {"group_ids": batch.group_ids, "num_groups": 4} if name == "flowrl" else {}
    assert_same(lambda: loss_of(config, batch), lambda: function(*arrays, **options))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_estimator_gets_the_arrays_in_its_signature(name: str) -> None:
    more = {"gae": ["loss.value_coef=0.5"], "turn_credit": [EPISODES]}.get(name, [])
    config = tiny.config_of(f"advantage={name}", *more)
    scores, scored, turn_ids, fields = turns_of()
    batch = dataclasses.replace(batch_of(), fields=fields)
    mask, groups = batch.completion_mask, batch.group_ids
    token_rewards = kljax.place_rewards(batch.rewards, mask)
    function, count = getattr(kljax, ADVANTAGES[name].rpartition(":")[2]), {"num_groups": 4}
    expected = {
        "gae": lambda: function(token_rewards, batch.values, mask)[0],
        "reinforce_plus_plus": lambda: function(token_rewards, mask),
        "opo": lambda: kljax.broadcast_to_tokens(function(batch.rewards, groups, mask, **count), mask),
        "otb": lambda: function(token_rewards, batch.old_log_probs, batch.sum_squared_probs, mask, groups, **count)[0],
        "iw_opd": lambda: function(batch.old_log_probs, batch.ref_log_probs, mask),
        "topd": lambda: function(batch.old_log_probs, batch.ref_log_probs, mask, groups, **count),
        "jsd": lambda: function(batch.old_log_probs, batch.ref_log_probs, mask),
        "turn_credit": lambda: function(batch.rewards, scores, scored, turn_ids, mask, group_ids=groups, **count),
    }.get(name, lambda: kljax.broadcast_to_tokens(function(batch.rewards, groups, **count), mask))
    assert_same(lambda: make_estimator(Plan.of(config))(batch)[0], expected)
    returns = jax.eval_shape(lambda: make_estimator(Plan.of(config))(batch)[1])
    assert (returns is not None) == (name == "gae")


@pytest.mark.parametrize("shaped", [False, True], ids=["rewards", "kl in the reward"])
def test_estimators_of_tokens_get_rewards_where_they_were_given(shaped: bool) -> None:
    config = tiny.config_of(
        "advantage={type: reinforce_plus_plus, gamma: 0.5, discount_per: turn}",
        *(["kl.reward.coef=0.1"] if shaped else []),
    )
    batch = batch_of()
    mask = np.asarray(batch.completion_mask)
    parts = np.random.default_rng(3).normal(size=mask.shape)
    batch = dataclasses.replace(batch, fields={**batch.fields, "token_rewards": jnp.asarray(parts)})
    given = np.where(mask, parts, 0)
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    rows = np.flatnonzero(mask.any(1))
    given[rows, last[rows]] += (np.asarray(batch.rewards) - given.sum(1))[rows]
    prepared = make_preparation(Plan.of(config))
    states = {name: controller.init() for name, controller in make_controllers(Plan.of(config)).items()}
    if shaped:
        estimate = {"estimator": config.kl.reward.estimator, "coef": 0.1, "value_clip": config.kl.reward.value_clip}
        given, _ = kljax.kl_shaped_rewards(given, batch.old_log_probs, batch.ref_log_probs, mask, **estimate)
    expected = kljax.reinforce_plus_plus_returns(given, mask, gamma=0.5, discount_per="turn")
    np.testing.assert_allclose(prepared(batch, states)[0].advantages, expected, 1e-5, 1e-6)


def test_user_functions_are_called_by_parameter_names(tmp_path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "import jax.numpy as jnp\n"
        "def loss(mask, log_probs, rollout_log_probs, *, power: float, entropies):\n"
        "    return jnp.where(mask, power * (log_probs - rollout_log_probs) - entropies, 0)\n"
        "def estimate(rewards, token_rewards, *, num_groups, scale: float = 3.0):\n"
        "    return scale * rewards + num_groups + 0 * token_rewards.sum(-1)\n"
    )
    user_functions = f"{{type: '{path}:loss', power: 2}}", f"{{type: '{path}:estimate'}}"
    config, batch = tiny.config_of(f"loss={user_functions[0]}", f"advantage={user_functions[1]}"), batch_of()
    expected = np.where(batch.completion_mask, 2 * (LOG_PROBS - batch.rollout_log_probs) - 1, 0)
    np.testing.assert_allclose(jax.jit(lambda: loss_of(config, batch))(), expected, rtol=1e-6)
    plan = Plan.of(config)
    assert (plan.rollout_log_probs, plan.entropies, plan.advantage) == (True, True, None)
    config = tiny.config_of(f"advantage={user_functions[1]}")
    mask = batch.completion_mask
    shaped = jnp.where(mask, batch.advantages, 0)
    advantages = jax.jit(lambda: make_estimator(Plan.of(config))(batch, shaped)[0])()
    rows = 3 * np.asarray(shaped).sum(-1) + 4
    np.testing.assert_allclose(advantages, np.where(mask, rows[:, None], 0), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "level"),
    [
        ("ppo", "token"),
        ("{type: ppo, level: sequence}", "sequence"),
        ("{type: ppo, level: average}", None),
        ("{type: cispo, clip_low: 0.2, clip_high: 0.2}", "token"),
        ("trl/cispo", None),
        ("{type: gspo, clip_low: 0.2, clip_high: 0.2}", "geometric"),
        ("clip_cov", "token"),
        ("gmpo", None),
        ("dppo", None),
        ("rec", None),
        ("sapo", None),
        ("reinforce", None),
    ],
)
def test_clip_fraction_is_measured_on_the_clipped_ratio(loss: str, level: str | None) -> None:
    config, batch = tiny.config_of(f"loss={loss}"), batch_of()
    if level is None:
        assert "clip_fraction" not in measured(config, batch)
        return
    arrays = (LOG_PROBS, batch.old_log_probs, batch.advantages, batch.completion_mask)
    assert_same(
        lambda: measured(config, batch)["clip_fraction"],
        lambda: kljax.clip_fraction(*arrays, level=level),
    )


PI = "{type: pi, target: 0.1, kp: 0.2, ki: 0.1}"


def test_a_controller_steers_the_kl_of_its_placement() -> None:
    options = [f"kl.{name}={{coef: 0.3, controller: {PI}}}" for name in ("reward", "loss", "advantage")]
    config, batch = tiny.config_of(*options), batch_of()
    controllers = make_controllers(Plan.of(config))
    assert list(controllers) == ["reward", "loss", "advantage"]
    states = {name: controller.init() for name, controller in controllers.items()}
    _, after, metrics = jax.jit(make_preparation(Plan.of(config)))(batch, states)
    for name in ("reward", "advantage"):
        error = np.clip(float(metrics[f"kl_{name}"].value()) / 0.1 - 1, -1, 1)
        # Three roundings of numbers up to 0.3; at an error of -1 they are all that is left.
        np.testing.assert_allclose(after[name].coef, max(0.3 + 0.3 * error, 0), rtol=1e-5, atol=3 * 0.3 * 2**-24)
        assert abs(error) > 0.01
    assert float(metrics["kl_advantage_coef"].value()) == np.float32(0.3)
    assert float(after["loss"].coef) == np.float32(0.3), "the loss is measured in the updates"
    kl = kljax.WeightedSum(jnp.float32(3.0), jnp.float32(10.0))
    after = jax.jit(make_control(Plan.of(config)))(after, {"loss": kl}, batch.completion_mask)
    np.testing.assert_allclose(after["loss"].coef, 0.3 + 0.2 * 1 + 0.1 * 1, rtol=1e-6)
    assert coefficients(config, after)["kl_loss"] is after["loss"].coef
    assert float(coefficients(config)["kl_loss"]) == np.float32(0.3)


def test_the_entropy_coefficient_moves_in_steps() -> None:
    """The state of its controller is that of the library, and the term has the coefficient of the state."""
    options = {"target": 0.5, "delta": 0.02, "min_coef": 0.01, "max_coef": 0.06}
    fields = ", ".join(f"{name}: {value}" for name, value in options.items())
    config, mask = tiny.config_of("loss.entropy_coef=0.03", ENTROPY.format(fields)), batch_of().completion_mask
    plan, controller = Plan.of(config), kljax.adaptive_entropy(0.03, **options)
    assert (plan.controllers, plan.steered, plan.entropies) == (("entropy",), ("entropy",), True)
    states, expected = {name: x.init() for name, x in make_controllers(plan).items()}, controller.init()
    control, coefs = jax.jit(make_control(plan)), []
    for entropy in (0.4, 0.5, 0.9, 0.1):
        coefs.append(float(coefficients(config, states)["entropy"]))
        states = control(states, {"entropy": kljax.WeightedSum(jnp.float32(entropy * 4), jnp.float32(4))}, mask)
        expected = controller.update(expected, entropy, len(mask))
        chex.assert_trees_all_close(states["entropy"], expected, rtol=1e-6)
    np.testing.assert_allclose(coefs, [0, 0.05, 0.06, 0], rtol=1e-6)
    assert Plan.of(tiny.config_of(ENTROPY.format("target: 1.0, delta: 0.1"))).entropies, "it can leave 0"
    fixed = Plan.of(tiny.config_of("loss.entropy_coef=0.03"))
    assert (fixed.controllers, fixed.steered, fixed.entropies) == ((), (), True)


def test_a_scheduled_coefficient_follows_its_schedule() -> None:
    schedule = "{type: linear, end_value: 0.5, transition_steps: 4}"
    config = tiny.config_of(f"kl.loss={{controller: {{type: scheduled, schedule: {schedule}}}}}")
    (controller,) = make_controllers(Plan.of(config)).values()
    state, coefs = controller.init(), []
    for _ in range(6):
        coefs.append(float(state.coef))
        state = controller.update(state, 1.0, 8)
    np.testing.assert_allclose(coefs, [0, 0.125, 0.25, 0.375, 0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1]),
        ("{type: linear, decay_steps: 4, end: 0.0}", [0.5, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("{type: cosine, decay_steps: 2, end: 0.2}", [0.5, 1, 0.6, 0.2, 0.2, 0.2, 0.2]),
        ("{type: wsd, stable_steps: 2, decay_steps: 2, end: 0.1}", [0.5, 1, 1, 1, 0.55, 0.1, 0.1]),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, expected: list[float]) -> None:
    config = tiny.config_of("optim.learning_rate=1.0", "optim.warmup_steps=1", f"optim.schedule={schedule}")
    rate = learning_rate(config.optim)
    np.testing.assert_allclose([float(rate(count)) for count in range(7)], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("schedule", ["constant", "{type: linear, decay_steps: 4, end: 0.0}"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_next_learning_rate_follows_the_applied_updates(name: str, schedule: str) -> None:
    """Whatever parts of the weights the optimizer counts apart."""
    section = tiny.config_of(f"optim.optimizer={name}", "optim.warmup_steps=1", f"optim.schedule={schedule}").optim
    weights, optimizer = {"layers": jnp.ones((2, 3, 4)), "norm": jnp.ones((2, 3))}, make_optimizer(section)
    state, rate = optimizer.init(weights), learning_rate(section)
    for count in range(4):
        assert float(next_learning_rate(section, state)) == np.float32(rate(count))
        _, state = optimizer.update(weights, state, weights)
    constant = section.model_copy(update={"warmup_steps": 0, "schedule": DEFAULT_SCHEDULE})
    assert float(next_learning_rate(constant, make_optimizer(constant).init(weights))) == np.float32(
        section.learning_rate
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_is_optax_behind_the_norm_clip(name: str) -> None:
    section = tiny.config_of(f"optim.optimizer={name}", "optim.learning_rate=0.1", "optim.max_grad_norm=0.5").optim
    weights = {
        "layers": jnp.ones((2, 3, 4)),
        "experts": jnp.ones((2, 2, 3, 4)),
        "bias": jnp.ones((2, 2, 4)),
        "norm": jnp.ones((2, 3)),
        "embedding": jnp.ones((5, 3)),
    }
    rng = np.random.default_rng(0)
    gradient = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), weights)
    options = section.optimizer.options()
    matrices = {"layers": optax.contrib.MuonDimensionNumbers(1, 2), "norm": None, "embedding": None, "bias": None}
    matrices["experts"] = optax.contrib.MuonDimensionNumbers(2, 3)
    named = {"muon": lambda rate, **more: optax.contrib.muon(rate, muon_weight_dimension_numbers=matrices, **more)}
    plain = named.get(name, getattr(optax, name, None))(0.1, **options)

    @jax.jit
    def both() -> tuple:
        optimizer = make_optimizer(section)
        clipped, _ = optax.clip_by_global_norm(0.5).update(gradient, optax.EmptyState())
        updates, _ = optimizer.update(gradient, optimizer.init(weights), weights)
        return updates, plain.update(clipped, plain.init(weights), weights)[0]

    change, expected = both()
    for leaf in weights:
        np.testing.assert_allclose(change[leaf], expected[leaf], rtol=1e-6, err_msg=leaf)
    if name == "muon":  # orthogonal layer by layer, and expert by expert; Adam's steps elsewhere are of one size
        for leaf in ("layers", "experts"):
            sizes = np.linalg.svd(change[leaf], compute_uv=False)
            assert sizes.min() > 0.5 * sizes.max()
        assert np.ptp(np.abs(change["norm"])) < 1e-3
