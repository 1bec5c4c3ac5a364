"""The stream of samples of a run: requests in flight, batches that are full, and what a checkpoint keeps of them."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import kljax
from train.config.errors import UserError, warn
from train.context import RunContext
from train.data.prompts import decode_completions
from train.distributed.exchange import run_together
from train.distributed.global_arrays import gather_rows, to_host_rows
from train.models.shard_rows import shard_rows
from train.models.sharding import batch_sharding
from train.process.interrupt import StepLeftError
from train.rollouts.source import (
    ROW_ARRAYS,
    Completions,
    FinishedSamples,
    Request,
    Source,
    SourceError,
    batch_rows,
    to_held,
)
from train.sequences.batch import prompt_lengths
from train.sequences.token_fields import TOKEN_FIELDS, UNKNOWN, VERSIONS, recorded_names
from train.weights.orbax import RunCheckpoints

Tree = Any


class Stream:
    """Starts the requests of a source, and takes samples until a batch is full.

    With `rollout.ahead: N` the requests of the next N steps are in flight while a step is judged and updated: step s
    takes its batch, sends its weights, and starts the request of step s + N. The first request of a run is started with
    the weights of its own step, and those of the N steps after it once it is full. A checkpoint has every batch that is
    in flight: with it a run goes on bit by bit, also if the source would draw other tokens. The last steps start
    requests too, for a run that is continued with more steps.
    """

    def __init__(self, context: RunContext, source: Source) -> None:
        """Takes a source with nothing in flight."""
        self._context = context
        self._source = source
        self._ahead = context.config.rollout.ahead
        self._unsent: tuple[kljax.Policy, int] | None = None
        self._started: dict[int, Request] = {}
        self._parts: dict[Request, list[FinishedSamples]] = {}
        self._full: dict[int, Completions] = {}
        self._lost: SourceError | None = None
        self._over = False

    @property
    def row_count(self) -> int | None:
        """The number of rows that come again in every epoch; None if every sample is new."""
        return self._source.row_count

    def update(self, policy: kljax.Policy, version: int) -> None:
        """Sets the weights, which the source gets before the next request is started."""
        self._unsent = policy, version

    def start(self, requests: Sequence[Request]) -> None:
        """Sends the weights if they are new, and starts requests."""
        if self._unsent is not None:
            policy, version = self._unsent
            self._unsent = None
            self._source.update(policy, version)
        for request in requests:
            self._parts[request] = []
        self._source.start(requests)

    def take(self, request: Request) -> Completions:
        """Takes samples until a request is full; samples of others are kept for them.

        Raises:
          SourceError: the source failed, or gave samples that were not asked for.
        """
        began = time.perf_counter()
        run_together("rollout", lambda: self._fill(request))
        return _join(request, self._parts.pop(request), waited=time.perf_counter() - began)

    def _fill(self, request: Request) -> None:
        while not _is_full(request, self._parts[request]):
            finished = self._source.take()
            parts = self._parts.get(finished.request)
            if parts is None or _is_full(finished.request, parts):
                raise SourceError("rollout.source: take: got samples of a request that is not in flight")
            parts.append(finished)
        _check_parts(request, self._parts[request])

    def batch(self, step: int) -> Completions:
        """Returns the batch of a step, and keeps the requests of the next `rollout.ahead` steps in flight.

        Raises:
          SourceError: the source failed, now or since the last step.
        """
        try:
            if self._lost is not None:
                raise self._lost
            if step not in self._started and step not in self._full:
                self._start_batches([step])
            completions = self._take_batch(step)
            kept = step if self._ahead else step + 1
            self._full = {number: batch for number, batch in self._full.items() if number >= kept}
            later = range(step + 1, step + 1 + self._ahead)
            self._start_batches([number for number in later if number not in {*self._started, *self._full}])
        except (SourceError, StepLeftError):
            # What is still in flight is not waited for any more.
            self._over = True
            raise
        return completions

    def _start_batches(self, steps: Sequence[int]) -> None:
        requests = {step: Request.of(self._context, step) for step in steps}
        if requests:
            self.start(list(requests.values()))
        self._started |= requests

    def _take_batch(self, step: int) -> Completions:
        """Returns the batch of a step that was started; it is kept until the next step takes its own."""
        if step not in self._full:
            self._full[step] = self.take(self._started[step])
            del self._started[step]
        return self._full[step]

    def attach(self, checkpoints: RunCheckpoints, step: int) -> None:
        """Takes the batches from a step on from its checkpoint, and saves those of later checkpoints with them.

        Raises:
          UserError: a saved batch is damaged, or its prompts are not the prompts of its step.
        """
        if not self._ahead:
            return
        restored = checkpoints.restore_batch(step, batch_sharding(self._context.mesh))
        if restored is not None:
            saved = to_host_rows(restored)
            # Earlier releases saved one batch, with the lag of each row.
            batches = {str(step): _with_lags(saved, step)} if "lags" in saved else saved
            self._full |= run_together(
                "rollout", lambda: {int(number): self._restored(int(number), batches[number]) for number in batches}
            )
        checkpoints.batch_of = self.saved

    def saved(self, step: int) -> Tree | None:
        """Returns the batches from a step on, on the devices, after a wait for those in flight; None without any.

        What the source cannot finish is requested again by a run that is continued; its error is raised by the next
        step.
        """
        for number in sorted(self._started):
            if self._over or self._lost is not None:
                break
            try:
                self._take_batch(number)
            except SourceError as error:
                warn(f"the batch that was requested ahead is lost: {error}")
                self._lost = error
        batches = {number: self._full[number] for number in sorted(self._full) if number >= step}
        if not batches:
            return None
        return shard_rows({str(number): self._arrays(batches[number]) for number in batches}, self._context.mesh)

    def close(self) -> None:
        """Ends what is in flight, and closes the source."""
        self._source.close()

    def _arrays(self, completions: Completions) -> Tree:
        """Returns the arrays of a batch: rows that this process holds, or those of all on the devices."""
        rows = batch_rows(self._context)
        completions = completions.completed()
        texts = [text.encode("utf-8", "surrogatepass") for text in completions.texts]
        lengths = gather_rows(
            "rollout", {"texts": np.array([len(text) for text in texts], np.int64)}, rows.own, rows.count
        )
        judged = {"finished": completions.finished, "texts": _bytes(texts, max(lengths["texts"].max(), 1))}
        saved = {name: getattr(completions, name) for name in ROW_ARRAYS} | {"fields": dict(completions.fields)}
        saved |= {name: x[rows.held] for name, x in gather_rows("rollout", judged, rows.own, rows.count).items()}
        if completions.rewards:
            rewards = gather_rows("rollout", completions.rewards, rows.own, rows.count)
            saved["rewards"] = {name: x[rows.held] for name, x in rewards.items()}
        return saved

    def _restored(self, step: int, arrays: Mapping[str, Any]) -> Completions:
        """Makes the completions of a saved batch, from the rows that this process holds."""
        context = self._context
        request = Request.of(context, step)
        rows = request.rows
        expected = (len(rows.held), context.config.data.row_length())
        if arrays["tokens"].shape != expected:
            raise UserError(
                f"rollout.ahead: the batch of step {step + 1} that was saved has {list(arrays['tokens'].shape)} tokens "
                f"in this process, expected {list(expected)}; resume with the rollout and data of the run"
            )
        # Earlier releases padded prompts on the left.
        saved = Completions([], **{name: arrays[name] for name in ROW_ARRAYS}, fields=dict(arrays["fields"]))
        saved = request.align(saved, context.tokenizer)
        if request.with_other_prompts(np.asarray(saved.tokens), np.asarray(saved.token_mask), context.tokenizer):
            raise UserError(
                f"rollout.ahead: the batch that was saved with step {step} has other prompts than the data has at that "
                "step; restore the data, or resume from an earlier checkpoint"
            )
        own = {name: rows.select_own(x) for name, x in arrays.items() if not isinstance(x, Mapping)}
        rewards = {name: rows.select_own(x) for name, x in arrays.get("rewards", {}).items()}
        if "texts" in own:
            texts = [
                (row[row > 0] - 1).astype(np.uint8).tobytes().decode("utf-8", "surrogatepass") for row in own["texts"]
            ]
        else:
            texts = decode_completions(own["tokens"], own["token_mask"], own["completion_mask"], context.tokenizer)
        return dataclasses.replace(
            saved,
            examples=[request.examples[row // request.samples] for row in rows.own],
            finished=own["finished"],
            texts=texts,
            rewards=rewards or None,
        )


def _is_full(request: Request, parts: Sequence[FinishedSamples]) -> bool:
    if any(part.rows is None for part in parts):
        return True
    return bool(parts) and sum(len(part.rows) for part in parts if part.rows is not None) >= len(request.rows.own)


def _check_parts(request: Request, parts: Sequence[FinishedSamples]) -> None:
    """Raises a `SourceError` unless the parts have each row of a request once, and alike token fields and rewards."""
    if any(part.rows is None for part in parts):
        if len(parts) > 1:
            raise SourceError("rollout.source: take: got a whole request after some of its rows")
        return
    numbers = np.sort(np.concatenate([part.rows for part in parts if part.rows is not None]))
    if not np.array_equal(numbers, request.rows.own):
        own = request.rows.own.tolist()
        raise SourceError(f"rollout.source: take: got the rows {numbers.tolist()} of a request, expected {own}")
    completions = [part.completions for part in parts if len(part.completions.tokens)]
    for kind, names in {
        "token fields": [{*part.fields} for part in completions],
        "rewards": [{*(part.rewards or ())} for part in completions],
    }.items():
        if any(other != names[0] for other in names):
            raise SourceError(f"rollout.source: samples of one request have different {kind}")
    if completions and not any(np.any(part.completion_mask) for part in completions):
        raise SourceError(f"rollout.source: completion_mask: got no completion token in {len(numbers)} rows")


def _join(request: Request, parts: Sequence[FinishedSamples], *, waited: float) -> Completions:
    """Puts the parts of a request in the order of its rows; processes that share rows exchange them."""
    if parts[0].rows is None:
        return parts[0].completions
    split = request.rows
    parts = [part for part in parts if len(part.completions.tokens)] or parts[:1]
    order = np.argsort(np.concatenate([part.rows for part in parts if part.rows is not None]), kind="stable")
    completions = [part.completions for part in parts]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in completions])[order] for name in ROW_ARRAYS
    }
    arrays["prompt_lengths"] = np.concatenate([prompt_lengths(part) for part in completions])[order]
    fields = {name: _concatenate(name, completions)[order] for name in completions[0].fields}
    arrays, fields = to_held(arrays, fields, split)
    examples = [example for part in completions for example in part.examples]
    texts = [text for part in completions for text in part.texts]
    rewards = None
    if completions[0].rewards is not None:
        rewards = {
            name: np.concatenate([(part.rewards or {})[name] for part in completions])[order]
            for name in completions[0].rewards
        }
    failures = None
    if any(part.failures is not None for part in completions):
        failures = [failure for part in completions for failure in part.failures or [None] * len(part.tokens)]
    seconds = [part.seconds for part in parts if part.seconds is not None]
    timings = {"rollout_wait": waited}
    if seconds:
        timings["rollout_tokens_per_second"] = float(arrays["completion_mask"].sum()) / max(seconds)
    return Completions(
        examples=[examples[row] for row in order],
        **arrays,
        finished=np.concatenate([part.finished for part in completions])[order],
        texts=[texts[row] for row in order],
        fields=fields,
        rewards=rewards,
        failures=None if failures is None else [failures[row] for row in order],
        metrics=_mean(parts, "metrics"),
        timings=_mean(parts, "timings") | timings,
    )


def _concatenate(name: str, completions: Sequence[Completions]) -> np.ndarray:
    """Concatenates a token field of several parts, whose ragged axes may differ."""
    arrays = [np.asarray(part.fields[name]) for part in completions]
    sizes = np.max([array.shape[2:] for array in arrays], axis=0).astype(int)
    fill = TOKEN_FIELDS[name].fill

    def widened(array: np.ndarray) -> np.ndarray:
        wider = [(0, int(size) - have) for size, have in zip(sizes, array.shape[2:], strict=True)]
        return np.pad(array, [(0, 0), (0, 0), *wider], constant_values=fill) if any(b for _, b in wider) else array

    return np.concatenate([widened(array) for array in arrays])


def _mean(parts: Sequence[FinishedSamples], kind: str) -> dict[str, float]:
    """Returns the means of measurements of the parts over their rows."""
    values: dict[str, list[tuple[float, int]]] = {}
    for part in parts:
        for name, value in getattr(part.completions, kind).items():
            values.setdefault(name, []).append((float(value), max(len(part.completions.tokens), 1)))
    return {
        name: sum(value * rows for value, rows in pairs) / sum(rows for _, rows in pairs)
        for name, pairs in values.items()
    }


def _bytes(texts: Sequence[bytes], width: int) -> np.ndarray:
    """Writes texts as rows of numbers: each byte plus 1, and 0 after the end."""
    rows = np.zeros((len(texts), width), np.uint16)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = np.frombuffer(text, np.uint8).astype(np.uint16) + 1
    return rows


def _with_lags(saved: Mapping[str, np.ndarray], step: int) -> Tree:
    """Returns a batch of an earlier release in the form of today."""
    versions = np.where(saved["completion_mask"], step - saved["lags"][:, None], UNKNOWN).astype(np.int32)
    fields = {name: saved[key] for key, name in recorded_names().items() if key in saved}
    return {**{name: saved[name] for name in (*ROW_ARRAYS, "finished")}, "fields": {**fields, VERSIONS: versions}}
