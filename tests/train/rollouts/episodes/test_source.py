"""Episodes as rows of a batch: scripted turns, an environment in a worker process, and what is trained of them."""

import dataclasses

import jax
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.errors import UserError
from train.config.plan import Plan
from train.data.tasks import Example, Task
from train.data.workers.process import WorkerProcess
from train.plan.programs import AbstractRun
from train.rl.algorithms import make_estimator
from train.rollouts.collect import collect, verify_sampled
from train.rollouts.describe import describe_batch
from train.rollouts.engine import Turn
from train.rollouts.episodes import EpisodeSource
from train.rollouts.episodes import source as episode_source
from train.rollouts.source import SourceError
from train.rollouts.stream import Stream
from train.run.evaluate import evaluate
from train.sequences.batch import place_rewards, present_arrays
from train.sequences.sample import Failure

SOURCE = '''
import time

class Tools:
    def reset(self, answer):
        self.answer = answer

    def add(self, numbers: str) -> str:
        """Adds."""
        if numbers == "outage":
            raise ConnectionError("no answer")
        return str(sum(map(int, numbers.split("+"))))

class Rewarded(Tools):
    def reward(self):
        return 0.5

class Judged(Tools):
    def reward(self, text, finished):
        return {"reward": float(text == self.answer), "ended": float(finished)}

class Scored(Tools):
    def add(self, numbers: str) -> str:
        """Adds; 7 is no good, and 9 leaves the state as it is."""
        self.score = {"7": -1.0, "9": None}.get(numbers, 0.5)
        return super().add(numbers)

    def turn_score(self):
        return self.score

class Hanging(Tools):
    def close(self):
        time.sleep(60 if self.answer == "hang" else 0)

    def add(self, numbers: str) -> str:
        """Adds, or fails, and hangs when it is closed."""
        self.answer = "hang"
        raise ConnectionError("no answer")

class Slow(Tools):
    def reset(self, answer):
        super().reset(answer)
        return "?"

class Steps:
    def reset(self):
        self.count = 0
        return "x"

    def step(self, text):
        self.count += 1
        return "again\\n", 0.25, text == "stop"
'''
EOS, LENGTH = 257, 24
ROOM = "data.max_completion_length=100"
ENVIRONMENT = "environment={name: 'train.data.environments.calculator:Calculator', max_turns: 3}"
EXAMPLES = [Example("1+2", "3", "3"), Example("2+2", "4", "4")]


class ScriptClock:
    """A clock that goes on only where a test lets it: with the engine, and with calls: 1 s each, 40 for `add 40`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """An engine that answers with texts of a script, by episode and turn."""

    def __init__(self, script, clock) -> None:
        self.clock = clock
        self.script, self.turns, self.waiting, self.count, self.greedy = script, {}, [], {}, False
        self.seen = []

    def update(self, policy, version) -> None:
        self.version = version

    def submit(self, turn: Turn) -> None:
        self.waiting.append(turn)

    def text_of(self, turn: Turn) -> str:
        texts = self.script[turn.session]
        return texts[min(self.turns.get(turn.session, 0), len(texts) - 1)]

    def is_idle(self) -> bool:
        return not self.waiting

    def release(self) -> None:
        self.waiting = []

    def cancel(self, turn: Turn) -> None:
        if turn in self.waiting:
            self.waiting.remove(turn)

    def step(self) -> list[Turn]:
        """Ends all turns but those with `slow` in their text, which take a step of 10 s more."""
        self.clock.now += 10.0
        slow = [turn for turn in self.waiting if "slow" in self.text_of(turn) and turn not in self.seen]
        self.seen += slow
        ended, self.waiting = [turn for turn in self.waiting if turn not in slow], slow
        for turn in ended:
            text = self.text_of(turn)
            self.turns[turn.session] = self.turns.get(turn.session, 0) + 1
            turn.tokens = ([*text.encode(), EOS])[: turn.max_tokens]
            turn.finish = "stop" if turn.tokens[-1] == EOS else "length"
            turn.rollout_log_probs = [-0.25 * (turn.first + n + 1) for n in range(len(turn.tokens))]
            turn.versions = [self.version] * len(turn.tokens)
        return ended


def _score(example, text, finished):
    return dict.fromkeys(("reward", "correct"), float(text == example.answer))


@pytest.fixture(scope="module")
def source_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("environment") / "mine.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def stream_of(source_file, monkeypatch):
    """Makes a run's context, and a stream of episodes whose turns follow a script."""
    sources = []

    def opened(name, script, *options, **changes):
        config = tiny.config_of(
            f"environment={{name: '{source_file}:{name}', max_turns: 3, max_failures: 0.5}}",
            "rollout={prompts_per_step: 2, samples_per_prompt: 2}",
            f"data.max_completion_length={LENGTH}",
            *options,
        )
        task = Task("sums", EXAMPLES, [], _score)
        context = tiny.context_of(config, task=task, **changes)
        clock = ScriptClock()
        ask = WorkerProcess.ask

        def asked(worker, question, **limits):
            clock.now += 40.0 if question and question.get("arguments") == "40" else 1.0
            return ask(worker, question, **limits)

        monkeypatch.setattr(WorkerProcess, "ask", asked)
        monkeypatch.setattr(episode_source, "engine_of_run", lambda context: Scripted(script, clock))
        source = EpisodeSource(context, clock)
        sources.append(source)
        source.update(None, 3)
        return context, Stream(context, source)

    yield opened
    for source in sources:
        source.close()


