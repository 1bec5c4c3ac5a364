"""The forms of a server's answers, as pydantic models; nothing in an answer is trusted."""

import dataclasses
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from train.models.config import DecoderConfig
from train.models.experts import NO_EXPERT
from train.rollouts.server.routes import decode_routes, routes_size
from train.sequences.sample import Sample
from train.sequences.token_fields import LEAST_LOG_PROB, MAX_LOG_PROB, ROUTES, UNKNOWN, VERSIONS

IDS_NEEDED = "training needs the ids that were sampled; use a server that returns them, such as vLLM 0.10.2 or newer"


class AnswerError(ValueError):
    """Raised for an answer that cannot be used.

    `retry` tells whether another attempt may help, `stale` whether the answer is from other weights than expected.

    Bytes that are no JSON come from a proxy or a server that is about to stop, so they are worth another attempt. A
    wrong form is a property of the server and would repeat.
    """

    def __init__(self, text: str, *, retry: bool = False, stale: bool = False) -> None:
        super().__init__(text)
        self.retry = retry
        self.stale = stale


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="ignore")


# A list stops at its first wrong entry, so that a long list of them costs no memory.
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]
LogProb = Annotated[float, Field(le=MAX_LOG_PROB, allow_inf_nan=True)] | None
"""A probability of 0 is null, minus infinity or a floor, such as -9999: see `LEAST_LOG_PROB`."""
VALUES_PER_TOKEN = 64
"""Values that an answer may have for each requested token: more are refused before they are parsed."""


class _LogProbs(_Form):
    token_logprobs: Annotated[list[LogProb], Field(fail_fast=True)] | None = None
    top_logprobs: Any = None


class _Span(_Form):
    version: str
    start: int | None = None
    end: int | None = None


class _Choice(_Form):
    token_ids: Ids
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: Ids | None = None
    logprobs: _LogProbs | None = None
    routed_experts: Any = None
    routed_experts_prompt_start: int | None = None
    weight_versions: Annotated[list[_Span], Field(fail_fast=True)] | None = None


class _Metadata(_Form):
    weight_version: str | None = None


class _SglExt(_Form):
    routed_experts: Any = None
    routed_experts_start_len: int | None = None


class _Completions(_Form):
    choices: Annotated[list[_Choice], Field(fail_fast=True)]
    prompt_routed_experts: Any = None
    sglext: _SglExt | None = None
    metadata: _Metadata | None = None


class _Model(_Form):
    id: str
    owned_by: Any = None


class _Models(_Form):
    data: Annotated[list[_Model], Field(fail_fast=True)]


EXPECTED = {
    "choices": "a list of completions",
    "data": "a list of models",
    "finish_reason": "stop or length",
    "id": "text",
    "metadata": "an object, or null",
    "version": "text",
    "start": "a number of tokens",
    "end": "a number of tokens",
    "weight_version": "text, or null",
    "weight_versions": "a list of spans with a version, or null",
    "logprobs": "an object with token_logprobs",
    "prompt_token_ids": "a list of ids, or null",
    "routed_experts_prompt_start": "a number of tokens",
    "routed_experts_start_len": "a number of tokens",
    "sglext": "an object with routed_experts",
    "token_ids": "a list of ids",
    "token_logprobs": f"numbers that are at most 0 (to {MAX_LOG_PROB:g}, for rounding), or null",
}
"""What each field of an answer has to be, for error messages."""

_SHORT = reprlib.Repr()
# Texts stay whole: the client removes its key from them before it shortens the message.
_SHORT.maxlevel = 3
_SHORT.maxlist = 20
_SHORT.maxstring = 2**24
_SHORT.maxother = 80
_Parsed = TypeVar("_Parsed", bound=_Form)


class _Version(_Form):
    weight_version: str


class _Workers(_Form):
    urls: list[str] = []
    workers: list[Any] = []


def read_version(content: bytes) -> str:
    """Reads the label of the weights that a server has; raises `AnswerError`."""
    return _parse(_Version, content).weight_version


def read_workers(content: bytes) -> int:
    """Reads the number of servers behind a router, in either form of its list; 0 for any other answer."""
    try:
        answer = _Workers.model_validate_json(content)
    except ValidationError:
        return 0
    return max(len(answer.urls), len(answer.workers))


def read_models(content: bytes) -> dict[str, str]:
    """Reads the names of the models that a server has, and who owns them, such as "vllm".

    Raises:
      AnswerError: the content is no JSON, or has another form.
    """
    return {model.id: str(model.owned_by) for model in _parse(_Models, content).data}


