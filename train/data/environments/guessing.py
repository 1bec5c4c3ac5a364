"""A number to guess in a few turns; the replies say in which direction it lies."""

import math

HIGHER = "higher\n"
LOWER = "lower\n"


class Guessing:
    """An episode of text steps; it ends with the number, which has the reward 1."""

    def __init__(self, most: int) -> None:
        """Takes numbers of 0 to `most`."""
        self._most = most

    def reset(self, answer: str) -> None:
        """Begins an episode with its number."""
        self._number = int(answer)
        self._low = 0
        self._high = self._most

    def step(self, text: str) -> tuple[str, float, bool]:
        """Returns the reply to a guess, the reward, and whether the episode is over."""
        reply = compare(text, self._number, self._most)
        if reply == HIGHER:
            self._low = max(self._low, int(text) + 1)
        elif reply == LOWER:
            self._high = min(self._high, int(text) - 1)
        elif not reply:
            self._low = self._high = self._number
        return reply, float(not reply), not reply

    def turn_score(self) -> float:
        """Returns how good the state is: 0 if one number is left, and 1 less for each time twice as many are."""
        return -math.log2(self._high - self._low + 1)


def compare(guess: str, number: int, most: int) -> str:
    """Returns the reply to a guess of a number of 0 to `most`; an empty one if it is right.

    Example:
      >>> compare("3", 7, 14), compare("9", 7, 14), compare("7", 7, 14), compare("seven", 7, 14)
      ('higher\\n', 'lower\\n', '', '0 to 14\\n')
    """
    if not (guess.isascii() and guess.isdigit()) or len(guess) > len(str(most)) or int(guess) > most:
        return f"0 to {most}\n"
    if int(guess) == number:
        return ""
    return HIGHER if int(guess) < number else LOWER
