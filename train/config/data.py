"""Prompts, tasks, the lengths of prompts and completions, and the weights of rewards."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationInfo

from train.config.types import (
    RECORDING,
    Arguments,
    Count,
    CountOrZero,
    Fraction,
    FunctionName,
    Judge,
    Length,
    NonNegative,
    NumberCount,
    Operand,
    Operations,
    Positive,
    RewardName,
    Seconds,
    Section,
    StoredPath,
    Table,
    TemplateArguments,
    Text,
    Weights,
    stored_path,
)

HUB = "datasets:"
"""Start of the name of a dataset that the library `datasets` loads, in place of a path."""
GSM8K_LENGTHS = {"max_prompt_length": 256, "max_completion_length": 192}
# In bytes, the tokens of the byte-level tokenizer; other tokenizers need about a third.
LENGTHS = {
    "gsm8k": GSM8K_LENGTHS,
    "math": {"max_prompt_length": 512, "max_completion_length": 1024},
    "countdown": {"max_prompt_length": 96, "max_completion_length": 64},
    "word_problems": {"max_prompt_length": 128, "max_completion_length": 64},
    "reasoning_gym": {"max_prompt_length": 512, "max_completion_length": 512},
    "jsonl": {"max_prompt_length": 256, "max_completion_length": 256},
    RECORDING: {"max_prompt_length": 512, "max_completion_length": 1024},
}


def arithmetic_lengths(data: Mapping[str, Any]) -> dict[str, int]:
    """Computes the lengths of the longest problem and answer, wrong answers included."""
    operand = data.get("max_operand", 99)
    operations = str(data.get("operations", "+"))
    if not isinstance(operand, int):
        return {}
    digits = len(str(operand))
    answer = (2 * digits if "*" in operations else digits + 1) + ("-" in operations)
    # The prompt adds operation, equals sign and BOS; the completion adds EOS.
    return {"max_prompt_length": 2 * digits + 3, "max_completion_length": answer + 1}


def task_lengths(task: Any, data: Mapping[str, Any]) -> dict[str, int]:
    """Returns the default lengths of a task."""
    if isinstance(task, str) and ":" in task:
        return LENGTHS["jsonl"]
    return LENGTHS[task] if isinstance(task, str) and task in LENGTHS else arithmetic_lengths(data)


def _expanded_dataset(text: str, info: ValidationInfo) -> str:
    return text if text.startswith(HUB) else stored_path(text, info)


DatasetName = Annotated[
    str,
    Field(min_length=1),
    AfterValidator(_expanded_dataset),
    "a path, an address of s3:// or gs://, or datasets:NAME",
]


class Data(Section):
    arguments: Arguments = Table()
    """module:function: keyword arguments of the function that `task` names; reasoning_gym: settings of the data set."""
    generator: Text | None = None
    """reasoning_gym: the name of the data set, such as chain_sum."""
    tokenizer: FunctionName | None = None
    """Your tokenizer: `module:function` or `path/to/file.py:function`; null: that of model.path, or bytes."""
    tokenizer_arguments: Arguments = Table()
    """Keyword arguments of data.tokenizer."""
    train: DatasetName | None = None
    """gsm8k, math, jsonl: training set: JSON lines, or datasets:NAME:CONFIG:SPLIT; recorded completions need none."""
    eval: DatasetName | None = None
    """gsm8k, math, jsonl: held-out set, in the same form; needed for evaluations."""
    max_prompt_length: Length = 7
    """Prompt length in tokens; longer prompts are counted and left out. The default depends on the task."""
    max_completion_length: Length = 4
    """Max new tokens, EOS included. The default depends on the task."""
    max_tokens: Length | None = None
    """Most tokens of a whole sequence; null: max_prompt_length + max_completion_length."""
    chat: bool | None = None
    """Format prompts by the chat template of model.path; null: if it has one."""
    system: Text | None = None
    """System message of the conversation."""
    chat_template: StoredPath | None = None
    """Jinja file in place of the chat template of model.path."""
    template_arguments: TemplateArguments = Table()
    """Variables of the chat template, such as {enable_thinking: false}."""
    judge: Judge = "math_verify"
    """gsm8k: math_verify compares answers as mathematics, strict the decimal number after '####'."""
    prompt_field: Text = "prompt"
    """jsonl: field of the prompt, text or a list of messages."""
    answer_field: Text = "answer"
    """jsonl: field of the answer, which is optional."""
    solution_field: Text = "solution"
    """jsonl: field of the solution that the warm start trains on, optional without a warm start."""
    reward: RewardName | None = None
    """jsonl: the reward function, as module:function or path/to/file.py:function."""
    problems: Count = 10_000
    """countdown, reasoning_gym: number of training problems."""
    numbers: NumberCount = 3
    """countdown: numbers in a problem."""
    max_number: Operand = 99
    """countdown: the largest number."""
    max_operand: Operand = 99
    """arithmetic: the largest operand."""
    operations: Operations = "+"
    """arithmetic: operations of the problems."""
    error_rate: Fraction = 0.0
    """arithmetic: fraction of wrong solutions in the warm start; the verifier always knows the right answer."""
    solutions: Count = 1
    """arithmetic: solutions per training problem, each with errors of its own, so that none is memorised."""

    def row_length(self) -> int:
        """Returns the columns of a batch, which are the most tokens of a sequence."""
        return self.max_tokens or self.max_prompt_length + self.max_completion_length

    def completion_length(self) -> int:
        """Returns the most tokens that a sequence has after its prompt, of a token at least."""
        return min(self.max_completion_length, self.row_length() - 1)


class Rewards(Section):
    weights: Weights | None = None
    """Weight of each named reward; others weigh 0, with a warning. null: the task's own total, named reward."""
    length_penalty: NonNegative = 0.0
    """Penalty of a completion of data.max_completion_length tokens, in proportion for shorter ones."""
    overlong_buffer: CountOrZero = 0
    """Tokens before data.max_completion_length over which DAPO's soft punishment grows from 0; 0: none."""
    overlong_coef: Positive = 1.0
    """Soft punishment of a completion of the full length."""
    workers: CountOrZero = 1
    """jsonl: processes that call data.reward, which may hang or exit there; 0: the trainer calls it, for a debugger."""
    timeout: Seconds = 60.0
    """jsonl: seconds that one call of data.reward may take; a longer one ends the run with an error."""
