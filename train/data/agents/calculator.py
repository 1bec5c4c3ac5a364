"""An agent with a calculator, written against the `openai` package alone."""

import functools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from train.data.environments.calculator import compute

if TYPE_CHECKING:
    from openai import AsyncOpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Computes products and sums of positive whole numbers, such as 12*7+5.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
TURNS = 3
TURN_TOKENS = 16


@functools.cache
def connect(base_url: str) -> "AsyncOpenAI":
    """Makes the client of an endpoint, whose connections all episodes share."""
    # Imported late, so that the module can be read without the package.
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=600)


async def play(row: Mapping[str, Any], base_url: str, api_key: str, model: str) -> dict[str, float]:
    """Runs one episode; returns its rewards."""
    client = connect(base_url).with_options(api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(TURNS):
        answer = await client.chat.completions.create(
            model=model, messages=messages, tools=[TOOL], max_tokens=TURN_TOKENS
        )
        choice = answer.choices[0]
        reply = choice.message
        if not reply.tool_calls:
            correct = float(choice.finish_reason == "stop" and reply.content == row["answer"])
            return {"reward": correct, "correct": correct}
        messages.append(reply)
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": call_tool(call.function)})
    return {"reward": 0.0, "correct": 0.0}


def call_tool(function: Any) -> str:
    """Calls the tool of a reply; returns its result, or what is wrong with the call."""
    try:
        expression = json.loads(function.arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        return "error: expected an expression"
    return compute(str(expression)) if function.name == "calc" else f"error: there is no tool {function.name!r}"
