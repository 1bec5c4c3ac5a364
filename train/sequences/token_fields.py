"""Per-token fields of a rollout: each is declared here once, and travels by its name from the sampler to the update.

`TokenFields` is a dictionary of arrays `[B, T, ...]`, and so a pytree. The sampler's slots, padding, collection,
recordings, batches, micro-batches and processes map over its entries and name none. A producer adds an entry; a
consumer reads `batch.fields[name]`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from train.config.float32 import fits_float32

TokenFields: TypeAlias = dict[str, Any]
"""Arrays by the names of `TOKEN_FIELDS`, `[B, T, ...]`. Position t belongs to token t."""

MAX_LOG_PROB = 1e-3
"""Largest log-prob that a server or a recording may have; a larger one is an error.

A log-prob is at most 0 but for rounding: the difference of a logit and a log-sum-exp, both in float32, is off by about
the spacing of float32 numbers of their size, which is below 1e-3 up to 2**13. No model has larger logits. A bound of 0
would refuse right answers; log-probs of another kind, such as base-2 or negated ones, exceed the bound at once.
"""
LEAST_LOG_PROB = -50.0
"""Smallest log-prob that a server or a recording can have of a sampled token; there is none below, or for null.

A sampler draws some token of a lower probability once in `e**50 / vocabulary` tokens: with 2**18 entries, once in 2e16.
So the number is a floor that stands for a probability of 0 (-9999 in vLLM, null in SGLang, -100 in others), and the
token came from another distribution than its log-prob. No weight corrects for it: it is left out of the loss.
"""
_NUMBERS = {"b": "true or false", "i": "integers", "u": "integers", "f": "finite numbers"}


@dataclasses.dataclass(frozen=True)
class TokenField:
    """The declaration of a per-token field.

    Attributes:
      dtype: of recorded values; the sampler may compute in a wider one.
      axes: the names of the axes after `[B, T]`.
      fill: the value in padding, and at tokens that have none.
      prompts: whether the tokens of prompts have values too, not only tokens of completions.
      ragged: whether the last axis has its own length at every token; `fill` pads it.
      recorded: whether recordings have the field.
      key: its key in recordings; None: its name.
      scored: whether log-probs depend on it, so that sequences share a token only if they have the same values.
      null: the value that is null in a recording, of a token without one; None: null is wrong.
      check: raises ValueError for recorded values that cannot be; gets the values of a row, the ids of its tokens and
        the size of the vocabulary.
    """

    dtype: Any
    axes: tuple[str, ...] = ()
    fill: float = 0
    prompts: bool = False
    ragged: bool = False
    recorded: bool = True
    key: str | None = None
    scored: bool = False
    null: float | None = None
    check: Callable[[Sequence[Any], Sequence[int], int], None] = lambda values, ids, vocab_size: None

    @property
    def form(self) -> str:
        """Describes the values of a row, for error messages."""
        axes = f" [{', '.join(self.axes)}]" if self.axes else ""
        null = "" if self.null is None else " or null"
        return f"a list of {_NUMBERS[np.dtype(self.dtype).kind]}{null}{axes} for each id"

    def sizes(self, values: Any) -> tuple[int, ...] | None:
        """Returns the sizes of the trailing axes of a row's values, the longest of a ragged one.

        Returns:
          One size for each of `axes`; None for values of another form.
        """
        level = [values]
        sizes = []
        for depth in range(1 + len(self.axes)):
            lengths = {len(entry) if isinstance(entry, list) else -1 for entry in level}
            if -1 in lengths or (len(lengths) > 1 and not (self.ragged and depth == len(self.axes))):
                return None
            sizes.append(max(lengths, default=0))
            level = list(itertools.chain.from_iterable(level))
        return tuple(sizes[1:]) if all(self._fits(value) for value in level) else None

    def _fits(self, value: Any) -> bool:
        if self.null is not None and value in (None, self.null):
            return True
        dtype = np.dtype(self.dtype)
        if dtype.kind in "iu":
            return type(value) is int and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
        return isinstance(value, bool) if dtype.kind == "b" else fits_float32(value)

    def empty(self, sizes: tuple[int, ...]) -> Any:
        """Returns the value of a token that has none, for trailing axes of these sizes, as recordings have it."""
        return np.full((*sizes[:-1], 0) if self.ragged else sizes, self.fill, self.dtype).tolist()

    def write(self, values: Sequence[Any], out: np.ndarray) -> None:
        """Writes the values of a row into `out`, `[len(values), ...]`, which holds `fill`."""
        if self.ragged:
            for index in np.ndindex(out.shape[:-1]):
                entry: Any = values
                for axis in index:
                    entry = entry[axis]
                out[(*index, slice(len(entry)))] = entry
        elif len(values):
            out[:] = values if self.null is None else [self.null if value is None else value for value in values]

    def lists(self, values: np.ndarray) -> list[Any]:
        """Returns the values of a row as lists, without the padding of a ragged axis: the inverse of `write`."""
        if self.ragged and values.ndim > 1:
            return [self.lists(entry) for entry in values]
        listed = (values[values != self.fill] if self.ragged else values).tolist()
        return listed if self.null is None else [None if value == self.null else value for value in listed]


def shorten(value: Any) -> str:
    """Returns the text of a value for an error message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _check_log_probs(values: Sequence[Any], ids: Sequence[int], vocab_size: int) -> None:
    if any(value is not None and value > MAX_LOG_PROB for value in values):
        raise ValueError(f"got {shorten(values)}, expected finite numbers that are not positive, or null")


