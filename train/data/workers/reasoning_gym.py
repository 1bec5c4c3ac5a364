"""Worker module: answers `{"index", "answer"}` with the score of an answer, by the verifier of a data set.

Its arguments are the name of the data set and its settings as JSON. Verifiers of some data sets give the answer to
`eval` or to sympy, which evaluates it too: one that calls more than a function of mathematics, or reads an attribute,
gets 0 from them.
"""

import ast
import builtins
import functools
import json
import re
import sys
import unicodedata
from typing import Any

from train.data.workers.serve import serve

MEMORY = 4 << 30
LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets whose verifiers give an answer to `eval`, where they expect a list."""
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Data sets whose verifiers give an answer to sympy."""
MATHEMATICS = frozenset({"abs", "max", "min", "pow", "round", "sum"})
_FORBIDDEN = frozenset(dir(builtins)) - MATHEMATICS
_NAME = re.compile(r"[^\W\d]\w*")
_ATTRIBUTE = re.compile(r"\.\s*[^\W\d]")


def is_harmless(name: str, answer: str) -> bool:
    """Whether a verifier may have an answer: it evaluates none, or there are only numbers, operations and mathematics.

    Example:
        >>> is_harmless("countdown", "(3 + 4) * 6"), is_harmless("countdown", "exec(chr(49))")
        (True, False)
        >>> is_harmless("spiral_matrix", "['A', 'B']"), is_harmless("spiral_matrix", "[f'{exec}']")
        (True, False)
    """
    if name not in LISTS | FORMULAS:
        return True
    if name in LISTS:
        try:
            ast.literal_eval(answer)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            # Without a call and a text, which may be one that is formatted, nothing runs: it may be a list in words.
            return not set(answer) & set("()'\"")
        return True
    # As Python reads names: letters of other widths and styles are those of ASCII.
    answer = unicodedata.normalize("NFKC", answer)
    names = set(_NAME.findall(answer))
    words = any(word in _FORBIDDEN or word.startswith("__") or word in ("lambda", "for") for word in names)
    return not (words or _ATTRIBUTE.search(answer) or "'" in answer or '"' in answer)


class Answers:
    """The scores of answers."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        """Makes the data set again."""
        import reasoning_gym

        self._name = name
        self._dataset = reasoning_gym.create_dataset(name, **settings)
        self._entry = functools.lru_cache(maxsize=1024)(self._dataset.__getitem__)

    def __call__(self, question: Any) -> float:
        """Returns the score of an answer to a problem; 0 for the first question, None."""
        if question is None:
            return 0.0
        answer = question["answer"]
        if not is_harmless(self._name, answer):
            return 0.0
        try:
            return float(self._dataset.score_answer(answer, self._entry(question["index"])))
        except Exception:  # of a verifier that cannot read the answer
            return 0.0


if __name__ == "__main__":
    serve(Answers(sys.argv[1], json.loads(sys.argv[2])), memory=MEMORY)
