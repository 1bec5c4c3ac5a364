"""The environment section: its checks, and what it refuses beside it."""

import pytest

from tests import tiny
from train.config.errors import UserError
from train.config.plan import Plan

ENVIRONMENT = "environment={name: 'train.data.environments.calculator:Calculator'}"


def test_environment_has_defaults():
    section = tiny.config_of(ENVIRONMENT).environment
    assert (section.max_turns, section.step_seconds, section.processes) == (8, 60.0, 1)
    assert (section.turn_seconds, section.episode_seconds) == (None, None)
    assert tiny.config_of().environment is None


AGENT = "rollout.source={type: endpoint, agent: 'train.data.agents.calculator:play'}"


@pytest.mark.parametrize("episodes", [ENVIRONMENT, AGENT])
def test_episodes_are_sampled_on_a_mesh_of_their_own(episodes):
    config = tiny.config_of(episodes, "mesh={data: 2, fsdp: 2}", "rollout.mesh={data: 4, tensor: 1}")
    assert config.rollout.mesh.data == 4


def test_scores_of_turns_need_an_environment():
    assert Plan.of(tiny.config_of("advantage=turn_credit", ENVIRONMENT, "environment.max_turns=3")).turns == 3
    assert Plan.of(tiny.config_of("advantage=turn_credit", ENVIRONMENT, "data.max_completion_length=6")).turns == 6
    assert Plan.of(tiny.config_of(ENVIRONMENT)).turns == 0
    with pytest.raises(UserError, match=r"advantage.type: got turn_credit, which reads a score after every turn; set"):
        tiny.config_of("advantage=turn_credit")
    options = (ENVIRONMENT, "environment.history=template", "rollout.fork_rows=1")
    with pytest.raises(UserError, match=r"rollout.fork_rows: got 1, but advantage.type turn_credit judges each row"):
        tiny.config_of("advantage=turn_credit", *options)


def test_turn_longer_than_its_episode_is_refused():
    message = r"environment.turn_seconds: got 9, more than environment.episode_seconds = 8"
    with pytest.raises(UserError, match=message):
        tiny.config_of(ENVIRONMENT, "environment.turn_seconds=9", "environment.episode_seconds=8")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("rollout.slots=4", "rollout.slots: got 4, but there is an environment, and environment.rows sets"),
        (
            "rollout.source={type: file, path: /tmp}",
            "environment: got one, but rollout.source.type file draws no turns",
        ),
        ("environment.turn_tokens=9", "environment.turn_tokens: got 9, more than data.max_completion_length"),
        ("environment.max_turns=0", "environment.max_turns: got 0, expected an integer >= 1"),
        (
            "environment.name=nowhere:Calculator",
            "environment.name: got 'nowhere:Calculator', but there is no module 'nowhere'",
        ),
        (
            "environment.name=train.data:Calculator",
            "environment.name: got 'train.data:Calculator', but train.data has no",
        ),
        ("environment.history=template", "environment.history: got template, but rollout.fork_rows is 0, and leaves"),
        (
            "rollout.fork_rows=1",
            "rollout.fork_rows: got 1, but rollout.source.type jax has no forks, unless environment",
        ),
        (
            "rollout.ahead=1",
            "rollout.ahead: got 1, but rollout.source.type jax cannot sample while the devices update; set "
            "rollout.policy_lag for samples of an earlier policy, or a source of yours whose episodes run on other ",
        ),
        ("environment.turn_seconds=0", "environment.turn_seconds: got 0"),
        ("environment.max_failures=2", "environment.max_failures: got 2"),
    ],
)
def test_combination_that_cannot_run_is_refused(option, message):
    with pytest.raises(UserError) as error:
        tiny.config_of(ENVIRONMENT, option)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "environment.renderer: got 'qwen3', which needs the tokenizer of a folder; set model.path"),
        (
            ("data.tokenizer='train.data.tokenizers:ByteTokenizer'",),
            "environment.renderer: got 'qwen3', which needs the tokenizer of a folder; leave data.tokenizer out",
        ),
        (
            ("model={path: /tmp}", "data.chat=false"),
            "data.chat: got false, but environment.renderer qwen3 writes the prompts; set only one of them",
        ),
        (
            ("model={path: /tmp}", "data.chat_template=/tmp/a.jinja"),
            "data.chat_template: got '/tmp/a.jinja', but environment.renderer qwen3 writes the prompts; set only one",
        ),
    ],
)
def test_renderer_alone_writes_the_prompts(options, message):
    with pytest.raises(UserError) as error:
        tiny.config_of(ENVIRONMENT, "environment.renderer=qwen3", *options)
    assert message in str(error.value)
    endpoint = "rollout.source={type: endpoint, agent: 'train.data.agents.calculator:play', renderer: qwen3}"
    with pytest.raises(UserError) as error:
        tiny.config_of(endpoint, *options)
    assert message.replace("environment.renderer", "rollout.source.renderer") in str(error.value)
