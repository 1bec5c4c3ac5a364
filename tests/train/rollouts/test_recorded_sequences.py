"""Recordings of sequences: episodes come back bit for bit, rows continue others, and mistakes name file and line."""

import dataclasses
import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny
from tests.train.sequences import test_packing as packing
from train.config.errors import UserError
from train.config.plan import Plan
from train.data.tasks import Example
from train.data.tokenizers import ByteTokenizer
from train.distributed.global_arrays import RowSplit
from train.rl.objective import coefficients
from train.rl.terms import make_weighting
from train.rollouts.collect import collect
from train.rollouts.episodes.rows import RowShape, make_rows, place_sequences
from train.rollouts.episodes.turns import Episode, SampledTurn
from train.rollouts.open import open_source
from train.rollouts.recorded import name_parents, record_rows
from train.rollouts.source import InTurn
from train.rollouts.stream import Stream

EOS = ByteTokenizer().eos_id
SHAPE = ("rollout={prompts_per_step: 2, samples_per_prompt: 4, fork_rows: 2}", packing.LONG)


def context_of(path, *options: str):
    source = f"rollout.source={{type: file, path: '{path}', shuffle: false}}"
    return tiny.context_of(tiny.config_of(*options, source))


def read(path, *options: str, shape=SHAPE, step: int = 0):
    context = context_of(path, *shape, *options)
    return collect(context, Stream(context, open_source(context)), step)


def written_rows(completions):
    """What is recorded of completions in groups of four."""
    rows = np.arange(len(completions.examples))
    return record_rows(completions, RowSplit(len(rows), rows, rows), 4, tiny.PROMPT)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_equal(batch, expected) -> None:
    chex.assert_trees_all_equal_dtypes(batch, expected)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((batch, expected)))


# ---- episodes ----


def episodes_of(prompts) -> list[Episode]:
    """Two episodes of each prompt: of three turns, forked, in one turn, and one that failed."""
    rng = np.random.default_rng(0)

    def turn(prompt, *ids, reward=0.0) -> SampledTurn:
        log_probs = (-rng.random(len(ids))).astype(np.float32).tolist()
        return SampledTurn(prompt, ids, log_probs, rng.integers(0, 3, len(ids)).tolist(), reward)

    def episode(*turns: SampledTurn, reward: float, finished: bool = True) -> Episode:
        rewards = {"reward": reward, "form": 0.25}
        fault = None if finished else ("max_turns", "a limit \ud800")
        return Episode(list(turns), [f"turn {n}" for n in range(len(turns))], rewards, finished, fault=fault)

    one, two = prompts
    first = turn(one, 65, 66, reward=0.3)
    second = turn([*one, 65, 66, 48], 67, reward=-0.1)
    third = turn([*one, 65, 66, 48, 67, 49], 68, 69, EOS)
    # A template dropped 65, and then more of the prompt.
    forks = turn([*one, 66, 48], 70, EOS), turn([*one[:2], 48, 49], 71, reward=0.1)
    return [
        episode(first, second, third, reward=1.0),
        episode(turn(one, 65), *forks, reward=0.7, finished=False),
        episode(turn(two, 72, EOS), reward=0.1),
        Episode(failure=("exception", "lost")),
    ]


class RecordedEpisodes(InTurn):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self._shared = shared

    def sample(self, request):
        prompts = [[256, 49, 43, 50], [256, 49]]
        examples = [Example(text, "3", "") for text in ("1+2", "1")]
        shape = RowShape(tiny.PROMPT, packing.WIDTH, ByteTokenizer().pad_id, 4, fork_rows=2, shared=self._shared)
        episodes = episodes_of(prompts)
        if self._shared:
            # The fork that begins within the prompt has another.
            episodes[1].turns.pop()
        both = [[values[0], values[0], values[1], values[1]] for values in (examples, prompts)]
        rows = place_sequences(episodes, shape)
        assert [row is None for row in rows] == [False] * 3 + [self._shared, False, True, True, True]
        return make_rows(*both, episodes, rows, shape, turn_rewards=True)


