"""Demonstrations of episodes for a model of bytes: turns are trained in the warm start, observations are not."""

import random
from collections.abc import Iterable

import numpy as np

from train.data.tasks.task import Example
from train.data.tokenizers import ByteTokenizer


def demonstrate(prompt: str, answer: str, turns: Iterable[tuple[str, str]]) -> Example:
    """Makes the example of an episode.

    Args:
      prompt: of the episode.
      answer: of the verifier, or of the environment.
      turns: each with the observation after it, empty after the last.

    Example:
      >>> example = demonstrate("2 plus 2?", "4", [("calc 2+2", "4\\n"), ("4", "")])
      >>> bytes(i for i in example.solution_ids[example.solution_mask].tolist() if i < 256)
      b'calc 2+24'
    """
    ids = list[int]()
    mask = list[bool]()
    tokenizer = ByteTokenizer()
    for turn, observation in turns:
        sampled = [*tokenizer.encode(turn), tokenizer.eos_id]
        observed = tokenizer.encode(observation)
        ids += [*sampled, *observed]
        mask += [True] * len(sampled) + [False] * len(observed)
    return Example(prompt, answer, answer, solution_ids=np.array(ids, np.int32), solution_mask=np.array(mask))


def miscopy(text: str, rng: random.Random) -> str:
    """Writes a digit in place of one of the characters of a text, which it may equal."""
    place = rng.randrange(len(text))
    return text[:place] + rng.choice("0123456789") + text[place + 1 :]
