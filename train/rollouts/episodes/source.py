"""The source of episodes: turns of the engine in this process, and an environment in worker processes."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

import kljax
from train.config.errors import UserError
from train.config.plan import Layout
from train.context import RunContext
from train.data.tasks import Example
from train.data.tokenizers import decode_continuation, vocabulary_bytes
from train.data.tokenizers.calls import ToolCall, parse_calls
from train.data.tokenizers.protocol import EpisodeTokenizer
from train.process.interrupt import leave_if_stopping
from train.rollouts.engine import EngineSizes, Turn, TurnEngine
from train.rollouts.engine.schedule import session_keys
from train.rollouts.episodes.environments import Answer, Environments
from train.rollouts.episodes.turns import Episode, SampledTurn, make_sequences
from train.rollouts.jax_source import rollout_sampling
from train.rollouts.sampler import stop_table
from train.rollouts.source import Completions, InTurn, Request, SourceError
from train.sequences.token_fields import TOKEN_FIELDS, TOKEN_REWARDS, UNKNOWN, VERSIONS

FAILURES = {
    "exception": "episodes_failed_exception",
    "timeout": "episodes_failed_timeout",
    "ended": "episodes_failed_ended",
    "lost": "episodes_failed_lost",
}
"""The metrics that count failures of the world, by name."""


@dataclasses.dataclass(eq=False)
class _Running:
    """An episode under way: its example, prompt and ids, and the conversation before its last turn."""

    example: Example
    key: np.ndarray
    prompt: list[int] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    episode: Episode = dataclasses.field(default_factory=Episode)


class EpisodeSource(InTurn):
    """Runs the episodes of a request, all at once; a row is an episode, and its observations are holes in the mask.

    Sampled ids are kept as they are, and an observation is encoded alone, as text. After every chunk of the engine all
    environments answer before it goes on, so that a run that is resumed has the same episodes to the bit, if its
    environment has.
    """

    def __init__(self, context: RunContext) -> None:
        """Starts the first process of the environment.

        Raises:
          UserError: the class is no environment, or the run cannot sample turn by turn.
        """
        super().__init__()
        config = context.config
        assert config.environment is not None
        if context.mesh.size > 1:
            raise UserError(f"environment: got a mesh of {context.mesh.size} devices, expected 1: episodes run on one")
        self._context = context
        self._section = config.environment
        self._tokenizer = cast(EpisodeTokenizer, context.tokenizer)
        self._environments = Environments(config.environment)
        self._tools = self._environments.tools if self._tokenizer.has_template else []
        self._names = [tool["function"]["name"] for tool in self._environments.tools]
        self._prompt_length = config.data.max_prompt_length
        self._longest = config.data.max_completion_length
        self._engine: TurnEngine | None = None

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sets the weights; the first call compiles the engine."""
        context = self._context
        with context.layout.active():
            if self._engine is None:
                self._engine = self._make_engine()
            self._engine.update(context.layout.weights(policy), version)

    def _make_engine(self) -> TurnEngine:
        context = self._context
        section = self._context.config.rollout
        size = context.model.config.vocab_size
        most = max(context.config.rows_per_batch(), context.config.eval.rows())
        rows = min(self._section.rows or most, most)
        return TurnEngine(
            context.layout.model,
            EngineSizes.of(rows, self._prompt_length + self._longest),
            sampling=rollout_sampling(context.config),
            eos_ids=context.tokenizer.eos_ids,
            stop=stop_table(section.stop, vocabulary_bytes(context.tokenizer, size) if section.stop else []),
        )

    def sample(self, request: Request) -> Completions:
        """Runs the episodes of a request.

        Raises:
          SourceError: more of them failed than `environment.max_failures` allows, or a prompt is too long.
          ValueError: before the first `update`.
        """
        if self._engine is None:
            raise ValueError("policy: missing; call `update` before `sample`")
        examples = [example for example in request.examples for _ in range(request.samples)]
        first = request.first_row or 0
        keys = session_keys(request.key, first + len(examples))[first:]
        running = [_Running(example, key) for example, key in zip(examples, keys, strict=True)]
        self._engine.greedy = request.greedy
        self._engine.count.clear()
        with self._context.layout.active():
            self._run(self._engine, running)
        episodes = [state.episode for state in running]
        self._check_failures(episodes)
        self._check_prompts(running, request.samples)
        return self._completions(running)

    def _check_prompts(self, running: Sequence[_Running], samples: int) -> None:
        """Checks that the episodes of a group have one prompt, if it is shared; one that failed gets that prompt."""
        for start in range(0, len(running), samples):
            group = running[start : start + samples]
            prompts = [state.prompt for state in group if state.episode.failure is None]
            if prompts and Layout.of(self._context.config).group > 1 and any(x != prompts[0] for x in prompts):
                raise SourceError(
                    f"environment: reset gave the episodes of the prompt {group[0].example.prompt[:80]!r} other texts; "
                    "set optim.share_prompts=false"
                )
            for state in group:
                if state.episode.failure is not None:
                    ids = prompts[0] if prompts else self._tokenizer.prompt_ids(state.example)
                    state.prompt = list(ids)

    def _run(self, engine: TurnEngine, running: Sequence[_Running]) -> None:
        rows = [{"prompt": s.example.prompt, "answer": s.example.answer, **s.example.record} for s in running]
        questions = [{"do": "reset", "episode": number, "row": row} for number, row in enumerate(rows)]
        for number, answer in enumerate(self._environments.answer(questions)):
            if not self._fails(running[number], answer):
                self._start(engine, number, running[number], answer["text"])
        while not engine.is_idle():
            leave_if_stopping(together=True)
            self._observe(engine, running, engine.step())
        numbers = [number for number, state in enumerate(running) if state.episode.failure is None]
        ends = self._environments.answer([{"do": "end", "episode": number} for number in numbers])
        for number, answer in zip(numbers, ends, strict=True):
            state = running[number]
            if self._fails(state, answer):
                continue
            rewards = answer["rewards"]
            if rewards is None and self._environments.form == "text":
                rewards = state.rewards
            state.episode.rewards = rewards

    def _start(self, engine: TurnEngine, number: int, state: _Running, text: str) -> None:
        example = state.example
        if text:
            messages = example.messages
            if messages:
                role, last = messages[-1]
                messages = (*messages[:-1], (role, last + text))
            example = dataclasses.replace(example, prompt=example.prompt + text, messages=messages, prompt_ids=None)
        if text or self._tools or example.prompt_ids is None:
            state.prompt = self._tokenizer.episode_prompt_ids(example, self._tools)
        else:
            state.prompt = example.prompt_ids.tolist()
        if len(state.prompt) > self._prompt_length:
            raise SourceError(
                f"data.max_prompt_length: got {self._prompt_length}, but the prompt {example.prompt[:80]!r} has "
                f"{len(state.prompt)} tokens with what the environment adds"
            )
        state.ids = list(state.prompt)
        state.messages = self._tokenizer.messages(example)
        self._ask(engine, number, state)

    def _ask(self, engine: TurnEngine, number: int, state: _Running) -> None:
        drawn = len(state.ids) - len(state.prompt)
        limit = min(self._longest - drawn, self._section.turn_tokens or self._longest)
        engine.submit(Turn(list(state.ids), limit, state.key, drawn, number))

    def _observe(self, engine: TurnEngine, running: Sequence[_Running], ended: Sequence[Turn]) -> None:
        """Gives turns to their environments, and goes on with the next turns."""
        waiting: list[tuple[int, str]] = []
        questions: list[dict[str, Any]] = []
        refused: list[tuple[int, str]] = []
        for turn in sorted(ended, key=lambda turn: turn.session):  # type: ignore[arg-type, return-value]
            number: int = turn.session  # type: ignore[assignment]
            state = running[number]
            text = decode_continuation(self._tokenizer, state.prompt, turn.tokens)
            state.episode.turns.append(SampledTurn(turn.ids, turn.tokens, turn.log_probs, turn.versions))
            state.episode.texts.append(text)
            state.ids += turn.tokens
            if turn.finish == "length" and len(state.ids) - len(state.prompt) >= self._longest:
                continue  # the tokens of the episode are used up
            if self._environments.form == "text":
                questions.append({"do": "step", "episode": number, "text": text})
                waiting.append((number, "user"))
                continue
            calls = parse_calls(text, self._names)
            if not calls:
                state.episode.finished = True
                continue
            state.episode.calls += 1
            call: ToolCall = calls[0]
            if call.problem is not None:
                refused.append((number, call.problem))
                continue
            question = {"do": "call", "episode": number, "tool": call.name, "arguments": call.arguments}
            questions.append(question)
            waiting.append((number, "tool"))
        for (number, role), answer in zip(waiting, self._environments.answer(questions), strict=True):
            state = running[number]
            if self._fails(state, answer):
                continue
            if "refused" in answer:
                refused.append((number, answer["refused"]))
                continue
            given = answer.get("rewards", {})
            for name, value in given.items():
                state.rewards[name] = state.rewards.get(name, 0.0) + value
            turns = state.episode.turns
            turns[-1] = dataclasses.replace(turns[-1], reward=self._weighted(given))
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

    def _go_on(self, engine: TurnEngine, number: int, state: _Running, *, text: str, role: str) -> None:
        """Appends an observation, and asks for the next turn, unless a limit ends the episode."""
        if len(state.episode.turns) >= self._section.max_turns:
            return
        if role == "tool" and not self._tokenizer.has_template:
            text = f"{text}\n"
        ids = self._tokenizer.observation_ids(state.messages, text, role=role, before=state.ids, tools=self._tools)
        if len(state.ids) - len(state.prompt) + len(ids) >= self._longest:
            return
        state.messages += [
            {"role": "assistant", "content": state.episode.texts[-1]},
            {"role": role, "content": text},
        ]
        state.ids += ids
        self._ask(engine, number, state)

    def _fails(self, state: _Running, answer: Answer) -> bool:
        """Notes that the world failed an episode, if it did."""
        if "failure" in answer:
            name, text = answer["failure"]
            state.episode.failure = name, text
        return "failure" in answer

    def _check_failures(self, episodes: Sequence[Episode]) -> None:
        failures = [episode.failure for episode in episodes if episode.failure is not None]
        if len(failures) > self._section.max_failures * len(episodes):
            counts = collections.Counter(name for name, _ in failures)
            listed = ", ".join(f"{count} {name}" for name, count in counts.most_common())
            raise SourceError(
                f"environment.max_failures: got {self._section.max_failures:g}, but {len(failures)} of "
                f"{len(episodes)} episodes failed ({listed}); the first: {failures[0][1]}"
            )

    def _completions(self, running: Sequence[_Running]) -> Completions:
        shape = len(running), self._prompt_length + self._longest
        tokens = np.full(shape, self._tokenizer.pad_id, np.int32)
        token_mask, completion_mask = np.zeros((2, *shape), bool)
        log_probs = np.zeros(shape, TOKEN_FIELDS["log_probs"].dtype)
        versions = np.full(shape, UNKNOWN, np.int32)
        rewards = np.zeros(shape, np.float32)
        for row, state in enumerate(running):
            start = self._prompt_length - len(state.prompt)
            turns = [] if state.episode.failure is not None else state.episode.turns
            if not turns:
                tokens[row, start : self._prompt_length] = state.prompt
                token_mask[row, start : self._prompt_length] = 1
                continue
            (sequence,) = make_sequences(turns)
            columns = slice(start, start + len(sequence.ids))
            tokens[row, columns] = sequence.ids
            token_mask[row, columns] = True
            completion_mask[row, columns] = sequence.sampled
            log_probs[row, columns] = sequence.log_probs
            versions[row, columns] = sequence.versions
            rewards[row, columns] = sequence.rewards
        episodes = [state.episode for state in running]
        return Completions(
            examples=[state.example for state in running],
            tokens=tokens,
            token_mask=token_mask,
            completion_mask=completion_mask,
            finished=np.array([episode.finished for episode in episodes]),
            texts=[episode.texts[-1] if episode.texts else "" for episode in episodes],
            fields={
                "log_probs": log_probs,
                VERSIONS: versions,
                # Tools give no rewards of their own.
                **({TOKEN_REWARDS: rewards} if self._environments.form == "text" else {}),
            },
            rewards=_rewards(episodes),
            failed=np.array([episode.failure is not None for episode in episodes]),
            sampled=[[] if e.failure is not None else list(e.turns) for e in episodes],
            metrics=self._metrics(episodes),
        )

    def _metrics(self, episodes: Sequence[Episode]) -> Mapping[str, float]:
        trained = [episode for episode in episodes if episode.failure is None]
        count = max(len(trained), 1)
        metrics = {
            "episode_turns": sum(len(episode.turns) for episode in trained) / count,
            "episode_truncated": sum(not episode.finished for episode in trained) / count,
            **dict.fromkeys(FAILURES.values(), 0.0),
        }
        if self._environments.form == "tools":
            metrics["episode_tool_calls"] = sum(episode.calls for episode in trained) / count
            metrics["episode_refused_calls"] = sum(episode.refused for episode in trained) / count
        for episode in episodes:
            if episode.failure is not None:
                metrics[FAILURES[episode.failure[0]]] += 1.0
        return metrics

    def close(self) -> None:
        """Ends the processes of the environment."""
        self._environments.close()


def _rewards(episodes: Sequence[Episode]) -> dict[str, np.ndarray] | None:
    """Returns the rewards by name, 0 for an episode that failed; None if the task scores the last turns."""
    if all(episode.rewards is None for episode in episodes):
        return None
    names = next((list(episode.rewards) for episode in episodes if episode.rewards), ["reward"])
    wrong = next((e.rewards for e in episodes if e.rewards and {*e.rewards} != {*names}), None)
    if wrong is not None:
        raise SourceError(
            f"environment: got the rewards {', '.join(wrong)} of an episode, {', '.join(names)} of another"
        )
    rewards = {name: np.array([(e.rewards or {}).get(name, 0.0) for e in episodes], np.float32) for name in names}
    if "correct" not in rewards and "reward" in rewards:
        rewards["correct"] = (rewards["reward"] >= 1).astype(np.float32)
    return rewards
