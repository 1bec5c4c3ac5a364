"""Problems of the package reasoning-gym: some hundred data sets without a file, each with a verifier of its own."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from train.config.errors import UserError
from train.config.messages import did_you_mean
from train.data.answers import THINK_END, tagged_answer, tagged_or_last_line
from train.data.tasks.task import FORMAT_WEIGHT, SPLIT_SEED, Example, Task, hold_out
from train.data.workers.process import NoAnswer, NotStarted, WorkerPool
from train.process.waiting import waiting_for

_LOG = logging.getLogger(__name__)

INSTRUCTION = "Think first, then give the final answer alone in <answer></answer>."
WORKERS = 2
SECONDS = 8.0
"""CPU seconds that a verifier may take."""


class ProblemVerifier:
    """The verifier of a data set, in worker processes: some evaluate an answer, which can take forever."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        """Describes the processes, which make the data set again."""
        self._pool = WorkerPool("reasoning_gym", name, json.dumps(dict(settings)), workers=WORKERS)

    def score(self, index: int, answer: str) -> float:
        """Returns the score of an answer to problem `index`, 0 to 1; 0 if the verifier takes too long or fails.

        Raises:
          UserError: the processes do not start.
        """
        try:
            return float(self._pool.ask({"index": index, "answer": answer}, cpu_seconds=SECONDS))
        except NoAnswer as error:
            _LOG.warning("reasoning_gym: %s for an answer, which counts as wrong: %r", error, answer[-80:])
            return 0.0
        except NotStarted as error:
            raise UserError(f"task: reasoning_gym: its verifier does not start ({error})") from None


def _described(name: str, arguments: Mapping[str, Any], seed: int, size: int) -> dict[str, Any]:
    """Checks the settings of a data set, and returns them with its seed and size."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"task: reasoning_gym needs a package: pip install 'kljax[reasoning-gym]' ({error})") from None
    if name not in DATASETS:
        raise UserError(
            f"data.generator: got {name!r}, expected one of the {len(DATASETS)} of reasoning_gym"
            f"{did_you_mean(name, DATASETS)}"
        )
    _, config = DATASETS[name]
    known = [field.name for field in dataclasses.fields(config) if field.name not in ("seed", "size")]
    for setting in arguments:
        if setting not in known:
            raise UserError(
                f"data.arguments.{setting}: not a setting of {name}, which has {', '.join(known) or 'none'}"
                f"{did_you_mean(setting, known)}"
            )
    settings = {**arguments, "seed": seed, "size": size}
    try:
        checked = config(**settings)
        if hasattr(checked, "validate"):
            checked.validate()
    except (AssertionError, AttributeError, TypeError, ValueError) as error:
        raise UserError(f"data.arguments: {name} refuses {json.dumps(dict(arguments))}: {error}") from None
    return settings


def _example(entry: Mapping[str, Any], index: int) -> Example:
    question = str(entry["question"]).strip()
    answer = "" if entry["answer"] is None else str(entry["answer"])
    return Example(
        prompt=f"{question}\nAnswer:",
        answer=answer,
        solution=f" {answer}" if answer else "",
        messages=(("user", f"{question}\n\n{INSTRUCTION}"),),
        record={"index": index},
    )


def score(example: Example, completion: str, finished: bool, *, verifier: ProblemVerifier) -> dict[str, float]:
    """Returns named rewards: score (of the verifier, 0 to 1), correct (a score of 1), format, reward (weighted sum).

    The answer is that in the last `<answer>` behind the last `</think>`, or else the last line; `format` requires the
    first, and an end.
    """
    reply = completion.rpartition(THINK_END)[2]
    answer = tagged_or_last_line(reply).strip()
    value = verifier.score(example.record["index"], answer) if answer else 0.0
    format_ = float(finished and tagged_answer(reply) is not None)
    return {
        "reward": value + FORMAT_WEIGHT * format_,
        "score": value,
        "correct": float(value >= 1.0),
        "format": format_,
    }


def load(*, name: str, arguments: Mapping[str, Any], problems: int, held_out: int, seed: int = SPLIT_SEED) -> Task:
    """Generates different problems in a seeded order; the first `held_out` are the held-out set.

    Args:
      name: of the data set, such as `chain_sum`.
      arguments: its settings.
      problems: number of training problems; fewer, with a logged warning, if there are not enough.
      held_out: number of held-out problems.
      seed: seed of the problems.

    Raises:
      UserError: the package is not installed, or it has no such data set, or not with these settings.
    """
    wanted = problems + held_out
    # A data set may repeat itself, and small ones have few problems, so the number of tries is bounded.
    settings = _described(name, arguments, seed, 2 * wanted + 1000)
    import reasoning_gym

    by_question: dict[str, Example] = {}
    with waiting_for(f"task: reasoning_gym: {name}"):
        dataset = reasoning_gym.create_dataset(name, **settings)
        for index in range(settings["size"]):
            if len(by_question) == wanted:
                break
            example = _example(dataset[index], index)
            by_question.setdefault(example.prompt, example)
    examples = list(by_question.values())
    held_out = hold_out(examples, problems=problems, held_out=held_out, found=f"{name} has")
    verifier = ProblemVerifier(name, settings)

    def judged(example: Example, completion: str, finished: bool) -> dict[str, float]:
        return score(example, completion, finished, verifier=verifier)

    return Task(
        "reasoning_gym",
        train=examples[held_out:],
        eval=examples[:held_out],
        score=judged,
        rewards=("score", "correct", "format"),
        workers=WORKERS,
    )
