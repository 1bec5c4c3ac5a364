"""Worker module: calls the reward function that its argument names; answers `{"rewards"}`, or `{"error"}` as a text.

The answer to None is the `{"signature"}` of the function.
"""

import sys
from typing import Any

from train.config.errors import UserError
from train.config.user_functions import find_function
from train.data.reward_call import RewardFunction, WrongRewardError, call_reward
from train.data.reward_signature import RewardSignature
from train.data.workers.serve import serve


class _Answers:
    """The function, imported at the first question."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._function: RewardFunction | None = None

    def __call__(self, question: Any) -> dict[str, Any]:
        try:
            if self._function is None:
                function = find_function("data.reward", self._name)
                self._signature = RewardSignature.of(function)
                self._function = self._signature.bind(function)
            if question is None:
                return {"signature": self._signature.to_json()}
            return {"rewards": call_reward(self._function, **question)}
        except (UserError, WrongRewardError) as error:
            return {"error": str(error)}


if __name__ == "__main__":
    serve(_Answers(sys.argv[1]))