@dataclasses.dataclass(frozen=True)
class Requested:
    """The request for one completion.

    Attributes:
      prompt: the ids of the prompt.
      max_new_tokens: the most ids of the completion.
      vocab_size: ids are below it.
      eos_ids: the ids that end a completion.
      stops: whether texts end one too.
      log_probs: whether each id has a log-prob.
      routes_of: the decoder whose experts are read; None: none are.
      version: number of RL steps of the weights when the request was sent; -1 if nobody knows.
      versions: number of RL steps by the label of weights, of all that were sent by now; an answer with a label has to
        have one of them, and none that is older than `version`. None: answers have labels of something else.
      spans: whether the weights may change while the request is under way, so that the answer has to tell them.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    vocab_size: int
    eos_ids: Collection[int]
    stops: bool = False
    log_probs: bool = True
    routes_of: DecoderConfig | None = None
    version: int = UNKNOWN
    versions: Mapping[str, int] | None = None
    spans: bool = False


def read_answer(requested: Requested, content: bytes) -> Sample:
    """Reads a completion, with its prompt.

    Its fields are the versions of the ids; if requested, their log-probs, minus infinity for a floor, and the experts
    of all ids but the last.

    Raises:
      AnswerError: the content is no JSON, or a field is missing or wrong; names it with the value and the expected
        value.
    """
    return _read(*_parse_choice(requested, content), requested)


def read_probe(requested: Requested, content: bytes) -> tuple[Sample, list[float]]:
    """Reads a completion as `read_answer`, with the largest log-prob at each position; empty if there are none."""
    choice, completions = _parse_choice(requested, content)
    answer = _read(choice, completions, requested)
    try:
        tops = [max(map(float, top.values())) for top in choice.logprobs.top_logprobs]  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        # No kind of server has to have them.
        return answer, []
    return answer, tops if len(tops) == len(answer.completion_ids) else []


def _parse_choice(requested: Requested, content: bytes) -> tuple[_Choice, _Completions]:
    values_per_token = VALUES_PER_TOKEN + (0 if requested.routes_of is None else routes_size(requested.routes_of))
    most = values_per_token * (64 + len(requested.prompt) + requested.max_new_tokens)
    if (values := content.count(b",")) > most:
        raise _wrong("values", f"{values}", f"at most {most} for a completion")
    completions = _parse(_Completions, content)
    if len(completions.choices) != 1:
        raise _wrong("choices", f"{len(completions.choices)} completions", "1, the requested n")
    if (fields := content.count(b'"token_ids"')) > 1:
        raise _wrong("token_ids", f"the field {fields} times", "it once")
    return completions.choices[0], completions


def _read(choice: _Choice, completions: _Completions, requested: Requested) -> Sample:
    tokens = choice.token_ids
    seen = choice.prompt_token_ids
    prompt = list(requested.prompt)
    if seen is not None and seen != prompt:
        raise _wrong("prompt_token_ids", _SHORT.repr(seen), f"the prompt that was sent, {_SHORT.repr(prompt)}")
    if not 0 < len(tokens) <= requested.max_new_tokens:
        raise _wrong(
            "token_ids", f"{len(tokens)} tokens", f"at least 1, at most max_tokens = {requested.max_new_tokens}"
        )
    if outside := [token for token in tokens if token >= requested.vocab_size]:
        raise _wrong("token_ids", outside[0], f"an id below {requested.vocab_size}, the vocabulary that is trained")
    _check_end(choice, requested)
    sample = Sample.of_prompt(prompt)
    fields: dict[str, Any] = {VERSIONS: _versions(choice, completions, requested)}
    if requested.log_probs:
        fields["rollout_log_probs"] = _log_probs(choice, len(tokens))
    sample.draw(tokens, fields)
    if requested.routes_of is not None:
        sample.fields[ROUTES] = _routes(choice, completions, requested.routes_of, len(prompt))
    sample.finished = choice.finish_reason == "stop"
    return sample


def _check_end(choice: _Choice, requested: Requested) -> None:
    """Raises AnswerError if the ids and the reason of the end contradict the requested ends."""
    *before, last = choice.token_ids
    ends = sorted(requested.eos_ids)
    if any(token in ends for token in before):
        raise _wrong("token_ids", _SHORT.repr(choice.token_ids), f"no id after one of stop_token_ids = {ends}")
    if choice.finish_reason == "length" and last in ends:
        raise _wrong("finish_reason", "length", f"stop, as the last id is {last}, one of stop_token_ids")
    if choice.finish_reason == "stop" and last not in ends and not requested.stops:
        raise _wrong("finish_reason", "stop", f"length, as the last id is {last}, none of stop_token_ids = {ends}")


def _versions(choice: _Choice, completions: _Completions, requested: Requested) -> list[int]:
    """Returns the version of each token: what the answer tells, of spans of tokens (vLLM) or the whole (SGLang).

    Raises:
      AnswerError: it tells of weights that were never sent, of older ones than those of the request, or of none where
        they may have changed.
    """
    count = len(choice.token_ids)
    versions = [requested.version] * count
    if requested.versions is None:
        return versions
    spans = list(choice.weight_versions or ())
    if requested.spans and not spans:
        raise _wrong("weight_versions", "null", "the spans of the tokens, which rollout.source.in_flight=keep needs")
    if completions.metadata is not None and completions.metadata.weight_version is not None:
        spans.insert(0, _Span(version=completions.metadata.weight_version))
    known = requested.versions
    if any(known.get(span.version, UNKNOWN) < requested.version for span in spans):
        got = ", ".join(dict.fromkeys(span.version for span in spans))
        newest = [label for label, version in known.items() if version == requested.version][-1:]
        text = f"weight_version of the answer: got {got}, expected {''.join(newest) or 'a label of this run'}"
        raise AnswerError(text, stale=True)
    for span in spans:
        for index in range(count)[span.start : span.end]:
            versions[index] = known[span.version]
    return versions


def _log_probs(choice: _Choice, count: int) -> list[float]:
    values = None if choice.logprobs is None else choice.logprobs.token_logprobs
    if values is None:
        raise AnswerError(
            "the answer has no logprobs.token_logprobs (got None), which are recorded as rollout_log_probs; use a "
            "server that returns them, or set rollout.record_log_probs=false"
        )
    if len(values) != count:
        raise _wrong("logprobs.token_logprobs", _SHORT.repr(values), f"{count} numbers, one for each of token_ids")
    return [-math.inf if value is None or value < LEAST_LOG_PROB else value for value in values]


def _routes(choice: _Choice, completions: _Completions, config: DecoderConfig, prompt: int) -> np.ndarray:
    """Reads the experts of a prompt and its completion, [P + C, L, k]; -1 where the answer has none.

    The row of the last token, which the server never computed, is -1 too.
    """
    count = len(choice.token_ids)
    sglext = completions.sglext
    routes = np.full((prompt + count, *config.route_shape), NO_EXPERT, np.int16)
    computed = slice(0, -1)
    field = "routed_experts"
    value = choice.routed_experts
    start = choice.routed_experts_prompt_start or 0
    if value is None and sglext is not None and sglext.routed_experts is not None:
        field = "sglext.routed_experts"
        value = sglext.routed_experts
        start = sglext.routed_experts_start_len or 0
    try:
        if completions.prompt_routed_experts is not None:
            field = "prompt_routed_experts"
            computed = slice(prompt, -1)
            routes[:prompt] = decode_routes(completions.prompt_routed_experts, prompt, config)
            field = "routed_experts"
            if isinstance(value, list) and len(value) == count:
                value = value[:-1]
        if value is not None:
            routes[computed] = decode_routes(value, len(routes[computed]), config, start=start)
    except ValueError as error:
        raise AnswerError(f"{field} of the answer: {error}") from None
    return routes


def _parse(form: type[_Parsed], content: bytes) -> _Parsed:
    try:
        return form.model_validate_json(content)
    except ValidationError as error:
        # The first problem is enough.
        problem = error.errors(include_url=False)[0]
    if problem["type"] == "json_invalid":
        raise AnswerError(
            f"the answer is not JSON ({problem['ctx']['error']}): {content[:1000].decode(errors='replace')}", retry=True
        )
    names = [name for name in problem["loc"] if isinstance(name, str)]
    got = None if problem["type"] == "missing" else problem["input"]
    if not names:
        raise AnswerError(f"the answer: got {_SHORT.repr(got)}, expected an object")
    if problem["loc"][-1] == "token_ids" and got is None:
        raise AnswerError(f"the answer has no token_ids (got {got!r}); {IDS_NEEDED}")
    field = ".".join(names[1:] or names)
    raise _wrong(field, _SHORT.repr(got), EXPECTED[names[-1]])


def _wrong(field: str, got: object, expected: str) -> AnswerError:
    return AnswerError(f"{field} of the answer: got {got}, expected {expected}")
