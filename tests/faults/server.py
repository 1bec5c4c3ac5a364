"""Faults of a server of completions: its answers, the bytes that carry them, and their time."""

import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tests import tiny
from tests.faults.case import Fault, raised
from tests.faults.wire import Reply, blanks, drips, hangs, resets, response, sends, wire, zipped
from tests.train.rollouts.fake_server import Answer, Digits, serving
from train.config.errors import ConfigError, UserError
from train.config.load import parse
from train.config.plan import Plan
from train.context import RunContext
from train.data.tokenizers import ByteTokenizer
from train.distributed.global_arrays import RowSplit
from train.models.sharding import batch_sharding
from train.rollouts.server import Client, ServerSource
from train.rollouts.source import Completions, Request, SourceError

AREA, ADDRESSES = "rollout server", "addresses and keys of servers"
MEGABYTE = 2**20
SECONDS = 15.0
"""Limit of a request; one that has to run into its limit has `SHORT`."""
SHORT = 0.3
SOURCE = "rollout.source={{type: openai, url: '{}', model: m, sync: none}}"


@functools.cache
def _context() -> RunContext:
    return tiny.context_of(tiny.config_of("rollout.prompts_per_step=1", SOURCE.format("http://unused")))


async def _no_wait(seconds: float) -> None:
    """Retries at once."""


@contextlib.contextmanager
def _opened(url: str, timeout: float, key: str | None = None) -> Iterator[ServerSource]:
    """Opens a source whose server was right when the run started."""
    config = tiny.config_of("rollout.prompts_per_step=1", SOURCE.format(url))
    context = dataclasses.replace(_context(), plan=Plan.of(config))
    client = Client(timeout=SECONDS, retries=1, key=key, sleep=_no_wait)
    with contextlib.closing(ServerSource(context, config.rollout.source, client)) as source:
        client._timeout = timeout
        yield source


def _request() -> Request:
    config = _context().config
    rows = RowSplit.of(batch_sharding(_context().mesh), config.rows_per_batch())
    return Request(_context().prompts.batch(0), config.rollout.samples_per_prompt, 0, jax.random.key(0), rows)


def _good(path: str, body: dict[str, Any]) -> bytes:
    return response(Digits(ByteTokenizer().eos_id)(path, body)[1].encode())


def _sample(first: Reply | None, then: Reply | None = None, timeout: float = SECONDS) -> Completions:
    """Samples a step from a server that answers with `first`, then with `then`, or rightly."""
    replies = iter([])

    def reply(path: str) -> Reply:
        chosen = next(replies, then)
        return chosen or (lambda connection, body: connection.sendall(_good(path, body)))

    with wire(reply) as url:
        start, replies = replies, itertools.repeat(None)
        with _opened(url, timeout) as source:
            replies = iter([first]) if first is not None else start
            return tiny.sampled(_context(), source, _request())


def refused(reply: Reply, *words: str, timeout: float = SECONDS) -> Callable[[pathlib.Path], str]:
    """Makes a fault that stays: the run ends with a message of the words, soon after the time that it has."""

    def run(directory: pathlib.Path) -> str:
        began = time.monotonic()
        outcome = raised(lambda: _sample(reply, reply, timeout), *words, error=SourceError)
        return outcome if time.monotonic() - began < SECONDS else "silent"

    return run


def recovered(reply: Reply) -> Callable[[pathlib.Path], str]:
    """Makes a fault that passes: the step has the completions of a server without one."""

    def run(directory: pathlib.Path) -> str:
        try:
            actual, right = _sample(reply), _sample(None)
        except Exception:
            return "traceback"
        pairs = (actual.tokens, right.tokens), (actual.fields["rollout_log_probs"], right.fields["rollout_log_probs"])
        same = all(np.array_equal(*pair) for pair in pairs)
        return "identical" if same else "silent"

    return run


def _answer(change: Callable[[dict[str, Any]], Any]) -> Reply:
    """Changes a right answer: to the result of `change`, or in place if that is None."""

    def reply(connection: socket.socket, body: dict[str, Any]) -> None:
        answer = json.loads(Digits(ByteTokenizer().eos_id)("/v1/completions", body)[1])
        changed = change(answer)
        text = changed if isinstance(changed, str) else json.dumps(answer if changed is None else changed)
        connection.sendall(response(text.encode()))

    return reply


def choice(*words: str, **fields: Any) -> Callable[[pathlib.Path], str]:
    """Makes a fault of a field of one completion that is replaced, or removed if it is `...`."""

    def change(answer: dict[str, Any]) -> None:
        for name, value in fields.items():
            answer["choices"][0][name] = value
            if value is ...:
                del answer["choices"][0][name]

    return refused(_answer(change), *words)


