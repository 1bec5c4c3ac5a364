"""Batches that users' rollouts contain, written as texts, which every layout has to compute alike.

A character is a token. A token of a completion in capitals is an observation: it is there, and is not trained.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from train.sequences.batch import Batch

PROMPT, COMPLETION = 6, 8
WIDTH, SAMPLES, ROWS = PROMPT + COMPLETION, 4, 8
"""Rows are two groups; a packed row has as many slots as one sequence may have tokens."""

Group = tuple[str, tuple[str, str, str, str]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of two groups.

    Attributes:
      groups: the prompt of each group and its completions.
      rewards: of all rows; None draws them.
      lags: by row, the lag of each token of its completion, the last one for the rest; others have lag 0.
      mismatch: by row, what is added to the log-probs of the sampler.
      padding: whether the rows of the second group are padding, without a group.
      saves: whether packed rows are fewer slots than padded ones, so that they are used.
    """

    groups: tuple[Group, Group]
    rewards: tuple[float, ...] | None = None
    lags: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    mismatch: Mapping[int, float] = dataclasses.field(default_factory=dict)
    padding: bool = False
    saves: bool = True


OTHER: Group = ("pqr", ("stu", "vw", "stv", "u"))
"""A group where nothing is special."""
PAIRS = ("wxyz", "wxya", "abcd", "abce")

