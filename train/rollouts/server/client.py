"""An HTTP client that bounds every answer and retries requests, for servers that restart or are overloaded."""

import asyncio
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx
from pydantic_core import from_json

from train.rollouts.server.answers import AnswerError
from train.rollouts.server.body import ENCODINGS, BrokenBodyError, TooLongError, read_body
from train.rollouts.source import SourceError

# Statuses worth a retry: time-outs, overload, a server that restarts behind a proxy.
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
SUCCESSES = range(200, 300)
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
CONNECT_SECONDS = 10.0
MOST_BYTES = 2**24
"""Limit of an answer that has no limit of its own."""
MOST_ERROR_BYTES = 2**16
"""Limit of the message of a refusal."""

SHOWN_OF_KEY = 8
"""A part of the key of this size or more is not shown."""

_Parsed = TypeVar("_Parsed")


def wait_before(attempt: int, chance: float, retry_after: float | None = None) -> float:
    """Computes the seconds before retry 1, 2, ...: exponential backoff with equal jitter.

    `w / 2 * (1 + chance)` with `w = min(0.5 * 2 ** (attempt - 1), 30)`, or `retry_after` if that is longer, at most 30.

    Example:
      >>> [wait_before(attempt, chance=1.0) for attempt in (1, 2, 3, 9)]
      [0.5, 1.0, 2.0, 30.0]
      >>> wait_before(1, chance=0.0), wait_before(1, chance=0.0, retry_after=5.0)
      (0.25, 5.0)
    """
    longest = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)
    return max(longest / 2 * (1 + chance), min(retry_after or 0.0, LONGEST_WAIT))


