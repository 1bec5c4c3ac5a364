"""The routes of an endpoint: what requests get, which are refused, and what of them is trained."""

import asyncio
import json

import httpx
import numpy as np
import pytest

from tests.train.rollouts.endpoint.fakes import LENGTHS, TOKENIZER, running
from train.config.errors import UserError
from train.data.tokenizers import ByteTokenizer
from train.rollouts.endpoint import app
from train.rollouts.endpoint.completions import EndpointKeys
from train.rollouts.endpoint.sessions import SequenceLengths
from train.rollouts.endpoint.wire import read_messages
from train.rollouts.episodes.turns import make_sequences
from train.rollouts.sampler import Sampling

CALC = {
    "type": "function",
    "function": {"name": "calc", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}},
}
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "2*3?\n"}


def ask(served, path, body=None, *, method="POST", **options):
    """Sends one request, and returns status and body."""

    async def send():
        transport = httpx.ASGITransport(served.endpoint.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
            return await client.request(method, path, json=body, **options)

    answer = asyncio.run(send())
    return answer.status_code, answer.json() if answer.headers["content-type"] == "application/json" else answer.text


def ids_of(text):
    return [TOKENIZER.bos_id, *text.encode()]


@pytest.fixture(scope="module")
def served():
    """An endpoint for any session, which repeats its prompt in capitals."""
    with running(lambda text: text.removeprefix("<bos>").strip().upper()) as served:
        yield served


def test_arguments_nested_too_deeply_are_kept_as_text():
    arguments = "[" * 100_000
    call = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": arguments}}
    said = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    read = read_messages({"messages": said})
    assert read[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_answers_have_text_ids_and_log_probs(served):
    options = {"logprobs": True, "return_token_ids": True, "n": 2, "max_tokens": 30}
    status, answer = ask(served, "/v1/chat/completions", {"model": "tiny", "messages": [USER], **options})
    assert status == 200
    assert answer["prompt_token_ids"] == ids_of("2*3?\n")
    assert answer["weight_version"] == 7
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 10, "total_tokens": 16}
    for number, choice in enumerate(answer["choices"]):
        assert choice["index"] == number
        assert choice["message"] == {"role": "assistant", "content": "2*3?"}
        assert choice["token_ids"] == [*b"2*3?", 257]
        assert [x["logprob"] for x in choice["logprobs"]["content"]] == [-0.5, -1.5, -2.5, -3.5, -4.5]
        assert [x["token"] for x in choice["logprobs"]["content"]] == ["2", "*", "3", "?", "<eos>"]
        assert choice["finish_reason"] == "stop"
    _, answer = ask(served, "/v1/completions", {"prompt": "ab", "logprobs": 1, "return_tokens_as_token_ids": True})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("AB", "stop")
    assert choice["logprobs"]["tokens"] == ["token_id:65", "token_id:66", "token_id:257"]
    body = {"token_ids": ids_of("ab"), "sampling_params": {"max_tokens": 2, "logprobs": 1}}
    _, answer = ask(served, "/inference/v1/generate", body)
    (choice,) = answer["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([65, 66], "length")
    assert choice["logprobs"]["content"][1]["token"] == "token_id:66"
    assert ask(served, "/v1/models", method="GET")[1]["data"][0]["max_model_len"] == LENGTHS.total
    assert ask(served, "/health", method="GET")[1]["status"] == "ok"


def test_stop_strings_end_a_turn_with_the_token_that_completes_them(served):
    body = {"prompt": "one END two", "stop": "END", "return_token_ids": True, "max_tokens": 40}
    (choice,) = ask(served, "/v1/completions", body)[1]["choices"]
    assert (choice["text"], choice["finish_reason"], bytes(choice["token_ids"])) == ("ONE ", "stop", b"ONE END")


def events_of(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_stop_tokens_end_a_turn_and_are_no_text(served):
    # As `renderers` asks, with the tokens of EOS among them.
    ids = [TOKENIZER.eos_id, ord("E")]
    body = {"prompt": "one END two", "stop_token_ids": ids, "return_token_ids": True, "max_tokens": 40}
    (choice,) = ask(served, "/v1/completions", body)[1]["choices"]
    assert (choice["text"], choice["finish_reason"], bytes(choice["token_ids"])) == ("ON", "stop", b"ONE")
    (choice,) = ask(served, "/v1/completions", body | {"stop": ["N"]})[1]["choices"]
    assert (choice["text"], choice["finish_reason"], bytes(choice["token_ids"])) == ("O", "stop", b"ON")
    body |= {"stop_token_ids": [TOKENIZER.eos_id], "prompt": "ab"}
    (choice,) = ask(served, "/v1/completions", body)[1]["choices"]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("AB", "stop", [65, 66, TOKENIZER.eos_id])


def test_streams_have_the_parts_of_an_answer():
    with running(lambda text: text.removeprefix("<bos>").strip().upper(), pause=0.02) as served:
        check_streams(served)


def check_streams(served):
    body = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, "max_tokens": 40}
    messages = [{"role": "user", "content": "caf\u00e9 au lait END"}]
    _, text = ask(served, "/v1/chat/completions", {"messages": messages, "stop": ["END"], **body})
    events = events_of(text)
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "CAF\u00c9 AU LAIT "
    ids = [token for e in events[:-1] for token in e["choices"][0].get("token_ids", [])]
    assert bytes(ids) == "CAF\u00c9 AU LAIT END".encode()
    assert len(events) > 4
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == len(ids)
    _, text = ask(served, "/v1/completions", {"prompt": "ab", **body})
    assert "".join(e["choices"][0]["text"] for e in events_of(text)[:-1]) == "AB"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("chat/completions", {"temperature": 0.7}, 400, "temperature: got 0.7, expected 0.5, the run's temperature"),
        ("chat/completions", {"top_p": 0.9}, 400, "top_p: got 0.9, expected 1, the run's rollout.top_p"),
        ("chat/completions", {"top_k": -1}, 400, "top_k: got -1, expected 5, the run's rollout.top_k"),
        ("chat/completions", {"temperature": True}, 400, "temperature: got true"),
        ("chat/completions", {"logit_bias": {"5": 3}}, 400, "logit_bias: got"),
        ("chat/completions", {"presence_penalty": 0.5}, 400, "presence_penalty: got 0.5, expected 0, or nothing"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, 400, "response_format: got"),
        ("chat/completions", {"tool_choice": "required"}, 400, 'tool_choice: got "required", expected "auto" or'),
        ("chat/completions", {"n": 17}, 400, "n: got 17, expected an integer from 1 to 16"),
        ("chat/completions", {"max_tokens": 0}, 400, "max_tokens: got 0"),
        ("chat/completions", {"stop": ["a"] * 5}, 400, "stop: got"),
        ("chat/completions", {"stop": [""]}, 400, "stop: got"),
        ("completions", {"stop_token_ids": ["</s>"]}, 400, "stop_token_ids: got"),
        ("completions", {"stop_token_ids": 257}, 400, "stop_token_ids: got"),
        ("chat/completions", {"messages": []}, 400, "messages: got 0 of them, expected a list of 1 to 1000"),
        ("chat/completions", {"messages": [USER] * 1001}, 400, "messages: got 1001 of them"),
        ("chat/completions", {"messages": ["a"]}, 400, 'messages[0]: got "a", expected an object'),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content: got null"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "messages[0].content: got",
        ),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 100}]}, 400, "the prompt has 101 tokens"),
        ("chat/completions", {"tools": [{"type": "x"}]}, 400, "tools: got"),
        ("chat/completions", {"model": "gpt-4o"}, 404, "model: got 'gpt-4o', expected 'tiny'"),
        ("completions", {"prompt": [1, 99999]}, 400, "prompt: got 99999, expected ids from 0 to 263"),
        ("completions", {"prompt": None}, 400, "prompt: got null, expected a list of token ids"),
        ("completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs: got 5, expected an integer from 0 to 1"),
        ("completions", {"prompt": "a", "echo": True}, 400, "echo: got true"),
    ],
)
def test_request_that_cannot_be_answered_rightly_is_refused(path, body, status, message):
    sampling = Sampling(temperature=0.5, top_k=5)
    with running(str.upper, sampling=sampling) as served:
        got, answer = ask(served, f"/v1/{path}", {"messages": [USER], **body})
    assert got == status
    assert answer["error"]["message"].startswith(message)
    assert answer["error"]["code"] == status


