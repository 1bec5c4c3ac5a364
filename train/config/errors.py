"""The error of a config that cannot be used."""

from collections.abc import Sequence

from train.errors import UserError


class ConfigError(UserError):
    """All problems of one config; `problems` holds one line each."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([f"{source}: {count}", *(f"  {problem}" for problem in self.problems)]))