@pytest.fixture
def rollout(stream_of):
    """Collects the batch of two prompts with two episodes each, whose turns follow a script."""
    return lambda *script, **changes: collect(*stream_of(*script, **changes), 3)


@pytest.fixture(autouse=True)
def _weights(monkeypatch):
    monkeypatch.setattr("train.rollouts.stream.Stream.start", _start)


def _start(self, requests):
    for request in requests:
        self._parts[request] = []
    self._source.start(requests)


def test_observations_are_holes_and_failures_leave_the_group(rollout):
    drawn = rollout("Tools", [["add 1+2", "3"], ["3"], ["add outage"], ["4"]])
    batch = drawn.batch
    text = "add 1+2<eos>3\n3<eos>"
    decoded = tiny.ByteTokenizer().decode_all(np.asarray(batch.tokens[0])[np.asarray(batch.token_mask[0])].tolist())
    numbers = np.flatnonzero(np.asarray(batch.token_mask[0]))
    prompts = np.asarray(drawn.completions.examples[0].prompt_ids)
    assert decoded.endswith(text)
    assert len(numbers) == len(prompts) + 8 + 2 + 2
    assert (
        np.asarray(batch.completion_mask[0])[numbers].tolist()
        == [False] * len(prompts) + [True] * 8 + [False] * 2 + [True] * 2
    )
    assert np.asarray(batch.group_ids).tolist() == [0, 0, -1, 1]
    assert np.asarray(batch.completion_mask).sum(1).tolist() == [10, 2, 0, 2]
    right = {"1+2": "3", "2+2": "4"}
    rewards = [
        float(right[e.prompt] == t) for e, t in zip(drawn.completions.examples, ["3", "3", "", "4"], strict=True)
    ]
    np.testing.assert_array_equal(batch.rewards, rewards)
    assert drawn.completions.metrics["episodes_failed_exception"] == 1
    assert drawn.completions.metrics["episode_turns"] == pytest.approx(4 / 3)
    assert drawn.completions.metrics["reward"] == pytest.approx(sum(rewards[:2] + rewards[3:]) / 3)
    assert drawn.completions.metrics["episode_truncated"] == 0
    failed = drawn.completions.failures
    assert [failure and (failure.of, failure.name) for failure in failed] == [None, None, ("world", "exception"), None]
    assert failed[2].text.startswith("ConnectionError: no answer\n")