class Templated(ByteTokenizer):
    """A tokenizer with a chat template."""

    has_template = True


def test_prompt_without_tokens_is_refused():
    with running(str.upper, tokenizer=Templated(bos_id=None)) as served:  # as that of Qwen
        status, answer = ask(served, "/v1/completions", {"prompt": ""})
    assert (status, answer["error"]["message"]) == (400, "the prompt has no tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_lone_surrogate_of_a_call_is_answered(stream):
    call = '<tool_call>{"name": "calc\\ud83d", "arguments": {"e": "\\ud83d"}}</tool_call>'
    lengths = SequenceLengths(40, 100)
    with running(lambda text: call, lengths=lengths) as served:
        body = {"messages": [USER], "tools": [CALC], "stream": stream}
        status, answer = ask(served, "/v1/chat/completions", body)
        wrong = ask(served, "/v1/chat/completions", content=b'{"temperature": "\\ud83d"}', headers=JSON)
    assert status == 200
    choices = [event["choices"][0] for event in events_of(answer)][-1:] if stream else answer["choices"]
    ((made,),) = [choice["delta" if stream else "message"]["tool_calls"] for choice in choices]
    assert (made["function"]["name"], made["function"]["arguments"]) == ("calc\ud83d", r'{"e": "\ud83d"}')
    assert wrong[0] == 400


def test_prompt_that_cannot_be_spelled_is_refused():
    class Poor(Templated):
        def encode(self, text):
            raise UserError("model.path: the tokenizer cannot spell it")

    with running(str.upper, tokenizer=Poor()) as served:
        status, answer = ask(served, "/v1/completions", {"prompt": "a"})
    assert (status, answer["error"]["message"]) == (400, "model.path: the tokenizer cannot spell it")


def test_equal_sampling_options_are_taken(served):
    body = {"messages": [USER], "temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "frequency_penalty": 0.0}
    assert ask(served, "/v1/chat/completions", body)[0] == 200


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"a": "' + b"a" * 2**20 + b'"}', "application/json", 413),
        (b'{"messages": []}', "text/plain", 415),
    ],
)
def test_bodies_that_are_no_objects_are_refused(served, content, kind, status):
    got, answer = ask(served, "/v1/chat/completions", content=content, headers={"content-type": kind})
    assert (got, answer["error"]["code"]) == (status, status)


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_keys_open_their_own_routes_alone():
    keys = EndpointKeys("sk-complete", "sk-reward")
    with running(str.upper, episodes=True, keys=keys) as served:
        (episode,) = served.sessions.open([{"prompt": "2*3?"}], [np.zeros(2, np.uint32)], LENGTHS)
        path, name = "/v1/chat/completions", episode.session.name
        body = {"messages": [USER], "max_tokens": 4}
        for wrong in ({}, bearer("sk-reward"), bearer(f"sk-reward:{name}"), bearer(name), bearer("sk-complete2")):
            assert ask(served, path, body, headers=wrong)[0] == 401
        assert ask(served, path, body, headers=bearer("sk-complete"))[0] == 400
        assert ask(served, path, body, headers=bearer("sk-complete:other"))[0] == 404
        assert ask(served, path, body, headers=bearer(f"sk-complete:{name}"))[0] == 200
        assert ask(served, path, body, headers=bearer("sk-complete") | {"X-Session-ID": name})[0] == 200
        assert ask(served, path, body | {"user": name}, headers=bearer("sk-complete"))[0] == 200
        for wrong in ({}, bearer("sk-complete"), bearer(f"sk-complete:{name}")):
            assert ask(served, "/v1/episodes", {}, headers=wrong)[0] == 401
            assert ask(served, f"/v1/episodes/{name}", method="GET", headers=wrong)[0] == 401
            assert ask(served, f"/v1/episodes/{name}/reward", {"reward": 1}, headers=wrong)[0] == 401
        assert not episode.over


