"""Many agents with faults against a live endpoint: `python -m tests.train.rollouts.endpoint.load --minutes 5`.

No answer that a client has read to its end is lost, none is there twice, and the memory stays as it is.
"""

import argparse
import asyncio
import collections
import gc
import itertools
import json
import random
import resource
import time
from contextlib import closing
from pathlib import Path

import numpy as np

from tests.train.rollouts.endpoint.fakes import Running, running
from train.rollouts.endpoint.completions import EndpointKeys
from train.rollouts.endpoint.listen import Listener
from train.rollouts.endpoint.sessions import SequenceLengths

LENGTHS = SequenceLengths(4096, 64)
KEYS = EndpointKeys("sk-complete", "sk-reward")


def request(path: str, body: bytes, key: str, *, kind: str = "application/json", length: int | None = None) -> bytes:
    """Writes a request of HTTP."""
    head = [
        f"POST {path} HTTP/1.1",
        "Host: endpoint",
        f"Authorization: Bearer {key}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body) if length is None else length}",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


class Agent:
    """A client with faults; `received` are the ids of the answers that it read to their end."""

    def __init__(self, port: int, name: str, seed: int, counts: collections.Counter) -> None:
        self._port = port
        self._name = name
        self._rng = random.Random(seed)
        self._counts = counts
        self.received: list[tuple[int, ...]] = []

    async def run(self, actions: int) -> None:
        """Does some of what clients do."""
        kinds = ("ask", "ask", "ask", "stream", "leave", "leave_stream", "slow", "bad", "key", "large", "short", "type")
        for _ in range(actions):
            kind = self._rng.choice(kinds)
            self._counts[kind] += 1
            try:
                async with asyncio.timeout(60):
                    await getattr(self, f"_{kind}")()
            except OSError:
                self._counts["refused"] += 1

    async def _send(self, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(data)
        return reader, writer

    async def _whole(self, data: bytes) -> tuple[int, bytes]:
        reader, writer = await self._send(data)
        answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]) if head else 0, body

    def _body(self, **options: object) -> bytes:
        prompt = [256, *(self._rng.randrange(97, 120) for _ in range(8))]
        return json.dumps({"prompt": prompt, "return_token_ids": True, "max_tokens": 40, **options}).encode()

    def _request(self, **options: object) -> bytes:
        return request("/v1/completions", self._body(**options), f"{KEYS.completions}:{self._name}")

    async def _ask(self) -> None:
        status, body = await self._whole(self._request())
        assert status in (200, 429, 503), body
        if status == 200:
            self.received.append(tuple(json.loads(body)["choices"][0]["token_ids"]))

    async def _stream(self, pause: float = 0.0) -> None:
        reader, writer = await self._send(self._request(stream=True))
        ids: list[int] = []
        async for line in reader:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                ids += event["choices"][0]["token_ids"]
                await asyncio.sleep(pause)
            if line.startswith(b"data: [DONE]"):
                self.received.append(tuple(ids))
        writer.close()

    async def _slow(self) -> None:
        await self._stream(pause=0.02)

    async def _leave(self) -> None:
        _, writer = await self._send(self._request())
        await asyncio.sleep(self._rng.random() * 0.05)
        writer.close()

    async def _leave_stream(self) -> None:
        reader, writer = await self._send(self._request(stream=True))
        await reader.read(self._rng.randrange(1, 400))
        writer.close()

    async def _refused(self, data: bytes, *statuses: int) -> None:
        status, body = await self._whole(data)
        assert status in (*statuses, 0), (status, body)

    async def _bad(self) -> None:
        data = self._body()[: self._rng.randrange(1, 20)]
        await self._refused(request("/v1/completions", data, f"{KEYS.completions}:{self._name}"), 400)

    async def _key(self) -> None:
        wrong = self._rng.choice(("sk-reward", f"sk-other:{self._name}", self._name))
        await self._refused(request("/v1/completions", self._body(), wrong), 401)

    async def _large(self) -> None:
        data = request("/v1/completions", b" " * (2**20 + 1), f"{KEYS.completions}:{self._name}")
        await self._refused(data, 413)

    async def _short(self) -> None:
        _, writer = await self._send(request("/v1/completions", b"{", f"{KEYS.completions}:{self._name}", length=50))
        await asyncio.sleep(0.01)
        writer.close()

    async def _type(self) -> None:
        key = f"{KEYS.completions}:{self._name}"
        await self._refused(request("/v1/completions", self._body(), key, kind="text/plain"), 415)


async def one_round(served: Running, port: int, agents: int, actions: int, seed: int) -> collections.Counter:
    """Runs the agents of one step; checks that the episodes have what they read, and no row is taken at the end."""
    counts: collections.Counter = collections.Counter()
    keys = [np.zeros(2, np.uint32)] * agents
    opened = served.sessions.open([{}] * agents, keys, LENGTHS)
    clients = [Agent(port, episode.session.name, seed + n, counts) for n, episode in enumerate(opened)]
    await asyncio.gather(*(client.run(actions) for client in clients))
    for episode, client in zip(opened, clients, strict=True):
        turns = [tuple(turn.ids) for turn in episode.session.turns]
        assert len(set(turns)) == len(turns)
        lost = set(client.received) - set(turns)
        assert not lost, f"{len(lost)} answers that were read are in no episode"
        counts["turns"] += len(turns)
        counts["received"] += len(client.received)
    for _ in range(500):
        if served.generator.open == 0 and served.engine.is_idle():
            break
        await asyncio.sleep(0.01)
    assert served.generator.open == 0
    assert served.engine.is_idle()
    assert all(not episode.session._draws for episode in opened)
    return counts


def run(*, agents: int, actions: int, seconds: float, most_growth: float) -> collections.Counter:
    """Runs rounds for so long; checks that the memory grows by at most so many MiB after the first quarter."""
    number = itertools.count()
    total: collections.Counter = collections.Counter()
    sizes: list[float] = []
    began = time.monotonic()
    # Each text is another one, so that no answer can stand for another.
    with (
        running(lambda text: f"{next(number):08d}", episodes=True, keys=KEYS, rows=64, pause=0.002) as served,
        closing(Listener(served.endpoint.app, "127.0.0.1", 0, field="--port", most=4096)) as listener,
    ):
        port = int(listener.url.rpartition(":")[2])
        for seed in itertools.count():
            total += asyncio.run(one_round(served, port, agents, actions, 1000 * seed))
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sizes.append(pages * resource.getpagesize() / 2**20)
            if time.monotonic() - began > seconds:
                break
    total["rounds"] = len(sizes)
    growth = sizes[-1] - sizes[len(sizes) // 4]
    assert growth <= most_growth, f"the memory grew by {growth:.1f} MiB: {sizes}"
    print(f"{dict(total)}; memory {sizes[0]:.0f} -> {sizes[len(sizes) // 4]:.0f} -> {sizes[-1]:.0f} MiB")
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--agents", type=int, default=200)
    chosen = parser.parse_args()
    run(agents=chosen.agents, actions=10, seconds=60 * chosen.minutes, most_growth=16)