CASES: Mapping[str, Case] = {
    # Completions that are alike.
    "two equal completions": Case((("abc", ("wxyz", "wxyz", "stuv", "klm")), OTHER)),
    "four equal completions": Case((("abc", ("wxyz",) * 4), OTHER)),
    "every row of the batch is the same": Case((("abc", ("wxyz",) * 4), ("abc", ("wxyz",) * 4))),
    "four equal completions of one token": Case((("abc", ("w",) * 4), OTHER)),
    "equal completions in every second row": Case((("abc", ("wxyz", "klm", "wxyz", "klm")), OTHER)),
    "a completion continues another": Case((("abc", ("wx", "wxyz", "stuv", "klm")), OTHER)),
    "a completion stops earlier than the one before": Case((("abc", ("wxyz", "wx", "stuv", "klm")), OTHER)),
    "each completion continues the one before": Case((("abc", ("w", "wx", "wxy", "wxyz")), OTHER)),
    "each completion stops before the one before": Case((("abc", ("wxyz", "wxy", "wx", "w")), OTHER)),
    "a long completion is continued by one token": Case((("abc", ("wxyzwxy", "wxyzwxyz", "w", "k")), OTHER)),
    "completions differ in the first token alone": Case((("abc", ("kxyz", "lxyz", "mxyz", "nxyz")), OTHER)),
    "completions differ in the last token alone": Case((("abc", ("wxyk", "wxyl", "wxym", "wxyn")), OTHER)),
    "completions differ in a middle token alone": Case((("abc", ("wkyz", "wlyz", "wmyz", "wnyz")), OTHER)),
    "completions share the first token alone": Case((("abc", ("wk", "wlm", "wno", "wp")), OTHER)),
    "two pairs of branches": Case((("abc", PAIRS), OTHER)),
    "two pairs of branches, taken in turns": Case((("abc", (PAIRS[0], PAIRS[2], PAIRS[1], PAIRS[3])), OTHER)),
    "branches at every depth": Case((("abc", ("wxyzabcd", "wxyzabce", "wxyzf", "wg")), OTHER)),
    "branches at every depth, the shallowest first": Case((("abc", ("wg", "wxyzf", "wxyzabce", "wxyzabcd")), OTHER)),
    "a branch of one token between longer ones": Case((("abc", ("wxyza", "wxb", "wxyzc", "wxyzd")), OTHER)),
    "the same token again and again": Case((("aaaa", ("aaaa", "aaa", "aa", "aaaaa")), ("aa", ("aa", "a", "aaa", "")))),
    "completions repeat their prompt": Case((("abc", ("abc", "abcabc", "ab", "cab")), OTHER)),
    "completions that begin alike after they differed": Case((("abc", ("kwxyz", "lwxyz", "wxyz", "xyz")), OTHER)),
    # Completions without tokens, or without trained ones.
    "an empty completion": Case((("abc", ("wxyz", "", "stuv", "klm")), OTHER)),
    "empty completions between equal ones": Case((("abc", ("wxyz", "", "wxyz", "")), OTHER)),
    "a group of empty completions": Case((("abc", ("", "", "", "")), OTHER)),
    "a single completion in the batch": Case((("abc", ("", "", "wxyz", "")), ("pqr", ("", "", "", "")))),
    "a batch of empty completions": Case((("abc", ("", "", "", "")), ("pqr", ("", "", "", "")))),
    "completions of one token": Case((("abc", ("w", "x", "y", "z")), ("pqr", ("s", "t", "u", "v")))),
    "groups of unequal numbers of completions": Case((("abc", ("", "wx", "", "")), ("pqr", ("st", "su", "sv", "s")))),
    "rows of padding after the batch": Case((("abc", ("wxyz", "wxya", "w", "k")), OTHER), padding=True),
    "no token of a row is trained": Case((("abc", ("WXYZ", "stuv", "klm", "n")), OTHER)),
    "no token of a row is trained, and another is equal": Case((("abc", ("WXYZ", "wxyz", "klm", "n")), OTHER)),
    "no token of a row is trained, and another continues it": Case((("abc", ("WX", "wxyz", "klm", "n")), OTHER)),
    "no token of a group is trained": Case((("abc", ("WXYZ", "WXY", "K", "L")), OTHER)),
    "no token of the batch is trained": Case((("abc", ("WX", "WXY", "K", "")), ("pqr", ("S", "T", "S", "")))),
    # Observations.
    "an observation at the start": Case((("abc", ("Wxyz", "STuv", "kl", "m")), OTHER)),
    "an observation in the middle": Case((("abc", ("wXYz", "sTuv", "kl", "m")), OTHER)),
    "an observation at the end": Case((("abc", ("wxYZ", "stuV", "kl", "m")), OTHER)),
    "equal completions with different observations": Case((("abc", ("wXyz", "wxYz", "Wxyz", "wxyZ")), OTHER)),
    "equal completions, each token trained in one": Case((("abc", ("wXyZ", "WxYz", "kl", "m")), OTHER)),
    "a shared token trained in the last row alone": Case((("abc", ("WXyz", "WXya", "WXYb", "wxc")), OTHER)),
    "a shared token trained in the first row alone": Case((("abc", ("wxyz", "WXya", "WXyb", "WXc")), OTHER)),
    "the token before a branch is an observation in one": Case((("abc", ("wXyz", "wxab", "wXcd", "wxef")), OTHER)),
    "the token after a branch is an observation": Case((("abc", ("wxYz", "wxAb", "wxcd", "wxEf")), OTHER)),
    "the last token of the shorter one is an observation": Case((("abc", ("wX", "wxyz", "wXy", "m")), OTHER)),
    "observations are all that is shared": Case((("abc", ("WXYz", "WXYa", "WXYb", "WXYc")), OTHER)),
    "two turns, the first shared": Case((("abc", ("wxUVyz", "wxUVab", "wxUWyz", "wxUWcd")), OTHER)),
    # Numbers that differ on shared tokens.
    "equal completions of opposite rewards": Case(
        (("abc", ("wxyz",) * 4), OTHER), rewards=(1, -1, 1, -1, 0.5, 0.25, -0.5, 1)
    ),
    "equal rewards in a group": Case((("abc", ("wxyz", "wxya", "kl", "m")), OTHER), rewards=(1,) * 4 + (0, 1, 0, 1)),
    "equal rewards in the batch": Case((("abc", PAIRS), OTHER), rewards=(1,) * 8),
    "one of two equal completions is too old": Case((("abc", ("wxyz", "wxyz", "kl", "m")), OTHER), lags={0: (7,)}),
    "tokens get too old before they branch": Case(
        (("abc", ("wxyz", "wxab", "wxyc", "wxyz")), OTHER), lags={0: (7, 7, 0), 1: (0, 7, 0), 3: (0, 0, 0, 7)}
    ),
    "the versions of one row are unknown": Case((("abc", ("wxyz", "wxyz", "wx", "m")), OTHER), lags={1: (-1,)}),
    "no version is known": Case((("abc", PAIRS), OTHER), lags={row: (-1,) for row in range(ROWS)}),
    "the sampler disagrees on one of two equal ones": Case((("abc", ("wxyz", "wxyz", "kl", "m")), OTHER), mismatch={1: 4}),
    "the sampler disagrees on all": Case((("abc", PAIRS), OTHER), mismatch={row: -6 + row for row in range(ROWS)}),
    # Prompts.
    "equal prompts of two groups": Case((("abc", PAIRS), ("abc", PAIRS[::-1]))),
    "a prompt begins as another": Case((("abc", ("wxyz", "wx", "kl", "m")), ("abcw", ("xyz", "xya", "k", "l")))),
    "a prompt with its completion is another prompt": Case((("abc", ("wx", "wxy", "w", "k")), ("abcwx", ("y", "yz", "", "a")))),
    "prompts of one token": Case((("a", PAIRS), ("b", ("wx", "wxy", "w", "k")))),
    "equal prompts of one token": Case((("a", ("wx", "wy", "", "w")), ("a", ("wx", "wy", "", "w")))),
    "prompts of all columns": Case((("abcdef", PAIRS), ("pqrstu", ("vw", "vx", "v", "w")))),
    "a prompt of one token beside one of all columns": Case((("a", PAIRS), ("pqrstu", ("vw", "vx", "v", "w")))),
    "tokens of id 0 and the largest id": Case((("a\0b", ("\0\0w", "\0\0x", "\xffy", "\xff")), ("\0", ("\0", "\0\0", "", "\xff")))),
    # Lengths and the slots of packed rows.
    "a completion of the limit": Case((("abc", ("wxyzstuv", "wx", "k", "m")), OTHER)),
    "equal completions of the limit": Case((("abc", ("wxyzstuv",) * 3 + ("w",)), ("pqr", ("s", "s", "t", "")))),
    "one sequence fills a row": Case((("abcdef", ("wxyzstuv", "w", "k", "")), OTHER)),
    "equal sequences fill a row": Case((("abcdef", ("wxyzstuv", "wxyzstuv", "wxyzstuv", "w")), ("pqr", ("s", "t", "", "")))),
    "a group fills a row": Case((("abc", ("wxy", "klm", "stu", "no")), ("pqr", ("s", "tu", "vw", "")))),
    "a group exceeds a row by a token": Case((("abc", ("wxy", "klm", "stu", "nop")), ("pqr", ("s", "tu", "vw", "")))),
    "two groups fill a row": Case((("abc", ("wx", "kl", "", "")), ("pqr", ("st", "uv", "", "")))),
    "two groups exceed a row by a token": Case((("abc", ("wx", "kl", "", "")), ("pqr", ("st", "uv", "w", "")))),
    "a tree fills a row": Case((("abc", ("wxyzab", "wxyzcd", "wxyze", "wxkl")), ("pqr", ("s", "s", "t", "")))),
    "a tree exceeds a row by a token": Case((("abc", ("wxyzab", "wxyzcd", "wxyze", "wxklm")), ("pqr", ("s", "s", "t", "")))),
    "completions of different rows begin alike": Case((("abc", ("wxyzabcd", "wxyzefgh", "wxyzijkl", "wxyzmnop")), OTHER)),
    "a batch without padding": Case(
        (("abcdef", ("wxyzstuv", "klmnopqr", "stuvwxyz", "opqrklmn")), ("pqrstu", ("abcdefgh", "ijklmnop", "bcdefghi", "klmnopqr"))),
        saves=False,
    ),
    # Windows of sliding layers, of 3 tokens.
    "shared tokens are fewer than a window": Case((("a", ("wxyzk", "wlmno", "w", "wp")), OTHER)),
    "shared tokens are a window": Case((("ab", ("wxyzk", "wlmno", "w", "wp")), OTHER)),
    "shared tokens are a window and a token": Case((("ab", ("wxyzk", "wxlmn", "wx", "wxp")), OTHER)),
    "shared tokens are many windows": Case((("abcde", ("wxyzabk", "wxyzabl", "wxyzab", "m")), OTHER)),
    "a branch shorter than a window before another": Case((("abcd", ("wxk", "wxl", "wxyzm", "wxyn")), OTHER)),
}