def test_program_from_outside_takes_episodes_and_ends_them(monkeypatch):
    monkeypatch.setattr(app, "TAKE_SECONDS", 0.1)
    right = {"headers": bearer("sk-reward")}
    with running(str.upper, episodes=True, keys=EndpointKeys(None, "sk-reward")) as served:
        keys = [np.zeros(2, np.uint32)] * 3
        opened = served.sessions.open([{"prompt": str(n)} for n in range(3)], keys, LENGTHS)
        taken = [ask(served, "/v1/episodes", {}, **right)[1] for _ in range(3)]
        assert [x["row"] for x in taken] == [{"prompt": "0"}, {"prompt": "1"}, {"prompt": "2"}]
        assert ask(served, "/v1/episodes", {}, **right)[0] == 503
        ends = [{"rewards": {"reward": 1, "form": 0.5}}, {"failure": "no network"}, {}]
        for episode, end in zip(taken, ends, strict=True):
            headers = bearer(episode["api_key"])
            assert ask(served, "/v1/completions", {"prompt": "a", "max_tokens": 3}, headers=headers)[0] == 200
            path = f"/v1/episodes/{episode['id']}"
            assert len(ask(served, path, method="GET", **right)[1]["turns"]) == 1
            wrong = ({"reward": "high"}, {"reward": float("1e60")}, {"score": 1}, {"reward": 1, "failure": "x"})
            assert [ask(served, f"{path}/reward", body, **right)[0] for body in wrong] == [400] * 4
            assert ask(served, f"{path}/reward", end, **right)[0] == 200
            assert ask(served, f"{path}/reward", end, **right)[0] == 409
            assert ask(served, "/v1/completions", {"prompt": "a"}, headers=headers)[0] == 404
        assert [x.rewards for x in opened] == [{"reward": 1.0, "form": 0.5}, None, None]
        assert [x.failure for x in opened] == [None, ("exception", "no network"), None]
        served.sessions.open([], [], LENGTHS)
        assert ask(served, f"/v1/episodes/{taken[0]['id']}/reward", {}, **right)[0] == 404


