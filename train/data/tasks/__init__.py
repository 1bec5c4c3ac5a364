"""Tasks with a verifier, by name."""

from collections.abc import Callable

from train.config.errors import UserError
from train.config.schema import Config
from train.config.types import RECORDING
from train.data.tasks import arithmetic, boxed_math, countdown, gsm8k, jsonl, reasoning_gym, word_problems
from train.data.tasks.rewards import check_names
from train.data.tasks.task import Example, Task
from train.data.tasks.user_task import load_user_task

__all__ = ["Example", "Task", "load_task"]


def _arithmetic(config: Config) -> Task:
    data = config.data
    return arithmetic.load(
        max_operand=data.max_operand,
        operations=data.operations,
        held_out=config.eval.prompts,
        error_rate=data.error_rate,
        solutions=data.solutions,
    )


def _countdown(config: Config) -> Task:
    data = config.data
    return countdown.load(
        problems=data.problems, numbers=data.numbers, max_number=data.max_number, held_out=config.eval.prompts
    )


def _reasoning_gym(config: Config) -> Task:
    data = config.data
    assert data.generator is not None
    return reasoning_gym.load(
        name=data.generator, arguments=data.arguments, problems=data.problems, held_out=config.eval.prompts
    )


def _jsonl(config: Config) -> Task:
    data = config.data
    return jsonl.load(
        train=data.train,
        held_out=data.eval,
        reward=data.reward,
        prompt=data.prompt_field,
        answer=data.answer_field,
        solution=data.solution_field,
        workers=config.rewards.workers,
        timeout=config.rewards.timeout,
    )


def _recording(config: Config) -> Task:
    def score(example: Example, completion: str, finished: bool) -> dict[str, float]:
        raise UserError(f"task: got {RECORDING}, which scores no completion; set a task that does")

    return Task(RECORDING, train=(), eval=(), score=score)


_TASKS: dict[str, Callable[[Config], Task]] = {
    "arithmetic": _arithmetic,
    "gsm8k": lambda config: gsm8k.load(train=config.data.train, held_out=config.data.eval, judge=config.data.judge),
    "math": lambda config: boxed_math.load(train=config.data.train, held_out=config.data.eval),
    "countdown": _countdown,
    "word_problems": lambda config: word_problems.load(held_out=config.eval.prompts),
    "reasoning_gym": _reasoning_gym,
    "jsonl": _jsonl,
    RECORDING: _recording,
}


def load_task(config: Config) -> Task:
    """Loads the task named by `config.task` with the settings of `config.data` and `config.eval`.

    Raises:
      UserError: a function of the user fails, a split is empty, a file is missing or malformed, or `rewards.weights`
        names an unknown reward.
    """
    task = load_user_task(config) if ":" in config.task else _TASKS[config.task](config)
    if task.rewards:
        check_names(config.rewards.weights, (*task.rewards, "reward"))
    return task
