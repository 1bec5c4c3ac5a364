"""Tasks with a verifier, by name."""

from train.config.schema import Config
from train.tasks import arithmetic, gsm8k
from train.tasks.task import Example, Task

__all__ = ["Example", "Task", "load_task"]


def _arithmetic(config: Config) -> Task:
    data = config.data
    return arithmetic.load(
        max_operand=data.max_operand,
        operations=data.operations,
        held_out=config.eval.prompts,
        error_rate=data.error_rate,
    )


def _gsm8k(config: Config) -> Task:
    return gsm8k.load(train=config.data.train, held_out=config.data.eval)


_TASKS = {"arithmetic": _arithmetic, "gsm8k": _gsm8k}


def load_task(config: Config) -> Task:
    """The task that `config.task` names, loaded as `config.data` and `config.eval` say.

    Raises:
        UserError: a split would be empty, or a file is missing or malformed.
    """
    return _TASKS[config.task](config)