def test_history_that_is_rewritten_forks_with_its_own_prompt():
    with running(lambda text: "ok", episodes=True) as served:
        (episode,) = served.sessions.open([{}], [np.zeros(2, np.uint32)], LENGTHS)
        headers = {"X-Session-ID": episode.session.name}
        reply = {"role": "assistant", "content": "ok"}
        for said in ([USER], [USER, reply, USER], [USER, {**reply, "content": "OK"}, USER], [USER]):
            assert ask(served, "/v1/chat/completions", {"messages": said}, headers=headers)[0] == 200
        prompts = [bytes(x for x in turn.prompt_ids if x < 256) for turn in episode.session.turns]
        assert prompts == [b"2*3?\n", b"2*3?\nok2*3?\n", b"2*3?\nOK2*3?\n", b"2*3?\n"]
        first, fork, again = make_sequences(episode.session.turns)
        assert [len(x.turns) for x in (first, fork, again)] == [2, 1, 1]
        # Each token of a session is drawn with a number of its own.
        assert episode.session._drawn >= sum(len(turn.ids) for turn in episode.session.turns)


def test_turns_fit_into_the_row_of_a_batch():
    with running(lambda text: "...", episodes=True, lengths=SequenceLengths(6, 20)) as served:
        (episode,) = served.sessions.open([{}], [np.zeros(2, np.uint32)], SequenceLengths(6, 20))
        session = episode.session
        headers = {"X-Session-ID": session.name}
        ask(served, "/v1/completions", {"prompt": ids_of("abc"), "max_tokens": 5}, headers=headers)
        before = [*ids_of("abc"), *session.turns[0].ids]
        assert session.most_tokens([*before, 1]) == 20 - 6  # the prompt of 4 leaves 20 columns after it
        assert session.most_tokens([1] * 6) == 20
        assert session.most_tokens([1] * 26) == 0  # another prompt, of which 6 stand before the completion
        assert ask(served, "/v1/completions", {"prompt": [1] * 26}, headers=headers)[0] == 400
        session._lengths = SequenceLengths(6, 20, shared=True)
        assert session.most_tokens([*ids_of("abc"), 1, 1]) == 18  # of a fork, the shared prompt alone
        session._lengths = SequenceLengths(6, 20, limit=10)
        assert session.most_tokens([1] * 6) == 4


def test_full_server_asks_to_try_again():
    with running(lambda text: "...", max_requests=1, rows=1) as served:

        async def two():
            transport = httpx.ASGITransport(served.endpoint.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://endpoint") as client:
                body = {"prompt": "a", "max_tokens": 59}
                return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))

        answers = asyncio.run(two())
    codes = sorted(answer.status_code for answer in answers)
    assert codes[0] == 200
    assert codes[-1] == 429
    assert {x.headers["retry-after"] for x in answers if x.status_code == 429} == {"1"}


def test_conversation_keeps_the_sampled_ids_and_calls():
    says = {"<bos>2*3?\n": "calc 2*3", "<bos>2*3?\ncalc 2*3<eos>6\n": "6"}
    with running(lambda text: says.get(text, "no")) as served:
        headers = {"X-Session-ID": "one"}
        body = {"messages": [USER], "tools": [CALC], "return_token_ids": True}
        _, answer = ask(served, "/v1/chat/completions", body, headers=headers)
        (choice,) = answer["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert (call["function"]["name"], call["function"]["arguments"]) == ("calc", '{"expression": "2*3"}')
        # A client writes the arguments in its own way, and adds fields.
        call["function"]["arguments"] = '{ "expression":"2*3" }'
        result = {"role": "tool", "tool_call_id": call["id"], "content": "6"}
        body["messages"] = [USER, choice["message"] | {"refusal": None, "content": ""}, result]
        _, answer = ask(served, "/v1/chat/completions", body, headers=headers)
        assert answer["prompt_token_ids"] == [*ids_of("2*3?\n"), *b"calc 2*3", 257, *b"6\n"]
        assert answer["choices"][0]["message"]["content"] == "6"
        _, text = ask(served, "/v1/chat/completions", body | {"stream": True, "messages": [USER]}, headers=headers)
        (delta,) = [e["choices"][0]["delta"] for e in events_of(text) if "tool_calls" in e["choices"][0]["delta"]]
        assert delta["tool_calls"][0]["function"]["name"] == "calc"