def wait_for(future: Future[_Parsed]) -> _Parsed:
    """Returns the result of a future; an interrupt of the caller cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def acknowledged(content: bytes) -> None:
    """Reads an answer that says, in any form, that the request was done.

    Raises:
      AnswerError: for a page of HTML, which comes from a proxy.
    """
    if content.lstrip()[:1] == b"<":
        raise AnswerError(f"the answer is a page: {content[:1000].decode(errors='replace')}", retry=True)


def without_key(text: str, key: str) -> str:
    """Replaces the key, and every part of it of at least 8 characters, by `[key]`.

    Example:
      >>> without_key("no such key: sk-0123456789ab...", "sk-0123456789abcdef")
      'no such key: [key]...'
    """
    size = min(SHOWN_OF_KEY, len(key))
    parts = {key[start : start + size] for start in range(len(key) - size + 1)}
    hidden = bytearray(len(text))
    for start in range(len(text) - size + 1):
        if text[start : start + size] in parts:
            hidden[start : start + size] = b"\1" * size
    runs = itertools.groupby(range(len(text)), lambda index: hidden[index])
    return "".join("[key]" if secret else "".join(text[index] for index in run) for secret, run in runs)


class Client:
    """Requests to one server, whose answers have limits of bytes and of time; safe to call from several threads.

    Failed connections, time-outs, the statuses in `RETRIED` and answers that say so (`AnswerError.retry`) are retried;
    any other error raises at once. Errors name the address, the request, the number of attempts and the elapsed time.
    They never show the key, even if the server repeats it.

    The requests run in an event loop of their own thread: only there a limit of time holds whatever a server sends,
    also one byte of a header now and then.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int,
        connections: int = 8,
        key: str | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout, self._retries, self._sleep, self._key = timeout, retries, sleep, key
        self._connections = asyncio.Semaphore(connections)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        try:
            self._client = httpx.AsyncClient(
                transport=transport,
                timeout=httpx.Timeout(None, connect=min(timeout, CONNECT_SECONDS)),
                limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
                headers={"Accept-Encoding": ", ".join(ENCODINGS), **headers},
            )
        except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
            # An address that is not valid may be shown with a part of its password.
            reason = "" if isinstance(error, httpx.InvalidURL) else f": {error}"
            raise SourceError(
                "rollout.source.url: cannot use the proxies or certificates that the environment names (HTTP_PROXY, "
                f"HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE){reason}"
            ) from None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="requests", daemon=True)
        self._thread.start()

    def get(self, path: str, read: Callable[[bytes], _Parsed]) -> _Parsed:
        """Returns the answer, read by `read`, which raises `AnswerError`."""
        return self._run(self._request("GET", path, None, read, MOST_BYTES))

    def post(self, path: str, body: Mapping[str, Any], read: Callable[[bytes], _Parsed]) -> _Parsed:
        """Returns the answer, read by `read`, which raises `AnswerError`."""
        return self._run(self._request("POST", path, body, read, MOST_BYTES))

    def post_all(
        self,
        path: str,
        bodies: Sequence[Mapping[str, Any]],
        reads: Sequence[Callable[[bytes], _Parsed]],
        *,
        most_bytes: int,
    ) -> Future[list[_Parsed]]:
        """Begins to post all bodies, `connections` at a time, and returns at once; the first error ends all.

        Args:
          path: path of the requests.
          bodies: JSON of each request.
          reads: for each request, reads the answer or raises `AnswerError`.
          most_bytes: limit of each answer, also after decompression.

        Returns:
          The answers to come, in order, for `wait_for`; `close` ends requests that nobody waits for.
        """

        async def together() -> list[_Parsed]:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._request("POST", path, body, read, most_bytes))
                        for body, read in zip(bodies, reads, strict=True)
                    ]
            except BaseExceptionGroup as group_error:
                raise group_error.exceptions[0] from None
            return [task.result() for task in tasks]

        return asyncio.run_coroutine_threadsafe(together(), self._loop)

    def hurry(self) -> None:
        """Gives later requests one attempt of a few seconds: the run ends, and its server may hang."""
        self._retries, self._timeout = 0, min(self._timeout, CONNECT_SECONDS)

    def close(self) -> None:
        """Ends the requests that are under way, and closes the connections."""
        if self._loop.is_closed():
            return
        self._run(self._end())
        self._run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def clean(self, text: str, longest: int = 1000) -> str:
        """Makes text of a server fit to be shown: one line of printable characters, shortened, without the key."""
        # The key goes first: a part of it would stay if the text were cut before.
        shown = " ".join((without_key(text, self._key) if self._key else text).split())[:longest]
        return "".join(letter if letter.isprintable() else "?" for letter in shown)

    def _run(self, request: Coroutine[Any, Any, _Parsed]) -> _Parsed:
        return wait_for(asyncio.run_coroutine_threadsafe(request, self._loop))

    async def _end(self) -> None:
        requests = asyncio.all_tasks() - {asyncio.current_task()}
        for request in requests:
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
        await self._client.aclose()

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        read: Callable[[bytes], _Parsed],
        most_bytes: int,
    ) -> _Parsed:
        start = time.monotonic()
        attempts = self._retries + 1
        last = ""
        async with self._connections:
            for attempt in range(1, attempts + 1):
                retry_after = None
                try:
                    status, retry_after, content = await self._attempt(method, path, body, most_bytes)
                    if status in SUCCESSES:
                        return read(content)
                    last = f"status {status}: {self.clean(_message(content), 300) or 'no message'}"
                    if status not in RETRIED:
                        raise self._error(f"rollout.source: {method} {self.url}{path} was refused with {last}")
                except TimeoutError:
                    last = "no complete answer in time"
                except (httpx.HTTPError, OSError) as error:
                    last = self.clean(_reason(error), 300)
                except BrokenBodyError as error:
                    last = f"the answer has {error}"
                except AnswerError as error:
                    last = self.clean(str(error), 500)
                    if not error.retry:
                        raise self._error(f"rollout.source: {last}") from None
                except TooLongError:
                    raise self._error(
                        f"rollout.source.max_response_bytes: the answer to {method} {self.url}{path} has more than "
                        f"{most_bytes} bytes"
                    ) from None
                if attempt < attempts:
                    await self._sleep(wait_before(attempt, random.random(), retry_after))
        times = "once" if attempts == 1 else f"{attempts} times"
        raise self._error(
            f"rollout.source.url: {method} {self.url}{path} failed {times} in {time.monotonic() - start:.0f} s "
            f"(rollout.source.timeout {self._timeout:g} s, rollout.source.retries {self._retries}); last: {last}"
        )

    async def _attempt(
        self, method: str, path: str, body: Mapping[str, Any] | None, most_bytes: int
    ) -> tuple[int, float | None, bytes]:
        """Sends one request; returns the status, the wait that the server asks for, and the body."""
        # ASCII: a lone surrogate in a stop text has no UTF-8.
        content = None if body is None else json.dumps(body).encode("ascii")
        headers = None if body is None else {"Content-Type": "application/json"}
        async with (
            asyncio.timeout(self._timeout),
            self._client.stream(method, self.url + path, content=content, headers=headers) as response,
        ):
            wait = _retry_after(response.headers.get("Retry-After", ""))
            if response.status_code in SUCCESSES:
                return response.status_code, wait, await read_body(response, most_bytes)
            try:
                message = await read_body(response, MOST_ERROR_BYTES)
            except (TooLongError, BrokenBodyError):
                message = b"a message that is too long or damaged"
            return response.status_code, wait, message

    def _error(self, text: str) -> SourceError:
        return SourceError(self.clean(text))


def _reason(error: BaseException) -> str:
    """Describes an error by its name and its first cause, which names the failed call."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return f"{type(error).__name__}: {cause}".strip(": ")


def _message(content: bytes) -> str:
    """Extracts the error message of a server, in any of the usual forms."""
    try:
        parsed = from_json(content)
    except ValueError:
        parsed = content.decode(errors="replace")
    inner = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    text = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(text)


def _retry_after(value: str) -> float | None:
    """Parses the seconds of a Retry-After header; ignores its other form, a date."""
    return float(value) if re.fullmatch("[0-9]{1,9}", value) else None
