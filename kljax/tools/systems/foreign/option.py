"""An option of another trainer, and the conversions that the trainers share."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Values = Mapping[str, Any]
Convert = Callable[[Any, Values], Mapping[str, Any]]


class NotExpressed(Exception):
    """Why a value has no field."""


@dataclasses.dataclass(frozen=True)
class ForeignOption:
    """An option of another trainer.

    Attributes:
      name: its name there, dotted.
      fields: the fields of the trainer that mean it; empty where there is none.
      default: its value there where a config does not say.
      note: how the fields follow from it, or why there is none.
      convert: returns the fields from the value and the other values; None takes the value as it is.
    """

    name: str
    fields: tuple[str, ...] = ()
    default: Any = None
    note: str = ""
    convert: Convert | None = None


@dataclasses.dataclass(frozen=True)
class ForeignSystem:
    """Another trainer: the options of its config.

    Attributes:
      file: the file that holds it.
      options: those that an update depends on.
      quiet: patterns of those that no update depends on: logs, folders, devices, loaders, memory.
      read_by_others: those that only conversions of other options read, with their defaults.
    """

    file: str
    options: tuple[ForeignOption, ...]
    quiet: tuple[str, ...]
    read_by_others: Values = dataclasses.field(default_factory=dict)


def same(name: str, field: str, default: Any = None, note: str = "") -> ForeignOption:
    """An option whose value is that of a field; None sets nothing."""
    return ForeignOption(name, (field,), default, note, lambda value, _: {} if value is None else {field: value})


def missing(name: str, default: Any, note: str) -> ForeignOption:
    """An option without a field, which other values than the default need."""
    return ForeignOption(name, (), default, note)


def unless(off: Any, field: str) -> Convert:
    """The value of a field, unless it is the number that switches it off."""
    return lambda value, _: {} if value is None or value == off else {field: value}


# The critics of the systems are models of their own; here it is a value head.
VALUE_HEAD = {"loss.value_coef": 0.5}


def where(option: str, choices: tuple[str, ...], field: str) -> Convert:
    """The value of a field that some choices of another option have."""
    return lambda value, values: {field: value} if values[option] in choices else {}


def clip(name: str, field: str, default: float, switch: str, losses: tuple[str, ...]) -> ForeignOption:
    """A bound that enters some of the losses that the option `switch` chooses."""
    fields = (f"loss.{field}",)
    note = "of " + ", ".join(f"`{loss}`" for loss in losses)
    return ForeignOption(name, fields, default, note, where(switch, losses, fields[0]))


def advantage(system: str, normalizes: str) -> Convert:
    """The estimator of a name; the option `normalizes` divides the advantages of GRPO by the deviation of a group."""

    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        plain = value == "grpo" and not values[normalizes]
        name = f"{system}/{value}" + f"+{normalizes.rpartition('.')[2]}=false" * plain
        return {"advantage.type": name, **(VALUE_HEAD if value == "gae" else {})}

    return convert


def updates(batch: str) -> Convert:
    """The updates of a batch, whose size is the option `batch`, from the size of an update."""

    def convert(value: Any, values: Values) -> Mapping[str, Any]:
        updates = values[batch] / value
        if updates != round(updates):
            raise NotExpressed(f"it does not divide {batch}")
        return {"optim.updates_per_batch": round(updates)} if updates > 1 else {}

    return convert


def decay(value: Any, _: Values) -> Mapping[str, Any]:
    return {"optim.optimizer.weight_decay": value}


def schedule(kind: Any, steps: Any, warmup: Any) -> Mapping[str, Any]:
    """The fall of the learning rate to 0 behind the warm-up.

    Raises:
      NotExpressed: the optimizer has no such schedule, or the file no number of updates.
    """
    name = str(kind).removesuffix("_with_warmup")
    if name == "constant":
        return {}
    if name not in ("linear", "cosine"):
        raise NotExpressed("optim.schedule.type has constant, linear, cosine and wsd")
    if not isinstance(steps, int) or steps <= 0:
        raise NotExpressed("the number of updates is not in the file; set optim.schedule.decay_steps to it")
    return {"optim.schedule": {"type": name, "decay_steps": max(steps - int(warmup or 0), 1), "end": 0.0}}