def test_call_that_cannot_be_made_is_answered_and_trained(rollout):
    drawn = rollout(
        "Rewarded", [["<tool_call>{</tool_call>", "3"], ["3"], ["3"], ["3"]], "data.max_completion_length=80"
    )
    assert drawn.completions.finished.all()
    assert drawn.completions.metrics["episode_refused_calls"] == 0.25
    assert drawn.batch.rewards.tolist() == [0.5] * 4
    assert drawn.batch.group_ids.tolist() == [0, 0, 1, 1]
    text = tiny.ByteTokenizer().decode_all(np.asarray(drawn.batch.tokens[0]).tolist())
    assert "</tool_call><eos>error: the call is not JSON\n3<eos>" in text
    unreadable = Failure("policy", "unreadable_call", "the call is not JSON")
    assert drawn.completions.failures == [unreadable, None, None, None]


def test_reward_gets_the_last_turn(rollout):
    drawn = rollout("Judged", [["add 1+2", "3"], ["4"], ["4"], ["a turn that uses every token up"]])
    assert drawn.batch.rewards.tolist() == [1, 0, 1, 0]
    assert drawn.completions.rewards["ended"].tolist() == [1, 1, 1, 0]


def test_limits_end_episodes_that_are_not_finished(rollout):
    drawn = rollout(
        "Steps", [["go"], ["stop"], ["a long turn that uses every token up"], ["stop"]], "optim.share_prompts=false"
    )
    assert drawn.completions.finished.tolist() == [False, True, False, True]
    assert drawn.completions.metrics["episode_truncated"] == 0.5
    assert drawn.batch.rewards.tolist() == [0.75, 0.25, 0.0, 0.25]
    assert np.asarray(drawn.batch.completion_mask).sum(1).tolist()[1:] == [5, LENGTH, 5]
    turns = Failure("policy", "max_turns", "not over within environment.max_turns = 3")
    tokens = Failure("policy", "max_completion_length", f"not over within data.max_completion_length = {LENGTH}")
    assert drawn.completions.failures == [turns, None, tokens, None]


def test_last_turn_that_is_cut_is_not_finished(rollout):
    drawn = rollout("Judged", [["4"], ["12345678"], ["4"], ["add 1+2", "12345678"]], "environment.turn_tokens=8", ROOM)
    assert drawn.completions.finished.tolist() == [True, False, True, False]
    cut = Failure("policy", "turn_tokens", "its last turn was cut at environment.turn_tokens = 8")
    assert drawn.completions.failures == [None, cut, None, cut]


def test_episode_of_the_most_tokens_is_over(rollout):
    """Its prompt counts, and so do observations."""
    turns = [["a long turn that uses every token up"], ["stop"], ["stop"], ["stop"]]
    drawn = rollout("Steps", turns, "optim.share_prompts=false", f"data.max_tokens={tiny.PROMPT + 8}")
    lengths = np.asarray(drawn.batch.token_mask).sum(1)
    assert drawn.batch.tokens.shape == (4, tiny.PROMPT + 8)
    assert lengths[0] == tiny.PROMPT + 8 > lengths[1]
    assert drawn.completions.finished.tolist() == [False, True, True, True]
    text = f"not over within data.max_tokens = {tiny.PROMPT + 8}"
    assert drawn.completions.failures == [Failure("policy", "max_tokens", text), None, None, None]


def test_call_that_the_environment_refuses_is_named(rollout):
    drawn = rollout("Tools", [['<tool_call>{"name": "sum"}</tool_call>', "3"], ["3"], ["3"], ["3"]], ROOM)
    refused = Failure("policy", "refused_call", "there is no tool 'sum'; the tools are add")
    assert drawn.completions.failures == [refused, None, None, None]


def test_episodes_of_an_earlier_policy_have_its_version(stream_of):
    """What a run sets in place of `rollout.ahead`."""
    correction = "correction=[{type: max_lag, max_lag: 4}]"
    context, stream = stream_of("Tools", [["add 1+2", "3"], ["3"], ["3"], ["3"]], "rollout.policy_lag=1", correction)
    stream._source.update(None, 2)
    drawn = collect(context, stream, 3)
    mask = np.asarray(drawn.batch.completion_mask)
    assert {*np.asarray(drawn.completions.fields["token_versions"])[mask].tolist()} == {2}
    assert {*np.asarray(drawn.batch.fields["token_lags"])[mask].tolist()} == {1}
    assert (drawn.completions.metrics["rollout_lag"], drawn.completions.metrics["rollout_lag_max"]) == (1, 1)


