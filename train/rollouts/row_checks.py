"""Checks of the rows that a source returns, on the host, before the step uses them."""

from collections.abc import Mapping

import numpy as np

from train.config.messages import did_you_mean
from train.context import RunContext
from train.rollouts.source import SourceError
from train.sequences.token_fields import MAX_LOG_PROB, TOKEN_FIELDS, TokenFields


def check_fields(fields: TokenFields, shape: tuple[int, ...]) -> None:
    """Checks the names and shapes of the per-token fields of rows `[B, T]`.

    Raises:
      SourceError: a field is not declared, or has another shape.
    """
    for name, x in fields.items():
        if name not in TOKEN_FIELDS:
            hint = did_you_mean(name, TOKEN_FIELDS)
            raise SourceError(f"rollout: got the field {name!r}, expected one of {', '.join(TOKEN_FIELDS)}{hint}")
        axes = TOKEN_FIELDS[name].axes
        if x.shape[:2] != shape or x.ndim != 2 + len(axes):
            raise SourceError(f"rollout: {name}: got {x.shape}, expected {(*shape, *axes)}")


def check_values(
    tokens: np.ndarray,
    token_mask: np.ndarray,
    completion_mask: np.ndarray,
    prompt_lengths: np.ndarray,
    fields: Mapping[str, np.ndarray],
    *,
    context: RunContext,
) -> None:
    """Checks the values of rows `[B, T]` on the host against the vocabulary and the lengths of a run.

    Raises:
      SourceError: a token is not of the vocabulary, a row does not begin at column 0 or has padding in it, a token of
        a prompt is sampled, a completion is too long, or a value of one is not finite, or a log-prob is above 0.
    """
    vocab_size = context.model.config.vocab_size
    longest = context.config.data.max_completion_length
    columns = np.arange(tokens.shape[1])
    problems = {
        f"tokens outside of the vocabulary of {vocab_size}": (tokens < 0) | (tokens >= vocab_size),
        "completion tokens that the token mask leaves out": completion_mask & ~token_mask,
        "tokens after padding": token_mask & (columns >= token_mask.sum(-1, keepdims=True)),
        "completion tokens in their prompts": completion_mask & (columns < prompt_lengths[:, None]),
        f"tokens beyond data.max_completion_length = {longest}": token_mask
        & (columns >= prompt_lengths[:, None] + longest),
        **{f"{name} that are not finite": _not_finite(name, x[completion_mask]) for name, x in fields.items()},
    }
    if "rollout_log_probs" in fields:
        problems["rollout_log_probs above 0"] = fields["rollout_log_probs"][completion_mask] > MAX_LOG_PROB
    for problem, wrong in problems.items():
        if wrong.any():
            raise SourceError(f"rollout: the completions have {int(wrong.sum())} {problem}")


def _not_finite(name: str, values: np.ndarray) -> np.ndarray:
    """Returns where values are not finite."""
    null = TOKEN_FIELDS[name].null
    return ~np.isfinite(values) & (True if null is None else values != null)
