"""The bodies of requests and answers: of OpenAI's API, with vLLM's fields for token ids, and of vLLM's `generate`."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from train.data.tokenizers.calls import ReadTurn
from train.rollouts.endpoint.sessions import RequestError
from train.rollouts.sampler import Sampling

MOST_MESSAGES = 1000
MOST_CHOICES = 16
MOST_STOPS = 4
MOST_STOP_IDS = 64
Body = Mapping[str, Any]
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "bad_words_token_ids": ([],),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "echo": (False,),
    "suffix": ("",),
    "prompt_logprobs": (),
    "top_logprobs": (0,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "documents": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "modalities": (["text"],),
    "audio": (),
}
"""Fields that would change what is drawn or how it is written, with the values that do not; null never does."""


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """The options of a request.

    Attributes:
      choices: completions of the prompt.
      max_tokens: the most tokens of each; None: as many as fit.
      stops: strings that end them.
      stop_ids: tokens that end them, besides those of the run.
      seed: of their tokens; None: those of the session.
      log_probs: whether the answer has the log-probs of the tokens.
      token_ids: whether it has the ids of prompt and tokens.
      ids_as_tokens: whether tokens are named `token_id:N` in place of their texts.
      stream: whether it comes in parts.
      usage: whether the last part counts tokens.
    """

    choices: int
    max_tokens: int | None
    stops: tuple[str, ...]
    stop_ids: frozenset[int]
    seed: int | None
    log_probs: bool
    token_ids: bool
    ids_as_tokens: bool
    stream: bool
    usage: bool


class ReplyTool(NamedTuple):
    """A tool of a request: its name and the name of its first argument, which a call without JSON gives."""

    name: str
    first: str | None


def _integer(body: Body, name: str, least: int, most: int) -> int | None:
    """Reads an integer; None if it is missing or null."""
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not least <= value <= most:
        raise RequestError(400, f"{name}: got {_shown(value)}, expected an integer from {least:g} to {most:g}", name)
    return value


def _flag(body: Body, name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False):
        raise RequestError(400, f"{name}: got {_shown(value)}, expected true or false", name)
    return bool(value)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_sampling(body: Body, sampling: Sampling) -> None:
    """Refuses sampling options other than those of the run, under which its log-probs are.

    Raises:
      RequestError: names the value of the run.
    """
    fields = {"temperature": "temperature", **{name: f"rollout.{name}" for name in ("top_k", "top_p", "min_p")}}
    for name, field in fields.items():
        value = body.get(name)
        own = getattr(sampling, name)
        allowed = (0, -1) if name == "top_k" and own == 0 else (own,)
        if value is not None and (isinstance(value, bool) or value not in allowed):
            raise RequestError(
                400,
                f"{name}: got {_shown(value)}, expected {own:g}, the run's {field}, which its log-probs have; leave it "
                "out",
                name,
            )
    for name, allowed in NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            expected = f"expected {' or '.join(map(_shown, allowed))}, or nothing" if allowed else "expected nothing"
            raise RequestError(
                400,
                f"{name}: got {_shown(value)}, {expected}: tokens are drawn from the policy as it is trained",
                name,
            )


def read_options(body: Body, sampling: Sampling, *, chat: bool) -> RequestOptions:
    """Reads the options of a request.

    Args:
      body: of the request.
      sampling: of the run.
      chat: whether `logprobs` is a flag; else a number, of which only 0 and 1 are served.

    Raises:
      RequestError: an option is wrong, or changes what is drawn.
    """
    check_sampling(body, sampling)
    stops = body.get("stop")
    listed = [] if stops is None else [stops] if isinstance(stops, str) else stops
    if not isinstance(listed, list) or len(listed) > MOST_STOPS or not all(x and isinstance(x, str) for x in listed):
        raise RequestError(400, f"stop: got {_shown(stops)}, expected at most {MOST_STOPS} texts", "stop")
    stop_ids = body.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or len(stop_ids) > MOST_STOP_IDS or any(type(x) is not int for x in stop_ids):
        raise RequestError(
            400,
            f"stop_token_ids: got {_shown(stop_ids)}, expected at most {MOST_STOP_IDS} token ids",
            "stop_token_ids",
        )
    if chat:
        log_probs = _flag(body, "logprobs")
    else:
        log_probs = (
            _flag(body, "logprobs")
            if isinstance(body.get("logprobs"), bool)
            else _integer(body, "logprobs", 0, 1) is not None
        )
    limits = (_integer(body, name, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens"))
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise RequestError(400, f"stream_options: got {_shown(stream_options)}, expected an object", "stream_options")
    return RequestOptions(
        choices=_integer(body, "n", 1, MOST_CHOICES) or 1,
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stops=tuple(listed),
        stop_ids=frozenset(stop_ids),
        seed=_integer(body, "seed", -(2**63), 2**63 - 1),
        log_probs=log_probs,
        token_ids=_flag(body, "return_token_ids"),
        ids_as_tokens=_flag(body, "return_tokens_as_token_ids"),
        stream=_flag(body, "stream"),
        usage=_flag(stream_options, "include_usage"),
    )


def read_ids(body: Body, name: str, vocab_size: int) -> list[int]:
    """Reads a list of token ids.

    Raises:
      RequestError: it is none, or an id is not in the vocabulary.
    """
    ids = body.get(name)
    if not isinstance(ids, list) or not ids:
        raise RequestError(400, f"{name}: got {_shown(ids)}, expected a list of token ids", name)
    wrong = next((x for x in ids if type(x) is not int or not 0 <= x < vocab_size), None)
    if wrong is not None:
        raise RequestError(400, f"{name}: got {_shown(wrong)}, expected ids from 0 to {vocab_size - 1}", name)
    return ids


def read_messages(body: Body) -> list[dict[str, Any]]:
    """Reads messages in the form of chat templates: contents as texts, arguments of tool calls as objects.

    Raises:
      RequestError: a message has another form.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MOST_MESSAGES:
        count = f"{len(messages)} of them" if isinstance(messages, list) else _shown(messages)
        raise RequestError(400, f"messages: got {count}, expected a list of 1 to {MOST_MESSAGES}", "messages")
    return [_read_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _read_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(400, f"{name}: got {_shown(message)}, expected an object with role and content", "messages")
    role = message["role"]
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(text, str) for text in texts) or {*kinds} - {"text"}:
            raise RequestError(400, f"{name}.content: got {_shown(content)}, expected parts of type text", "messages")
        content = "".join(texts)  # type: ignore[arg-type]
    if not isinstance(content, str | None) or (content is None and role != "assistant"):
        raise RequestError(400, f"{name}.content: got {_shown(content)}, expected a text", "messages")
    read: dict[str, Any] = {"role": role, "content": content or ""}
    for field in ("name", "tool_call_id"):
        if isinstance(message.get(field), str):
            read[field] = message[field]
    if message.get("tool_calls"):
        read["tool_calls"] = _read_calls(message["tool_calls"], f"{name}.tool_calls")
    return read


