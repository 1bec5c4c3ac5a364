"""Parsing of responses of `/v1/completions`; a missing field that training needs is an error."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from train.rollouts.source import SourceError

IDS_NEEDED = "training needs the ids that were sampled; use a server that returns them, such as vLLM 0.10.2 or newer"


class Answer(NamedTuple):
    """One completion: the sampled ids, including EOS, and their log-probs if requested."""

    tokens: list[int]
    log_probs: list[float] | None
    finished: bool


def read_answers(
    answer: Any, *, prompt: Sequence[int], samples: int, max_new_tokens: int, vocab_size: int, log_probs: bool
) -> list[Answer]:
    """Reads the completions of one prompt in the order of their index.

    Raises:
      SourceError: a field is missing or wrong; names it with the value and the expected value.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list):
        raise _answer_error("choices", answer, "a list of completions")
    if len(choices) != samples:
        raise _answer_error("choices", f"{len(choices)} completions", f"{samples}, the requested n")
    choices = sorted(choices, key=lambda choice: choice.get("index", 0))
    return [_read(choice, prompt, max_new_tokens, vocab_size, log_probs) for choice in choices]


def _read(
    choice: Mapping[str, Any], prompt: Sequence[int], max_new_tokens: int, vocab_size: int, log_probs: bool
) -> Answer:
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list):
        raise SourceError(f"rollout.source: the answer has no token_ids (got {tokens!r}); {IDS_NEEDED}")
    seen = choice.get("prompt_token_ids")
    if seen is not None and list(seen) != list(prompt):
        raise _answer_error("prompt_token_ids", seen, f"the prompt that was sent, {list(prompt)}")
    if len(tokens) > max_new_tokens:
        raise _answer_error("token_ids", f"{len(tokens)} tokens", f"at most max_tokens = {max_new_tokens}")
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise _answer_error("token_ids", outside[0], f"an id below {vocab_size}, the vocabulary that is trained")
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        raise _answer_error("finish_reason", repr(reason), "stop or length")
    return Answer(tokens, _log_probs(choice, len(tokens)) if log_probs else None, reason == "stop")


def _log_probs(choice: Mapping[str, Any], count: int) -> list[float]:
    values = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(values, list):
        raise SourceError(
            f"rollout.source: the answer has no logprobs.token_logprobs (got {values!r}), which are recorded as "
            "rollout_log_probs; use a server that returns them, or set rollout.record_log_probs=false"
        )
    if len(values) != count or any(value is None for value in values):
        raise _answer_error("logprobs.token_logprobs", values, f"{count} numbers, one for each of token_ids")
    return [float(value) for value in values]


def _answer_error(field: str, got: Any, expected: str) -> SourceError:
    return SourceError(f"rollout.source: {field} of the answer: got {str(got)[:200]}, expected {expected}")
