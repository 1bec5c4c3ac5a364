"""The prompts, and how long they and their completions are."""

from collections.abc import Mapping
from typing import Any

from train.config.types import (
    Count,
    Fraction,
    Judge,
    NumberCount,
    Operand,
    Operations,
    Section,
    Table,
    TemplateArguments,
    Text,
)

GSM8K_LENGTHS = {"max_prompt_length": 256, "max_completion_length": 192}
# In bytes, as the tokenizer without a folder counts; others need about a third of it.
LENGTHS = {
    "gsm8k": GSM8K_LENGTHS,
    "math": {"max_prompt_length": 512, "max_completion_length": 1024},
    "countdown": {"max_prompt_length": 96, "max_completion_length": 64},
    "jsonl": {"max_prompt_length": 256, "max_completion_length": 256},
}


def arithmetic_lengths(data: Mapping[str, Any]) -> dict[str, int]:
    """What the longest problem and answer need, wrong answers included; nothing for operands that are no numbers."""
    operand, operations = data.get("max_operand", 99), str(data.get("operations", "+"))
    if not isinstance(operand, int):
        return {}
    digits = len(str(operand))
    answer = (2 * digits if "*" in operations else digits + 1) + ("-" in operations)
    # Operation, equals sign and the beginning of the sequence; the end of the sequence.
    return {"max_prompt_length": 2 * digits + 3, "max_completion_length": answer + 1}


def task_lengths(task: Any, data: Mapping[str, Any]) -> dict[str, int]:
    """The lengths of a task where the config says nothing."""
    return LENGTHS[task] if isinstance(task, str) and task in LENGTHS else arithmetic_lengths(data)


class Data(Section):
    train: Text | None = None
    """gsm8k, math, jsonl: what is trained on: JSON lines, or datasets:NAME:CONFIG:SPLIT."""
    eval: Text | None = None
    """gsm8k, math, jsonl: what is held out, in the same form."""
    max_prompt_length: Count = 7
    """Tokens; longer prompts are counted and left out. The default fits every arithmetic problem, else by the task."""
    max_completion_length: Count = 4
    """Tokens that are sampled at most, what ends it included. The default fits every answer, else by the task."""
    chat: bool | None = None
    """Prompts as a conversation by the chat template of model.path; null: where it has one."""
    system: Text | None = None
    """What the system says first in a conversation."""
    chat_template: Text | None = None
    """A jinja file instead of the template of model.path."""
    template_arguments: TemplateArguments = Table()
    """Variables of the chat template, such as {enable_thinking: false}."""
    judge: Judge = "math_verify"
    """gsm8k: equality of answers as mathematics, or strictly of the decimal number after '####'."""
    prompt_field: Text = "prompt"
    """jsonl: field of the text, or of the list of messages."""
    answer_field: Text = "answer"
    """jsonl: field of the answer; a line may lack it."""
    solution_field: Text = "solution"
    """jsonl: field of what the warm start imitates; a line may lack it where nothing does."""
    reward: Text | None = None
    """jsonl: the reward function, as module:function or path/to/file.py:function."""
    problems: Count = 10_000
    """countdown: problems to train on."""
    numbers: NumberCount = 3
    """countdown: numbers of a problem."""
    max_number: Operand = 99
    """countdown: the largest number."""
    max_operand: Operand = 99
    """arithmetic: the largest operand."""
    operations: Operations = "+"
    """arithmetic: which operations the problems use."""
    error_rate: Fraction = 0.0
    """arithmetic: share of wrong solutions in what the warm start imitates; the verifier knows the right answers."""
    solutions: Count = 1
    """arithmetic: solutions of each training problem; several with errors of their own are not learned by heart."""
