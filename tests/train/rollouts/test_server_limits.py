"""Limits of an answer, and the key of a server: where it comes from, and where it goes."""

import dataclasses
import json
import math
from contextlib import closing

import pytest

from tests import tiny
from tests.train.rollouts.fake_server import PROBES, Answer, Digits, serving
from train.config.errors import UserError
from train.config.rollout import OpenAISourceSection
from train.data.tokenizers import ByteTokenizer
from train.rollouts.open import open_source, open_stream
from train.rollouts.server import Client
from train.rollouts.server.answers import AnswerError, Requested, read_answer
from train.rollouts.server.key import read_key
from train.rollouts.source import SourceError
from train.sequences.token_fields import LEAST_LOG_PROB, MAX_LOG_PROB

KEY = "sk-0123456789-secret"


def source_of(url: str = "http://host", **fields: object) -> OpenAISourceSection:
    return OpenAISourceSection(type="openai", url=url, model="m", sync="none", **fields)


def key_of(env: str | None = None, file: str | None = None) -> str | None:
    return read_key("rollout.source.api_key_", env=env, file=file)


def test_key_comes_from_the_environment_or_files(tmp_path, monkeypatch):
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    monkeypatch.setenv("SERVER_KEY", f" {KEY}")
    assert key_of() is None
    assert key_of(env="SERVER_KEY") == KEY
    assert key_of(file=str(path)) == KEY


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no variable 'SERVER_KEY'"),
        (" \n", "the variable 'SERVER_KEY' is empty"),
        (f"{KEY}\nX-Other: 1", "expected one key"),
        (f"{KEY}\u00e9", "expected one key"),
        (KEY * 1000, "expected one key of at most 8192 ASCII characters"),
    ],
)
def test_unsendable_key_is_refused_without_showing_it(tmp_path, monkeypatch, text, problem):
    monkeypatch.delenv("SERVER_KEY", raising=False)
    if text is not None:
        monkeypatch.setenv("SERVER_KEY", text)
        path = tmp_path / "key"
        path.write_text(text)
        with pytest.raises(UserError, match=r"^rollout\.source\.api_key_file: ") as caught:
            key_of(file=str(path))
        assert KEY not in str(caught.value)
    with pytest.raises(UserError, match=rf"^rollout\.source\.api_key_env: .*{problem}") as caught:
        key_of(env="SERVER_KEY")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("path", ["missing", ".", "a\0b"])
def test_unreadable_key_file_is_named(tmp_path, path):
    with pytest.raises(UserError, match=r"^rollout\.source\.api_key_file: cannot read "):
        key_of(file=str(tmp_path / path))


def test_the_key_of_a_file_is_sent(tmp_path):
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    source = "rollout.source={{type: openai, url: '{}', model: m, sync: none, api_key_file: {}}}"
    sent = []
    with serving(Digits(ByteTokenizer().eos_id), seen=sent) as url:
        context = tiny.context_of(tiny.config_of(source.format(url, path)))
        with closing(open_source(context)):
            pass
    assert {headers["Authorization"] for headers in sent} == {f"Bearer {KEY}"}
    assert {headers["Accept-Encoding"] for headers in sent} == {"identity, gzip"}


def test_server_is_asked_for_the_tokens_that_are_left():
    server = Digits(ByteTokenizer().eos_id)
    source = "rollout.source={{type: openai, url: '{}', model: m, sync: none}}"
    with serving(server) as url:
        context = tiny.context_of(tiny.config_of(source.format(url), f"data.max_tokens={tiny.PROMPT + 2}"))
        with closing(open_stream(context)) as stream:
            completions = stream.batch(0)
    assert {len(body["prompt"]) + body["max_tokens"] for body in server.bodies[PROBES:]} == {tiny.PROMPT + 2}
    assert completions.tokens.shape == (tiny.ROWS, tiny.PROMPT + 2)


