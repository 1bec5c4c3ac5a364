"""The task and its data."""

from collections.abc import Iterator
from pathlib import Path

from train.config.checks.functions import function_problems
from train.config.checks.problem import Problem, changed, problem
from train.config.data import HUB
from train.config.schema import Config
from train.config.storage import is_address
from train.config.types import RECORDING

FROM_FILES = ("gsm8k", "math", "jsonl")
# Fields of `data` that a chat template alone reads.
TEMPLATE = ("system", "chat_template", "template_arguments")
_READS = {RECORDING: "has the prompts of rollout.source.path"}
GYM = "reasoning_gym"
# Fields of `data` that some tasks alone read.
OWNED = {
    "judge": ("gsm8k",),
    "prompt_field": ("jsonl",),
    "answer_field": ("jsonl",),
    "solution_field": ("jsonl",),
    "reward": ("jsonl",),
    "problems": ("countdown", GYM),
    "numbers": ("countdown",),
    "max_number": ("countdown",),
    "generator": (GYM,),
}


def _set_fields(config: Config, *names: str) -> list[str]:
    """Lists the fields of `data` among these that are set."""
    return [name for name in names if getattr(config.data, name)]


def _files(config: Config) -> Iterator[Problem]:
    task = config.task
    recorded = config.rollout.source.type == "file"
    unread = {"data.train": recorded and not config.warm_start.trains(), "data.eval": not config.eval.prompts}
    for name, path in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if task not in FROM_FILES:
            if path is not None:
                reads = _READS.get(task, "reads data.arguments alone" if ":" in task else "makes its own problems")
                text = f"got {path!r}, but task {task} {reads}; set task=gsm8k or leave it null"
                yield problem(text, name, "task")
        elif path is None and unread[name]:
            continue
        elif path is None:
            yield problem(f"missing; task {task} needs a file of JSON lines: {name}=PATH", name, "task")
        elif path.startswith(HUB):
            if not path.removeprefix(HUB).split(":")[0]:
                yield problem(f"got {path!r}, expected datasets:NAME, :SPLIT or :CONFIG:SPLIT after it", name)
        elif not is_address(path) and not Path(path).is_file():
            exists = "it is no regular file" if Path(path).exists() else "there is no such file"
            kind = "it is a directory" if Path(path).is_dir() else exists
            yield problem(f"got {path!r}, expected a file of JSON lines, but {kind}", name, "task")


def _lengths(config: Config) -> Iterator[Problem]:
    data = config.data
    least, most = data.max_prompt_length + 1, data.max_prompt_length + data.max_completion_length
    if data.max_tokens is not None and not least <= data.max_tokens <= most:
        line = (
            f"got {data.max_tokens}, expected {least} to {most}: longer than a prompt, at most with all of a completion"
        )
        yield problem(line, "data.max_tokens", "data.max_prompt_length", "data.max_completion_length")


def _arithmetic(config: Config) -> Iterator[Problem]:
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


def _owned(config: Config) -> Iterator[Problem]:
    data = config.data
    for name, _, _ in changed(data, (name for name, tasks in OWNED.items() if config.task not in tasks)):
        yield problem(f"task {config.task} does not read it, only {' and '.join(OWNED[name])}", f"data.{name}", "task")
    if config.task == "jsonl" and data.reward is None:
        yield problem("missing; task jsonl needs a reward function: data.reward=module:function", "data.reward", "task")
    if config.task == GYM and data.generator is None:
        yield problem(
            "missing; task reasoning_gym needs a name, such as data.generator=chain_sum", "data.generator", "task"
        )
    if data.reward is not None and not all(data.reward.rpartition(":")[::2]):
        yield problem(f"got {data.reward!r}, expected module:function or path/to/file.py:function", "data.reward")


def _recording(config: Config) -> Iterator[Problem]:
    if config.task != RECORDING:
        return
    source = config.rollout.source.type
    absent = f"but task {RECORDING} has no examples; set it to 0, or set a task"
    if source != "file":
        line = f"got {RECORDING}, but rollout.source.type {source} brings no rewards; set it to file, or set a task"
        yield problem(line, "task", "rollout.source.type")
    if config.eval.prompts:
        yield problem(f"got {config.eval.prompts}, {absent}", "eval.prompts", "task")
    if config.warm_start.trains():
        yield problem(f"got {config.warm_start.steps}, {absent}", "warm_start.steps", "task")


def _template(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.chat is False:
        for name in _set_fields(config, *TEMPLATE):
            yield problem("only a chat template reads it, and data.chat is false", f"data.{name}", "data.chat")
    path = data.chat_template
    if path is not None and not is_address(path) and not Path(path).is_file():
        yield problem(f"got {path!r}, expected a jinja file, but there is no such file", "data.chat_template")


def _rewards(config: Config) -> Iterator[Problem]:
    buffer = config.rewards.overlong_buffer
    longest = config.data.max_completion_length
    if buffer > longest:
        yield problem(
            f"got {buffer}, expected at most data.max_completion_length = {longest}",
            "rewards.overlong_buffer",
            "data.max_completion_length",
        )
    for name, _, _ in changed(config.rewards, () if config.task == "jsonl" else ("workers", "timeout")):
        yield problem(f"task {config.task} does not read it, only jsonl", f"rewards.{name}", "task")


def _functions(config: Config) -> Iterator[Problem]:
    data = config.data
    if ":" in config.task:
        yield from function_problems(config.task, data.arguments, "task", "data.arguments", supplied=())
    elif config.task == GYM:
        for name in sorted(data.arguments.keys() & {"seed", "size"}):
            yield problem("the number of problems is data.problems, and their seed is fixed", f"data.arguments.{name}")
    elif data.arguments:
        line = f"task {config.task} does not read it, only module:function and {GYM}"
        yield problem(line, "data.arguments", "task")
    if data.tokenizer is not None:
        names = "data.tokenizer", "data.tokenizer_arguments"
        yield from function_problems(data.tokenizer, data.tokenizer_arguments, *names, supplied=())
        for name in _set_fields(config, "chat", *TEMPLATE):
            yield problem("not read, because data.tokenizer writes the prompts", f"data.{name}", "data.tokenizer")
    elif data.tokenizer_arguments:
        yield problem("read by data.tokenizer alone, which is null", "data.tokenizer_arguments", "data.tokenizer")


CHECKS = (_files, _lengths, _recording, _arithmetic, _owned, _functions, _template, _rewards)


def warnings(config: Config) -> Iterator[str]:
    """Warns of chat fields that a model without a folder does not read."""
    if config.model.path is None and config.data.tokenizer is None:
        for name in _set_fields(config, "chat", *TEMPLATE):
            yield f"data.{name}: not read, because without model.path prompts are bytes and no conversation"