def log_probs(values: Any, *words: str) -> Callable[[pathlib.Path], str]:
    """Makes a fault of other log-probs of one completion."""
    return choice("token_logprobs of the answer: got", *words, logprobs={"token_logprobs": values})


def judged(*words: str, ids: Sequence[int] = (49, 257), values: Sequence[Any]) -> Callable[[pathlib.Path], str]:
    """Makes a fault of all completions of a step, that shows when they are judged together."""

    def change(answer: dict[str, Any]) -> None:
        (completion,) = answer["choices"]
        completion |= {"token_ids": list(ids), "logprobs": {"token_logprobs": list(values)}}

    def run(directory: pathlib.Path) -> str:
        completions = _sample(_answer(change), _answer(change))
        return raised(lambda: tiny.rollout_of(_context(), completions), *words, error=SourceError)

    return run


def probed(
    change: Callable[[dict[str, Any], dict[str, Any]], None], *words: str, options: Sequence[str] = ()
) -> Callable[[pathlib.Path], str]:
    """Makes a fault of the answers at the start: `change(request, answer)` replaces parts of the answer."""
    digits = Digits(ByteTokenizer().eos_id)

    def answer(path: str, body: dict) -> Answer:
        status, text = digits(path, body)
        changed = json.loads(text)
        if path == "/v1/completions":
            change(body, changed)
        return status, json.dumps(changed)

    def run(directory: pathlib.Path) -> str:
        with serving(answer) as url:
            context = tiny.context_of(tiny.config_of(SOURCE.format(url), *options))
            return raised(lambda: ServerSource(context, context.config.rollout.source), *words)

    return run


