"""Requests to a server that fails in every way that servers do: what is tried again, and what the error says."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.train.rollouts.fake_server import Answer, serving
from train.rollouts.server import Client
from train.rollouts.server.answers import read_models
from train.rollouts.server.client import acknowledged, wait_before, wait_for
from train.rollouts.source import SourceError


@contextlib.contextmanager
def client_of(
    url: str, *, timeout: float = 5, retries: int = 3, key: str | None = None
) -> Iterator[tuple[Client, list[float]]]:
    """A client that does not wait, and the waits that it would have made."""
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    client = Client(url, timeout=timeout, retries=retries, key=key, sleep=sleep)
    try:
        yield client, waits
    finally:
        client.close()


def failing(times: int, status: int | None) -> Callable[[str, dict], Answer]:
    """Fails so many times, then answers."""
    left = [times]

    def answer(path: str, body: dict) -> Answer:
        left[0] -= 1
        if left[0] >= 0:
            return None if status is None else (status, json.dumps({"error": {"message": "too\nmuch"}}))
        return 200, json.dumps({"echo": body})

    return answer


@pytest.mark.parametrize("status", [None, 408, 429, 500, 502, 503, 504])
def test_temporary_failures_are_retried(status):
    with serving(failing(3, status)) as url, client_of(url) as (client, waits):
        assert client.post("/v1/x", {"a": 1}, json.loads) == {"echo": {"a": 1}}
    assert len(waits) == 3
    for attempt, wait in enumerate(waits, start=1):
        assert wait_before(attempt, 0.0) <= wait <= wait_before(attempt, 1.0)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_an_error_at_once(status):
    with serving(failing(1, status)) as url, client_of(url) as (client, waits):
        expected = rf"rollout.source: POST {url}/v1/x was refused with status {status}: too much$"
        with pytest.raises(SourceError, match=expected):
            client.post("/v1/x", {}, bytes)
        assert not waits


def test_unavailable_server_is_named_with_the_attempts():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with client_of(url, retries=2) as (client, waits), pytest.raises(SourceError) as caught:
            client.get("/v1/models", read_models)
    text = str(caught.value)
    assert text.startswith(f"rollout.source.url: GET {url}/v1/models failed 3 times in 0 s (")
    assert "rollout.source.timeout 5 s, rollout.source.retries 2); last: ConnectError" in text
    assert len(waits) == 2
    with serving(failing(9, 503)) as url, client_of(url, retries=0) as (client, waits):
        with pytest.raises(SourceError, match=r"failed once in 0 s .*; last: status 503: too much$"):
            client.post("/v1/x", {}, bytes)
        assert not waits


def test_slow_request_is_abandoned():
    done = threading.Event()

    def slow(path: str, body: dict) -> Answer:
        done.wait(10)
        return 200, "{}"

    began = time.monotonic()
    with serving(slow) as url, client_of(url, timeout=0.2, retries=1) as (client, _):
        with pytest.raises(
            SourceError, match=r"failed 2 times in \d s .*timeout 0.2 s.*; last: no complete answer in time"
        ):
            client.post("/v1/x", {}, bytes)
        done.set()
    assert time.monotonic() - began < 5


def test_a_server_may_ask_for_a_longer_wait():
    with serving(failing(1, 429), Retry_After="7") as url, client_of(url) as (client, waits):
        client.post("/v1/x", {}, bytes)
    assert waits == [7.0]
    with (
        serving(failing(1, 429), Retry_After="Wed, 21 Oct 2026 07:28:00 GMT") as url,
        client_of(url) as (client, waits),
    ):
        client.post("/v1/x", {}, bytes)
    assert waits[0] <= wait_before(1, 1.0)


def test_malformed_json_answer_is_retried():
    """A proxy answers so while its server starts; another form would repeat, and is an error at once."""
    answers = ["<html>starting</html>", "", '{"data": ', json.dumps({"data": [{"id": "m"}]})]
    with serving(lambda path, body: (200, answers.pop(0))) as url, client_of(url) as (client, waits):
        assert client.get("/v1/models", read_models) == {"m": "None"}
    assert len(waits) == 3
    with serving(lambda path, body: (200, "[]")) as url, client_of(url) as (client, waits):
        with pytest.raises(SourceError, match=r"^rollout.source: the answer: got \[\], expected an object$"):
            client.get("/v1/models", read_models)
        assert not waits
    with serving(lambda path, body: (200, "<html>starting</html>")) as url, client_of(url) as (client, waits):
        with pytest.raises(SourceError, match=r"failed 4 times .*; last: the answer is not JSON .*starting</html>$"):
            client.get("/v1/models", read_models)
        assert client.url == url


def test_web_page_does_not_confirm_loaded_weights():
    """A proxy says so with status 200 while its server starts; servers say it in several forms."""
    answers = ["<html>starting</html>", "Success: loaded", '{"results": [null]}', ""]
    with serving(lambda path, body: (200, answers.pop(0))) as url, client_of(url) as (client, waits):
        for _ in range(3):
            client.post("/v1/load_lora_adapter", {}, acknowledged)
            assert len(waits) == 1
        assert not answers


def test_all_requests_end_with_the_first_error():
    """The others are not waited for, and the connections can be used again."""
    done = threading.Event()

    def answer(path: str, body: dict) -> Answer:
        if body.get("wait"):
            done.wait(10)
        return (400, "no") if body.get("fail") else (200, json.dumps(body))

    began = time.monotonic()
    with serving(answer) as url, client_of(url, timeout=30) as (client, _):
        bodies = [{"wait": True}, {"fail": True}, {"wait": True}]
        with pytest.raises(SourceError, match=r"was refused with status 400: no$"):
            wait_for(client.post_all("/v1/x", bodies, [json.loads] * 3, most_bytes=100))
        assert time.monotonic() - began < 5
        done.set()
        bodies = [{"number": number} for number in range(20)]
        assert wait_for(client.post_all("/v1/x", bodies, [json.loads] * 20, most_bytes=100)) == bodies


def test_hurried_client_tries_once():
    with serving(failing(9, 503)) as url, client_of(url) as (client, waits):
        client.hurry()
        with pytest.raises(SourceError, match=r"failed once in 0 s .*; last: status 503: too much$"):
            client.post("/v1/x", {}, bytes)
        assert not waits


KEY = "sk-0123456789-secret"


@pytest.mark.parametrize("status", [200, 401, 500])
@pytest.mark.parametrize("before", [0, 290])
def test_the_key_is_never_shown(status, before):
    """Also where a message is cut within the key."""
    said = json.dumps({"error": {"message": "-" * before + KEY}, "data": [{"id": [KEY]}]})
    with (
        serving(lambda path, body: (status, said)) as url,
        client_of(url, retries=0, key=KEY) as (client, _),
        pytest.raises(SourceError) as caught,
    ):
        client.get("/v1/models", read_models)
    assert KEY[:6] not in str(caught.value)
    assert status == 401 or "[key]" in str(caught.value) or before


def test_server_text_is_shown_as_one_printable_line():
    with (
        serving(lambda path, body: (400, "a\x1b[31m\r\nb\u202ec")) as url,
        client_of(url) as (client, _),
        pytest.raises(SourceError, match=r"was refused with status 400: a\?\[31m b\?c$"),
    ):
        client.post("/v1/x", {}, bytes)
