"""Tool calls in the text of a turn."""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
"""The form of Qwen and Hermes."""


class ToolCall(NamedTuple):
    """A tool call: its name, and its arguments by name or a text, the first of them; or why it cannot be read."""

    name: str
    arguments: dict[str, Any] | str
    problem: str | None = None


class ReadTurn(NamedTuple):
    """A sampled turn: its tool calls, and the text before them; all of the text if there is none."""

    text: str
    calls: list[ToolCall]


def parse_turn(text: str, tools: Collection[str]) -> ReadTurn:
    """Finds the tool calls of a turn, and the text before them.

    Example:
      >>> parse_turn('First. <tool_call>{"name": "calc"}</tool_call>', ["calc"]).text
      'First.'
      >>> parse_turn("calc 2*3", ["calc"]).text
      ''
    """
    calls = parse_calls(text, tools)
    if not calls:
        return ReadTurn(text, [])
    before, begins, _ = text.partition("<tool_call>")
    return ReadTurn(before.strip() if begins else "", calls)


def parse_calls(text: str, tools: Collection[str]) -> list[ToolCall]:
    """Finds the tool calls of a turn: `<tool_call>` with JSON, or a text that begins with the name of a tool.

    The second form is for models without a chat template: `calc 2*3` is a call of `calc` with the text `2*3`.

    Example:
      >>> parse_calls('<tool_call>{"name": "calc", "arguments": {"e": "1"}}</tool_call>', ["calc"])
      [ToolCall(name='calc', arguments={'e': '1'}, problem=None)]
      >>> parse_calls("calc 2*3", ["calc"])
      [ToolCall(name='calc', arguments='2*3', problem=None)]
      >>> parse_calls("The answer is 6.", ["calc"])
      []
      >>> parse_calls('<tool_call>{"name": </tool_call>', ["calc"])[0].problem
      'the call is not JSON'
      >>> parse_calls("<tool_call>" + "[" * 100_000 + "</tool_call>", ["calc"])[0].problem
      'the call is not JSON'
    """
    calls = [_parse(match[1]) for match in CALL.finditer(text)]
    if not calls and "<tool_call>" in text:
        return [ToolCall("", "", "the call has no </tool_call>")]
    name, _, rest = text.strip().partition(" ")
    if not calls and name in tools:
        return [ToolCall(name, rest)]
    return calls


def _parse(text: str) -> ToolCall:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return ToolCall("", "", "the call is not JSON")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall("", "", "the call has no name")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(call["name"], "", "the arguments are no object")
    return ToolCall(call["name"], arguments)


def plain_text(message: Mapping[str, Any]) -> str:
    """Writes a message for a model without a chat template: a result of a tool is a line, a call a name and a text.

    Example:
      >>> plain_text({"role": "tool", "content": "6"})
      '6\\n'
      >>> plain_text({"role": "assistant", "tool_calls": [{"function": {"name": "calc", "arguments": {"e": "2*3"}}}]})
      'calc 2*3'
    """
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        values = list(arguments.values()) if isinstance(arguments, dict) else [arguments]
        text += " ".join([call["function"]["name"], *map(str, values[:1])])
    return f"{text}\n" if message["role"] == "tool" else text
