"""Worker module: calls the reward function that its argument names; answers `{"rewards"}`, or `{"error"}` as a text."""

import sys
from typing import Any

from train.config.errors import UserError
from train.config.user_functions import find_function
from train.data.tasks.reward_function import RewardFunction, Wrong, call
from train.data.workers.serve import serve


class _Answers:
    """The function, imported at the first question, None, whose answer tells whether that failed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: RewardFunction | None = None

    def __call__(self, question: Any) -> dict[str, Any]:
        try:
            if question is None:
                self._function = find_function("data.reward", self._name)
                return {}
            assert self._function is not None
            return {"rewards": call(self._function, question["record"], question["completion"], question["finished"])}
        except (UserError, Wrong) as error:
            return {"error": str(error)}


if __name__ == "__main__":
    serve(_Answers(sys.argv[1]))
