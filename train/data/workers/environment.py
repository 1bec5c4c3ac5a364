"""Worker module: runs the episodes of an environment, which its argument names as JSON.

Questions are `{"do", "episode", ...}`. The answer is an `{"error"}` if the environment raised one, and `{"refused"}`
for a tool call that cannot be made.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_origin, get_type_hints

from train.config.errors import UserError
from train.config.user_functions import find_function
from train.data.reward_call import WrongRewardError, named_rewards, returned_by
from train.data.workers.serve import serve

NOT_TOOLS = ("reset", "reward", "get_reward", "turn_score", "close", "step")
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", list: "array", dict: "object"}


def _form(kind: Any) -> str:
    """Returns the form of an environment: `text` steps, or `tools`."""
    return "text" if callable(getattr(kind, "step", None)) else "tools"


def _tools(kind: Any) -> dict[str, Callable[..., Any]]:
    """Lists the public methods of a class, which are its tools."""
    members = inspect.getmembers(kind, callable)
    return {name: member for name, member in members if not name.startswith("_") and name not in NOT_TOOLS}


def _schema(name: str, method: Callable[..., Any]) -> dict[str, Any]:
    """Describes a tool for a chat template, as transformers does."""
    parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    kinds = _kinds(method)
    properties = {p.name: {"type": TYPES[kinds.get(p.name, (str,))[0]]} for p in parameters}
    required = [p.name for p in parameters if p.default is p.empty]
    described = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": inspect.getdoc(method) or "", "parameters": described}
    return {"type": "function", "function": function}


def _kinds(method: Callable[..., Any]) -> dict[str, tuple[type, ...]]:
    """Returns the types of JSON that each parameter takes, NoneType among them if it may be null, by its type hint."""
    try:
        hints = get_type_hints(method)
    except (NameError, TypeError):
        return {}
    kinds = {}
    for name, hint in hints.items():
        members = [get_origin(member) or member for member in get_args(hint) if type(None) in get_args(hint)]
        found = tuple(kind for kind in (*members, hint, get_origin(hint)) if kind in TYPES)
        if found:
            kinds[name] = (*found, *([type(None)] if members else []))
    return kinds


def _read_arguments(method: Callable[..., Any], arguments: dict[str, Any] | str) -> dict[str, Any]:
    """Returns the arguments of a call as the type hints say; a text is the first of them.

    Raises:
      TypeError: one is missing, unknown, or of another type; the text tells which.
    """
    kinds = _kinds(method)
    if isinstance(arguments, str):
        first = next(iter(inspect.signature(method).parameters), None)
        arguments = {} if first is None else {first: _read_number(arguments, kinds.get(first, (str,)))}
    inspect.signature(method).bind(**arguments)
    for name, value in arguments.items():
        wanted = kinds.get(name)
        # A bool is no number in JSON, and an integer is one.
        of_value = (int, float) if type(value) is int else (type(value),)
        if wanted is not None and not {*wanted} & {*of_value}:
            raise TypeError(f"{name}: got {json.dumps(value)[:60]}, expected {' or '.join(map(_json_name, wanted))}")
    return arguments


def _read_number(text: str, kinds: tuple[type, ...]) -> Any:
    """Reads a text as a number where no text is wanted, if it is one."""
    for kind in (int, float):
        if kind in kinds and str not in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def _json_name(kind: type) -> str:
    return TYPES.get(kind, "null")


class _Environments:
    """The episodes of this process, by number."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        self._name = name
        self._arguments = arguments
        self._kind: Any = None
        self._episodes: dict[int, Any] = {}

    def __call__(self, question: Any) -> dict[str, Any]:
        try:
            if self._kind is None:
                self._kind = find_function("environment.name", self._name)
            if question is None:
                return self._describe()
            answer: dict[str, Any] = getattr(self, f"_{question.pop('do')}")(**question)
        except (UserError, WrongRewardError) as error:
            return {"error": str(error)}
        return answer

    def _describe(self) -> dict[str, Any]:
        tools = _tools(self._kind)
        if not callable(getattr(self._kind, "reset", None)):
            return {"error": f"{self._name} has no method reset"}
        if _form(self._kind) == "tools" and not tools:
            return {"error": f"{self._name} has neither a method step nor tools, which are its public methods"}
        return {
            "form": _form(self._kind),
            "tools": [_schema(name, tool) for name, tool in tools.items()],
            "has_scores": callable(getattr(self._kind, "turn_score", None)),
        }

    def _reset(self, episode: int, row: Mapping[str, Any]) -> dict[str, Any]:
        environment = self._episodes[episode] = returned_by(self._kind, **self._arguments)
        return {"text": _text(_call_with_named(environment.reset, row))}

    def _step(self, episode: int, text: str) -> dict[str, Any]:
        returned = returned_by(self._episodes[episode].step, text)
        if isinstance(returned, Mapping):
            observed = returned.get("observation", returned.get("observations"))
            returned = observed, returned.get("reward", 0.0), returned.get("done", False)
        if not isinstance(returned, tuple | list) or len(returned) != 3:
            raise WrongRewardError(f"step returned {type(returned).__name__}, expected (observation, reward, done)")
        observed, reward, done = returned
        if isinstance(observed, list):  # messages
            observed = "".join(str(message.get("content", "")) for message in observed)
        answer = {"text": _text(observed), "rewards": named_rewards(reward), "done": bool(done)}
        return answer | self._score(episode)

    def _call(self, episode: int, tool: str, arguments: Any) -> dict[str, Any]:
        method = _tools(self._kind).get(tool)
        if method is None:
            return {"refused": f"there is no tool {tool!r}; the tools are {', '.join(_tools(self._kind))}"}
        call = getattr(self._episodes[episode], tool)
        try:
            arguments = _read_arguments(call, arguments)
        except TypeError as error:
            return {"refused": f"{tool}: {error}"}
        return {"text": _text(returned_by(call, **arguments))} | self._score(episode)

    def _score(self, episode: int) -> dict[str, float]:
        """Returns how good the state of an episode is, if its environment says so."""
        turn_score = getattr(self._episodes[episode], "turn_score", None)
        score = None if turn_score is None else returned_by(turn_score)
        if score is None:
            return {}
        if isinstance(score, Mapping):
            raise WrongRewardError(f"turn_score returned {score}, expected a number or None")
        return {"score": named_rewards(score)["reward"]}

    def _end(self, episode: int, **last: Any) -> dict[str, Any]:
        """Ends an episode; returns its rewards, None if the environment has no method for them.

        `last` is the text of the last turn, and whether the policy ended the episode.
        """
        environment = self._episodes.get(episode)
        reward = getattr(environment, "reward", None) or getattr(environment, "get_reward", None)
        try:
            rewards = None if reward is None else named_rewards(_call_with_named(reward, last))
        finally:
            self._close(episode)
        return {"rewards": rewards}

    def _close(self, episode: int) -> dict[str, Any]:
        """Closes the environment of an episode, which may have failed."""
        environment = self._episodes.pop(episode, None)
        if callable(getattr(environment, "close", None)):
            returned_by(environment.close)
        return {}


def _call_with_named(method: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Calls a method with those of the values that it has parameters for."""
    parameters = inspect.signature(method).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return returned_by(method, **{name: value for name, value in values.items() if takes_all or name in parameters})


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    _chosen = json.loads(sys.argv[1])
    serve(_Environments(_chosen["name"], _chosen["arguments"]))
