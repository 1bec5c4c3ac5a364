"""The source of episodes: turns of the engine in this process or of servers, and an environment in worker processes."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

import kljax
from train.config.errors import UserError
from train.context import RunContext
from train.data.tasks import Example
from train.data.tokenizers import decode_continuation
from train.data.tokenizers.calls import ToolCall
from train.data.tokenizers.protocol import EpisodeTokenizer
from train.data.tokenizers.rendered import read_turn
from train.distributed.exchange import run_together
from train.process.interrupt import leave_if_stopping
from train.rollouts.engine import Turn, TurnEngine
from train.rollouts.engine.of_run import check_processes, engine_of_run, running_engine
from train.rollouts.engine.schedule import session_keys
from train.rollouts.episodes.environments import Answer, Environments
from train.rollouts.episodes.failures import FailureWatch
from train.rollouts.episodes.rows import RowShape, episode_metrics, join_rows, make_rows, place_sequences
from train.rollouts.episodes.turns import Episode, SampledTurn
from train.rollouts.server import ServerSource
from train.rollouts.server.turns import ServerTurns
from train.rollouts.source import Completions, InTurn, Request, SourceError


@dataclasses.dataclass(eq=False)
class _Running:
    """An episode under way: its example, prompt and ids, the conversation before its last turn, and its seconds."""

    example: Example
    key: np.ndarray
    prompt: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    drawn: int = 0
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    episode: Episode = dataclasses.field(default_factory=Episode)
    turn: Turn | None = None
    turn_seconds: float = 0.0
    episode_seconds: float = 0.0

    def spend(self, seconds: float) -> None:
        """Adds to the time of the turn and of the episode."""
        self.turn_seconds += seconds
        self.episode_seconds += seconds


class EpisodeSource(InTurn):
    """Runs the episodes of a request, all at once; a row is an episode, and its observations are holes in the mask.

    Each process runs the episodes of its own rows, with an engine of its own.

    Sampled ids are kept as they are, and an observation is encoded alone, as text. After every chunk of the engine all
    environments answer before it goes on, so that a run that is resumed has the same episodes to the bit, if its
    environment has.
    """

    def __init__(self, context: RunContext, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts the first process of the environment.

        Args:
          context: of the run.
          clock: the time in seconds.

        Raises:
          UserError: the class is no environment, or the run cannot sample turn by turn.
        """
        super().__init__()
        config = context.config
        assert config.environment is not None
        check_processes(context)
        servers = config.rollout.source
        self._context = context
        self._section = config.environment
        self._tokenizer = cast(EpisodeTokenizer, context.tokenizer)
        self._clock = clock
        self._failures = FailureWatch(config.environment.max_failures, "environment.max_failures")
        self._environments = Environments(config.environment, clock)
        if context.plan.turns and not self._environments.has_scores:
            self._environments.close()
            raise UserError(
                f"environment.name: got {config.environment.name!r}, but advantage.type {config.advantage.type} reads "
                "a score after every turn, and the class has no method turn_score"
            )
        self._tools = self._environments.tools if self._tokenizer.has_template else []
        self._names = [tool["function"]["name"] for tool in self._environments.tools]
        self._data = config.data
        self._engine: TurnEngine | ServerTurns | None = None
        self._weights: tuple[kljax.Policy, int] | None = None
        if servers.type == "openai":
            try:
                self._engine = ServerTurns(ServerSource(context, servers))
            except UserError:
                self._environments.close()
                raise

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sets the weights, without a copy if turns are drawn here."""
        self._weights = policy, version
        if isinstance(self._engine, ServerTurns):
            self._engine.update(policy, version)

    def sample(self, request: Request) -> Completions:
        """Runs the episodes of a request; an engine of this process has memory on the devices only meanwhile.

        Raises:
          SourceError: more of them failed than `environment.max_failures` allows, or a prompt is too long.
          ValueError: before the first `update`.
        """
        if self._weights is None:
            raise ValueError("policy: missing; call `update` before `sample`")
        shape = RowShape.of(self._context, request)
        first = request.first_row or 0
        keys = session_keys(request.key, first + len(request.examples) * shape.episodes)[first:]
        groups = request.rows.own[:: shape.samples] // shape.samples
        numbers = [group * shape.episodes + place for group in groups for place in range(shape.episodes)]
        examples = [request.examples[number // shape.episodes] for number in numbers]
        running = [_Running(example, key) for example, key in zip(examples, keys[numbers], strict=True)]
        with self._running_engine(*self._weights) as engine:
            engine.greedy = request.greedy
            engine.count.clear()
            run_together("environment", lambda: self._run(engine, running))
        episodes = [state.episode for state in running]
        rows = place_sequences(episodes, shape)
        self._failures.check(episodes, request)
        for state in running:
            state.prompt = state.prompt or self._tokenizer.prompt_ids(state.example)
        has_tools = self._environments.form == "tools"
        prompts = [state.prompt for state in running]
        # Tools give no rewards of their own.
        scores = {"turn_rewards": not has_tools, "turn_scores": self._context.plan.turns > 0}
        completions = run_together("environment", lambda: make_rows(examples, prompts, episodes, rows, shape, **scores))
        metrics = episode_metrics(episodes, tools=has_tools)
        completions = join_rows(completions, request.rows)
        fields = dict(completions.fields)
        if isinstance(engine, ServerTurns):
            metrics |= engine.metrics
            if not self._context.config.rollout.record_log_probs:
                del fields["rollout_log_probs"]  # no server was asked for them
        return dataclasses.replace(completions, fields=fields, metrics=metrics)

    def _running_engine(
        self, policy: kljax.Policy, version: int
    ) -> contextlib.AbstractContextManager[TurnEngine | ServerTurns]:
        """Returns the context in which the engine has these weights; servers have theirs."""
        if isinstance(self._engine, ServerTurns):
            return contextlib.nullcontext(self._engine)
        self._engine = self._engine or engine_of_run(self._context)
        assert self._engine is not None
        return running_engine(self._context, self._engine, policy, version)

    def _run(self, engine: TurnEngine | ServerTurns, running: Sequence[_Running]) -> None:
        rows = [{"prompt": s.example.prompt, "answer": s.example.answer, **s.example.record} for s in running]
        questions = [{"do": "reset", "episode": number, "row": row} for number, row in enumerate(rows)]
        for number, answer in enumerate(self._environments.answer(questions)):
            state = running[number]
            state.episode_seconds = self._environments.call_seconds[number]
            if not self._fails(state, answer):
                self._start(engine, number, state, answer["text"])
        while not engine.is_idle():
            leave_if_stopping()
            began = self._clock()
            ended = engine.step()
            seconds = self._clock() - began
            for state in running:
                if state.turn is not None:
                    state.spend(seconds)
                    if self._is_late(state):
                        engine.cancel(state.turn)
                        state.turn = None
            self._observe(engine, running, [turn for turn in ended if running[_number(turn)].turn is turn])
        failed = [number for number, state in enumerate(running) if state.episode.failure is not None]
        numbers = [number for number, state in enumerate(running) if state.episode.failure is None]
        ends = self._environments.answer([_end(number, running[number].episode) for number in numbers])
        for number, answer in zip(numbers, ends, strict=True):
            state = running[number]
            if self._fails(state, answer):
                continue
            rewards = answer["rewards"]
            if rewards is None and self._environments.form == "text":
                rewards = state.rewards
            state.episode.rewards = rewards
        # After the others, which a call that hangs would take with it.
        self._environments.answer([{"do": "close", "episode": number} for number in failed])

    def _start(self, engine: TurnEngine | ServerTurns, number: int, state: _Running, text: str) -> None:
        example = state.example
        if text:
            messages = example.messages
            if messages:
                role, last = messages[-1]
                messages = (*messages[:-1], (role, last + text))
            example = dataclasses.replace(example, prompt=example.prompt + text, messages=messages, prompt_ids=None)
        if self._tools:
            state.prompt = self._tokenizer.conversation_ids(self._tokenizer.messages(example), self._tools)
        elif text or example.prompt_ids is None:
            state.prompt = self._tokenizer.prompt_ids(example)
        else:
            state.prompt = example.prompt_ids.tolist()
        if len(state.prompt) > self._data.max_prompt_length:
            raise SourceError(
                f"data.max_prompt_length: got {self._data.max_prompt_length}, but the prompt {example.prompt[:80]!r} "
                f"has {len(state.prompt)} tokens with what the environment adds"
            )
        state.ids = list(state.prompt)
        state.messages = self._tokenizer.messages(example)
        self._ask(engine, number, state)

    def _ask(self, engine: TurnEngine | ServerTurns, number: int, state: _Running) -> None:
        used = len(state.ids) - len(state.prompt)
        left = self._tokens_left(state, state.ids)
        limit = min(left, self._section.turn_tokens or left)
        # No two tokens of an episode are drawn with one number, also after a fork.
        state.drawn = max(state.drawn, used)
        state.turn = Turn(list(state.ids), limit, state.key, state.drawn, number)
        state.turn_seconds = 0.0
        engine.submit(state.turn)

    def _tokens_left(self, state: _Running, ids: Sequence[int]) -> int:
        """Returns how many tokens may come after these ids of an episode."""
        most = min(len(state.prompt) + self._data.max_completion_length, self._data.row_length())
        return most - len(ids)

    def _limit_of_tokens(self, state: _Running) -> tuple[str, str]:
        """Returns the name and the text of the limit of tokens that ends an episode."""
        is_whole = len(state.prompt) + self._data.max_completion_length <= self._data.row_length()
        name = "max_completion_length" if is_whole else "max_tokens"
        return name, f"not over within data.{name} = {getattr(self._data, name)}"

    def _observe(self, engine: TurnEngine | ServerTurns, running: Sequence[_Running], ended: Sequence[Turn]) -> None:
        """Gives turns to their environments, and goes on with the next turns."""
        waiting: list[tuple[int, str]] = []
        questions: list[dict[str, Any]] = []
        refused: list[tuple[int, str]] = []
        for turn in sorted(ended, key=_number):
            number = _number(turn)
            state = running[number]
            state.turn = None
            text = decode_continuation(self._tokenizer, state.prompt, turn.tokens)
            state.episode.turns.append(SampledTurn(turn.ids, turn.tokens, turn.rollout_log_probs, turn.versions))
            state.episode.texts.append(text)
            state.ids += turn.tokens
            state.drawn += len(turn.tokens)
            if turn.finish == "length" and self._tokens_left(state, state.ids) <= 0:
                state.episode.fault = self._limit_of_tokens(state)
                continue
            if self._environments.form == "text":
                questions.append({"do": "step", "episode": number, "text": text})
                waiting.append((number, "user"))
                continue
            read = read_turn(
                self._tokenizer, self._names, prompt=turn.ids, ids=turn.tokens, text=text, tools=self._tools
            )
            if not read.calls:
                state.episode.finished = turn.finish == "stop"
                if not state.episode.finished:
                    limit = self._section.turn_tokens
                    state.episode.fault = "turn_tokens", f"its last turn was cut at environment.turn_tokens = {limit}"
                continue
            state.episode.calls += 1
            call: ToolCall = read.calls[0]
            if call.problem is not None:
                refused.append((number, call.problem))
                state.episode.fault = "unreadable_call", call.problem
                continue
            question = {"do": "call", "episode": number, "tool": call.name, "arguments": call.arguments}
            questions.append(question)
            waiting.append((number, "tool"))
        for (number, role), answer in zip(waiting, self._environments.answer(questions), strict=True):
            state = running[number]
            state.spend(self._environments.call_seconds[number])
            if self._fails(state, answer):
                continue
            if "refused" in answer:
                refused.append((number, answer["refused"]))
                state.episode.fault = "refused_call", answer["refused"]
                continue
            given = answer.get("rewards", {})
            for name, value in given.items():
                state.rewards[name] = state.rewards.get(name, 0.0) + value
            turns = state.episode.turns
            turns[-1] = dataclasses.replace(turns[-1], reward=self._weighted(given), score=answer.get("score"))
            if answer.get("done"):
                state.episode.finished = True
                continue
            self._go_on(engine, number, state, text=answer["text"], role=role)
        for number, problem in refused:
            running[number].episode.refused += 1
            self._go_on(engine, number, running[number], text=f"error: {problem}", role="tool")

    def _weighted(self, rewards: Mapping[str, float]) -> float:
        """Returns what named rewards of a step add to that of the episode."""
        weights = self._context.config.rewards.weights or {"reward": 1.0}
        return sum(weight * rewards.get(name, 0.0) for name, weight in weights.items())

    def _go_on(self, engine: TurnEngine | ServerTurns, number: int, state: _Running, *, text: str, role: str) -> None:
        """Appends an observation, and asks for the next turn, unless a limit ends the episode."""
        most = self._section.max_turns
        if len(state.episode.turns) >= most:
            state.episode.fault = "max_turns", f"not over within environment.max_turns = {most}"
            return
        observed = {"role": role, "content": text}
        ids = self._tokenizer.observation_ids(state.messages, [observed], before=state.ids, tools=self._tools)
        ids = [*state.ids, *ids]
        messages = [*state.messages, {"role": "assistant", "content": state.episode.texts[-1]}, observed]
        if self._section.history == "template" and self._tokenizer.has_template:
            ids = self._as_rendered(messages, ids)
        if self._tokens_left(state, ids) <= 0:
            state.episode.fault = self._limit_of_tokens(state)
            return
        state.messages = messages
        state.ids = ids
        self._ask(engine, number, state)

    def _as_rendered(self, messages: list[dict[str, Any]], ids: list[int]) -> list[int]:
        """Returns the ids of a conversation, or those of the template, a fork, if it writes another text."""
        rendered = self._tokenizer.conversation_ids(messages, self._tools)
        is_equal = self._tokenizer.decode_all(rendered) == self._tokenizer.decode_all(ids)
        return ids if is_equal else rendered

    def _fails(self, state: _Running, answer: Answer) -> bool:
        """Notes that the world failed an episode, if it did, by its answer or by its time."""
        if "failure" in answer:
            name, text = answer["failure"]
            state.episode.failure = name, text
            return True
        return self._is_late(state)

    def _is_late(self, state: _Running) -> bool:
        """Notes that an episode or its turn is over its time, if it is."""
        limits = [
            ("turn_seconds", state.turn_seconds, self._section.turn_seconds),
            ("episode_seconds", state.episode_seconds, self._section.episode_seconds),
        ]
        for name, seconds, most in limits:
            if most is not None and seconds > most:
                state.episode.failure = name, f"not over within environment.{name} = {most:g}"
                return True
        return False

    def close(self) -> None:
        """Ends the processes of the environment, and what servers draw."""
        self._environments.close()
        if isinstance(self._engine, ServerTurns):
            self._engine.close()


def _end(number: int, episode: Episode) -> dict[str, Any]:
    """Returns the question that ends an episode, with what its rewards may depend on."""
    text = episode.texts[-1] if episode.texts else ""
    return {"do": "end", "episode": number, "text": text, "finished": episode.finished}


def _number(turn: Turn) -> int:
    """Returns the number of the episode of a turn."""
    return turn.session  # type: ignore[return-value]