@pytest.fixture(scope="module", params=[False, True], ids=["rows", "shared prompts"])
def recorded(request, tmp_path_factory):
    """The batch of a step with episodes, its recording, and the options of both."""
    folder = tmp_path_factory.mktemp("recorded")
    options = ("correction=[{type: max_lag, max_lag: 4}]", f"optim.share_prompts={str(request.param).lower()}")
    (folder / "rows").mkdir()
    environment = "environment={name: 'train.data.environments.calculator:Calculator', history: template}"
    config = tiny.config_of(*SHAPE, environment, f"rollout.record={folder / 'rows'}", *options)
    context = tiny.context_of(config)
    return (
        collect(context, Stream(context, RecordedEpisodes(request.param)), 2),
        folder / "rows" / "00000002.jsonl",
        options,
    )


def assert_read(rollout, expected) -> None:
    assert_equal(rollout.batch, expected.batch)
    assert rollout.completions.metrics == expected.completions.metrics
    assert rollout.completions.texts == expected.completions.texts
    for name in ("fields", "episode_rows", "finished", "rewards"):
        chex.assert_trees_all_equal(getattr(rollout.completions, name), getattr(expected.completions, name))
    failures = [failure and failure.recorded() for failure in expected.completions.failures]
    assert [failure and failure.recorded() for failure in rollout.completions.failures] == failures
    kinds = [failure and (failure["of"], failure["name"]) for failure in failures]
    failed = [None, ("policy", "max_turns"), None, None, None, ("world", "exception"), None, None]
    assert kinds == failed


def test_recorded_episodes_train_bit_for_bit(recorded, tmp_path):
    """Tokens, masks, groups, rewards, versions, log-probs and episodes; the step decides the lag."""
    expected, path, options = recorded
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {line["kljax_format"] for line in lines} == {2}
    for step in range(3):
        (tmp_path / f"{step}.jsonl").write_bytes(path.read_bytes())
    assert_read(read(tmp_path, *options, step=2), expected)
    # What was read is recorded as it was.
    again = written_rows(read(path, *options).completions)
    assert [line | row for line, row in zip(lines, name_parents(again, 4, tiny.PROMPT), strict=True)] == lines


def test_fork_is_recorded_without_what_it_shares(recorded):
    """It names the row of its episode with which it shares most."""
    _, path, options = recorded
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    forks = {number: (line["parent"], line["ids"]) for number, line in enumerate(lines) if "parent" in line}
    expected = {2: ({"row": 1, "tokens": 4}, [66, 48, 70, EOS]), 3: ({"row": 1, "tokens": 2}, [48, 49, 71])}
    if "optim.share_prompts=true" in options:
        del expected[3]  # it begins with another prompt, and is left out
    assert forks == expected
    for line in lines:
        assert {len(line[name]) for name in ("trained", "log_probs", "version", "token_rewards")} == {len(line["ids"])}


def test_fork_continues_what_has_its_experts():
    """Where the values of a shared id differ, or the fork trains it, the fork has the id itself."""
    routes = [[[0]], [[1]], [[2]], [[3]]]
    first = {"group": 0, "ids": [1, 2, 3, 4], "trained": [False, False, True, True], "routed_experts": routes}
    fork = first | {"trained": [False, False, False, True], "episode": {"row": 0, "of": 4}}
    other = fork | {"routed_experts": [[[0]], [[7]], [[2]], [[3]]]}
    trained = fork | {"trained": [False, True, True, True]}
    rows = name_parents([first, fork, other, trained], 4, 2)
    assert [row.get("parent", {}).get("tokens") for row in rows] == [None, 3, 1, 1]
    assert [row["parent"]["row"] for row in rows[1:]] == [0, 0, 0]
    assert [row["routed_experts"] for row in rows[1:]] == [routes[3:], [[[7]], [[2]], [[3]]], routes[1:]]
    assert [row.get("prompt_length") for row in rows] == [None, None, 2, None]


