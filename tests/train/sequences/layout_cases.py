"""Batches that users' rollouts contain, written as texts, which every layout has to compute alike.

A character is a token. A token of a completion in capitals is an observation: it is there, and is not trained.
"""

import dataclasses
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tests import tiny
from train.sequences.batch import Batch

PROMPT, COMPLETION = 6, 8
WIDTH, SAMPLES, ROWS = PROMPT + COMPLETION, 4, 8
"""Rows are two groups; a packed row has as many slots as one sequence may have tokens."""

Group = tuple[str, tuple[str, str, str, str]]


@dataclasses.dataclass(frozen=True)
class BatchCase:
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

CASES: Mapping[str, BatchCase] = {
    # Completions that are alike.
    "two equal completions": BatchCase((("abc", ("wxyz", "wxyz", "stuv", "klm")), OTHER)),
    "four equal completions": BatchCase((("abc", ("wxyz",) * 4), OTHER)),
    "every row of the batch is the same": BatchCase((("abc", ("wxyz",) * 4), ("abc", ("wxyz",) * 4))),
    "four equal completions of one token": BatchCase((("abc", ("w",) * 4), OTHER)),
    "equal completions in every second row": BatchCase((("abc", ("wxyz", "klm", "wxyz", "klm")), OTHER)),
    "a completion continues another": BatchCase((("abc", ("wx", "wxyz", "stuv", "klm")), OTHER)),
    "a completion stops earlier than the one before": BatchCase((("abc", ("wxyz", "wx", "stuv", "klm")), OTHER)),
    "each completion continues the one before": BatchCase((("abc", ("w", "wx", "wxy", "wxyz")), OTHER)),
    "each completion stops before the one before": BatchCase((("abc", ("wxyz", "wxy", "wx", "w")), OTHER)),
    "a long completion is continued by one token": BatchCase((("abc", ("wxyzwxy", "wxyzwxyz", "w", "k")), OTHER)),
    "completions differ in the first token alone": BatchCase((("abc", ("kxyz", "lxyz", "mxyz", "nxyz")), OTHER)),
    "completions differ in the last token alone": BatchCase((("abc", ("wxyk", "wxyl", "wxym", "wxyn")), OTHER)),
    "completions differ in a middle token alone": BatchCase((("abc", ("wkyz", "wlyz", "wmyz", "wnyz")), OTHER)),
    "completions share the first token alone": BatchCase((("abc", ("wk", "wlm", "wno", "wp")), OTHER)),
    "two pairs of branches": BatchCase((("abc", PAIRS), OTHER)),
    "two pairs of branches, taken in turns": BatchCase((("abc", (PAIRS[0], PAIRS[2], PAIRS[1], PAIRS[3])), OTHER)),
    "branches at every depth": BatchCase((("abc", ("wxyzabcd", "wxyzabce", "wxyzf", "wg")), OTHER)),
    "branches at every depth, the shallowest first": BatchCase(
        (("abc", ("wg", "wxyzf", "wxyzabce", "wxyzabcd")), OTHER)
    ),
    "a branch of one token between longer ones": BatchCase((("abc", ("wxyza", "wxb", "wxyzc", "wxyzd")), OTHER)),
    "the same token again and again": BatchCase(
        (("aaaa", ("aaaa", "aaa", "aa", "aaaaa")), ("aa", ("aa", "a", "aaa", "")))
    ),
    "completions repeat their prompt": BatchCase((("abc", ("abc", "abcabc", "ab", "cab")), OTHER)),
    "completions that begin alike after they differed": BatchCase((("abc", ("kwxyz", "lwxyz", "wxyz", "xyz")), OTHER)),
    # Completions without tokens, or without trained ones.
    "an empty completion": BatchCase((("abc", ("wxyz", "", "stuv", "klm")), OTHER)),
    "empty completions between equal ones": BatchCase((("abc", ("wxyz", "", "wxyz", "")), OTHER)),
    "a group of empty completions": BatchCase((("abc", ("", "", "", "")), OTHER)),
    "a single completion in the batch": BatchCase((("abc", ("", "", "wxyz", "")), ("pqr", ("", "", "", "")))),
    "a batch of empty completions": BatchCase((("abc", ("", "", "", "")), ("pqr", ("", "", "", "")))),
    "completions of one token": BatchCase((("abc", ("w", "x", "y", "z")), ("pqr", ("s", "t", "u", "v")))),
    "groups of unequal numbers of completions": BatchCase(
        (("abc", ("", "wx", "", "")), ("pqr", ("st", "su", "sv", "s")))
    ),
    "rows of padding after the batch": BatchCase((("abc", ("wxyz", "wxya", "w", "k")), OTHER), padding=True),
    "no token of a row is trained": BatchCase((("abc", ("WXYZ", "stuv", "klm", "n")), OTHER)),
    "no token of a row is trained, and another is equal": BatchCase((("abc", ("WXYZ", "wxyz", "klm", "n")), OTHER)),
    "no token of a row is trained, and another continues it": BatchCase((("abc", ("WX", "wxyz", "klm", "n")), OTHER)),
    "no token of a group is trained": BatchCase((("abc", ("WXYZ", "WXY", "K", "L")), OTHER)),
    "no token of the batch is trained": BatchCase((("abc", ("WX", "WXY", "K", "")), ("pqr", ("S", "T", "S", "")))),
    # Observations.
    "an observation at the start": BatchCase((("abc", ("Wxyz", "STuv", "kl", "m")), OTHER)),
    "an observation in the middle": BatchCase((("abc", ("wXYz", "sTuv", "kl", "m")), OTHER)),
    "an observation at the end": BatchCase((("abc", ("wxYZ", "stuV", "kl", "m")), OTHER)),
    "equal completions with different observations": BatchCase((("abc", ("wXyz", "wxYz", "Wxyz", "wxyZ")), OTHER)),
    "equal completions, each token trained in one": BatchCase((("abc", ("wXyZ", "WxYz", "kl", "m")), OTHER)),
    "a shared token trained in the last row alone": BatchCase((("abc", ("WXyz", "WXya", "WXYb", "wxc")), OTHER)),
    "a shared token trained in the first row alone": BatchCase((("abc", ("wxyz", "WXya", "WXyb", "WXc")), OTHER)),
    "the token before a branch is an observation in one": BatchCase((("abc", ("wXyz", "wxab", "wXcd", "wxef")), OTHER)),
    "the token after a branch is an observation": BatchCase((("abc", ("wxYz", "wxAb", "wxcd", "wxEf")), OTHER)),
    "the last token of the shorter one is an observation": BatchCase((("abc", ("wX", "wxyz", "wXy", "m")), OTHER)),
    "observations are all that is shared": BatchCase((("abc", ("WXYz", "WXYa", "WXYb", "WXYc")), OTHER)),
    "two turns, the first shared": BatchCase((("abc", ("wxUVyz", "wxUVab", "wxUWyz", "wxUWcd")), OTHER)),
    # Numbers that differ on shared tokens.
    "equal completions of opposite rewards": BatchCase(
        (("abc", ("wxyz",) * 4), OTHER), rewards=(1, -1, 1, -1, 0.5, 0.25, -0.5, 1)
    ),
    "equal rewards in a group": BatchCase(
        (("abc", ("wxyz", "wxya", "kl", "m")), OTHER), rewards=(1,) * 4 + (0, 1, 0, 1)
    ),
    "equal rewards in the batch": BatchCase((("abc", PAIRS), OTHER), rewards=(1,) * 8),
    "one of two equal completions is too old": BatchCase((("abc", ("wxyz", "wxyz", "kl", "m")), OTHER), lags={0: (7,)}),
    "tokens get too old before they branch": BatchCase(
        (("abc", ("wxyz", "wxab", "wxyc", "wxyz")), OTHER), lags={0: (7, 7, 0), 1: (0, 7, 0), 3: (0, 0, 0, 7)}
    ),
    "the versions of one row are unknown": BatchCase((("abc", ("wxyz", "wxyz", "wx", "m")), OTHER), lags={1: (-1,)}),
    "no version is known": BatchCase((("abc", PAIRS), OTHER), lags=dict.fromkeys(range(ROWS), (-1,))),
    "the sampler disagrees on one of two equal ones": BatchCase(
        (("abc", ("wxyz", "wxyz", "kl", "m")), OTHER), mismatch={1: 4}
    ),
    "the sampler disagrees on all": BatchCase((("abc", PAIRS), OTHER), mismatch={row: -6 + row for row in range(ROWS)}),
    # Prompts.
    "equal prompts of two groups": BatchCase((("abc", PAIRS), ("abc", PAIRS[::-1]))),
    "a prompt begins as another": BatchCase((("abc", ("wxyz", "wx", "kl", "m")), ("abcw", ("xyz", "xya", "k", "l")))),
    "a prompt with its completion is another prompt": BatchCase(
        (("abc", ("wx", "wxy", "w", "k")), ("abcwx", ("y", "yz", "", "a")))
    ),
    "prompts of one token": BatchCase((("a", PAIRS), ("b", ("wx", "wxy", "w", "k")))),
    "equal prompts of one token": BatchCase((("a", ("wx", "wy", "", "w")), ("a", ("wx", "wy", "", "w")))),
    "prompts of all columns": BatchCase((("abcdef", PAIRS), ("pqrstu", ("vw", "vx", "v", "w")))),
    "a prompt of one token beside one of all columns": BatchCase((("a", PAIRS), ("pqrstu", ("vw", "vx", "v", "w")))),
    "a prompt without tokens": BatchCase((("", ("wxyz", "wx", "kl", "w")), OTHER)),
    "tokens of id 0 and the largest id": BatchCase(
        (("a\0b", ("\0\0w", "\0\0x", "\xffy", "\xff")), ("\0", ("\0", "\0\0", "", "\xff")))
    ),
    # Lengths and the slots of packed rows.
    "a completion of the limit": BatchCase((("abc", ("wxyzstuv", "wx", "k", "m")), OTHER)),
    "equal completions of the limit": BatchCase((("abc", ("wxyzstuv",) * 3 + ("w",)), ("pqr", ("s", "s", "t", "")))),
    "one sequence fills a row": BatchCase((("abcdef", ("wxyzstuv", "w", "k", "")), OTHER)),
    "equal sequences fill a row": BatchCase(
        (("abcdef", ("wxyzstuv", "wxyzstuv", "wxyzstuv", "w")), ("pqr", ("s", "t", "", "")))
    ),
    "a group fills a row": BatchCase((("abc", ("wxy", "klm", "stu", "no")), ("pqr", ("s", "tu", "vw", "")))),
    "a group exceeds a row by a token": BatchCase(
        (("abc", ("wxy", "klm", "stu", "nop")), ("pqr", ("s", "tu", "vw", "")))
    ),
    "two groups fill a row": BatchCase((("abc", ("wx", "kl", "", "")), ("pqr", ("st", "uv", "", "")))),
    "two groups exceed a row by a token": BatchCase((("abc", ("wx", "kl", "", "")), ("pqr", ("st", "uv", "w", "")))),
    "a tree fills a row": BatchCase((("abc", ("wxyzab", "wxyzcd", "wxyze", "wxkl")), ("pqr", ("s", "s", "t", "")))),
    "a tree exceeds a row by a token": BatchCase(
        (("abc", ("wxyzab", "wxyzcd", "wxyze", "wxklm")), ("pqr", ("s", "s", "t", "")))
    ),
    "completions of different rows begin alike": BatchCase(
        (("abc", ("wxyzabcd", "wxyzefgh", "wxyzijkl", "wxyzmnop")), OTHER)
    ),
    "a batch without padding": BatchCase(
        (
            ("abcdef", ("wxyzstuv", "klmnopqr", "stuvwxyz", "opqrklmn")),
            ("pqrstu", ("abcdefgh", "ijklmnop", "bcdefghi", "klmnopqr")),
        ),
        saves=False,
    ),
    # Windows of sliding layers, of 3 tokens.
    "shared tokens are fewer than a window": BatchCase((("a", ("wxyzk", "wlmno", "w", "wp")), OTHER)),
    "shared tokens are a window": BatchCase((("ab", ("wxyzk", "wlmno", "w", "wp")), OTHER)),
    "shared tokens are a window and a token": BatchCase((("ab", ("wxyzk", "wxlmn", "wx", "wxp")), OTHER)),
    "shared tokens are many windows": BatchCase((("abcde", ("wxyzabk", "wxyzabl", "wxyzab", "m")), OTHER)),
    "a branch shorter than a window before another": BatchCase((("abcd", ("wxk", "wxl", "wxyzm", "wxyn")), OTHER)),
}