@pytest.mark.parametrize("weights", [None, {"reward": 2.0}])
def test_rewards_of_steps_are_on_the_last_tokens_of_their_turns(rollout, weights):
    options = ["rewards.length_penalty=0.5", "optim.share_prompts=false", "data.max_completion_length=40"]
    script = [["go", "go", "stop"], ["stop"], ["go", "stop"], ["stop"]]
    drawn = rollout("Steps", script, *options, *([f"rewards.weights={weights}"] if weights else []))
    part = 0.25 * (2 if weights else 1)
    mask = np.asarray(drawn.batch.completion_mask)
    placed = np.asarray(place_rewards(drawn.batch))
    np.testing.assert_allclose(placed.sum(1), drawn.batch.rewards, rtol=1e-6)
    for row, turns in enumerate((3, 1, 2, 1)):
        ends = np.flatnonzero(mask[row] & ~np.append(mask[row, 1:], False))
        assert len(ends) == turns
        assert np.flatnonzero(placed[row]).tolist() == ends.tolist()
        np.testing.assert_allclose(placed[row, ends[:-1]], part)
        # A penalty of the whole episode is on its last token.
        np.testing.assert_allclose(placed[row, ends[-1]], part - 0.5 * mask[row].sum() / 40, rtol=1e-6)


TIMED = [
    # A turn takes 10 s, a slow one 20, a call 1 s, a long one 40: others do not wait for their neighbours' calls.
    ("turn_seconds=15", ["turn_seconds"], [["add 1+2", "3"], ["slow"], ["slow 3"], ["4"]], [0, -1, -1, 1]),
    ("turn_seconds=11", [], [["add 1+2", "3"], ["3"], ["add 2+2", "add 2+2", "4"], ["4"]], [0, 0, 1, 1]),
    ("turn_seconds=10.5", ["turn_seconds"], [["add 1+2", "3"], ["3"], ["3"], ["4"]], [-1, 0, 1, 1]),
    ("episode_seconds=21.5", ["episode_seconds"], [["add 1+2", "3"], ["3"], ["add 2+2", "4"], ["4"]], [-1, 0, -1, 1]),
    ("episode_seconds=22", [], [["add 1+2", "3"], ["3"], ["add 2+2", "4"], ["4"]], [0, 0, 1, 1]),
    ("episode_seconds=30", ["episode_seconds"], [["add 40", "3"], ["add 2+2", "3"], ["3"], ["4"]], [-1, 0, 1, 1]),
]


@pytest.mark.parametrize(("limit", "names", "script", "groups"), TIMED)
def test_episodes_over_their_time_leave_the_group(rollout, limit, names, script, groups):
    drawn = rollout("Slow", script, f"environment.{limit}", "data.max_completion_length=64")
    assert np.asarray(drawn.batch.group_ids).tolist() == groups
    metrics = drawn.completions.metrics
    failed = {name: count for name, count in metrics.items() if name.startswith("episodes_failed") and count}
    assert failed == {f"episodes_failed_{name}": float(groups.count(-1)) for name in names}


def test_close_that_hangs_loses_no_other_episode(rollout):
    drawn = rollout("Hanging", [["add 1"], ["3"], ["3"], ["4"]], "environment.step_seconds=2")
    assert np.asarray(drawn.batch.group_ids).tolist() == [-1, 0, 1, 1]
    assert drawn.completions.metrics["episodes_failed_lost"] == 0


def test_time_over_a_limit_is_named(rollout):
    with pytest.raises(
        SourceError, match=r"4 of 4 .*\(4 episode_seconds\).*not over within environment.episode_seconds = 5"
    ):
        rollout("Slow", [["3"]] * 4, "environment.episode_seconds=5")