def _read_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    read = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(400, f"{name}: got {_shown(call)}, expected an object with a function", "messages")
        arguments = function.get("arguments")
        with contextlib.suppress(ValueError, RecursionError):  # the policy may have written the call wrongly
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        read.append(
            {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return read


def read_tools(body: Body) -> tuple[list[Any] | None, list[ReplyTool]]:
    """Reads the tools of a request: as they are, for the template, and by their names; none with `tool_choice: none`.

    Raises:
      RequestError: a tool is no function with a name.
    """
    tools = body.get("tools")
    if not tools:
        return None, []
    if not isinstance(tools, list):
        raise RequestError(400, f"tools: got {_shown(tools)}, expected a list", "tools")
    read = []
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(400, f"tools: got {_shown(tool)}, expected functions with a name", "tools")
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        read.append(ReplyTool(function["name"], next(iter(properties), None) if isinstance(properties, dict) else None))
    return tools, [] if body.get("tool_choice") == "none" else read


def reply_message(text: str, read: ReadTurn, tools: Sequence[ReplyTool], call_id: Callable[[], str]) -> dict[str, Any]:
    """Makes the message of a reply: its tool calls, and the text before them; a call that cannot be read stays text.

    Example:
      >>> from train.data.tokenizers.calls import parse_turn
      >>> read = parse_turn("calc 2*3", ["calc"])
      >>> reply_message("calc 2*3", read, [ReplyTool("calc", "expression")], lambda: "call_1")["tool_calls"]
      [{'id': 'call_1', 'type': 'function', 'function': {'name': 'calc', 'arguments': '{"expression": "2*3"}'}}]
    """
    if not read.calls or any(call.problem is not None for call in read.calls):
        return {"role": "assistant", "content": text}
    first = {tool.name: tool.first for tool in tools}
    written = []
    for call in read.calls:
        arguments = call.arguments
        if isinstance(arguments, str):
            name = first[call.name]
            arguments = {} if name is None else {name: arguments}
        function = {"name": call.name, "arguments": json.dumps(arguments)}
        written.append({"id": call_id(), "type": "function", "function": function})
    return {"role": "assistant", "content": read.text or None, "tool_calls": written}


@dataclasses.dataclass(frozen=True)
class ServedChoice:
    """One completion of an answer.

    Attributes:
      index: its number.
      ids: its tokens.
      log_probs: of these.
      names: of these, for the log-probs.
      text: of these, without EOS.
      finish: `stop`, `length`, or `tool_calls`.
    """

    index: int
    ids: Sequence[int]
    log_probs: Sequence[float]
    names: Sequence[str]
    text: str
    finish: str

    def chat_log_probs(self) -> dict[str, Any]:
        """Returns the log-probs in the form of chats."""
        entries = [
            {
                "token": name,
                "logprob": _finite(value),
                "bytes": list(name.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
            for name, value in zip(self.names, self.log_probs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def plain_log_probs(self) -> dict[str, Any]:
        """Returns the log-probs in the form of completions."""
        starts = [0]
        for name in self.names[:-1]:
            starts.append(starts[-1] + len(name))
        return {
            "tokens": list(self.names),
            "token_logprobs": [_finite(value) for value in self.log_probs],
            "top_logprobs": None,
            "text_offset": starts[: len(self.names)],
        }


def _finite(value: float) -> float:
    """Returns a log-prob that JSON can write; OpenAI's is -9999 for a probability of 0."""
    return float(value) if math.isfinite(value) else -9999.0


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Counts the tokens of an answer."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_body(error: RequestError) -> dict[str, Any]:
    """Makes the body of an error, as OpenAI's."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": error.field, "code": error.status}}
