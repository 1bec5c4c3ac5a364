"""Reward functions that fail, hang, exit or return other than finite numbers."""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.faults.case import Fault, raised
from train.config.data import Rewards
from train.data.tasks.equality import Judge
from train.data.tasks.reward_function import Verifier
from train.data.tasks.rewards import compose
from train.data.tasks.task import Example
from train.data.tasks.user_score import RewardError

EXAMPLE = Example("the prompt", "", "", record={"prompt": "the prompt"})
COMPLETION = "the completion"
NAMED = ("data.reward", "the prompt", "the completion")
FOREVER = "import time\n    while True: time.sleep(0.01)"
STUBBORN = "import time\n    try: time.sleep(9)\n    except BaseException: pass\n    time.sleep(9)"
REGEX = "import re; return re.fullmatch('(a+)+b', 'a' * 40) is not None"


def verifier(directory: Path, body: str, *, workers: int = 0, timeout: float = 20.0, before: str = "") -> Verifier:
    """Makes a verifier of a function with this body."""
    (directory / "rate.py").write_text(f"{before}\ndef rate(record, completion, finished):\n    {body}\n")
    return Verifier(f"{directory / 'rate.py'}:rate", workers=workers, timeout=timeout)


def call(body: str, *words: str, workers: int = 0, timeout: float = 20.0) -> Callable[[Path], str]:
    """Makes a fault of a call that must be refused with prompt and completion."""

    def run(directory: Path) -> str:
        score = verifier(directory, body, workers=workers, timeout=timeout)
        return raised(lambda: score(EXAMPLE, COMPLETION, True), *NAMED, *words, error=RewardError)

    return run


def imported(before: str, *words: str, workers: int = 0) -> Callable[[Path], str]:
    """Makes a fault of a file that cannot be imported."""
    return lambda directory: raised(
        lambda: verifier(directory, "return 1", workers=workers, before=before), "data.reward: cannot import", *words
    )


def number(body: str) -> Callable[[Path], str]:
    """Makes a case of a number that must be taken as 0.5."""

    def run(directory: Path) -> str:
        values = verifier(directory, body, workers=0)(EXAMPLE, COMPLETION, True)
        return "identical" if values == {"reward": 0.5, "correct": 0.0} else "silent"

    return run


def bound_to_process(directory: Path) -> str:
    """Has a record that no other process can take."""
    score = verifier(directory, "return 1", workers=1)
    example = dataclasses.replace(EXAMPLE, record={"lock": threading.Lock()})
    words = ("cannot pickle", "set rewards.workers=0")
    return raised(lambda: score(example, COMPLETION, True), *NAMED, *words, error=RewardError)


def renamed(directory: Path) -> str:
    """Returns other names for the second completion."""
    score = verifier(directory, "return {'reward': 1, completion: 0}")
    score(EXAMPLE, "first", True)
    return raised(lambda: score(EXAMPLE, COMPLETION, True), *NAMED, "first, reward before", error=RewardError)


def reserved(name: str) -> Callable[[Path], str]:
    """Makes a fault of a reward with a name of the trainer."""

    def run(_: Path) -> str:
        scores = {"reward": np.float32([1]), name: np.float32([1])}
        return raised(lambda: compose(Rewards(), scores, np.array([1]), longest=4), f"a reward named {name!r}")

    return run


def weight_that_overflows(_: Path) -> str:
    """Multiplies a reward beyond float32."""
    scores = {"reward": np.float32([1, 1e30])}
    config = Rewards(weights={"reward": 1e20})
    return raised(lambda: compose(config, scores, np.array([1, 1]), longest=4), "rewards: got a sum of inf")


def busy_judge(_: Path) -> str:
    """Asks for an answer that keeps math-verify busy for ever; the next one is judged right."""
    judge = Judge(workers=1, seconds=2)
    try:
        wrong = judge.equal("9", r"\boxed{9^{9^{9^9}}}")
        return "repaired" if not wrong and judge.gave_up == 1 and judge.equal("1/2", "0.5") else "silent"
    finally:
        judge.close()


LATE = ("no answer within 0.2 s", "rewards.timeout")
CASES = {
    "NaN": call("return float('nan')", "expected names and finite numbers"),
    "infinity": call("return float('inf')", "expected names and finite numbers"),
    "None": call("return None", "returned 'reward': None"),
    "a list": call("return [1.0]", "returned 'reward': [1.0]"),
    "a text": call("return 'good'", "returned 'reward': 'good'"),
    "a complex number": call("return 1j", "returned 'reward': 1j"),
    "an array with an axis": call("import numpy; return numpy.ones(2)", "returned 'reward': array"),
    "a name that is no text": call("return {1: 1.0}", "returned 1: 1.0"),
    "a number beyond float32": call("return 1e39", "finite numbers of float32"),
    "a NumPy number beyond float32": call("import numpy; return numpy.float64(-1e308)", "numbers of float32"),
    "an integer of 401 digits": call("return 10**400", "finite numbers of float32"),
    "an integer of 6,000 digits": call("return 10**6000", "finite numbers of float32"),
    "an exception": call("return record['nothing']", "KeyError: 'nothing'"),
    "endless recursion": call("return rate(record, completion, finished)", "RecursionError"),
    "MemoryError": call("raise MemoryError", "MemoryError"),
    "SystemExit": call("raise SystemExit(0)", "SystemExit: 0"),
    "GeneratorExit": call("raise GeneratorExit", "GeneratorExit"),
    "an error while its result is read": call(
        "import collections; return type('M', (collections.UserDict,), {'keys': lambda self: 1 / 0})()",
        "ZeroDivisionError",
    ),
    "a number of a class that fails": call(
        "return type('F', (float,), {'__float__': lambda self: 1 / 0})(0.5)", "cannot be read", "ZeroDivisionError"
    ),
    "a value whose text fails": call("return type('T', (), {'__repr__': lambda self: 1 / 0})()", "without a text"),
    "a reward named phase": reserved("phase"),
    "a reward named loss": reserved("loss"),
    "a reward named as a KL": reserved("kl_reference"),
    "other names": renamed,
    "a hang": call(FOREVER, *LATE, timeout=0.2),
    "a hang that catches everything": call(STUBBORN, *LATE, timeout=0.2),
    "a regular expression that hangs": call(REGEX, *LATE, timeout=0.2),
    "a NumPy scalar": number("import numpy; return numpy.float32(0.5)"),
    "an array without axes": number("import numpy; return {'reward': numpy.array(0.5)}"),
    "SystemExit when imported": imported("raise SystemExit(0)", "SystemExit: 0"),
    "a sum beyond float32": weight_that_overflows,
}
IN_PROCESSES = {
    "exit in a worker process": call("import os; os._exit(0)", "ended with exit code 0", workers=1),
    "a hang in a worker process": call(FOREVER, *LATE, workers=1, timeout=0.2),
    "SystemExit in a worker process": call("raise SystemExit(0)", "SystemExit: 0", workers=1),
    "exit when imported in a worker process": imported("import os; os._exit(3)", "exit code 3", workers=1),
    "a record that no worker process can take": bound_to_process,
    "an answer that math-verify cannot judge": busy_judge,
}
HARMLESS = dict.fromkeys(("a NumPy scalar", "an array without axes"), "they are numbers")
FAULTS = [Fault("reward functions", name, run, HARMLESS.get(name, "")) for name, run in (CASES | IN_PROCESSES).items()]