def test_turns_are_credited_as_the_library_says(rollout):
    script = [["add 7", "add 1+2", "3"], ["add 1+2", "add 9", "3"], ["4"], ["add 9", "add 7", "add 4"]]
    options = ("advantage={type: turn_credit, coef: 0.5, gamma: 0.75}", "optim.share_prompts=false")
    drawn = rollout("Scored", script, *options, "data.max_completion_length=64")
    batch = drawn.batch
    mask = np.asarray(batch.completion_mask)
    texts = [np.asarray(batch.tokens[row])[mask[row]].tolist() for row in range(4)]
    turns = np.full(mask.shape, 99)
    for row, columns in enumerate(mask):
        ends = np.cumsum(np.asarray(batch.tokens[row])[columns] == EOS)
        turns[row, columns] = ends - (np.array(texts[row]) == EOS)
    nan = np.nan
    scores = np.array([[-1, 0.5, nan], [0.5, nan, nan], [nan] * 3, [nan, -1, 0.5]])
    assert np.array_equal(np.asarray(batch.fields["turn_ids"])[mask], turns[mask])
    assert (np.asarray(batch.fields["turn_ids"])[~mask] == -1).all()
    config = tiny.config_of(ENVIRONMENT, "rollout={prompts_per_step: 2, samples_per_prompt: 2}", *options)
    actual, returns = make_estimator(Plan.of(config))(batch)
    expected = kljax.turn_credit_advantages(
        np.asarray(batch.rewards),
        scores,
        ~np.isnan(scores),
        turns,
        mask,
        group_ids=np.array([0, 0, 1, 1]),
        num_groups=2,
        coef=0.5,
        gamma=0.75,
    )
    assert returns is None
    np.testing.assert_allclose(actual, expected, 1e-6, 1e-7)
    assert np.ptp(np.asarray(actual)[0][mask[0]]) > 0.1


PLANNED = [
    ("Steps", ("rollout.fork_rows=1", "environment.history=template")),
    ("Scored", ("advantage=turn_credit", "optim.share_prompts=false")),
]


@pytest.mark.parametrize(("name", "options"), PLANNED)
def test_plan_counts_the_arrays_of_episodes(rollout, source_file, name, options):
    drawn = rollout(name, [["3"], ["stop"], ["3"], ["stop"]], *options)
    environment = f"environment={{name: '{source_file}:{name}', max_turns: 3}}"
    rows = "rollout={prompts_per_step: 2, samples_per_prompt: 2}"
    config = tiny.config_of(environment, rows, f"data.max_completion_length={LENGTH}", *options)
    planned = AbstractRun.of(config, tiny.mesh_of())
    forms = [
        {key: (x.shape, x.dtype) for key, x in present_arrays(batch).items()}
        for batch in (describe_batch(planned.context), drawn.batch)
    ]
    # Rewards come after the rollout; tools give none of turns.
    forms[1].pop("rewards")
    if name == "Scored":
        assert forms[0].pop("token_rewards") == forms[1]["turn_scores"]
    assert forms[0] == forms[1]
    assert [program.name for program in planned.lower()][-2:] == ["prepare", "update"]


def test_environment_without_scores_is_refused(rollout):
    with pytest.raises(
        UserError, match=r"^environment.name: got .*Tools', but advantage.type turn_credit reads a score"
    ):
        rollout("Tools", [["3"]] * 4, "advantage=turn_credit")


def test_too_many_failures_end_the_run(rollout):
    with pytest.raises(
        SourceError, match=r"^environment.max_failures: got 0.5, but 3 of 4 episodes failed \(3 exc.*no answer"
    ):
        rollout("Tools", [["add outage"], ["add outage"], ["add outage"], ["3"]])


def test_first_failure_of_a_step_is_shown(rollout, capsys):
    rollout("Tools", [["add outage"], ["3"], ["4"], ["4"]])
    shown = capsys.readouterr().err
    assert "warning: step 4: 1 of 4 episodes failed (1 exception); the first: ConnectionError: no answer" in shown
    assert "mine.py" in shown, "the line of the environment"


