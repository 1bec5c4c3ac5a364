"""The endpoint as a source: its checks, and what it refuses beside it."""

import pytest

from tests import tiny
from train.config.errors import UserError

OUTSIDE = "{type: endpoint, port: 8001, reward_key_env: KEY%s}"
AGENT = "{type: endpoint, agent: 'train.data.agents.calculator:play'%s}"


def source(text, more=""):
    return f"rollout.source={text % more}"


def test_endpoint_has_defaults():
    section = tiny.config_of(source(AGENT)).rollout.source
    assert (section.host, section.port, section.max_requests) == ("127.0.0.1", 0, 1024)
    assert tiny.config_of(source(OUTSIDE)).rollout.fork_rows == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("rollout.source={type: endpoint, reward_key_env: KEY}",), "rollout.source.port: got 0, but without rollout"),
        (("rollout.source={type: endpoint, port: 8001}",), "rollout.source.reward_key_env: missing; without"),
        ((source(AGENT, ", host: 0.0.0.0"),), "rollout.source.host: got '0.0.0.0', which other machines reach; set"),
        ((source(AGENT, ", host: example.org"),), "rollout.source.host: got 'example.org', which other machines"),
        (
            (source(AGENT, ", reward_key_env: A, reward_key_file: b"),),
            "rollout.source.reward_key_file: got 'b', but rollout.source.reward_key_env is set too",
        ),
        (("rollout.source={type: endpoint, agent: 'train.data:nothing'}",), "rollout.source.agent: got 'train.data:no"),
        ((source(AGENT, ", arguments: {size: 3}"),), "train.data.agents.calculator:play has no argument 'size'"),
        ((source(AGENT), "rollout.ahead=1"), "rollout.ahead: got 1, but rollout.source.type endpoint cannot sample"),
        ((source(AGENT), "rollout.slots=4"), "rollout.slots: got 4, but rollout.source.type endpoint does not use it"),
        (
            (source(AGENT), "environment={name: 'train.data.environments.calculator:Calculator'}"),
            "environment: got one, but rollout.source.type endpoint draws",
        ),
        (("rollout.fork_rows=1",), "rollout.fork_rows: got 1, but rollout.source.type jax has no forks, unless"),
        ((source(AGENT), "rollout.fork_rows=2"), "rollout.fork_rows: got 2, which leaves no row of"),
        (
            (source(AGENT), "rollout.fork_rows=1", "advantage.type=reinforce_plus_plus"),
            "rollout.fork_rows: got 1, but advantage.type reinforce_plus_plus judges each row by itself, and an ep",
        ),
        ((source(AGENT), "rollout.fork_rows=1", "kl.reward.coef=0.1"), "rollout.fork_rows: got 1, but kl.reward charg"),
        ((source(AGENT), "rollout.fork_rows=1", "loss.type=gvpo"), "rollout.fork_rows: got 1, but loss.type gvpo judg"),
    ],
)
def test_endpoint_that_cannot_run_is_refused(options, message):
    with pytest.raises(UserError) as error:
        tiny.config_of(*options)
    assert message in str(error.value)


def test_function_of_the_trainer_may_not_be_async():
    with pytest.raises(UserError, match="no function 'play' that is defined by `def`"):
        tiny.config_of("loss={type: custom, function: 'train.data.agents.calculator:play'}")
