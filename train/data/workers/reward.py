"""Worker module: calls the reward function that its argument names; answers `{"rewards"}`, or `{"error"}` as a text."""

import sys
from typing import Any

from train.config.errors import UserError
from train.config.user_functions import find_function
from train.data.reward_call import RewardFunction, WrongRewardError, call_reward
from train.data.workers.serve import serve


class _Answers:
    """The function, imported at the first question, None, whose answer tells whether that failed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: RewardFunction | None = None

    def __call__(self, question: Any) -> dict[str, Any]:
        try:
            if self._function is None:
                self._function = find_function("data.reward", self._name)
            if question is None:
                return {}
            return {"rewards": call_reward(self._function, **question)}
        except (UserError, WrongRewardError) as error:
            return {"error": str(error)}


if __name__ == "__main__":
    serve(_Answers(sys.argv[1]))
