"""The prompts, and how long they and their completions are."""

from collections.abc import Mapping
from typing import Any

from train.config.types import Count, Fraction, Operand, Operations, Section, Text

GSM8K_LENGTHS = {"max_prompt_length": 256, "max_completion_length": 192}


def arithmetic_lengths(data: Mapping[str, Any]) -> dict[str, int]:
    """What the longest problem and answer need, wrong answers included; nothing for operands that are no numbers."""
    operand, operations = data.get("max_operand", 99), str(data.get("operations", "+"))
    if not isinstance(operand, int):
        return {}
    digits = len(str(operand))
    answer = (2 * digits if "*" in operations else digits + 1) + ("-" in operations)
    # Operation, equals sign and the beginning of the sequence; the end of the sequence.
    return {"max_prompt_length": 2 * digits + 3, "max_completion_length": answer + 1}


class Data(Section):
    train: Text | None = None
    """gsm8k: JSON lines of question and answer to train on."""
    eval: Text | None = None
    """gsm8k: JSON lines of question and answer that are held out."""
    max_prompt_length: Count = 7
    """Tokens; longer prompts are counted and left out. The default fits every arithmetic problem; 256 with gsm8k."""
    max_completion_length: Count = 4
    """Tokens that are sampled at most, the end of sequence included. The default fits every answer; 192 with gsm8k."""
    max_operand: Operand = 99
    """arithmetic: the largest operand."""
    operations: Operations = "+"
    """arithmetic: which operations the problems use."""
    error_rate: Fraction = 0.0
    """arithmetic: share of wrong solutions in what the warm start imitates; the verifier knows the right answers."""
