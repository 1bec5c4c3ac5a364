"""Records a sample of the rollouts of each step, with the values of every token, for the page of a run."""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.config.errors import UserError, warn
from train.config.schema import Config
from train.context import RunContext
from train.data.tokenizers import Tokenizer
from train.data.tokenizers.continuation import decode_after
from train.distributed.exchange import run_together, send_to_leader
from train.distributed.global_arrays import RowSplit, place_whole
from train.distributed.peers import is_leader
from train.models.sharding import replicated
from train.rl.token_values import TokenValues, make_select, recorded_arrays
from train.rollouts.recorded.table import TokenRows, TokenTexts, write_table
from train.rollouts.source import Completions, batch_rows
from train.sequences.batch import Batch, prompt_lengths
from train.sequences.token_fields import UNKNOWN, VERSIONS
from train.weights.files import usable_directory


class RolloutFiles:
    """The files of a directory, `<step>.parquet`, within a size limit.

    Beyond the limit every other recorded step is deleted, and later steps are recorded as rarely: the files always
    cover the run evenly. A thread of its own writes; a step waits for the file of the step before it.
    """

    def __init__(self, directory: Path, *, max_bytes: int, done: int) -> None:
        """Continues the files of a directory after `done` steps; files of later steps are deleted.

        Raises:
          UserError: the directory is not writable.
        """
        self._directory = directory
        self._max_bytes = max_bytes
        try:
            usable_directory(directory)
            for path in directory.glob("*.partial"):
                path.unlink()
            self._sizes = {step: self.path(step).stat().st_size for step in recorded_steps(directory)}
            for step in [step for step in self._sizes if step > done]:
                self._delete(step)
        except OSError as error:
            raise UserError(f"report.rollouts: cannot write to {directory}: {error.strerror}") from error
        self._every = math.gcd(*self._sizes) if self._sizes else 1
        self._writer = ThreadPoolExecutor(1, "rollouts")
        self._pending: Future[None] | None = None
        self._failed = False

    def path(self, step: int) -> Path:
        """Returns the file of a step."""
        return self._directory / f"{step:08d}.parquet"

    def wants(self, step: int) -> bool:
        """Whether a step is recorded."""
        return not self._failed and step % self._every == 0

    def write(self, step: int, write: Callable[[Path], int]) -> None:
        """Writes the file of a step in the thread; `write` returns its size.

        If the disk fills, recording stops with a warning and the run goes on.
        """
        self.wait()
        self._pending = self._writer.submit(self._write, step, write)

    def _write(self, step: int, write: Callable[[Path], int]) -> None:
        # The write of the step before may have made recording rarer since `wants` was asked.
        if step % self._every:
            return
        self._sizes[step] = write(self.path(step))
        while sum(self._sizes.values()) > self._max_bytes and len(self._sizes) > 1:
            self._every *= 2
            for late in [late for late in self._sizes if late % self._every]:
                self._delete(late)

    def _delete(self, step: int) -> None:
        self.path(step).unlink(missing_ok=True)
        del self._sizes[step]

    def wait(self) -> None:
        """Waits for the file that is being written."""
        pending = self._pending
        self._pending = None
        try:
            if pending is not None:
                pending.result()
        except OSError as error:
            self._failed = True
            warn(f"{self._directory}: rollouts are not recorded any more, because {error.strerror or error}")

    def close(self) -> None:
        """Waits for the last file, and ends the thread."""
        self.wait()
        self._writer.shutdown()


def recorded_steps(directory: Path) -> list[int]:
    """Lists the steps that have a file, in order."""
    return sorted(int(path.stem) for path in directory.glob("*.parquet") if path.stem.isdigit())


