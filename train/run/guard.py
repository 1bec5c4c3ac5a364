"""The guard of a run on the host: it reports skipped updates, answers limits, and saves finite states alone."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kljax.trees import named_leaves
from train.config.errors import GuardError, warn
from train.config.schema import Config
from train.distributed import on_leader, place_whole, to_host
from train.rl.batch import Batch
from train.rl.state import GuardState, TrainState, first_nonfinite
from train.weights.orbax import Checkpoints

Tree = Any
KLS = ("kl_reference", "kl_reference_exact")
MAX_BATCHES = 20
"""Batches of skipped updates that a run keeps; later ones are only reported."""
FIELDS = (
    *("rewards", "rollout_log_probs", "old_log_probs", "ref_log_probs", "ref_exact_kl", "values", "sum_squared_probs"),
    *("advantages", "returns", "correction_weights"),
)
"""The arrays of a batch in the order of the data, with those that are computed from others behind them."""

find_nonfinite = jax.jit(first_nonfinite)


def nonfinite_array(tree: Tree) -> str | None:
    """Returns the dotted name of the first array of a tree that is not finite; None if all are."""
    return _first_name(named_leaves(tree))


def _first_name(arrays: Mapping[str, jax.Array]) -> str | None:
    """Returns the first name, in the order of the mapping, whose array is not finite; None if all are."""
    found = int(find_nonfinite(list(arrays.values()))) if arrays else -1
    return None if found < 0 else list(arrays)[found]


def check_finite(tree: Tree, what: str) -> None:
    """Raises `GuardError` naming the first array that is not finite."""
    name = nonfinite_array(tree)
    if name is not None:
        raise GuardError(f"{what}: {name} has numbers that are not finite; nothing was saved")


class Watch:
    """Stands between the loop and the checkpoints.

    Attributes:
      checkpoints: the checkpoints of the run.
    """

    def __init__(self, config: Config, checkpoints: Checkpoints, directory: Path) -> None:
        self.checkpoints = checkpoints
        self._guard = config.guard
        self._directory = directory
        self._first = ""

    def inspect(self, batch: Batch, state: TrainState) -> None:
        """Reports a step with skipped updates, names the first array that was not finite, and keeps the batch."""
        step = int(state.step)
        self._first = self._name(batch, state)
        text = f"step {step}: an update was skipped, because {self._first} is not finite"
        arrays = dict(_arrays(batch))

        def write() -> str:
            self._directory.mkdir(exist_ok=True)
            file = self._directory / f"step-{step}.npz"
            if len(list(self._directory.iterdir())) >= MAX_BATCHES:
                return text
            np.savez(file, **arrays)  # type: ignore[arg-type]
            return f"{text}; the batch is in {file}"

        warn(on_leader("nonfinite batch", write))

    def _name(self, batch: Batch, state: TrainState) -> str:
        weights = nonfinite_array(state.trainable)
        if weights is not None:
            return f"the weight {weights}"
        field = _first_name({name: getattr(batch, name) for name in FIELDS if getattr(batch, name) is not None})
        if field is not None:
            return field
        index = int(state.guard.nonfinite)
        return "the loss, or the norm of the gradient," if index < 0 else _gradient_of(state.trainable, index)

    def check(self, state: TrainState, values: Mapping[str, float]) -> TrainState:
        """Returns the state to go on from after a step.

        Raises:
          GuardError: too many updates in a row were skipped, or a limit was left and the run is to stop.
        """
        if values["skipped_updates"] > 0 and int(state.guard.skipped) >= self._guard.max_skipped:
            self._stop_skipping(state)
        reason = self._beyond_limit(values)
        return state if reason is None else self._act(state, reason)

    def _stop_skipping(self, state: TrainState) -> None:
        step, skipped = int(state.step), int(state.guard.skipped)
        text = f"guard.max_skipped: {skipped} updates in a row were skipped; at step {step} {self._first} is not finite"
        if nonfinite_array(state.trainable) is not None:
            self.wait()
            raise GuardError(f"{text}{self._last_checkpoint()}")
        # A run that is continued counts anew.
        self.save(dataclasses.replace(state, guard=_with(state.guard, skipped=0)), step)
        self.wait()
        raise GuardError(f"{text}\nStep {step} is saved, with the weights from before; continue with --resume")

    def _beyond_limit(self, values: Mapping[str, float]) -> str | None:
        guard = self._guard
        kl = max((values[name] for name in KLS if name in values), default=0.0)
        if guard.max_kl is not None and kl > guard.max_kl:
            return f"guard.max_kl: the KL to the reference is {kl:.4g}, the limit {guard.max_kl:g}"
        if guard.min_entropy is not None and values["entropy"] < guard.min_entropy:
            return f"guard.min_entropy: the entropy is {values['entropy']:.4g}, the limit {guard.min_entropy:g}"
        return None

    def _act(self, state: TrainState, reason: str) -> TrainState:
        guard, step, actions = self._guard, int(state.step), int(state.guard.actions)
        reason = f"step {step}: {reason}"
        if guard.action == "stop" or actions == guard.max_actions:
            often = "" if guard.action == "stop" else f", for the {actions + 1}. time (guard.max_actions)"
            self.wait()
            raise GuardError(f"{reason}{often}; step {step} is not saved{self._last_checkpoint()}")
        following = _with(state.guard, actions=actions + 1)
        if guard.action == "lower_learning_rate":
            following = _with(following, rate=float(state.guard.rate) * guard.learning_rate_factor)
            warn(f"{reason}; the learning rate is now {float(following.rate):g} of the schedule's")
            return dataclasses.replace(state, guard=following)
        restored = self.checkpoints.restore_last(state)
        if restored is None:
            raise GuardError(f"{reason}; there is no checkpoint to roll back to")
        warn(f"{reason}; rolled back to the weights of step {int(restored.step)}, on to the prompts of step {step + 1}")
        return dataclasses.replace(restored, step=state.step, guard=following)

    def save(self, state: TrainState, step: int) -> None:
        """Saves a state, unless it is saved.

        Raises:
          GuardError: it is not finite; it is not saved, and the earlier checkpoints stay.
        """
        if step in self.checkpoints.steps():
            return
        name = nonfinite_array(state)
        if name is not None:
            self.wait()
            raise GuardError(f"step {step}: {name} is not finite; not saved{self._last_checkpoint()}")
        self.checkpoints.save(state, step)

    def _last_checkpoint(self) -> str:
        steps = self.checkpoints.steps()
        return f"\nThe last checkpoint is of step {steps[-1]}" if steps else ""

    def wait(self) -> None:
        """Waits until what was saved is on disk."""
        self.checkpoints.wait()


def _with(guard: GuardState, **numbers: float) -> GuardState:
    """Replaces numbers of the guard by others of their dtype and sharding."""
    arrays = {name: getattr(guard, name) for name in numbers}
    new = {name: place_whole(jnp.asarray(numbers[name], x.dtype), x.sharding) for name, x in arrays.items()}
    return dataclasses.replace(guard, **new)


def _gradient_of(trainable: Tree, index: int) -> str:
    return f"the norm of the gradient of {list(named_leaves(trainable))[index]}"


def _arrays(batch: Batch) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the arrays of a batch by name; NumPy has no bfloat16."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    arrays = {name: value for name, value in fields.items() if isinstance(value, jax.Array)}
    for name, value in to_host(arrays).items():
        yield name, np.asarray(value, np.float32 if value.dtype == jnp.bfloat16 else value.dtype)