def test_step_without_an_episode_ends_the_run(rollout):
    with pytest.raises(
        SourceError, match=r"^environment.max_failures: got 1, but nothing is left to train on: 4 of 4 .*no answer"
    ):
        rollout("Tools", [["add outage"]] * 4, "environment.max_failures=1.0")


def test_evaluation_counts_calls_and_failures_of_all_its_batches(stream_of):
    held_out = [Example(f"{n}+2", str(n + 2), str(n + 2)) for n in range(1, 6)]
    # An episode of the second batch begins with the second text of its number.
    script = [["add 1+2", "3"], ["4", "add outage"], ["add 3+2", "{", "5"], ["4"]]
    context, stream = stream_of("Tools", script, "eval.batch_size=3", "environment.max_failures=0.6", held_out=held_out)
    metrics, _ = evaluate(context, stream, None, jax.random.key(0), step=3)
    assert metrics["accuracy"] == 40
    assert metrics["episode_tool_calls"] == 2 / 4
    assert metrics["episode_turns"] == 6 / 4
    assert metrics["episodes_failed_exception"] == 1


class Forgetful(tiny.ByteTokenizer):
    """Has a template that drops what earlier replies say before `~`, as thinking."""

    has_template = True

    def conversation_ids(self, messages, tools=None):
        kept = [m | {"content": m["content"].rpartition("~")[2]} if m["role"] == "assistant" else m for m in messages]
        return super().conversation_ids(kept)


def test_template_that_rewrites_history_forks(rollout):
    options = ("rollout.fork_rows=1", "environment.history=template")
    drawn = rollout("Steps", [["why~go", "stop"], ["go", "stop"]], *options, tokenizer=Forgetful())
    batch = drawn.batch
    texts = [
        tiny.ByteTokenizer().decode_all(np.asarray(ids)[np.asarray(mask)].tolist())
        for ids, mask in zip(batch.tokens, batch.token_mask, strict=True)
    ]
    prompt = f"<bos>{drawn.completions.examples[0].prompt}x"
    assert texts[:2] == [f"{prompt}why~go<eos>", f"{prompt}go<eos>again\nstop<eos>"]
    assert texts[2].endswith("xgo<eos>again\nstop<eos>")
    assert np.asarray(batch.completion_mask).sum(1).tolist() == [7, 5, 8, 0]
    assert np.asarray(batch.group_ids).tolist() == [0, -1, 1, -1]
    assert np.asarray(batch.episode_rows).tolist() == [0, 0, 2, -1]
    assert drawn.completions.metrics["episode_forks"] == 0.5
    # Each token is drawn with a number of its own, also after the fork.
    np.testing.assert_allclose(np.asarray(batch.rollout_log_probs)[1].min(), -0.25 * (9 + 5))
    kept = rollout("Steps", [["why~go", "stop"], ["why~on", "stop"]] * 2, tokenizer=Forgetful())
    assert kept.completions.metrics["episode_forks"] == 0


@pytest.mark.parametrize(
    ("name", "column", "message"),
    [
        ("tokens", -23, "other ids"),
        ("rollout_log_probs", -24, "other log-probs"),
        ("completion_mask", -24, "trained tokens that were not sampled"),
    ],
)
def test_batch_that_is_not_what_was_sampled_is_refused(rollout, name, column, message):
    drawn = rollout("Tools", [["add 1+2", "3"], ["3"], ["3"], ["4"]])
    array = getattr(drawn.batch, name)
    changed = array.at[0, column].set(~array[0, column] if array.dtype == bool else array[0, column] + 1)
    batch = dataclasses.replace(drawn.batch, **{name: changed})
    verify_sampled(drawn.batch, drawn.completions.sampled)
    with pytest.raises(SourceError, match=f"^rollout: row 0 of the batch has {message}"):
        verify_sampled(batch, drawn.completions.sampled)
