"""An engine that writes given texts a few tokens at a step, and an endpoint around it."""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from train.data.tokenizers import ByteTokenizer
from train.rollouts.endpoint.app import Endpoint
from train.rollouts.endpoint.completions import EndpointKeys, Served
from train.rollouts.endpoint.generator import Generator
from train.rollouts.endpoint.sessions import OpenEpisodes, SequenceLengths, Sessions
from train.rollouts.engine import Turn
from train.rollouts.sampler import Sampling

TOKENIZER = ByteTokenizer()
LENGTHS = SequenceLengths(prompt=40, completion=60)


class ScriptedEngine:
    """Answers each turn with the text that `say` gives for the text of its prompt; "..." in it never ends."""

    def __init__(self, say: Callable[[str], str], rows: int = 8, chunk: int = 3, tokenizer=TOKENIZER) -> None:
        self.say = say
        self.tokenizer = tokenizer
        self.end = tokenizer.eos_ids[0]
        self.rows = rows
        self.chunk = chunk
        self.waiting: list[Turn] = []
        self.active: dict[Turn, list[int]] = {}
        self.cancelled = 0

    def submit(self, turn: Turn) -> None:
        self.waiting.append(turn)

    def cancel(self, turn: Turn) -> None:
        self.cancelled += 1
        if turn in self.waiting:
            self.waiting.remove(turn)
        self.active.pop(turn, None)

    def is_idle(self) -> bool:
        return not self.waiting and not self.active

    def step(self) -> list[Turn]:
        while self.waiting and len(self.active) < self.rows:
            turn = self.waiting.pop(0)
            text = self.say(self.tokenizer.decode_all(turn.ids))
            ids = self.tokenizer.encode(text)
            self.active[turn] = ids if text.endswith("...") else [*ids, self.end]
        ended = []
        for turn, ids in list(self.active.items()):
            for _ in range(self.chunk):
                n = len(turn.tokens)
                turn.tokens.append(ids[n] if n < len(ids) else ord("."))
                turn.rollout_log_probs.append(-0.5 - n)
                turn.versions.append(7)
                if turn.tokens[-1] == self.end or len(turn.tokens) == turn.max_tokens:
                    turn.finish = "stop" if turn.tokens[-1] == self.end else "length"
                    del self.active[turn]
                    ended.append(turn)
                    break
        return ended


@dataclasses.dataclass
class Running:
    """An endpoint whose engine runs in a thread."""

    endpoint: Endpoint
    generator: Generator
    engine: ScriptedEngine
    sessions: Sessions | OpenEpisodes


@contextmanager
def running(
    say: Callable[[str], str], *, episodes: bool = False, keys: EndpointKeys | None = None, **options
) -> Iterator[Running]:
    """Serves a scripted engine: any session, or episodes."""
    generator = Generator()
    tokenizer = options.pop("tokenizer", TOKENIZER)
    engine = ScriptedEngine(say, rows=options.pop("rows", 8), tokenizer=tokenizer)
    lengths = options.pop("lengths", LENGTHS)
    pause = options.pop("pause", 0.0)
    sessions = OpenEpisodes(generator.wake) if episodes else Sessions(lengths)
    served = Served(
        model="tiny",
        tokenizer=tokenizer,
        sampling=options.pop("sampling", Sampling()),
        lengths=lengths,
        vocab_size=tokenizer.vocab_size,
        sessions=sessions,
        keys=keys or EndpointKeys(),
        **options,
    )
    endpoint = Endpoint(served, generator)
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            generator.advance(engine, seconds=0.01)
            time.sleep(pause)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        yield Running(endpoint, generator, engine, sessions)
    finally:
        over.set()
        generator.wake()
        thread.join()
