"""Requests that are tried again: what a server that restarts or is overloaded needs, and nothing else."""

import json
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from train.rollouts.source import SourceError

RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that another attempt may change: time-outs, overload, a server that restarts behind a proxy."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
CONNECT_SECONDS = 10.0


def wait_before(attempt: int, chance: float, asked: float | None = None) -> float:
    """Seconds before attempt 1, 2, ...: exponential with equal jitter, so that clients do not return all at once.

    `w / 2 * (1 + chance)` with `w = min(0.5 * 2 ** (attempt - 1), 30)`; a server that asks for longer gets it.

    Example:
      >>> [wait_before(attempt, chance=1.0) for attempt in (1, 2, 3, 9)]
      [0.5, 1.0, 2.0, 30.0]
      >>> wait_before(1, chance=0.0), wait_before(1, chance=0.0, asked=5.0)
      (0.25, 5.0)
    """
    longest = min(FIRST_WAIT * 2 ** (attempt - 1), LONGEST_WAIT)
    return max(longest / 2 * (1 + chance), min(asked or 0.0, LONGEST_WAIT))


class Client:
    """JSON requests to one server, from any number of threads.

    Connections that fail, requests that take too long and the statuses in `RETRIED` are tried again; any other refusal
    is an error at once. Errors name the address, what was tried, how often and for how long.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        retries: int,
        connections: int = 8,
        key: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._timeout, self._retries, self._sleep = timeout, retries, sleep
        self._client = httpx.Client(
            transport=transport,
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
        )

    def get(self, path: str) -> Any:
        """The JSON of an answer, or its text where that is no JSON."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of an answer, or its text where that is no JSON."""
        return self._ask("POST", path, body)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        began, attempts, last = time.monotonic(), self._retries + 1, ""
        for attempt in range(1, attempts + 1):
            asked = None
            try:
                response = self._client.request(method, self.url + path, json=body)
            except httpx.TransportError as error:
                last = f"{type(error).__name__}: {error}".strip(": ")
            else:
                if response.is_success:
                    return _content(response)
                last = f"status {response.status_code}: {_message(response)}"
                if response.status_code not in RETRIED:
                    raise SourceError(f"rollout.source: {method} {self.url}{path} was refused with {last}")
                asked = _asked(response)
            if attempt < attempts:
                self._sleep(wait_before(attempt, random.random(), asked))
        times = "once" if attempts == 1 else f"{attempts} times"
        raise SourceError(
            f"rollout.source.url: {method} {self.url}{path} failed {times} in {time.monotonic() - began:.0f} s "
            f"(rollout.source.timeout {self._timeout:g} s, rollout.source.retries {self._retries}); last: {last}"
        )


def _content(response: httpx.Response) -> Any:
    try:
        return response.json()
    except json.JSONDecodeError:
        return response.text


def _message(response: httpx.Response) -> str:
    """What a server says of an error, in any of the forms that they use, on one line."""
    content = _content(response)
    inner = content.get("error", content) if isinstance(content, dict) else content
    text = inner.get("message", inner) if isinstance(inner, dict) else inner
    return " ".join(str(text).split())[:300] or "no message"


def _asked(response: httpx.Response) -> float | None:
    """The seconds of a Retry-After header; its other form, a date, is left to the usual wait."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None