def _check_kept_ids(values: Sequence[Any], ids: Sequence[int], vocab_size: int) -> None:
    if not all(0 <= kept_id < vocab_size for kept_id in itertools.chain.from_iterable(values)):
        raise ValueError(f"got {shorten(values)}, expected a list of ids for each completion id")
    for token, kept_ids in zip(ids, values, strict=True):
        if token not in kept_ids:
            raise ValueError(f"got {shorten(kept_ids)} for the completion id {token}, expected it in the list")


def _check_routes(values: Sequence[Any], ids: Sequence[int], vocab_size: int) -> None:
    for experts in itertools.chain.from_iterable(values):
        chosen = [expert for expert in experts if expert >= 0]
        if min(experts) < -1 or len(set(chosen)) < len(chosen) or 0 < len(chosen) < len(experts):
            raise ValueError(f"got the experts {shorten(experts)}, expected different ones, or -1 for all of them")


def _check_versions(values: Sequence[Any], ids: Sequence[int], vocab_size: int) -> None:
    if any(value is not None and value < 0 for value in values):
        raise ValueError(f"got {shorten(values)}, expected numbers of RL steps, or null")


ROUTES = "routed_experts"
TOKEN_REWARDS = "token_rewards"
TURN_IDS = "turn_ids"
TURN_SCORES = "turn_scores"
VERSIONS = "token_versions"
LAGS = "token_lags"
UNKNOWN = -1
"""In place of a version, and of a lag: nobody knows it."""
TOKEN_FIELDS: dict[str, TokenField] = {
    # Of the sampled tokens under the sampling policy; with `kept_ids`, renormalised over these tokens. Below
    # `LEAST_LOG_PROB`, as null is, nobody knows it.
    "rollout_log_probs": TokenField(np.float32, null=-math.inf, key="log_probs", check=_check_log_probs),
    # The tokens that top-k, top-p and min-p kept. If present, all log-probs of a batch are renormalised over them.
    "kept_ids": TokenField(np.int32, axes=("kept",), fill=-1, ragged=True, scored=True, check=_check_kept_ids),
    # The log of the probability of the kept tokens. A source subtracts it from its log-probs, and drops it.
    "log_kept_mass": TokenField(np.float32, recorded=False),
    # The number of RL steps of the policy that drew a token.
    VERSIONS: TokenField(np.int32, fill=UNKNOWN, null=UNKNOWN, check=_check_versions),
    # The number of RL steps since then, which the trainer computes from the version.
    LAGS: TokenField(np.int32, fill=UNKNOWN, recorded=False),
    # The part of the reward of a row that was given at a token, such as the last one of a turn.
    TOKEN_REWARDS: TokenField(np.float32),
    # The turn of an episode that a token was sampled in, counted from 0.
    TURN_IDS: TokenField(np.int32, fill=-1, recorded=False),
    # On the last token of a turn, how good the state is after it; -inf: no score.
    TURN_SCORES: TokenField(np.float32, fill=-math.inf, null=-math.inf, recorded=False),
    # The experts that computed a token, which decide the log-prob of the next; -1: unknown, as of the last token of a
    # row, which the sampler never computes.
    ROUTES: TokenField(np.int16, axes=("layers", "experts"), fill=-1, prompts=True, scored=True, check=_check_routes),
}
"""Every per-token field that a source may return, by name."""


def recorded_names() -> dict[str, str]:
    """Returns the names of the fields that recordings have, by their keys there."""
    return {field.key or name: name for name, field in TOKEN_FIELDS.items() if field.recorded}