def ids(text: str) -> list[int]:
    """The ids of the tokens of a text, in the alphabet of `BatchCase`."""
    return [ord(character.lower()) for character in text]


def batch_of(case: BatchCase, seed: int = 0) -> Batch:
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
    drawn = Batch(
        tokens=jnp.asarray(tokens * live[:, None]),
        token_mask=jnp.asarray(real),
        completion_mask=jnp.asarray(trained),
        rewards=jnp.asarray(np.where(live, rewards, 0), jnp.float32),
        group_ids=jnp.asarray(np.where(live, np.arange(ROWS) // SAMPLES, -1), jnp.int32),
        rollout_log_probs=jnp.asarray(log_probs, jnp.float32),
        fields={"token_lags": jnp.asarray(np.where(trained, lags, -1), jnp.int32)},
    )
    return tiny.from_column_0(drawn, PROMPT)


def drawn_by_prefix(batch: Batch, row: int, column: int, seed: int) -> np.random.Generator:
    """Draws the same numbers after the same tokens, of whatever row, if the seed is the same."""
    real = np.asarray(batch.token_mask)[row, : column + 1]
    return np.random.default_rng([seed, zlib.crc32(np.asarray(batch.tokens)[row, : column + 1][real].tobytes())])


def with_kept_ids(batch: Batch, count: int = 5, *, by_row: bool = False) -> Batch:
    """Adds what the sampler kept for each trained token; `by_row`: other tokens in each row, as of other weights."""
    kept = np.full((*batch.tokens.shape, count), -1, np.int32)
    for row, column in np.argwhere(np.asarray(batch.completion_mask)):
        rng, token = drawn_by_prefix(batch, row, column, int(row) if by_row else 0), int(batch.tokens[row, column])
        others = rng.permutation(np.setdiff1d(np.arange(256), [token]))[: rng.integers(count)]
        kept[row, column, : len(others) + 1] = [token, *others]
    return dataclasses.replace(batch, fields={**batch.fields, "kept_ids": jnp.asarray(kept)})


def with_routes(batch: Batch, layers: int, experts: int, active: int, *, by_row: bool = False) -> Batch:
    """Adds the experts of all tokens but the last of a row; `by_row`: others for completions of each row."""
    routes = np.full((*batch.tokens.shape, layers, active), -1, np.int16)
    for row, column in np.argwhere(np.asarray(batch.token_mask)):
        if column + 1 < WIDTH and batch.token_mask[row, column + 1]:
            rng = drawn_by_prefix(batch, row, column, int(row) if by_row and column >= batch.prompt_lengths[row] else 0)
            routes[row, column] = [np.sort(rng.permutation(experts)[:active]) for _ in range(layers)]
    return dataclasses.replace(batch, fields={**batch.fields, "routed_experts": jnp.asarray(routes)})


def noise(batch: Batch) -> jax.Array:
    """What moves log-probs of the old policy, by each token of each row on its own."""
    return jnp.asarray(0.15 * np.random.default_rng(7).normal(size=batch.tokens.shape))
