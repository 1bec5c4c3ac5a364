"""The bodies of answers: of chats, of completions and of ids, at once and as the events of a stream."""

import secrets
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from train.data.tokenizers.calls import ReadTurn
from train.data.tokenizers.rendered import read_turn
from train.rollouts.endpoint.completions import CompletionRequest, WaitingClient
from train.rollouts.endpoint.wire import ServedChoice, read_messages, reply_message, usage

Event = dict[str, Any]


def _head(request: CompletionRequest, kind: str, name: str) -> Event:
    head = {
        "id": f"{name}-{secrets.token_hex(8)}",
        "object": kind,
        "created": int(time.time()),
        "model": request.served.model,
    }
    versions = [version for draw in request.draws for version in draw.turn.versions[: draw.count]]
    return head | ({"weight_version": max(versions)} if versions else {})


def _body(head: Event, request: CompletionRequest, entries: Iterable[Event]) -> Event:
    used = usage(len(request.ids), sum(draw.count for draw in request.draws))
    return head | {"choices": list(entries), "usage": used}


def _message(request: CompletionRequest, choice: ServedChoice) -> tuple[Event, str]:
    """Returns the message of a completion, remembered for the requests that go on from it, and why it ended."""
    tools = request.reply_tools
    turn = ReadTurn(choice.text, [])
    if tools:
        names = [tool.name for tool in tools]
        tokenizer = request.served.tokenizer
        turn = read_turn(tokenizer, names, prompt=request.ids, ids=choice.ids, text=choice.text, tools=request.tools)
    message = reply_message(choice.text, turn, tools, lambda: f"call_{secrets.token_hex(8)}")
    assert request.messages is not None
    (read,) = read_messages({"messages": [message]})
    request.session.remember(request.messages, request.tools, read, request.draws[choice.index].turn)
    return message, "tool_calls" if "tool_calls" in message else choice.finish


def _with_ids(request: CompletionRequest, body: Event, **ids: Sequence[int]) -> Event:
    """Adds token ids to a part of an answer, if the request asks for them."""
    return body | ({name: list(values) for name, values in ids.items()} if request.options.token_ids else {})


def chat_body(request: CompletionRequest, choices: Sequence[ServedChoice]) -> Event:
    """Returns the answer to a chat."""
    entries = []
    for choice in choices:
        message, finish = _message(request, choice)
        log_probs = choice.chat_log_probs() if request.options.log_probs else None
        entry = {"index": choice.index, "message": message, "finish_reason": finish, "logprobs": log_probs}
        entries.append(_with_ids(request, entry, token_ids=choice.ids))
    head = _head(request, "chat.completion", "chatcmpl")
    return _body(_with_ids(request, head, prompt_token_ids=request.ids), request, entries)


async def chat_events(request: CompletionRequest, client: WaitingClient) -> AsyncIterator[Event]:
    """Yields the parts of a chat; with tools a reply comes as a whole, as it may be a call."""
    head = _head(request, "chat.completion.chunk", "chatcmpl")
    role = {"role": "assistant", "content": ""}
    first = [{"index": n, "delta": role, "finish_reason": None} for n in range(len(request.draws))]
    yield _with_ids(request, head, prompt_token_ids=request.ids) | {"choices": first}
    async for choice, text, ended in request.parts(client):
        delta: Event = {"content": text} if text and not request.reply_tools else {}
        finish: str | None = None
        if ended:
            message, finish = _message(request, request.choice(choice.index))
            if request.reply_tools and message["content"]:
                delta["content"] = message["content"]
            if "tool_calls" in message:
                delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]
        entry: Event = {"index": choice.index, "delta": delta, "finish_reason": finish}
        if request.options.log_probs:
            entry["logprobs"] = choice.chat_log_probs()
        yield head | {"choices": [_with_ids(request, entry, token_ids=choice.ids)]}
    if request.options.usage:
        yield _body(head, request, [])


def _plain_entry(request: CompletionRequest, choice: ServedChoice, text: str, finish: str | None) -> Event:
    log_probs = choice.plain_log_probs() if request.options.log_probs else None
    entry = {"index": choice.index, "text": text, "finish_reason": finish, "logprobs": log_probs}
    return _with_ids(request, entry, token_ids=choice.ids)


def plain_body(request: CompletionRequest, choices: Sequence[ServedChoice]) -> Event:
    """Returns the answer to a request for the completions of a text, or of ids."""
    entries = (_plain_entry(request, choice, choice.text, choice.finish) for choice in choices)
    written = (_with_ids(request, entry, prompt_token_ids=request.ids) for entry in entries)
    return _body(_head(request, "text_completion", "cmpl"), request, written)


async def plain_events(request: CompletionRequest, client: WaitingClient) -> AsyncIterator[Event]:
    """Yields the parts of completions."""
    head = _head(request, "text_completion", "cmpl")
    async for choice, text, ended in request.parts(client):
        yield head | {"choices": [_plain_entry(request, choice, text, choice.finish if ended else None)]}
    if request.options.usage:
        yield _body(head, request, [])


def ids_body(request: CompletionRequest, choices: Sequence[ServedChoice]) -> Event:
    """Returns the answer of vLLM's `generate`."""
    entries = []
    for choice in choices:
        entry = {"index": choice.index, "token_ids": list(choice.ids), "finish_reason": choice.finish}
        entries.append(entry | {"logprobs": choice.chat_log_probs() if request.options.log_probs else None})
    head = _head(request, "generate", "gen")
    return _body({"request_id": head["id"], **head}, request, entries)
