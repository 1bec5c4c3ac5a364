"""Rewards by name, weighed; what length costs."""

import threading

import numpy as np
import pytest

from tests import tiny
from train.config.data import Rewards
from train.config.errors import UserError
from train.config.load import parse
from train.data.tasks import Example, Task, load_task
from train.data.tasks.rewards import compose, judge, overlong
from train.rollouts.source import Completions

EXAMPLES = [Example(f"{a}+{b}=", str(a + b), str(a + b)) for a, b in ((1, 2), (3, 4), (5, 5), (0, 8))]
SCORES = {"reward": np.float32([1.1, 0.1]), "correct": np.float32([1, 0]), "format": np.float32([1, 1])}


def test_named_rewards_stay_separate():
    task = Task("two", EXAMPLES, EXAMPLES, lambda e, text, done: {"reward": len(text) + done, "correct": 0, "form": 2})
    scores = judge(task, EXAMPLES[:2], ["abc", ""], np.array([True, False]))
    assert {name: values.tolist() for name, values in scores.items()} == {
        "reward": [4, 0],
        "correct": [0, 0],
        "form": [2, 2],
    }
    assert {values.dtype for values in scores.values()} == {np.dtype(np.float32)}
    with pytest.raises(ValueError, match="argument"):
        judge(task, EXAMPLES, ["abc"], np.array([True]))


def test_threads_preserve_the_order_and_raise_verifier_errors():
    together = threading.Barrier(2, timeout=10)

    def score(example, text, finished):
        together.wait()  # two at a time, or never
        if text == "bad":
            raise UserError("this one")
        return {"reward": float(text), "correct": 0}

    task = Task("slow", EXAMPLES, EXAMPLES, score, workers=2)
    texts = [str(number) for number in range(4)]
    assert judge(task, EXAMPLES, texts, np.ones(4, bool))["reward"].tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError, match="this one"):
        judge(task, EXAMPLES, ["0", "bad", "1", "2"], np.ones(4, bool))


def test_rewards_of_different_names_are_an_error():
    task = Task("odd", EXAMPLES, EXAMPLES, lambda e, text, done: {"reward": 1, text: 0})
    with pytest.raises(UserError, match="got rewards a, reward for one completion and b, reward for another"):
        judge(task, EXAMPLES[:2], ["a", "b"], np.ones(2, bool))


def test_reward_without_settings_is_the_task_reward():
    composed = compose(Rewards(), SCORES, np.array([3, 9]), longest=10)
    assert composed.keys() == SCORES.keys()
    np.testing.assert_array_equal(composed["reward"], SCORES["reward"])


def test_weights_penalty_and_punishment_add_up():
    settings = Rewards(weights={"correct": 2, "format": -0.5}, length_penalty=0.3, overlong_buffer=4, overlong_coef=0.5)
    composed = compose(settings, SCORES, np.array([3, 9]), longest=10)
    # 2 * correct - 0.5 * format - 0.3 * length / 10 - 0.5 * (length - 6) / 4 beyond 6
    np.testing.assert_allclose(composed["reward"], [2 - 0.5 - 0.09, -0.5 - 0.27 - 0.375], rtol=1e-6)
    np.testing.assert_allclose(composed["length_penalty"], [-0.09, -0.27], rtol=1e-6)
    np.testing.assert_allclose(composed["overlong"], [0, -0.375], rtol=1e-6)
    assert {values.dtype for values in composed.values()} == {np.dtype(np.float32)}


def dapo(length: int, longest: int, cache: int) -> float:
    """Equation 13 of DAPO, case by case."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "cache"), [(20480, 4096), (10, 1), (10, 10), (7, 3)])
def test_overlong_is_the_equation_of_dapo(longest, cache):
    edges = (0, 1, longest - cache - 1, longest - cache, longest - cache + 1, longest - 1, longest, longest + 5)
    lengths = np.array([length for length in edges if length >= 0])
    expected = [dapo(int(length), longest, cache) for length in lengths]
    np.testing.assert_allclose(overlong(lengths, longest=longest, buffer=cache), expected, rtol=1e-6)


def test_unknown_and_missing_rewards_are_named():
    with pytest.raises(UserError, match=r"rewards\.weights: got 'style', expected some of correct, format, reward"):
        compose(Rewards(weights={"style": 1.0}), SCORES, np.array([1, 1]), longest=4)
    with pytest.raises(
        UserError,
        match=r"rewards\.weights: missing; the task has no total, only style; return .* rewards\.weights=\{style: 1\}",
    ):
        compose(Rewards(), {"style": np.float32([1])}, np.array([1]), longest=4)
    config, _ = parse({"steps": 1, "rewards": {"weights": {"style": 1}}, "eval": {"prompts": 8}})
    with pytest.raises(UserError, match=r"rewards\.weights: got 'style', expected some of correct, reward"):
        load_task(config)


def test_the_buffer_fits_the_completions():
    with pytest.raises(UserError, match=r"rewards\.overlong_buffer: got 5, expected at most .* = 4"):
        parse({"steps": 1, "rewards": {"overlong_buffer": 5}})


def test_batch_uses_the_composed_reward_and_logs_names():
    config = tiny.config_of("rewards={length_penalty: 0.5, weights: {correct: 2}}", "rollout.samples_per_prompt=2")
    task = Task("fixed", EXAMPLES, EXAMPLES, lambda e, text, done: {"reward": 9.0, "correct": 1.0})
    context = tiny.context_of(config, task=task)
    rows, longest = len(EXAMPLES), config.data.max_completion_length
    shape = (rows, tiny.PROMPT + longest)
    mask = np.zeros(shape, bool)
    mask[:, : tiny.PROMPT + 1] = mask[0] = True
    completions = Completions(
        examples=EXAMPLES,
        tokens=np.zeros(shape, np.int32),
        token_mask=mask,
        completion_mask=mask & (np.arange(shape[1]) >= tiny.PROMPT),
        texts=["x"] * rows,
        finished=np.ones(rows, bool),
    )
    rollout = tiny.rollout_of(context, completions)
    expected = 2 - 0.5 * mask[:, tiny.PROMPT :].sum(1) / longest
    np.testing.assert_allclose(np.asarray(rollout.batch.rewards), expected, rtol=1e-6)
    np.testing.assert_allclose(rollout.completions.metrics["length_penalty"], (expected - 2).mean(), rtol=1e-6)
    np.testing.assert_allclose(rollout.completions.metrics["reward"], expected.mean(), rtol=1e-6)
    assert rollout.completions.metrics["correct"] == 1