def _penalize(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Takes the second token in place of a repeated one, as a penalty does."""
    log_probs = answer["choices"][0]["logprobs"]
    log_probs["top_logprobs"] = [{"a": value, "b": -0.5} for value in log_probs["token_logprobs"]]


def _cut(request: dict[str, Any], answer: dict[str, Any]) -> None:
    """Has the log-probs of what is left after the cuts."""
    answer["choices"][0]["logprobs"]["token_logprobs"] = [0.0] * request["max_tokens"]


def said(text: str | bytes, *words: str, status: str = "200 OK", **headers: str) -> Callable[[pathlib.Path], str]:
    """Makes a fault of an answer of this text."""
    body = text if isinstance(text, bytes) else text.encode()
    return refused(sends(response(body, status, **headers)), *words)


def _choices(change: Callable[[list[Any]], Any]) -> Reply:
    return _answer(lambda answer: {"choices": change(answer["choices"])})


def _twice(connection: socket.socket, body: dict[str, Any]) -> None:
    """Answers with two lists of ids in a completion, of which a reader of JSON takes the last."""
    answer = Digits(ByteTokenizer().eos_id)("/v1/completions", body)[1]
    connection.sendall(response(answer.replace('"index"', '"token_ids": [49, 257], "index"', 1).encode()))


def _memory(directory: pathlib.Path) -> str:
    """Sends a small answer that decompresses to a large one, whose memory must not be taken."""
    packed = blanks(200 * MEGABYTE)
    tracemalloc.start()
    try:
        outcome = refused(sends(packed), "max_response_bytes", "has more than")(directory)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return outcome if peak < 100 * MEGABYTE else "silent"


def _unreachable(directory: pathlib.Path) -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return raised(lambda: _get(url), "failed 2 times", "ConnectError", error=SourceError)


def _plain_text(directory: pathlib.Path) -> str:
    with wire(lambda path: sends(b"HTTP/1.1 400 not TLS\r\n\r\n")) as url:
        return raised(lambda: _get(url.replace("http:", "https:")), "ConnectError", error=SourceError)


def _get(url: str) -> None:
    with contextlib.closing(Client(timeout=SECONDS, retries=1, sleep=_no_wait)) as client:
        client.get(f"{url}/v1/models", bytes)


def _redirect(directory: pathlib.Path) -> str:
    """Redirects, which is not followed: the key stays with the server that it is for."""
    requests: list[str] = []

    def elsewhere(path: str) -> Reply:
        requests.append(path)
        return sends(response(b"{}"))

    with wire(elsewhere) as other:
        outcome = said("", "refused with status 302", status="302 Found", Location=f"{other}/x")(directory)
    return "silent" if requests else outcome


def _repeated_key(directory: pathlib.Path) -> str:
    key = "sk-of-this-run-0123456789"

    def reply(path: str) -> Reply:
        return sends(response(f"no such key: {key}".encode(), "401 Unauthorized"))

    with wire(reply) as url, contextlib.closing(Client(timeout=SECONDS, retries=0, key=key)) as client:
        try:
            client.get(f"{url}/v1/models", bytes)
        except UserError as error:
            return "refused" if "[key]" in str(error) and key not in str(error) else "silent"
    return "silent"


def _part_of_key(directory: pathlib.Path) -> str:
    key = "sk-of-this-run-0123456789"

    def reply(path: str) -> Reply:
        return sends(response(f"no such key: {key[:18]}...".encode(), "401 Unauthorized"))

    with wire(reply) as url, contextlib.closing(Client(timeout=SECONDS, retries=0, key=key)) as client:
        try:
            client.get(f"{url}/v1/models", bytes)
        except UserError as error:
            return "refused" if "[key]..." in str(error) and key[:8] not in str(error) else "silent"
    return "silent"


def address(url: str, *words: str, hidden: str = "") -> Callable[[pathlib.Path], str]:
    """Makes a fault of an address that the check of the config refuses."""

    def run(directory: pathlib.Path) -> str:
        try:
            parse({**tiny.RAW, "rollout": {"source": {"type": "openai", "url": url, "model": "m"}}})
        except ConfigError as error:
            shown = hidden and hidden in str(error)
            return "refused" if not shown and all(word in str(error) for word in words) else "silent"
        except Exception:
            return "traceback"
        return "silent"

    return run


DEEP, LONG = "[" * 100_000, "9" * 6_000
IDS, CHOICES = "token_ids of the answer: got", "choices of the answer: got"
NOT_JSON = "the answer is not JSON"

CASES: dict[str, Callable[[pathlib.Path], str]] = {
    "refuses the connection": _unreachable,
    "resets the connection": refused(resets, "failed 2 times"),
    "hangs": refused(hangs, "failed 2 times", "no complete answer in time", timeout=SHORT),
    "a body that is cut": refused(sends(response(b"{}" * 50)[:-10]), "failed 2 times", "RemoteProtocolError"),
    "garbage": refused(sends(b"\x00\xff\x80" * 100), "failed 2 times", "RemoteProtocolError"),
    "a bad status line": refused(sends(b"HTTP/1.1 abc\r\n\r\n"), "failed 2 times", "RemoteProtocolError"),
    "a header of 200 kB": refused(sends(response(b"{}", X="x" * 200_000)), "failed 2 times", "RemoteProtocolError"),
    "status 500": said("{}", "failed 2 times", "status 500", status="500 Internal Server Error"),
    "status 429": said("{}", "failed 2 times", "status 429", status="429 Too Many Requests"),
    "status 400": said('{"error": {"message": "bad n"}}', "status 400: bad n", status="400 Bad Request"),
    "status 401": said("", "status 401: no message", status="401 Unauthorized"),
    "a redirect": _redirect,
    "HTML": said("<html>hello</html>", NOT_JSON, "hello"),
    "an empty body": said("", NOT_JSON),
    "null": said("null", "the answer: got None, expected an object"),
    "no TLS": _plain_text,
    "no ids": choice("the answer has no token_ids", token_ids=...),
    "no log-probs": choice("the answer has no logprobs.token_logprobs", logprobs=...),
    "log-probs of another length": log_probs([-1.0], "one for each of token_ids"),
    "an id over the vocabulary": choice(IDS, "264, expected an id below 264", token_ids=[264, 257]),
    "a negative id": choice(IDS, "-1", token_ids=[-1, 257]),
    "too many ids": choice(IDS, "at most max_tokens", token_ids=[49] * 50),
    "too few completions": refused(_choices(lambda choices: choices[:-1]), CHOICES, "0 completions"),
    "too many completions": refused(_choices(lambda choices: choices * 2), CHOICES, "2 completions"),
    "ids of another prompt": choice("prompt_token_ids of the answer: got [9]", prompt_token_ids=[9]),
    "no reason of the end": choice("finish_reason of the answer: got None", finish_reason=...),
    "a text of 100 MB": refused(sends(response(b" " * 100 * MEGABYTE)), "max_response_bytes", "has more than"),
    "one status 500": recovered(sends(response(b"{}", "500 Internal Server Error"))),
    "JSON that is too deep": said('{"choices": ' + DEEP, NOT_JSON, "recursion"),
    "invalid UTF-8": said(b'{"choices": "\xff"}', NOT_JSON),
    "broken gzip": said(b"\x1f\x8b\x08broken", "failed 2 times", "damaged gzip", Content_Encoding="gzip"),
    "an integer of 6,000 digits": said('{"choices": [], "created": ' + LONG + "}", NOT_JSON, "out of range"),
    "completions that are lists": refused(_choices(lambda choices: [[] for _ in choices]), CHOICES),
    "completions that are null": refused(_choices(lambda choices: [None for _ in choices]), CHOICES, "None"),
    "a penalty that nobody asked for": probed(_penalize, "does not sample from the distribution of its log-probs"),
    "log-probs after the cuts": probed(_cut, "those after the cut", options=["rollout.top_k=3"]),
    "ids that are floats": choice(IDS, "49.0", token_ids=[49.0, 257.0]),
    "ids that are text": choice(IDS, "'49'", token_ids=["49", "257"]),
    "ids that are null": choice(IDS, "None", token_ids=[None, None]),
    "log-probs in a list": choice("logprobs of the answer: got [-1.0]", logprobs=[-1.0]),
    "log-probs that are text": choice("logprobs of the answer: got 'x'", logprobs="x"),
    "a prompt that is a number": choice("prompt_token_ids of the answer: got 5", prompt_token_ids=5),
    "Retry-After of another script": recovered(sends(response(b"", "429 Too Many Requests", Retry_After="\xb2"))),
    "log-probs NaN": log_probs([float("nan"), -1.0], "nan, expected numbers that are at most 0"),
    "log-probs -inf": judged("2 of the 4 sampled tokens have no log-prob", values=[float("-inf"), -1.0]),
    "a log-prob of +3": log_probs([3.0, -1.0], "3.0, expected numbers that are at most 0"),
    "false as log-prob": log_probs([False, -1.0], "False, expected numbers"),
    "true as id": choice(IDS, "True", token_ids=[True, 257]),
    "equal completions of every prompt": judged("all 2 completions are equal, by chance", values=[-20.0, -20.0]),
    "a byte of the body now and then": refused(
        drips(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n"), "no complete answer in time", timeout=SHORT
    ),
    "200 MB in 200 kB of gzip": _memory,
    "unknown fields": recovered(_answer(lambda answer: {**answer, "usage": None, "created": 1.5})),
}
"""The faults of the study."""
MORE: dict[str, Callable[[pathlib.Path], str]] = {
    "a byte of the header now and then": refused(
        drips(b"HTTP/1.1 200 OK\r\nX: ", b"x"), "no complete answer in time", timeout=SHORT
    ),
    "an integer of 400 digits as id": choice(IDS, token_ids=[10**400, 257]),
    "a log-prob below float32": judged("have no log-prob", values=[-1e39, -1.0]),
    "an id after the end": choice(IDS, "no id after one of stop_token_ids", token_ids=[257, 49]),
    "an end that is no reason": choice("finish_reason of the answer: got length", finish_reason="length"),
    "a stop without an end": choice("finish_reason of the answer: got stop", token_ids=[49, 50]),
    "no id at all": choice(IDS, "0 tokens", token_ids=[], finish_reason="length"),
    "ids twice": refused(_twice, "token_ids of the answer: got the field 2 times"),
    "a log-prob of -3e38": judged("have no log-prob", values=[-3e38, -1.0]),
    "a million ids": choice("values of the answer: got", "expected at most", token_ids=[49] * 10**6),
    "log-probs of another temperature": probed(
        lambda request, answer: None, "those at temperature 1", options=["temperature=0.6"]
    ),
    "gzip that ends too early": refused(
        sends(response(zipped(b"{}" * 100).partition(b"\r\n\r\n")[2][:-4], Content_Encoding="gzip")), "ends too early"
    ),
    "another compression": said(b"x", "content encoding 'br'", Content_Encoding="br"),
    "a refusal of 100 MB": said(b"x" * MEGABYTE, "status 400: a message that is too long", status="400 Bad Request"),
    "one answer that is HTML": recovered(sends(response(b"<html>starting</html>"))),
}
PASSWORD = "hunter2"
ADDRESS_CASES: dict[str, Callable[[pathlib.Path], str]] = {
    "the key in a refusal": _repeated_key,
    "a part of the key in a refusal": _part_of_key,
    "a password": address(f"http://user:{PASSWORD}@host", "rollout.source.url: got", "api_key", hidden=PASSWORD),
    "a password with a slash": address(f"http://user:/{PASSWORD}@host", "rollout.source.url: got", hidden=PASSWORD),
    "a password in a long address": address(f"http://u:{PASSWORD * 20}@host", "rollout.source.url", hidden=PASSWORD),
    "a password and another scheme": address(f"ftp://user:{PASSWORD}@host", "rollout.source.url", hidden=PASSWORD),
    "a bracket that is open": address(
        "http://[::1", "rollout.source.url: got 'http://[::1', but it cannot be read: Invalid IPv6"
    ),
    "a space": address("http://a b", "rollout.source.url: got", "it has a space"),
    "a port over 65535": address("http://host:99999", "rollout.source.url: got", "Port out of range"),
    "a port that is text": address("http://host:abc", "rollout.source.url: got", "Port"),
    "a control character": address("http://host\x7f", "rollout.source.url: got", "not printable"),
    "an empty label": address("http://a..b", "rollout.source.url: got", "no name of a host"),
}
FAULTS = [
    *(Fault(AREA, name, run) for name, run in (CASES | MORE).items()),
    *(Fault(ADDRESSES, name, run) for name, run in ADDRESS_CASES.items()),
]