def test_parquet_of_episodes_trains_bit_for_bit(recorded, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    expected, path, options = recorded
    rows = [json.loads(line) for line in 3 * path.read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_struct_array(pyarrow.array(rows)), tmp_path / "a.parquet")
    assert_read(read(tmp_path / "a.parquet", *options, step=2), expected)


# ---- sequences of others ----

PROMPT = [256, 49, 43]
SMALL = ("rollout={prompts_per_step: 1, samples_per_prompt: 4}", packing.LONG)


def row(*ids: int, trained, **changes) -> dict:
    """A sequence whose log-probs say which ids they are of."""
    log_probs = [-0.01 * token if was else None for token, was in zip(ids, trained, strict=True)]
    base = {"group": 0, "ids": list(ids), "trained": trained, "log_probs": log_probs, "version": 1, "rewards": 0.0}
    return {name: value for name, value in (base | changes).items() if value is not None}


def trunk(**changes) -> dict:
    whole = row(*PROMPT, 65, 66, 48, 67, EOS, trained=[False] * 3 + [True, True, False, True, True])
    return {name: value for name, value in (whole | changes).items() if value is not None}


TREE = [
    trunk(rewards=1.0),
    # From the middle of its parent, from the middle of that one, and from the end of a prompt.
    row(68, 69, 70, trained=[True, False, True], parent={"row": 0, "tokens": 5, "trained": True}, rewards=0.5),
    row(71, EOS, trained=[True, True], parent={"row": 1, "tokens": 7, "trained": True}, version=[0, None]),
    row(72, trained=[True], parent={"row": 0, "tokens": 3}, rewards=2.0),
]
TREE += [{**line, "group": 1, "rewards": line["rewards"] + 1} for line in TREE]


def flattened(rows: list[dict]) -> list[dict]:
    """The same rows with all of their ids."""
    flat: list[dict] = []
    for line in rows:
        own = {name: value for name, value in line.items() if name != "parent"}
        count = len(own["ids"])
        own["version"] = own["version"] if isinstance(own["version"], list) else [own["version"]] * count
        if "parent" in line:
            parent, tokens = flat[line["group"] * 4 + line["parent"]["row"]], line["parent"]["tokens"]
            for name in ("ids", "log_probs", "version"):
                own[name] = parent[name][:tokens] + own[name]
            inherited = parent["trained"][:tokens] if line["parent"].get("trained") else [False] * tokens
            own |= {"trained": inherited + own["trained"], "prompt_length": 3}
        flat.append(own)
    return flat


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_that_continue_others_train_as_whole_sequences(tmp_path, suffix):
    expected = read(write(tmp_path / "flat.jsonl", flattened(TREE)), shape=SMALL, step=1).batch
    path = tmp_path / f"tree.{suffix}"
    if suffix == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        whole = flattened(TREE)
        lists = [line | {"version": whole[n]["version"][-len(line["ids"]) :]} for n, line in enumerate(TREE)]
        parquet.write_table(pyarrow.Table.from_struct_array(pyarrow.array(lists)), path)
    else:
        write(path, TREE)
    batch = read(path, shape=SMALL, step=1).batch
    assert_equal(batch, expected)
    assert np.asarray(batch.completion_mask).sum(-1).tolist() == [4, 4, 5, 1]
    assert np.asarray(batch.rewards).tolist() == [2.0, 1.5, 1.0, 3.0]
    # A shuffled recording reads each row by itself.
    assert read(path, shape=("rollout.samples_per_prompt=4", packing.LONG)).batch.tokens.shape == (16, packing.WIDTH)


def test_tree_has_the_loss_and_gradient_of_its_sequences(tmp_path):
    """With `optim.share_prefixes`, in float64."""
    shape = ("rollout={prompts_per_step: 2, samples_per_prompt: 4}", packing.LONG)
    trees, flat = (
        read(write(tmp_path / f"{name}.jsonl", rows), shape=shape).batch
        for name, rows in (("tree", TREE), ("flat", flattened(TREE)))
    )
    with jax.enable_x64(True):
        options = (*packing.TERMS, *packing.VALUE, shape[0])
        config, run = packing.gradient_of(options)
        filled = packing.full_batch(packing.Lengths(*[np.full(8, 3)] * 2, np.arange(8) // 4))
        given = {name: getattr(filled, name) for name in ("old_log_probs", "ref_log_probs", "values", "returns")}
        given["advantages"] = jnp.asarray(np.random.default_rng(0).normal(size=filled.tokens.shape))
        given = {name: jnp.where(trees.completion_mask, x, 0) for name, x in given.items()}
        trees, flat = (
            tiny.wide(make_weighting(Plan.of(config))(dataclasses.replace(x, **given))) for x in (trees, flat)
        )
        state = tiny.wide(tiny.state_of(config, tiny.keep_gradient()).trainable)
        packed = packing.placed(config, trees, share_prefixes=True)
        # 14 slots for the 29 tokens of each group.
        assert int((np.asarray(packed.readers[..., 0]) >= 0).sum()) == 28
        (loss, _), gradient = run(state, None, flat, coefficients(config))
        (shared_loss, _), shared = run(state, None, trees, coefficients(config), packed=packed)
        scale = np.sqrt(sum(np.square(x).sum() for x in jax.tree.leaves(gradient)))
        np.testing.assert_allclose(shared_loss, loss, rtol=1e-12)
        chex.assert_trees_all_close(shared, gradient, rtol=0, atol=1e-12 * scale)


def test_sequence_equals_a_prompt_and_its_completion(tmp_path):
    """With the defaults of both, in one file: the ids before the first trained one are the prompt."""
    rows = [
        {"prompt_ids": PROMPT, "completion_ids": ids, "log_probs": [-1.0] * len(ids), "reward": 0.5}
        for ids in ([65, EOS], [66])
    ]
    sequences = [
        {"ids": PROMPT + line["completion_ids"], "trained": [False] * 3 + [True] * len(line["completion_ids"]),
         "log_probs": [None] * 3 + line["log_probs"], "rewards": 0.5}
        for line in rows
    ]  # fmt: skip
    shape = ("rollout={prompts_per_step: 1, samples_per_prompt: 2}",)
    expected = read(write(tmp_path / "a.jsonl", rows), shape=shape)
    # As a table has them, whose columns are those of all rows.
    columns = dict.fromkeys([*rows[0], *sequences[0], "parent", "version", "prompt_length", "episode"])
    nulls = [columns | rows[0], columns | sequences[1]]
    for name, lines in (("b", sequences), ("c", [rows[0], sequences[1]]), ("d", nulls)):
        rollout = read(write(tmp_path / f"{name}.jsonl", lines), shape=shape)
        assert_equal(rollout.batch, expected.batch)
        assert rollout.completions.texts == expected.completions.texts
        assert rollout.completions.finished.tolist() == [True, False]


def test_example_of_the_docs_is_read(tmp_path):
    text = (pathlib.Path(__file__).parents[3] / "docs" / "rollouts.md").read_text()
    (tmp_path / "a.jsonl").write_text(text.split("```json\n")[1].split("```")[0])
    batch = read(tmp_path / "a.jsonl", shape=SMALL).batch
    assert np.asarray(batch.rewards).tolist() == [1.0, 0.5, 1.0, 0.0]
    assert np.asarray(batch.completion_mask).sum(-1).tolist() == [3, 2, 2, 0]
    assert np.asarray(batch.tokens)[1, :6].tolist() == [256, 49, 51, 67, 53, 257]


def test_list_of_rewards_gives_tokens_their_parts(tmp_path):
    rows = [trunk(rewards=[None, None, 0, 0.5, 0, None, 0.0, 1.0]) for _ in range(4)]
    batch = read(write(tmp_path / "a.jsonl", rows), shape=SMALL).batch
    assert np.asarray(batch.rewards).tolist() == [1.5] * 4
    assert np.asarray(batch.fields["token_rewards"])[0, len(PROMPT) :][:5].tolist() == [0.5, 0, 0, 0, 1.0]


def test_prompt_beyond_its_columns_continues_as_an_observation(tmp_path):
    """As an episode that forked does; a prompt of a completion is too long, and left out."""
    ids = [256, *range(65, 72), EOS]
    rows = [row(*ids, trained=[False] * 7 + [True, True]) for _ in range(4)]
    batch = read(write(tmp_path / "a.jsonl", rows), shape=SMALL).batch
    assert np.asarray(batch.tokens)[0, : len(ids)].tolist() == ids
    assert np.asarray(batch.completion_mask)[0].nonzero()[0].tolist() == [7, 8]


def test_row_without_a_trained_id_is_read_as_it_was(tmp_path):
    """Its reward stays in its group."""
    untrained = row(*PROMPT, 48, trained=[False] * 4, episode={"row": 1, "of": 4}, prompt_length=3, rewards=0.25)
    path = write(tmp_path / "a.jsonl", [trunk(), untrained, trunk(), trunk()])
    rollout = read(path, shape=SMALL)
    assert np.asarray(rollout.batch.rewards).tolist() == [0.0, 0.25, 0.0, 0.0]
    written = written_rows(rollout.completions)
    assert [written[1][name] for name in ("ids", "trained", "prompt_length")] == [[*PROMPT, 48], [False] * 4, 3]
    assert written[1]["episode"] == untrained["episode"]
    assert_equal(read(write(tmp_path / "b.jsonl", written), shape=SMALL).batch, rollout.batch)


CHILD = TREE[1]
BAD = {
    "ids: got [264], expected a list of ids from 0 to 263": row(264, trained=[True]),
    "ids: got an empty list, expected at least one id": row(trained=[]),
    "ids: given beside completion_ids; set only one of them": trunk(completion_ids=[1]),
    "trained: got None, expected a list of true and false": trunk(trained=None),
    "trained: got [1, 0], expected a list of true and false": trunk(trained=[1, 0]),
    "trained: got 2 values, expected one for each of ids": trunk(trained=[False, True]),
    "trained: got no true, expected a trained id": trunk(trained=[False] * 8),
    "trained: got true for the first id, expected false": trunk(trained=[True] * 8),
    "episode.row: got null, expected a row of the group": trunk(episode={"row": None, "of": 4}),
    "log_probs: got 2 numbers, expected 8, one for each id": trunk(log_probs=[-1.0, -1.0]),
    "log_probs: got 0.5, expected a list": trunk(log_probs=0.5),
    "log_probs: got [0, 0, 0, 0, 0, 0, 0, 0.5], expected finite numbers that are not": trunk(log_probs=[0] * 7 + [0.5]),
    "log_probs: missing, but not in the rows before": trunk(log_probs=None),
    "version: got [-1, -1, -1, -1, -1, -1, -1, -2], expected numbers of RL steps": trunk(version=[-1] * 7 + [-2]),
    "version: got 1 numbers, expected 8": trunk(version=[1]),
    "version: got ['a', 'a', 'a', 'a', 'a', 'a', 'a', 'a'], expected a list of integers": trunk(version="a"),
    "version: given beside token_versions; set only one": trunk(token_versions=[1] * 8),
    "rewards: got 2 numbers, expected 8, one for each id": trunk(rewards=[1.0, 2.0]),
    "rewards: got [0, 0, 0, 0, 0, 0.5, 0, 0], expected 0 or null for ids that": trunk(rewards=[0] * 5 + [0.5, 0, 0]),
    "rewards.reward: got 'a', expected a finite number": trunk(rewards="a"),
    "prompt_length: got 4, expected 1 to 3, the ids before the first": trunk(prompt_length=4),
    "prompt_length: got True, expected 1 to 3": trunk(prompt_length=True),
    "versions: unknown field; did you mean 'version'?": trunk(version=None, versions=1),
    "parent: got 1, expected {'row': an earlier row of the group": CHILD | {"parent": 1},
    "parent: got {'row': 0}, expected": CHILD | {"parent": {"row": 0}},
    "parent.row: got 2, expected an earlier row of the group, 0 to 1": CHILD | {"parent": {"row": 2, "tokens": 1}},
    "parent.row: got -1, expected an earlier row of the group, 0 to 1": CHILD | {"parent": {"row": -1, "tokens": 1}},
    "parent.row: got 0, expected an earlier row of the group, but this is the first one": CHILD | {"group": 7},
    "parent.tokens: got 9, expected 1 to 8, the ids of that row": CHILD | {"parent": {"row": 0, "tokens": 9}},
    "parent.tokens: got 0, expected 1 to 8, the ids of that row": CHILD | {"parent": {"row": 0, "tokens": 0}},
}


@pytest.mark.parametrize("problem", BAD)
def test_bad_sequence_is_named(tmp_path, problem):
    path = write(tmp_path / "a.jsonl", [trunk(), trunk(), BAD[problem]])
    with pytest.raises(UserError) as caught:
        open_source(context_of(path, *SMALL))
    assert str(caught.value).startswith(f"rollout.source.path: {path}, line 3: {problem}")


def test_sequences_without_needed_log_probs_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", [trunk(log_probs=None) for _ in range(4)])
    with pytest.raises(UserError, match="has no log_probs, which this config needs"):
        open_source(context_of(path, *SMALL, "kl.rollout.coef=0.1"))
