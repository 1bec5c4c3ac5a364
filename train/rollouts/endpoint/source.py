"""The source of episodes that agent programs run against an endpoint of this process."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import cast

import kljax
from train.config.errors import UserError, warn
from train.config.plan import Layout
from train.config.rollout import EndpointSourceSection
from train.context import RunContext
from train.data.tokenizers.protocol import EpisodeTokenizer
from train.process.interrupt import leave_if_stopping
from train.rollouts.endpoint.agents import Agents
from train.rollouts.endpoint.completions import EndpointKeys, Served
from train.rollouts.endpoint.generator import Generator
from train.rollouts.endpoint.sessions import OpenEpisode, OpenEpisodes, RequestError, SequenceLengths
from train.rollouts.engine import TurnEngine
from train.rollouts.engine.of_run import check_processes, engine_of_run, running_engine
from train.rollouts.engine.schedule import session_keys
from train.rollouts.episodes.failures import FailureWatch
from train.rollouts.episodes.rows import RowShape, episode_metrics, make_rows, place_sequences
from train.rollouts.episodes.turns import Episode
from train.rollouts.jax_source import plain_sampling
from train.rollouts.server.key import read_key
from train.rollouts.source import Completions, InTurn, Request

POLL_SECONDS = 0.05
QUIET_SECONDS = 30.0
"""Wait for a program from outside before the run says that it waits."""
CLOSED = "the step is over, and its episodes with it"


class EndpointSource(InTurn):
    """Offers the problems of a step as episodes, and draws for the agents that run them, until all are over.

    What is drawn when depends on the agents, and is no function of the seed. The episodes of a step that is left or
    killed are forgotten, and run again from their beginning.
    """

    def __init__(self, context: RunContext, section: EndpointSourceSection) -> None:
        """Starts the agent program, if the config names one, and listens.

        Raises:
          UserError: the agent program cannot be imported, a key is missing, or nobody may listen there.
        """
        super().__init__()
        check_processes(context)
        try:
            from train.rollouts.endpoint.listen import listen
        except ImportError:
            raise UserError(
                "rollout.source.type: endpoint needs uvicorn and starlette; pip install 'kljax[serve]'"
            ) from None
        config = context.config
        data = config.data
        self._context = context
        self._section = section
        self._tokenizer = cast(EpisodeTokenizer, context.tokenizer)
        self._model = config.name
        shared = Layout.of(config).group > 1
        self._lengths = SequenceLengths(data.max_prompt_length, data.max_completion_length, shared, data.max_tokens)
        key = "rollout.source.api_key_"
        self._key = read_key(key, env=section.api_key_env, file=section.api_key_file)
        reward_key = read_key("rollout.source.reward_key_", env=section.reward_key_env, file=section.reward_key_file)
        if reward_key is not None and reward_key == self._key:
            raise UserError("rollout.source.reward_key_env: got the key of completions, expected another one")
        self._failures = FailureWatch(section.max_failures, "rollout.source.max_failures")
        self._generator = Generator()
        self._episodes = OpenEpisodes(self._generator.wake)
        self._agents = None if section.agent is None else Agents(section)
        served = Served(
            model=self._model,
            tokenizer=self._tokenizer,
            sampling=plain_sampling(config),
            lengths=self._lengths,
            vocab_size=context.tokenizer.vocab_size,
            sessions=self._episodes,
            keys=EndpointKeys(self._key, reward_key),
            max_requests=section.max_requests,
            episode_seconds=section.episode_seconds,
        )
        self._listener = listen(served, self._generator, section.host, section.port, field="rollout.source.port")
        self._engine: TurnEngine | None = None
        self._weights: tuple[kljax.Policy, int] | None = None

    @property
    def url(self) -> str:
        """The address of the endpoint, without a path."""
        return self._listener.url

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sets the weights, without a copy."""
        self._weights = policy, version

    def sample(self, request: Request) -> Completions:
        """Lets agents run the episodes of a request; the engine has memory on the devices only meanwhile.

        Raises:
          SourceError: more of them failed than `rollout.source.max_failures` allows, or they do not fit into rows.
          ValueError: before the first `update`.
        """
        if self._weights is None:
            raise ValueError("policy: missing; call `update` before `sample`")
        shape = RowShape.of(self._context, request)
        examples = [example for example in request.examples for _ in range(shape.episodes)]
        first = request.first_row or 0
        keys = session_keys(request.key, first + len(examples))[first:]
        rows = [{"prompt": e.prompt, "answer": e.answer, **e.record} for e in examples]
        self._engine = self._engine or engine_of_run(self._context)
        assert self._engine is not None
        with running_engine(self._context, self._engine, *self._weights) as engine:
            engine.greedy = request.greedy
            engine.count.clear()
            opened = self._run(engine, self._episodes.open(rows, list(keys), self._lengths))
        episodes = [_episode(episode) for episode in opened]
        placed = place_sequences(episodes, shape)
        self._failures.check(episodes, request)
        prompts = [
            episode.turns[0].prompt_ids if episode.turns else self._tokenizer.prompt_ids(example)
            for episode, example in zip(episodes, examples, strict=True)
        ]
        completions = make_rows(examples, prompts, episodes, placed, shape)
        return dataclasses.replace(completions, metrics=episode_metrics(episodes, tools=False))

    def _run(self, engine: TurnEngine, opened: list[OpenEpisode]) -> list[OpenEpisode]:
        """Draws for the agents until all episodes are over."""
        if self._agents is not None:
            # Its process ends each that is over its time.
            for _ in opened:
                self._episodes.take(math.inf)
            self._agents.play(
                self._episodes, opened, base_url=f"{self.url}/v1", model=self._model, key=self._key or "none"
            )
        began = time.monotonic()
        told = self._agents is not None
        try:
            while not all(episode.over for episode in opened):
                leave_if_stopping(together=True)
                self._generator.advance(engine, seconds=POLL_SECONDS)
                now = time.monotonic()
                if not told and now - began > QUIET_SECONDS and all(x.deadline is None for x in opened):
                    told = True
                    warn(f"waiting for an agent program, which takes episodes at {self.url}/v1/episodes")
                self._end_late(opened, now)
        finally:
            for episode in opened:
                episode.session.close(CLOSED)
            self._generator.end_all(engine, CLOSED)
        return opened

    def _end_late(self, opened: Sequence[OpenEpisode], now: float) -> None:
        """Ends episodes that are over their time."""
        for episode in opened:
            if not episode.over and episode.deadline is not None and now > episode.deadline:
                try:
                    text = f"not over within rollout.source.episode_seconds = {self._section.episode_seconds:g}"
                    self._episodes.end(episode, failure=("episode_seconds", text))
                except RequestError:
                    continue  # it ended meanwhile

    def close(self) -> None:
        """Ends the agents and the server."""
        if self._agents is not None:
            self._agents.close()
        self._listener.close()


def _episode(opened: OpenEpisode) -> Episode:
    """Returns an episode that is over."""
    session = opened.session
    failure = opened.failure
    if failure is None and not session.turns:
        failure = "exception", "the agent program asked for no completion"
    is_cut = failure is None and not session.finished
    return Episode(
        turns=list(session.turns),
        texts=list(session.texts),
        rewards=None if failure is not None else opened.rewards,
        finished=session.finished,
        failure=failure,
        fault=("length", "its last turn was cut at its limit of tokens") if is_cut else None,
    )
