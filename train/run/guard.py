"""Reports skipped updates, acts when a limit is exceeded, and never saves a state that is not finite."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kljax.checkpoint import named_leaves
from train.config.algorithms import UserFunction
from train.config.errors import GuardError, warn
from train.config.schema import Config
from train.data.tokenizers import Tokenizer, decode_continuation
from train.distributed.exchange import on_leader
from train.distributed.global_arrays import place_whole, to_host
from train.process.repeated_warnings import Warnings
from train.rl.kl_metrics import ROLLOUT_KL_MAX
from train.rl.metrics import SHARE, WITHOUT_GRADIENT, LargestToken, limits
from train.rl.state import GuardState, TrainState, nonfinite_name
from train.sequences.batch import Batch, present_arrays
from train.storage.uploads import whole_file
from train.weights.orbax import RunCheckpoints

Tree = Any
Tokens = Mapping[str, LargestToken]
NameToken = Callable[[Sequence[str]], str]
SHOWN_PROMPT = 60
"""Characters of a prompt in a message."""
MAX_BATCHES = 20
"""Batches of skipped updates that a run keeps; later ones are only reported."""
FIELDS = (
    *("rewards", "rollout_log_probs", "old_log_probs", "ref_log_probs", "ref_exact_kl", "values", "sum_squared_probs"),
    *("advantages", "returns", "correction_weights"),
)
"""The arrays of a batch in the order of the data, with those that are computed from others behind them."""


def nonfinite_array(tree: Tree) -> str | None:
    """Returns the dotted name of the first array of a tree that is not finite; None if all are."""
    return nonfinite_name(named_leaves(tree))


def check_finite(tree: Tree, what: str) -> None:
    """Raises `GuardError` naming the first array that is not finite."""
    name = nonfinite_array(tree)
    if name is not None:
        raise GuardError(f"{what}: {name} has numbers that are not finite; nothing was saved")


class Beyond(NamedTuple):
    """A limit that a step exceeds: the message, how many times as large the value is, metrics that name a token."""

    reason: str
    factor: float
    tokens: Sequence[str]

    def describe(self, name_token: NameToken) -> str:
        """Returns the message, with the token of the first metric that names one."""
        return self.reason + name_token(self.tokens)


class StepGuard:
    """Checks metrics and state before each save.

    Attributes:
      checkpoints: the checkpoints of the run.
    """

    def __init__(
        self, config: Config, checkpoints: RunCheckpoints, directory: Path, tokenizer: Tokenizer | None = None
    ) -> None:
        self.checkpoints = checkpoints
        self._guard = config.guard
        self._directory = directory
        self._tokenizer = tokenizer
        self._cause = ""
        self._name_token: NameToken = _name_no_token
        self._warnings = Warnings()
        self._loss = config.loss.function if isinstance(config.loss, UserFunction) else config.loss.type
        self._told_of_gradient = False

    def inspect(self, batch: Batch, state: TrainState, values: Mapping[str, float], tokens: Tokens) -> None:
        """Reports a step with updates that were not finite, and keeps the batch for `check`, which follows.

        Args:
          values: the metrics of the step.
          tokens: the arrays that name a token, on the host.
        """
        # A look-up copies rows to the host, which only a message is worth.
        self._name_token = functools.partial(describe_token, batch, tokens, self._tokenizer)
        if values["skipped_updates"] > values.get(SHARE, 0.0):
            self._keep(batch, state)

    def _keep(self, batch: Batch, state: TrainState) -> None:
        """Names the first array that was not finite, and writes the batch."""
        step = int(state.step)
        name = self._name(batch, state)
        hint = ": a weight of correction is NaN, infinite or below 0" if name == "correction_weights" else ""
        self._cause = f"{name} is not finite{hint}"
        text = f"step {step}: an update was skipped, because {self._cause}"
        arrays = dict(_arrays(batch))

        def write() -> str:
            self._directory.mkdir(exist_ok=True)
            file = self._directory / f"step-{step}.npz"
            if len(list(self._directory.glob("*"))) >= MAX_BATCHES:
                return text
            with whole_file(file) as partial, partial.open("wb") as stream:
                np.savez(stream, **arrays)  # type: ignore[arg-type]
            return f"{text}; the batch is in {file}"

        warn(on_leader("nonfinite batch", write))

    def _name(self, batch: Batch, state: TrainState) -> str:
        weights = nonfinite_array(state.trainable)
        if weights is not None:
            return f"the weight {weights}"
        field = nonfinite_name({name: getattr(batch, name) for name in FIELDS if getattr(batch, name) is not None})
        if field is not None:
            return field
        index = int(state.guard.nonfinite)
        if index < 0:
            return "the loss, or the norm of the gradient,"
        return f"the norm of the gradient of {list(named_leaves(state.trainable))[index]}"

    def check(self, state: TrainState, values: Mapping[str, float]) -> TrainState:
        """Returns the state to go on from after a step.

        Raises:
          GuardError: too many updates in a row were skipped, or a limit was exceeded and the run is to stop.
        """
        # The batch is not kept until the next step.
        name_token = self._name_token
        self._name_token = _name_no_token
        action = self._guard.action
        beyond = self._beyond_limit(values)
        if beyond is not None and action in ("warn", "skip"):
            self._report(int(state.step), beyond, name_token)
        if values.get(WITHOUT_GRADIENT) and not self._told_of_gradient:
            self._told_of_gradient = True
            warn(
                f"loss.type: {self._loss}: an update of step {int(state.step)} had no gradient from it, although "
                "advantages are not 0: it trains nothing; let it depend on log_probs, without stop_gradient"
            )
        if values["skipped_updates"] > 0 and int(state.guard.skipped) >= self._guard.max_skipped:
            self._stop_skipping(state)
        if beyond is None or action in ("warn", "skip"):
            return state
        return self._act(state, beyond.describe(name_token))

    def _report(self, step: int, beyond: Beyond, name_token: NameToken) -> None:
        skip = self._guard.action == "skip"
        shown, before = self._warnings.count(step, beyond.factor)
        if skip:
            self._cause = f"it is beyond a limit: {beyond.reason}"
        if shown:
            done = "an update was skipped, because it was beyond a limit: " if skip else ""
            more = f"; so were {before} steps since the last such warning" if before else ""
            warn(f"step {step}: {done}{beyond.describe(name_token)}{more}; guard.action is {self._guard.action}")

    def _stop_skipping(self, state: TrainState) -> None:
        step = int(state.step)
        skipped = int(state.guard.skipped)
        text = f"guard.max_skipped: {skipped} updates in a row were skipped; at step {step} {self._cause}"
        if nonfinite_array(state.trainable) is not None:
            self.wait()
            raise GuardError(f"{text}{self._last_checkpoint()}")
        # A run that is continued counts anew.
        self.save(dataclasses.replace(state, guard=_with(state.guard, skipped=0)), step)
        self.wait()
        raise GuardError(f"{text}\nStep {step} is saved, with the weights from before; continue with --resume")

    def _beyond_limit(self, values: Mapping[str, float]) -> Beyond | None:
        """Returns the limit that the step exceeds the most; None if none, or if it skips and nothing was skipped."""
        exceeded = []
        for limit in limits(self._guard):
            for name in limit.metrics:
                if name in values and limit.is_exceeded_by(values[name]):
                    reason = f"{limit.field}: {limit.name} is {values[name]:.4g}, the limit {limit.number:g}"
                    exceeded.append(Beyond(reason, _ratio(values[name], limit.number), limit.tokens))
        if self._guard.action == "skip":
            if not values.get(SHARE):
                return None
            # The mean of a step may be within a limit that one of its updates has left.
            fields = " or ".join(dict.fromkeys(limit.field for limit in limits(self._guard)))
            tokens = [name for limit in limits(self._guard) for name in limit.tokens]
            exceeded = exceeded or [Beyond(f"{fields}, at one of the updates", 1.0, tokens)]
        return max(exceeded, key=lambda beyond: beyond.factor, default=None)

    def _act(self, state: TrainState, reason: str) -> TrainState:
        guard = self._guard
        step = int(state.step)
        actions = int(state.guard.actions)
        reason = f"step {step}: {reason}"
        if guard.action == "stop" or actions >= guard.max_actions:
            often = "" if guard.action == "stop" else f", {actions + 1} times so far (guard.max_actions)"
            self.wait()
            raise GuardError(f"{reason}{often}; step {step} is not saved{self._last_checkpoint()}")
        next_guard = _with(state.guard, actions=actions + 1)
        if guard.action == "lower_learning_rate":
            next_guard = _with(next_guard, rate=float(state.guard.rate) * guard.learning_rate_factor)
            warn(f"{reason}; the learning rate is now {float(next_guard.rate):g} of the schedule's")
            return dataclasses.replace(state, guard=next_guard)
        restored = self.checkpoints.restore_last(state)
        if restored is None:
            raise GuardError(f"{reason}; there is no checkpoint to roll back to")
        warn(f"{reason}; rolled back to the weights of step {int(restored.step)}, on to the prompts of step {step + 1}")
        return dataclasses.replace(restored, step=state.step, guard=next_guard)

    def save(self, state: TrainState, step: int) -> None:
        """Saves a state, unless it is saved.

        Raises:
          GuardError: it is not finite; it is not saved, and the earlier checkpoints stay.
        """
        if step in self.checkpoints.steps():
            return
        self._check_finite(state, step)
        self.checkpoints.save(state, step)

    def save_in_memory(self, state: TrainState, step: int) -> None:
        """Saves a state in the memory of other slices, as `save` does."""
        self._check_finite(state, step)
        self.checkpoints.save_in_memory(state, step)

    def _check_finite(self, state: TrainState, step: int) -> None:
        name = nonfinite_array(state)
        if name is not None:
            self.wait()
            raise GuardError(f"step {step}: {name} is not finite; not saved{self._last_checkpoint()}")

    def _last_checkpoint(self) -> str:
        steps = self.checkpoints.steps()
        return f"\nThe last checkpoint is of step {steps[-1]}" if steps else ""

    def wait(self) -> None:
        """Waits until what was saved is on disk."""
        self.checkpoints.wait()


def _ratio(value: float, number: float) -> float:
    """Returns how many times a value is as large as its limit, or as small."""
    larger = max(abs(value), number)
    smaller = min(abs(value), number)
    return larger / smaller if smaller else math.inf


def _name_no_token(names: Sequence[str]) -> str:
    return ""


def describe_token(batch: Batch, tokens: Tokens, tokenizer: Tokenizer | None, names: Sequence[str]) -> str:
    """Names the token with the largest KL of the first metric of `names` that has one, for a message; else empty.

    Every process of a run calls it, as the rows of a batch may be spread over them.
    """
    metric = next((name for name in names if name in tokens), None)
    if metric is None or not (token := tokens[metric]).largest > -math.inf:
        return ""
    row = int(token.row)
    column = int(token.column)
    arrays = to_host({name: getattr(batch, name) for name in ("tokens", "token_mask", "completion_mask")})
    ids, real, drawn = (np.asarray(arrays[name][row]) for name in ("tokens", "token_mask", "completion_mask"))
    first = int(np.argmax(drawn))
    prompt, before = (ids[:end][real[:end]].tolist() for end in (first, column))
    number = int(drawn[: column + 1].sum())
    text = f"id {ids[column]}"
    location = f"row {row}"
    if tokenizer is not None:
        end = ids[column] in tokenizer.eos_ids
        text += " (end)" if end else f" ({_quoted(decode_continuation(tokenizer, before, [int(ids[column])]))})"
        location += f", {_quoted(tokenizer.decode(prompt))}"
    other = "the sampler" if metric == ROLLOUT_KL_MAX else "the reference"
    known = [(token.log_prob, "the policy"), (token.other_log_prob, other)]
    log_probs = ", ".join(f"{number:.4g} under {who}" for number, who in known if not np.isnan(number))
    return (
        f"; the largest is {token.largest:.4g} at token {number} of the {int(drawn.sum())} sampled in {location}: "
        f"{text}, log-prob {log_probs}"
    )


def _quoted(text: str) -> str:
    """Returns the end of a text, which a token follows, on one line and in quotes."""
    return repr(text if len(text) <= SHOWN_PROMPT else f"...{text[-SHOWN_PROMPT:]}")


def _with(guard: GuardState, **numbers: float) -> GuardState:
    """Replaces numbers of the guard by others of their dtype and sharding."""
    arrays = {name: getattr(guard, name) for name in numbers}
    new = {name: place_whole(jnp.asarray(numbers[name], x.dtype), x.sharding) for name, x in arrays.items()}
    return dataclasses.replace(guard, **new)


def _arrays(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a batch by name; NumPy has no bfloat16."""
    for name, value in to_host(present_arrays(batch)).items():
        yield name, np.asarray(value, np.float32 if value.dtype == jnp.bfloat16 else value.dtype)
