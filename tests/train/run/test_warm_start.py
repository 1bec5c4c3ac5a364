"""The warm start: imitation of the solutions at the temperature of the run, reported step by step."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import optax
import pytest

from tests import tiny
from train.config.errors import GuardError
from train.config.schema import Config
from train.context import RunContext
from train.data.prompts import Supervised
from train.data.tasks import load_task
from train.data.tokenizers import ByteTokenizer
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.run.warm_start import supervised_loss, warm_start


def context_of(config: Config) -> tuple[RunContext, Supervised]:
    tokenizer, task = ByteTokenizer(), load_task(config)
    lengths = {"prompt_length": tiny.PROMPT, "completion_length": tiny.NEW_TOKENS}
    data = Supervised(task.train, tokenizer, **lengths, batch_size=config.warm_start.batch_size, seed=config.seed)
    return tiny.context_of(config, task=task), data


def params_of(config: Config):
    return tiny.state_of(config, optax.identity()).trainable["params"]


def trained(config: Config):
    context, data = context_of(config)
    params, reports = params_of(config), []
    after = warm_start(context, params, data, lambda step, values: reports.append((step, values)))
    return params, after, reports, data


def test_imitation_lowers_the_loss_and_reports_every_step():
    config = tiny.config_of("warm_start={steps: 20, batch_size: 8, learning_rate: 1e-2}", "temperature=0.8")
    params, after, reports, data = trained(config)
    assert [step for step, _ in reports] == list(range(1, 21))
    losses = [values["loss"] for _, values in reports]
    assert losses[-1] < losses[0] - 1
    # The first loss is that of the first weights on the first batch: mean over the tokens of the solutions.
    batch, model = data.batch(0), tiny.model_of(config)
    policy = tiny.kljax.Policy(tiny.host_params())
    scored = jax.jit(
        lambda policy: token_stats(
            ScoredPolicy(model, policy), Sequences.rows(batch.tokens, batch.token_mask), temperature=0.8
        )[0]
    )
    expected = -np.asarray(scored(policy).log_prob, float)[batch.completion_mask].mean()
    np.testing.assert_allclose(losses[0], expected, rtol=1e-5)
    # The weights that came in were not given away.
    chex.assert_trees_all_equal(jax.device_get(params), tiny.host_params())
    assert jax.tree.map(lambda x: x.sharding, after) == jax.tree.map(lambda x: x.sharding, params)


def test_only_solutions_are_imitated():
    config = tiny.config_of()
    _, data = context_of(config)
    batch, loss_of = data.batch(0), jax.jit(functools.partial(supervised_loss, config, tiny.model_of(config)))
    loss, metric = loss_of(tiny.host_params(), batch)
    np.testing.assert_allclose(loss, metric.value(), rtol=1e-6)
    assert float(metric.weight) == batch.completion_mask.sum()
    beyond = ~batch.token_mask
    changed = dataclasses.replace(batch, tokens=np.where(beyond, 7, batch.tokens))
    assert beyond.any()
    np.testing.assert_array_equal(loss_of(tiny.host_params(), changed)[0], loss)


@pytest.mark.parametrize("steps", [0, 1])
def test_the_shortest_warm_starts(steps):
    config = tiny.config_of()
    section = config.warm_start.model_copy(update={"steps": steps})
    params, after, reports, _ = trained(config.model_copy(update={"warm_start": section}))
    assert [step for step, _ in reports] == list(range(1, steps + 1))
    moved = jax.tree.map(lambda a, b: bool((np.asarray(a) != np.asarray(b)).any()), params, after)
    assert set(jax.tree.leaves(moved)) == {steps > 0}


@pytest.mark.parametrize("rate", ["1e38", "1e20"])
def test_unusable_last_weights_end_the_warm_start(rate):
    config = tiny.config_of(f"warm_start={{steps: 2, batch_size: 8, learning_rate: {rate}}}")
    with pytest.raises(GuardError, match="the weights after its last step cannot be used: their loss is not finite"):
        trained(config)