def test_byte_limit_follows_the_config():
    digits = Digits(ByteTokenizer().eos_id)

    def answer(path: str, body: dict) -> Answer:
        status, text = digits(path, body)
        return status, text if path == "/v1/models" else text + " " * 2000

    source = "rollout.source={{type: openai, url: '{}', model: m, sync: none, max_response_bytes: {}}}"
    with serving(answer) as url:
        with closing(open_source(tiny.context_of(tiny.config_of(source.format(url, 4000))))):
            pass
        with pytest.raises(SourceError, match=r"^rollout\.source\.max_response_bytes: .* has more than 2000 bytes$"):
            open_source(tiny.context_of(tiny.config_of(source.format(url, 2000))))


def log_prob_of(value: object) -> float:
    """The log-prob that is read of an answer."""
    choice = {"index": 0, "token_ids": [1], "finish_reason": "stop", "logprobs": {"token_logprobs": [value]}}
    answer = read_answer(Requested([1], 1, 2, eos_ids=(1,)), json.dumps({"choices": [choice]}).encode())
    return answer.fields["rollout_log_probs"][1]


@pytest.mark.parametrize("value", [MAX_LOG_PROB, 0, LEAST_LOG_PROB])
def test_log_probs_are_at_most_0_within_rounding(value):
    assert log_prob_of(value) == value


@pytest.mark.parametrize("value", [None, -math.inf, -50.1, -100.0, -9999.0, -1e4, -3.4e38, -1e39])
def test_floors_and_null_are_no_log_probs(value):
    """vLLM writes -9999 for a probability of 0, SGLang null, llama.cpp the smallest float."""
    assert log_prob_of(value) == -math.inf


@pytest.mark.parametrize("value", [2 * MAX_LOG_PROB, math.nan, math.inf, True, "-1"])
def test_impossible_log_probs_are_refused(value):
    with pytest.raises(AnswerError, match=r"token_logprobs of the answer: got .*, expected numbers that are at most 0"):
        log_prob_of(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP_PROXY", "host:1:2"),
        ("HTTP_PROXY", "ftp://user:hunter2@host"),
        ("HTTP_PROXY", "http://user:hunter2"),
        ("SSL_CERT_FILE", "/no/such/file"),
    ],
)
def test_unusable_environment_is_an_error_of_the_address(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(SourceError, match=r"^rollout\.source\.url: cannot use the proxies or cert") as caught:
        Client(timeout=1, retries=0)
    assert "hunter2" not in str(caught.value)


SPANS = [{"version": "b", "start": 0, "end": 2}, {"version": "c", "start": 2, "end": 3}]


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, [2, 2, 2]),
        (
            {"weight_versions": SPANS},
            [2, 2, 3],
        ),
        ({"weight_versions": [{"version": "c"}]}, [3, 3, 3]),
        ({"metadata": {"weight_version": "c"}}, [3, 3, 3]),
        ({"weight_versions": [{"version": "a", "start": 0, "end": 1}]}, "got a, expected b"),
        ({"metadata": {"weight_version": "x"}}, "got x, expected b"),
    ],
)
def test_versions_that_an_answer_tells_are_those_of_its_tokens(told, expected):
    """Weights may be newer than when the request was sent, and not older."""
    choice = {"token_ids": [0, 0, 1], "finish_reason": "stop"}
    answer = {"choices": [choice | {name: x for name, x in told.items() if name == "weight_versions"}]}
    answer |= {name: x for name, x in told.items() if name == "metadata"}
    known = {"a": 1, "b": 2, "c": 3}
    requested = Requested([1], 4, 2, eos_ids=(1,), log_probs=False, version=2, versions=known)
    content = json.dumps(answer).encode()
    if isinstance(expected, str):
        with pytest.raises(AnswerError, match=expected) as caught:
            read_answer(requested, content)
        assert caught.value.stale
    else:
        assert read_answer(requested, content).of_completion("token_versions") == expected
    # Without labels of the run's weights what an answer tells is of something else.
    assert read_answer(dataclasses.replace(requested, versions=None), content).of_completion("token_versions") == [
        2,
        2,
        2,
    ]
