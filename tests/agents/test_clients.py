"""The endpoint with the clients that agents are written with: `make test-agents`."""

import asyncio
import itertools
import json
from contextlib import closing

import numpy as np
import pytest

from tests.integration.command import records, run_here
from tests.integration.test_shipped_configs import CALCULATOR
from tests.train.rollouts.endpoint.fakes import LENGTHS, running
from train.rollouts.endpoint.completions import EndpointKeys
from train.rollouts.endpoint.listen import Listener

openai = pytest.importorskip("openai", reason="make test-agents has the package")

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
SAYS = {"2*3?\n": "calc 2*3", "2*3?\ncalc 2*3<eos>6\n": "It is 6."}
USER = {"role": "user", "content": "2*3?\n"}


@pytest.fixture(scope="module")
def served():
    """An endpoint with one open episode for each test, and the base URL."""
    with (
        running(
            lambda text: SAYS.get(text.removeprefix("<bos>"), "four"),
            episodes=True,
            keys=EndpointKeys("sk-a", "sk-b"),
            pause=0.01,
        ) as served,
        closing(Listener(served.endpoint.app, "127.0.0.1", 0, field="--port", most=64)) as listener,
    ):
        yield served, f"{listener.url}/v1"


@pytest.fixture
def episode(served):
    """The only open episode, and the options of its clients."""
    endpoint, base_url = served
    (episode,) = endpoint.sessions.open([{"prompt": "2*3?\n"}], [np.zeros(2, np.uint32)], LENGTHS)
    return episode, {"base_url": base_url, "api_key": f"sk-a:{episode.session.name}", "max_retries": 0}


def assert_one_sequence(episode, *texts):
    """The turns of an episode are those texts, and each begins with all tokens before it."""
    turns = episode.session.turns
    assert episode.session.texts == list(texts)
    for first, second in itertools.pairwise(turns):
        before = [*first.prompt_ids, *first.ids]
        assert list(second.prompt_ids)[: len(before)] == before


def test_tools_in_two_turns(episode):
    episode, options = episode
    with openai.OpenAI(**options) as client:
        messages = [USER]
        first = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL], max_tokens=20)
        reply = first.choices[0].message
        (call,) = reply.tool_calls
        assert json.loads(call.function.arguments) == {"expression": "2*3"}
        messages += [reply, {"role": "tool", "tool_call_id": call.id, "content": "6"}]
        second = client.chat.completions.create(
            model="tiny", messages=messages, tools=[TOOL], logprobs=True, extra_body={"return_token_ids": True}
        )
    assert second.choices[0].message.content == "It is 6."
    assert second.choices[0].finish_reason == "stop"
    assert len(second.choices[0].logprobs.content) == len(second.choices[0].token_ids) == 9
    assert_one_sequence(episode, "calc 2*3", "It is 6.")


def test_stream_has_the_same_turns(episode):
    episode, options = episode
    with openai.OpenAI(**options) as client:
        parts = list(client.chat.completions.create(model="tiny", messages=[USER], stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        assert text == "calc 2*3"
        assert len(parts) > 3
        messages = [USER, {"role": "assistant", "content": text}, {"role": "tool", "tool_call_id": "x", "content": "6"}]
        with client.chat.completions.stream(model="tiny", messages=messages, tools=[]) as stream:
            answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "It is 6."
    assert_one_sequence(episode, "calc 2*3", "It is 6.")


def test_async_sessions_at_once(served):
    endpoint, base_url = served
    opened = endpoint.sessions.open([{}] * 24, [np.zeros(2, np.uint32)] * 24, LENGTHS)

    async def play(client, name):
        messages = [{"role": "user", "content": "hello"}]
        for _ in range(3):
            answer = await client.chat.completions.create(
                model="tiny", messages=messages, extra_headers={"X-Session-ID": name}, max_tokens=8
            )
            messages += [answer.choices[0].message, {"role": "user", "content": "more"}]

    async def play_all():
        async with openai.AsyncOpenAI(base_url=base_url, api_key="sk-a", max_retries=0) as client:
            await asyncio.gather(*(play(client, episode.session.name) for episode in opened))

    asyncio.run(play_all())
    for episode in opened:
        assert_one_sequence(episode, "four", "four", "four")


def test_completions_and_models(episode):
    _, options = episode
    with openai.OpenAI(**options) as client:
        answer = client.completions.create(model="tiny", prompt="a", n=2, logprobs=1, stop=["u"])
        assert [choice.text for choice in answer.choices] == ["fo", "fo"]
        assert client.models.list().data[0].max_model_len == LENGTHS.total


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"temperature": 0.3}, "BadRequestError"), ({"model": "gpt-4o"}, "NotFoundError")],
)
def test_errors_have_the_classes_of_the_client(episode, changes, error):
    _, options = episode
    with openai.OpenAI(**options) as client, pytest.raises(getattr(openai, error)):
        client.chat.completions.create(**({"model": "tiny", "messages": [USER]} | changes))
    with openai.OpenAI(**options | {"api_key": "sk-b"}) as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_agents_of_openai_run(served):
    agents = pytest.importorskip("agents")
    endpoint, base_url = served
    (episode,) = endpoint.sessions.open([{}], [np.zeros(2, np.uint32)], LENGTHS)

    def calc(expression: str) -> str:
        """Computes."""
        return str(eval(expression))

    async def play():
        key = f"sk-a:{episode.session.name}"
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            model = agents.OpenAIChatCompletionsModel(model="tiny", openai_client=client)
            agent = agents.Agent(name="calculator", model=model, tools=[agents.function_tool(calc)])
            return await agents.Runner.run(agent, "2*3?\n")

    agents.set_tracing_disabled(True)
    assert asyncio.run(play()).final_output == "It is 6."
    assert_one_sequence(episode, "calc 2*3", "It is 6.")


@pytest.mark.slow
def test_recipe_trains_through_the_endpoint(tmp_path):
    options = ("configs/calculator_agent.yaml", *CALCULATOR[1:3], *CALCULATOR[4:], f"output={tmp_path}")
    rollout = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2")
    run_here(*options, *rollout).succeeded()
    steps = records(tmp_path / "calculator-agent", "train")
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["episode_turns"] >= 1 for record in steps)
    assert all(record[f"episodes_failed_{name}"] == 0 for record in steps for name in ("exception", "episode_seconds"))
