"""The parameters of a reward function: how it is called, and what to write for one that another trainer calls.

A function of another trainer that happens to take three arguments would score wrong values without an error.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

ARGUMENTS = ("record", "completion", "finished")
"""The arguments of a reward function, in their places."""

_RECORD = ("record", "row", "example", "item", "entry", "data", "fields", "line", "doc")
_TEXT = ("completion", "response", "text", "output", "reply", "generation", "generated", "prediction")
_ENDED = ("finished", "done", "ended", "complete", "completed", "stopped", "terminated")
PLACES = {**dict.fromkeys(_RECORD, 0), **dict.fromkeys((*_TEXT, "answer"), 1), **dict.fromkeys(_ENDED, 2)}
"""Names of parameters that say which argument they take, and its place. A name of nothing here fits everywhere."""

_OTHER_TEXTS = ("solution_str", "predict_str", "model_output", "action")
_TRUTHS = ("ground_truth", "answer", "label", "truth", "gold", "target", "solution", "reference")
_PROMPTS = ("prompt", "question", "query")
_PLURALS = {
    **dict.fromkeys(("completions", "responses", "solution_strs"), "completion"),
    **dict.fromkeys(("labels", "answers", "ground_truths", "solutions"), "ground_truth"),
    "prompts": "prompt",
    "queries": "query and completion",
    "data_sources": "data_source",
    "extra_infos": "extra_info",
    "samples": "sample",
}
"""Names of lists of one value for each completion, and of such a value."""
FOREIGN = {
    *_OTHER_TEXTS,
    *_PLURALS,
    *(set(_TRUTHS) - {"answer", "solution", "reference"}),
    *("prompt", "query", "data_source", "extra_info", "state", "info", "parser", "args", "sample"),
    *("prompt_ids", "completion_ids", "trainer_state", "tokenizer"),
}
"""Names of parameters that none of the arguments is for."""


class OtherTrainer(NamedTuple):
    """Another trainer, told by the names of parameters.

    Attributes:
      name: of the trainer.
      names: parameters that together tell it.
      several: whether a call has lists, of one value for each completion.
      reward: the expression of the reward in the `result` of a call.
    """

    name: str
    names: frozenset[str]
    several: bool = False
    reward: str = "result"


TRAINERS = (
    OtherTrainer("verl", frozenset({"solution_str"}), False, 'result["score"] if isinstance(result, dict) else result'),
    OtherTrainer("verl", frozenset({"solution_strs"}), True, "result[0]"),
    OtherTrainer(
        *("OpenRLHF", frozenset({"queries"}), True),
        reward='float((result["rewards"] if isinstance(result, dict) else result)[0])',
    ),
    OtherTrainer("AReaL", frozenset({"completions", "prompt_ids"})),
    OtherTrainer("TRL", frozenset({"completions"}), True, "result[0]"),
    OtherTrainer("slime", frozenset({"args", "sample"})),
    OtherTrainer("slime", frozenset({"args", "samples"}), True, "result[0]"),
    OtherTrainer("verifiers", frozenset({"completion", "answer"})),
    OtherTrainer("verifiers", frozenset({"completion", "state"})),
    OtherTrainer("Trinity-RFT", frozenset({"response", "truth"})),
)
"""In the order in which they are looked for."""
MESSAGES = ("TRL", "verifiers")
"""Trainers whose functions read the fields of a record by their names, and conversations as messages."""


@dataclass(frozen=True)
class RewardParameter:
    """A parameter of a function: name, kind (the name that `inspect` has for it), and whether it has no default."""

    name: str
    kind: str
    required: bool

    @property
    def positional(self) -> bool:
        """Whether it takes an argument by its place."""
        return self.kind in ("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")

    def __str__(self) -> str:
        """Returns it as in a signature."""
        star = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(self.kind, "")
        return f"{star}{self.name}{'' if self.required or star else '=...'}"


@dataclass(frozen=True)
class RewardSignature:
    """The parameters and the kind of an object that is called as a reward function.

    Attributes:
      parameters: its parameters; None if they cannot be told, as with functions of C.
      kind: "function", "async function" or "class".
    """

    parameters: tuple[RewardParameter, ...] | None
    kind: str = "function"

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "RewardSignature":
        """Reads the signature of a function; of a decorated one that of the decorator's function, which is called."""
        try:
            declared = inspect.signature(function, follow_wrapped=False).parameters.values()
        except (TypeError, ValueError):
            return cls(None)
        parameters = tuple(RewardParameter(p.name, p.kind.name, p.default is p.empty) for p in declared)
        call = getattr(type(function), "__call__", None)  # noqa: B004 (an instance with an async method)
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
        return cls(parameters, "class" if inspect.isclass(function) else "async function" if is_async else "function")

    def to_json(self) -> dict[str, Any]:
        """Returns it as a JSON value."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "RewardSignature":
        """Returns the signature that `to_json` made a value of."""
        parameters = value["parameters"]
        return cls(None if parameters is None else tuple(RewardParameter(**p) for p in parameters), value["kind"])

    @property
    def names(self) -> frozenset[str]:
        """The names of the parameters."""
        return frozenset(parameter.name for parameter in self.parameters or ())

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of the parameters."""
        return frozenset(parameter.kind for parameter in self.parameters or ())

    def by_name(self) -> tuple[str, ...] | None:
        """Returns the arguments that the function takes by their names, in any order; None if it does not."""
        if self.parameters is None:
            return None
        required = {p.name for p in self.parameters if p.required and not p.kind.startswith("VAR")}
        if self.kinds & {"VAR_POSITIONAL", "POSITIONAL_ONLY"} or not required <= {*ARGUMENTS}:
            return None
        if "VAR_KEYWORD" in self.kinds:
            return ARGUMENTS
        return tuple(name for name in ARGUMENTS if name in self.names) if "completion" in self.names else None

    def fits(self) -> bool:
        """Whether the function takes the arguments: by their names, or in their places, without a name of another."""
        if self.parameters is None or self.by_name() is not None:
            return True
        places = [parameter for parameter in self.parameters if parameter.positional]
        enough = len(places) >= len(ARGUMENTS) or "VAR_POSITIONAL" in self.kinds
        more = [p for p in self.parameters if p.required and (p in places[3:] or p.kind == "KEYWORD_ONLY")]
        wrong = [p for n, p in enumerate(places[:3]) if p.name in FOREIGN or PLACES.get(p.name, n) != n]
        return enough and not more and not wrong

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as one of (record, completion, finished)."""
        names = self.by_name()
        if names is None:
            return function

        def called_by_name(*values: Any) -> Any:
            arguments = dict(zip(ARGUMENTS, values, strict=True))
            return function(**{name: arguments[name] for name in names})

        return called_by_name


class RecordFields(NamedTuple):
    """The fields of a record: of prompt and answer by the config, and the names of all in the first record."""

    prompt: str = "prompt"
    answer: str = "answer"
    names: Sequence[str] = ()

    def truth(self, name: str) -> str:
        """Returns the expression of the answer, for a parameter of this name."""
        if "reward_model" in self.names:  # verl's files
            return 'record["reward_model"]["ground_truth"]'
        known = (name, self.answer, *_TRUTHS)
        return f"record[{json.dumps(next((field for field in known if field in self.names), self.answer))}]"


def signature_problem(name: str, signature: RewardSignature, fields: RecordFields) -> str | None:
    """Says what to write for a function that is called with other arguments; None if it fits."""
    source, _, function = name.rpartition(":")
    if signature.kind == "class":
        return f"got the class {name}, expected a function, or an object of the class: write `reward = {function}()`"
    if signature.kind == "function" and signature.fits():
        return None
    trainer = next((trainer for trainer in TRAINERS if trainer.names <= signature.names), None)
    parameters = ", ".join(map(str, signature.parameters or ()))
    like = f", which {trainer.name} calls," if trainer is not None and not signature.fits() else ""
    file = source if source.endswith(".py") else "rewards.py"
    return (
        f"the {signature.kind} {name}({parameters}){like} does not take ({', '.join(ARGUMENTS)}): the fields of a "
        f"line, the text of a completion, and whether it ended. Add to {file}, and set data.reward={file}:"
        f"{_wrapper_name(function)}\n\n" + "\n".join(_wrapper(name, signature, trainer, fields)) + "\n"
    )


def _wrapper_name(function: str) -> str:
    return "reward" if function != "reward" else "score_completion"


def _wrapper(
    name: str, signature: RewardSignature, trainer: OtherTrainer | None, fields: RecordFields
) -> Iterator[str]:
    """Yields the lines of a reward function that calls a function with its own arguments."""
    source, _, function = name.rpartition(":")
    fits = signature.fits()
    several = bool(signature.names & _PLURALS.keys()) if trainer is None else trainer.several
    arguments = list(ARGUMENTS) if fits else list(_arguments(signature, trainer, fields, several=several))
    imports = [] if source.endswith(".py") else [f"from {source} import {function}"]
    if any("SimpleNamespace" in argument for argument in arguments):
        imports.insert(0, "from types import SimpleNamespace")
    if signature.kind == "async function":
        imports.insert(0, "import asyncio")
    yield from [*imports, "", ""] if imports else []
    yield f"def {_wrapper_name(function)}({', '.join(ARGUMENTS)}):"
    if trainer is not None and trainer.name in MESSAGES and not fits:
        message = '[{"role": "assistant", "content": completion}]'
        yield f"    # a function that reads messages gets {message} in place of completion"
    opening = f"{function}("
    closing = ")"
    if signature.kind == "async function":
        opening = f"asyncio.run({opening}"
        closing = "))"
    yield f"    result = {opening}"
    yield from (f"        {argument}," for argument in arguments)
    yield f"    {closing}"
    returned = ("result[0]" if several else "result") if trainer is None else trainer.reward
    yield f"    return {'result' if fits else returned}"


def _arguments(
    signature: RewardSignature, trainer: OtherTrainer | None, fields: RecordFields, *, several: bool
) -> Iterator[str]:
    """Yields the arguments of a function as they are written in its call."""
    for parameter in signature.parameters or ():
        value = _value(parameter.name, fields)
        if parameter.kind.startswith("VAR") or (value is None and not parameter.required):
            continue
        text = "None" if value is None else f"[{value}]" if several and parameter.name != "args" else value
        yield text if parameter.kind == "POSITIONAL_ONLY" else f"{parameter.name}={text}"
    if trainer is not None and trainer.name in MESSAGES and "VAR_KEYWORD" in signature.kinds:
        taken = sorted({fields.prompt, *signature.names} & {fields.prompt, *fields.names})
        value = "[value]" if several else "value"
        yield f"**{{name: {value} for name, value in record.items() if name not in {json.dumps(taken)}}}"


def _value(name: str, fields: RecordFields) -> str | None:
    """Returns the expression of the value for a parameter, of the arguments of a reward function; None without one."""
    name = _PLURALS.get(name, name)
    prompt = f"record[{json.dumps(fields.prompt)}]"
    sample = f"prompt={prompt}, response=completion, label={fields.truth('label')}, metadata=record"
    values = {
        **dict.fromkeys((*_TEXT, *_OTHER_TEXTS), "completion"),
        **dict.fromkeys(_ENDED, "finished"),
        **dict.fromkeys(_RECORD, "record"),
        **dict.fromkeys(_PROMPTS, prompt),
        "sample": f"SimpleNamespace({sample})",
        "query and completion": f"{prompt} + completion",
        "data_source": 'record.get("data_source")',
        "extra_info": 'record.get("extra_info")',
    }
    if name in _TRUTHS:
        return fields.truth(name)
    return values.get(name, f"record[{json.dumps(name)}]" if name in fields.names else None)
