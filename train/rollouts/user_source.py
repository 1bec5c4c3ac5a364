"""A source of the user: errors of its code name it, and what it returns is checked, also what lies on devices."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import jax
import numpy as np

import kljax
from train.config.errors import UserError
from train.config.rollout import UserSourceSection
from train.config.user_functions import check_members, make_with, user_code
from train.context import RunContext
from train.data.tasks import Example
from train.distributed.global_arrays import RowSplit, to_host_rows
from train.process.waiting import waiting_for
from train.rollouts.routes import check_routes
from train.rollouts.row_checks import check_fields, check_values
from train.rollouts.row_statistics import has_log_prob
from train.rollouts.source import ROW_ARRAYS, Completions, FinishedSamples, InTurn, Request, SourceError, StreamSource
from train.sequences.token_fields import LEAST_LOG_PROB


class OneCallSource(Protocol):
    """The other form of a source of the user: `sample` returns all completions of a request."""

    def update(self, policy: kljax.Policy, step: int) -> None:
        """Sets the weights of the following samples."""

    def sample(self, request: Request) -> Completions:
        """Returns the completions of a request."""

    def close(self) -> None:
        """Frees the resources of the source outside this process."""


def make_user_source(context: RunContext, section: UserSourceSection) -> StreamSource | OneCallSource:
    """Calls the function of the user.

    Raises:
      UserError: it cannot be imported or fails, or what it returns is no source; or that has nothing in flight, and the
        run is to be ahead.
    """
    field = "rollout.source"
    with waiting_for(f"{field}: {section.function}"):
        made = make_with(field, section.function, None, context, **section.arguments)
    is_stream = hasattr(made, "start") or hasattr(made, "take")
    check_members(field, section.function, made, StreamSource if is_stream else OneCallSource)
    if context.config.rollout.ahead and not is_stream:
        raise UserError(
            f"rollout.ahead: got {context.config.rollout.ahead}, but {section.function} returned "
            f"{type(made).__name__!r} with sample alone, which has nothing in flight; give it start and take, or set 0"
        )
    return made


class UserSource:
    """Calls a source of the user, in either form: every failure is a `SourceError` that names it, its samples are
    checked, and a wait of a minute is told.

    Samples without versions have that of the weights that were set when their request was started.
    """

    row_count: int | None = None

    def __init__(self, context: RunContext, name: str, source: StreamSource | OneCallSource) -> None:
        """Takes the name of the function that made the source."""
        self._context = context
        self._source = source
        self._answers_in_turn = not hasattr(source, "take")
        self._stream: Any = _Turns(source) if self._answers_in_turn else source
        self._label = f"rollout.source: {name}"
        self._version = 0
        self._versions: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    @contextmanager
    def _calling(self, method: str) -> Iterator[None]:
        label = f"{self._label}: {method}"
        with waiting_for(label), user_code(label, SourceError):
            yield

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sets the weights of the following samples."""
        with self._calling("update"):
            self._source.update(policy, version)
        self._version = version

    def start(self, requests: Sequence[Request]) -> None:
        """Begins to draw completions."""
        with self._calling("start"):
            self._stream.start(requests)
        self._versions.update(dict.fromkeys(requests, self._version))

    def take(self) -> FinishedSamples:
        """Returns finished samples, checked; where devices still sample them, the checks wait for `finish`.

        Raises:
          SourceError: the source fails, or its rows are wrong.
        """
        method = "sample" if self._answers_in_turn else "take"
        with self._calling(method):
            finished = self._stream.take()
            self._check_part(finished, method)
            completions = finished.completions
            request = finished.request
            if finished.rows is not None:
                request = dataclasses.replace(request, rows=RowSplit(len(finished.rows), finished.rows, finished.rows))
            self._check_form(completions, request, method)
            whole = finished.rows is None
            completions = request.align(completions, self._context.tokenizer)
        version = self._versions[finished.request]
        finish = completions.finish
        if finish is None:
            with self._calling(method):
                self._check(completions, request, whole=whole)
            completions = dataclasses.replace(completions, **self._numbers(completions))
        else:

            def finish_and_check() -> Mapping[str, Any]:
                with self._calling("finish"):
                    values = finish()
                    completed = dataclasses.replace(completions, finish=None, **values)
                    self._check(completed, request, whole=whole)
                    return {**values, **self._numbers(completed)}

            completions = dataclasses.replace(completions, finish=finish_and_check)
        return dataclasses.replace(finished, completions=completions.with_versions(version))

    def close(self) -> None:
        """Frees the resources of the source."""
        with self._calling("close"):
            self._source.close()

    def _check_part(self, finished: Any, method: str) -> None:
        """Checks that samples are of a request that was started, and which rows of it they are."""
        if not isinstance(finished, FinishedSamples):
            raise SourceError(f"{self._label}: {method} returned {type(finished).__name__}, expected FinishedSamples")
        if not isinstance(finished.request, Request) or finished.request not in self._versions:
            raise SourceError(f"{self._label}: {method} returned samples of a request that was not started")
        rows = finished.rows
        if getattr(finished.completions, "episode_rows", None) is not None:
            # Neither parts nor checkpoints have them.
            if rows is not None:
                raise SourceError(f"{self._label}: episode_rows: got some rows of a request, expected all with them")
            if self._context.config.rollout.ahead:
                raise SourceError(f"{self._label}: episode_rows: expected None with rollout.ahead")
        if rows is None:
            return
        if getattr(finished.completions, "finish", None) is not None:
            raise SourceError(
                f"{self._label}: rows: got some of a request whose completions have finish, expected None"
            )
        own = finished.request.rows.own
        is_subset = isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and np.isin(rows, own).all()
        if not is_subset or len(np.unique(rows)) < len(rows):
            raise SourceError(
                f"{self._label}: rows: got {rows}, expected an array of some of the numbers {own.tolist()}, each once"
            )

    def _check_form(self, completions: Any, request: Request, method: str) -> None:
        """Checks types and shapes, which need no values."""
        if not isinstance(completions, Completions):
            raise SourceError(f"{self._label}: {method} returned {type(completions).__name__}, expected Completions")
        rows = request.rows
        width = self._context.config.data.row_length()
        kinds = {"tokens": ("i", "integers"), "token_mask": ("b", "booleans"), "completion_mask": ("b", "booleans")}
        for name, (kind, text) in kinds.items():
            x = getattr(completions, name)
            if not isinstance(x, np.ndarray | jax.Array):
                raise SourceError(f"{self._label}: {name}: got {type(x).__name__}, expected an array")
            # Arrays on the devices have the rows of all processes.
            expected = (rows.count if isinstance(x, jax.Array) else len(rows.held), width)
            # The sampler of this process fills the last held-out rows up.
            filled = isinstance(x, jax.Array) and request.first_row is not None and x.shape[0] > expected[0]
            shape = (expected[0], *x.shape[1:]) if filled else x.shape
            if x.dtype.kind != kind or shape != expected:
                raise SourceError(
                    f"{self._label}: {name}: got {x.dtype}{list(x.shape)}, expected {text} {list(expected)}"
                )
        for name, x in completions.fields.items():
            if not isinstance(x, np.ndarray | jax.Array):
                raise SourceError(f"{self._label}: fields[{name!r}]: got {type(x).__name__}, expected an array")
        check_fields(completions.fields, completions.tokens.shape)

    def _check(self, completions: Completions, request: Request, *, whole: bool) -> None:
        """Checks the values, copied from the devices where they lie there, of a whole request or some of its rows."""
        self._check_rows(completions, request)
        arrays = {name: getattr(completions, name) for name in ROW_ARRAYS} | dict(completions.fields)
        held = len(request.rows.held)
        arrays = {name: to_host_rows(x)[:held] if isinstance(x, jax.Array) else x for name, x in arrays.items()}
        tokens, token_mask, completion_mask = (arrays.pop(name) for name in ROW_ARRAYS)
        lengths = np.asarray(completions.prompt_lengths)
        check_values(tokens, token_mask, completion_mask, lengths, arrays, context=self._context)
        log_probs = completions.fields.get("rollout_log_probs")
        if isinstance(log_probs, jax.Array) and not has_log_prob(arrays["rollout_log_probs"][completion_mask]).all():
            raise SourceError(
                f"{self._label}: rollout_log_probs: got some below {LEAST_LOG_PROB:g}, the floor of tokens without "
                "one, in an array on the devices; return a NumPy array, from which such tokens are left out"
            )
        # Of some rows, the joined ones are checked.
        if whole:
            if not completion_mask.any():
                raise SourceError(f"{self._label}: completion_mask: got no completion token in {len(tokens)} rows")
            rows = dataclasses.replace(completions, fields=arrays, token_mask=token_mask)
            check_routes(self._context, rows, request.rows)
        if others := request.with_other_prompts(tokens, token_mask, self._context.tokenizer):
            raise SourceError(
                f"{self._label}: tokens: row {others[0]} begins with other tokens than the prompt "
                f"{request.examples[others[0] // request.samples].prompt[:80]!r} of the request"
            )

    def _check_rows(self, completions: Completions, request: Request) -> None:
        """Checks the values that each row of this process has one of."""
        judged = request.rows.own
        for name in ("examples", "texts", "finished"):
            count = len(getattr(completions, name))
            if count != len(judged):
                raise SourceError(f"{self._label}: {name}: got {count}, expected {len(judged)}, one for each row")
        for number, text in enumerate(completions.texts):
            if not isinstance(text, str):
                raise SourceError(f"{self._label}: texts[{number}]: got {type(text).__name__}, expected text")
        if np.asarray(completions.finished).dtype != bool:
            raise SourceError(f"{self._label}: finished: got {np.asarray(completions.finished).dtype}, expected bool")
        for number, (row, example) in enumerate(zip(judged.tolist(), completions.examples, strict=True)):
            expected = request.examples[row // request.samples]
            if not _is_same(example, expected):
                got = repr(example.prompt[:80]) if isinstance(example, Example) else type(example).__name__
                raise SourceError(
                    f"{self._label}: examples[{number}]: got {got}, expected {expected.prompt[:80]!r}, the example of "
                    f"row {row} of the request"
                )
        for name, values in (completions.rewards or {}).items():
            array = np.asarray(values)
            if array.shape != judged.shape or array.dtype.kind not in "fiu" or not np.isfinite(array).all():
                raise SourceError(
                    f"{self._label}: rewards[{name!r}]: got {array.dtype}{list(array.shape)}, expected finite numbers "
                    f"[{len(judged)}]"
                )

    def _numbers(self, completions: Completions) -> dict[str, Any]:
        """Returns the metrics and timings as numbers of Python, which the metrics of a run are written as."""
        numbers: dict[str, dict[str, float]] = {"metrics": {}, "timings": {}}
        for kind, values in numbers.items():
            for name, value in getattr(completions, kind).items():
                if np.ndim(value) or not np.issubdtype(np.asarray(value).dtype, np.number) or not np.isfinite(value):
                    raise SourceError(f"{self._label}: {kind}[{name!r}]: got {value!r}, expected a finite number")
                values[name] = float(value)
        return numbers


class _Turns(InTurn):
    """The stream of a source with `sample` alone."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.sample = source.sample  # type: ignore[method-assign]


def _is_same(example: Any, expected: Example) -> bool:
    """Whether two examples are of one problem; their records may be arrays, which no one comparison fits."""
    if example is expected:
        return True
    names = ("prompt", "answer", "solution", "messages")
    return isinstance(example, Example) and all(getattr(example, n) == getattr(expected, n) for n in names)