def ids(text: str) -> list[int]:
    """The ids of the tokens of a text, in the alphabet of `Case`."""
    return [ord(character.lower()) for character in text]


def batch_of(case: Case, seed: int = 0) -> Batch:
    """The batch of a case as a rollout leaves it; numbers hold 1e4 and versions 99 where nothing may read them."""
    rng, column = np.random.default_rng(seed), np.arange(WIDTH)
    texts = [(prompt, completion) for prompt, completions in case.groups for completion in completions]
    tokens = np.zeros((ROWS, WIDTH), np.int32)
    trained, lags = np.zeros((ROWS, WIDTH), bool), np.zeros((ROWS, WIDTH), np.int32)
    for row, (prompt, completion) in enumerate(texts):
        tokens[row, PROMPT - len(prompt) : PROMPT] = ids(prompt)
        tokens[row, PROMPT : PROMPT + len(completion)] = ids(completion)
        trained[row, PROMPT : PROMPT + len(completion)] = [not character.isupper() for character in completion]
        for place, lag in enumerate(case.lags.get(row, ())):
            lags[row, PROMPT + place :] = lag
    lengths = np.array([[len(prompt), len(completion)] for prompt, completion in texts])
    real = (column >= PROMPT - lengths[:, :1]) & (column < PROMPT + lengths[:, 1:])
    live = np.arange(ROWS) < (SAMPLES if case.padding else ROWS)
    trained, real = trained & live[:, None], real & live[:, None]
    shift = np.array([case.mismatch.get(row, 0) for row in range(ROWS)])[:, None]
    rewards = rng.normal(size=ROWS) if case.rewards is None else np.array(case.rewards)
    log_probs = np.where(trained, -5.6 + 0.3 * rng.normal(size=trained.shape) + shift, 1e4)
    return Batch(
        tokens=jnp.asarray(tokens * live[:, None]),
        token_mask=jnp.asarray(real),
        completion_mask=jnp.asarray(trained),
        rewards=jnp.asarray(np.where(live, rewards, 0), jnp.float32),
        group_ids=jnp.asarray(np.where(live, np.arange(ROWS) // SAMPLES, -1), jnp.int32),
        rollout_log_probs=jnp.asarray(log_probs, jnp.float32),
        fields={"token_lags": jnp.asarray(np.where(trained, lags, -1), jnp.int32)},
    )


def noise(batch: Batch) -> jax.Array:
    """What moves log-probs of the old policy, by each token of each row on its own."""
    return jnp.asarray(0.15 * np.random.default_rng(7).normal(size=batch.tokens.shape))