class RolloutRecorder:
    """Selects rows of each step, completes them on the host, and hands them to the files of the leader."""

    def __init__(self, context: RunContext, directory: Path, *, done: int) -> None:
        """Continues the recording of a run after `done` steps.

        Raises:
          UserError: the directory is not writable.
        """
        config = context.config

        def open_files() -> RolloutFiles | None:
            max_bytes = config.report.max_mib * 2**20
            return RolloutFiles(directory, max_bytes=max_bytes, done=done) if is_leader() else None

        self._config = config
        self._tokenizer = context.tokenizer
        self._mesh = context.mesh
        self._split = batch_rows(context)
        self._files = run_together("rollouts", open_files)
        self._select = make_select(context.mesh)

    @functools.cached_property
    def _texts(self) -> TokenTexts:
        return token_texts(self._tokenizer)

    def record(self, step: int, completions: Completions, batch: Batch, updates: Sequence[TokenValues]) -> None:
        """Records rows of a step, which counts from 1, with the values that the updates on its batch computed."""
        rows = chosen_rows(self._config, step)
        last = updates[-self._config.optim.updates_per_batch :]
        numbers = place_whole(np.asarray(rows, np.int32), replicated(self._mesh))
        selected = self._select(recorded_arrays(batch), last, numbers)
        own = _describe(self._config, step, completions, self._split, rows)
        parts = send_to_leader("rollouts", json.dumps(own).encode())
        if self._files is None or not self._files.wants(step):
            return
        described = {int(row): facts for part in parts for row, facts in json.loads(part).items()}
        if all(facts["episode"] == row and all(facts["completion_mask"]) for row, facts in described.items()):
            for facts in described.values():
                del facts["episode"], facts["completion_mask"]
        if all(facts["failure"] is None for facts in described.values()):
            for facts in described.values():
                del facts["failure"]

        def write(path: Path) -> int:
            arrays = jax.device_get(selected)
            rewards = arrays.pop("rewards")
            arrays = whole_completions(arrays, arrays.pop("prompt_lengths"))
            records = [described[row] | {"reward": float(reward)} for row, reward in zip(rows, rewards, strict=True)]
            metadata = {"step": step, "samples_per_prompt": self._config.rollout.samples_per_prompt}
            return write_table(path, TokenRows(records, arrays), self._texts, metadata)

        self._files.write(step, write)

    def close(self) -> None:
        """Waits for the last file."""
        if self._files is not None:
            self._files.close()


def whole_completions(arrays: Mapping[str, np.ndarray], prompts: np.ndarray) -> dict[str, np.ndarray]:
    """Returns rows whose completions have all tokens after the prompt, with NaN for what was not computed of them.

    Tokens without a log-prob, and observations of an episode, are in no mask of the batch.
    """
    completions = arrays["token_mask"] & (np.arange(arrays["token_mask"].shape[1]) >= prompts[:, None])
    left_out = completions & ~arrays["completion_mask"]
    numbers = {
        name: np.where(left_out, np.nan, x).astype(x.dtype)
        for name, x in arrays.items()
        if x.dtype.kind == "f" and x.shape == left_out.shape
    }
    return {**arrays, **numbers, "completion_mask": completions}


def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """Returns the texts of tokens, special ones as the model sees them.

    Those of a decoder that is not supported are the texts that they add to a word.
    """
    try:
        pieces = list(tokenizer.token_bytes())
    except UserError:
        ids = range(tokenizer.vocab_size)
        word = next(([token] for token in ids if tokenizer.decode([token]).isalnum()), [])
        pieces = [decode_after(tokenizer.decode, word, [token]).encode() for token in ids]
    for special in (tokenizer.bos_id, tokenizer.pad_id, *tokenizer.eos_ids):
        if special is not None:
            pieces[special] = tokenizer.decode_all([special]).encode()
    return TokenTexts(pieces)


def chosen_rows(config: Config, step: int) -> list[int]:
    """Draws the rows of a step that are recorded: all completions of some prompts, up to the number of rows."""
    samples = config.rollout.samples_per_prompt
    prompts = config.rollout.prompts_per_step
    count = min(config.report.rollouts, config.rows_per_batch())
    groups = np.random.default_rng([config.seed, step]).choice(prompts, -(-count // samples), replace=False)
    return [int(group) * samples + sample for group in sorted(groups) for sample in range(samples)][:count]


def _describe(
    config: Config, step: int, completions: Completions, split: RowSplit, rows: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Describes the rows that this process judged, by their numbers."""
    arrays = completions.token_mask, completions.completion_mask, prompt_lengths(completions)
    token_mask, completion_mask, prompts = map(split.select_own, arrays)
    episodes = split.own
    if completions.episode_rows is not None:
        episodes = split.select_own(completions.episode_rows)
    versions = completions.fields.get(VERSIONS)
    own_versions = None if versions is None else split.select_own(versions)
    described = {}
    for index, row in enumerate(split.own.tolist()):
        if row not in rows:
            continue
        example = completions.examples[index]
        failure = None if completions.failures is None else completions.failures[index]
        texts = {"prompt": example.prompt, "completion": completions.texts[index], "answer": example.answer}
        described[str(row)] = {
            "step": step,
            "row": row,
            "group": row // config.rollout.samples_per_prompt,
            "policy_version": None if own_versions is None else _oldest(own_versions[index]),
            # A lone surrogate of a prompt has no UTF-8.
            **{name: text.encode("utf-8", errors="replace").decode() for name, text in texts.items()},
            "finished": bool(completions.finished[index]),
            "rewards": {name: float(values[index]) for name, values in (completions.rewards or {}).items()},
            "episode": int(episodes[index]),
            "failure": None if failure is None else failure.recorded(),
            "completion_mask": completion_mask[index][token_mask[index]][prompts[index] :].tolist(),
        }
    return described


def _oldest(versions: np.ndarray) -> int | None:
    """Returns the oldest version of the tokens of a row; None if nobody knows one."""
    known = versions[versions != UNKNOWN]
    return int(known.min()) if len(known) else None
