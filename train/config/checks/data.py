"""The task and its data."""

from collections.abc import Iterator
from pathlib import Path

from train.config.checks.problem import Problem, problem
from train.config.schema import Config


def _task(config: Config) -> Iterator[Problem]:
    for name, path in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if config.task == "arithmetic" and path is not None:
            yield problem(
                f"got {path!r}, but task arithmetic makes its own problems; set task=gsm8k or leave it null",
                name,
                "task",
            )
        if config.task == "gsm8k" and path is None:
            yield problem(f"missing; task gsm8k needs a file of JSON lines: {name}=PATH", name, "task")
        if config.task == "gsm8k" and path is not None and not Path(path).is_file():
            kind = "it is a directory" if Path(path).is_dir() else "there is no such file"
            yield problem(f"got {path!r}, expected a file of JSON lines, but {kind}", name, "task")
    problems = (config.data.max_operand + 1) ** 2 * len(config.data.operations)
    if config.task == "arithmetic" and config.eval.prompts > problems // 2:
        yield problem(
            f"got {config.eval.prompts}, expected at most {problems // 2}, half of the {problems} problems that "
            "data.max_operand and data.operations give",
            "eval.prompts",
            "data.max_operand",
            "data.operations",
            "task",
        )


CHECKS = (_task,)
