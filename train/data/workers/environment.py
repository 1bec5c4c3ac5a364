"""Worker module: runs the episodes of an environment, which its argument names as JSON.

Questions are `{"do", "episode", ...}`. The answer is an `{"error"}` if the environment raised one, and `{"refused"}`
for a tool call that cannot be made.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

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
    properties = {p.name: {"type": TYPES.get(p.annotation, "string")} for p in parameters}
    required = [p.name for p in parameters if p.default is p.empty]
    described = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": inspect.getdoc(method) or "", "parameters": described}
    return {"type": "function", "function": function}


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
        parameters = inspect.signature(environment.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        text = returned_by(environment.reset, **{k: v for k, v in row.items() if takes_all or k in parameters})
        return {"text": _text(text)}

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
        environment = self._episodes[episode]
        parameters = [name for name in inspect.signature(method).parameters if name != "self"]
        if isinstance(arguments, str):
            arguments = {parameters[0]: arguments} if parameters else {}
        try:
            inspect.signature(getattr(environment, tool)).bind(**arguments)
        except TypeError as error:
            return {"refused": f"{tool}: {error}"}
        return {"text": _text(returned_by(getattr(environment, tool), **arguments))} | self._score(episode)

    def _score(self, episode: int) -> dict[str, float]:
        """Returns how good the state of an episode is, if its environment says so."""
        turn_score = getattr(self._episodes[episode], "turn_score", None)
        score = None if turn_score is None else returned_by(turn_score)
        if score is None:
            return {}
        if isinstance(score, Mapping):
            raise WrongRewardError(f"turn_score returned {score}, expected a number or None")
        return {"score": named_rewards(score)["reward"]}

    def _end(self, episode: int) -> dict[str, Any]:
        """Ends an episode; returns its rewards, None if the environment has no method for them."""
        environment = self._episodes.get(episode)
        reward = getattr(environment, "reward", None) or getattr(environment, "get_reward", None)
        try:
            rewards = None if reward is None else named_rewards(returned_by(reward))
        finally:
            self._close(episode)
        return {"rewards": rewards}

    def _close(self, episode: int) -> dict[str, Any]:
        """Closes the environment of an episode, which may have failed."""
        environment = self._episodes.pop(episode, None)
        if callable(getattr(environment, "close", None)):
            returned_by(environment.close)
        return {}


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    _chosen = json.loads(sys.argv[1])
    serve(_Environments(_chosen["name"], _chosen["arguments"]))
