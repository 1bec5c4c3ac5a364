"""Recorded completions: what a run writes is what it trained on, read back row for row; mistakes name file and line."""

import codecs
import dataclasses
import gzip
import json
import logging

import jax
import numpy as np
import optax
import pytest
from tokenizers import Tokenizer, models

from tests import tiny
from train.config.errors import UserError
from train.data.tokenizers import ByteTokenizer
from train.data.tokenizers.folder import FolderTokenizer
from train.report.rollouts import read_parquet
from train.rl.state import policy_of
from train.rollouts.collect import collect
from train.rollouts.open import open_stream
from train.rollouts.recorded import record_rows, write_rows
from train.rollouts.recorded.files import JsonLinesFile, count_file, file_name, list_files, open_files
from train.rollouts.recorded.row_checks import with_checks
from train.rollouts.source import SourceError, batch_rows

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos_id
SOURCE = "rollout.source={{type: file, path: {path}, shuffle: {shuffle}}}"


def context_of(path, *overrides: str, shuffle: bool = True):
    source = SOURCE.format(path=path, shuffle=str(shuffle).lower())
    return tiny.context_of(tiny.config_of("rollout.prompts_per_step=2", source, *overrides))


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(prompt: int, sample: int, **changes) -> dict:
    """A completion whose numbers say which one it is."""
    ids = [prompt, sample, EOS]
    base = {"prompt_ids": [1, prompt], "completion_ids": ids, "log_probs": [-1.0 * prompt, -0.5, 0.0], "reward": sample}
    return {name: value for name, value in (base | changes).items() if value is not None}


ROWS = [row(prompt, sample) for prompt in range(5) for sample in range(2)]


def test_recording_is_read_back_row_for_row(tmp_path):
    """Also the float32 of a log-prob, and the reward that the task gave."""
    config = tiny.config_of(f"rollout.record={tmp_path / 'r'}")
    context = tiny.context_of(config)
    source = open_stream(context)
    source.update(policy_of(tiny.state_of(config, optax.identity()).trainable, None), 0)
    rollouts = [collect(context, source, step) for step in range(2)]
    assert sorted(file.name for file in (tmp_path / "r").iterdir()) == [
        "00000000.jsonl",
        "00000001.jsonl",
        "count.sealed",
    ]

    reading = tiny.context_of(tiny.config_of(SOURCE.format(path=tmp_path / "r", shuffle="false")))
    recorded = open_stream(reading)
    for step, rollout in enumerate(rollouts):
        again = collect(reading, recorded, step)
        assert again.completions.texts == rollout.completions.texts
        metrics = rollout.completions.metrics
        assert again.completions.metrics | metrics == metrics | {"log_probs_missing": 0.0}
        same = ("token_mask", "completion_mask", "rewards", "group_ids", "rollout_log_probs")
        for name in same:
            np.testing.assert_array_equal(getattr(again.batch, name), getattr(rollout.batch, name), err_msg=name)
        selected = np.asarray(rollout.batch.token_mask)
        np.testing.assert_array_equal(again.batch.tokens[selected], rollout.batch.tokens[selected])
    with pytest.raises(UserError, match=r"rollout\.record: got .* holds recordings already"):
        open_stream(context)
    open_stream(context, continued=True)


def test_kept_tokens_are_read_back(tmp_path):
    """With log-probs that are renormalised over them; the lists are as long as the longest of the file."""
    options = ("rollout.top_k=5", "rollout.top_p=0.7", "rollout.record_kept_tokens=true")
    config = tiny.config_of(f"rollout.record={tmp_path / 'r'}", *options)
    context = tiny.context_of(config)
    source = open_stream(context)
    source.update(policy_of(tiny.state_of(config, optax.identity()).trainable, None), 0)
    rollout = collect(context, source, 0)
    assert 0 < rollout.completions.metrics["rollout_kept_mass"] < 0.2
    reading = tiny.context_of(tiny.config_of(SOURCE.format(path=tmp_path / "r", shuffle="false")))
    batch = collect(reading, open_stream(reading), 0).batch
    np.testing.assert_array_equal(batch.rollout_log_probs, rollout.batch.rollout_log_probs)
    ids = np.asarray(rollout.batch.fields["kept_ids"])
    longest = (ids >= 0).sum(-1).max()
    np.testing.assert_array_equal(batch.fields["kept_ids"], ids[..., :longest])


def prompts_of(context, source, steps) -> list[list[int]]:
    return [collect(context, source, step).completions.tokens[::2, 1].tolist() for step in steps]


def test_epochs_are_permutations_and_resume_continues_them(tmp_path):
    path = write(tmp_path / "a.jsonl", ROWS)
    context = context_of(path)
    full = prompts_of(context, open_stream(context), range(10))
    flat = [prompt for step in full for prompt in step]
    epochs = [tuple(flat[start : start + 5]) for start in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len(set(epochs)) > 1
    assert prompts_of(context, open_stream(context), range(7, 10)) == full[7:]
    ordered = context_of(path, shuffle=False)
    assert prompts_of(ordered, open_stream(ordered), range(3)) == [[0, 1], [2, 3], [4, 0]]
    batch = collect(ordered, open_stream(ordered), 1).batch
    np.testing.assert_array_equal(batch.rewards, [0, 1, 0, 1])
    np.testing.assert_array_equal(batch.rollout_log_probs[0, 2:], [-2, -0.5, 0, *[0] * 4])


def test_texts_are_encoded_and_scored_like_a_run(tmp_path):
    texts = [("3", True), ("4", True), ("3", False), ("12", True)]
    rows = [
        {"prompt": "1+2=", "completion": t, "finished": f, "answer": 3, "group": i // 2}
        for i, (t, f) in enumerate(texts)
    ]
    context = context_of(write(tmp_path / "a.jsonl", rows), shuffle=False)
    rollout = collect(context, open_stream(context), 0)
    np.testing.assert_array_equal(rollout.batch.rewards, [1, 0, 0, 0])
    prompt = [TOKENIZER.bos_id, *TOKENIZER.encode("1+2=")]
    np.testing.assert_array_equal(rollout.batch.tokens[0, : tiny.PROMPT + 2], [*prompt, ord("3"), EOS])
    np.testing.assert_array_equal(rollout.batch.completion_mask.sum(-1), [2, 2, 1, 3])
    assert rollout.batch.rollout_log_probs is None


def test_group_may_be_a_multiple_without_long_rows(tmp_path, caplog):
    long = [row(9, 0, completion_ids=[1] * (tiny.NEW_TOKENS + 1), log_probs=[-1.0] * (tiny.NEW_TOKENS + 1)), row(9, 1)]
    rows = [row(7, sample) for sample in range(4)] + long
    context = context_of(write(tmp_path / "a.jsonl", rows), shuffle=False)
    with caplog.at_level(logging.WARNING):
        source = open_stream(context)
    assert "1 of 3 groups are longer than data.max_prompt_length = 5" in caplog.text
    np.testing.assert_array_equal(collect(context, source, 0).batch.rewards, [0, 1, 2, 3])
    np.testing.assert_array_equal(collect(context, source, 0).batch.group_ids, [0, 0, 1, 1])


def test_rows_of_too_many_tokens_are_left_out(tmp_path, caplog):
    """Of a whole sequence, whose prompt and completion fit each by themselves."""
    long = [row(9, sample, prompt_ids=[1, 9, 1, 1, 1]) for sample in range(2)]
    rows = [row(7, sample) for sample in range(4)] + long
    context = context_of(write(tmp_path / "a.jsonl", rows), "data.max_tokens=7", shuffle=False)
    with caplog.at_level(logging.WARNING):
        source = open_stream(context)
    assert "1 of 3 groups are longer than data.max_prompt_length = 5, data.max_completion_length = 4, " in caplog.text
    assert "data.max_tokens = 7 and are left out" in caplog.text
    batch = collect(context, source, 0).batch
    assert batch.tokens.shape == (4, 7)
    assert batch.token_mask.sum(1).tolist() == [5] * 4


def test_tokens_with_floors_have_no_log_prob(tmp_path):
    """Floors of vLLM, and null of SGLang: the tokens stay in their rows, and out of the loss."""
    rows = [row(7, sample) for sample in range(128)]
    rows[3]["log_probs"][1], rows[5]["log_probs"][0] = None, -9999.0
    context = context_of(write(tmp_path / "a.jsonl", rows), "rollout.samples_per_prompt=64", shuffle=False)
    rollout = collect(context, open_stream(context), 0)
    mask = np.asarray(rollout.batch.completion_mask)
    assert [tuple(indices) for indices in np.argwhere(rollout.completions.completion_mask & ~mask)] == [
        (3, 2 + 1),
        (5, 2),
    ]
    assert rollout.completions.metrics["log_probs_missing"] == 2 / (128 * 3)
    # Another recording of the rows has null where this one has it.
    written = record_rows(rollout.completions, batch_rows(context), 64, tiny.PROMPT)
    assert [written[index]["log_probs"] for index in (3, 5)] == [[-7.0, None, 0.0], [-9999.0, -0.5, 0.0]]
    assert "null" in json.dumps(written[3])


def test_recording_full_of_floors_is_refused(tmp_path):
    rows = [row(7, sample, log_probs=[-9999.0, -1.0, -1.0]) for sample in range(4)]
    context = context_of(write(tmp_path / "a.jsonl", rows))
    with pytest.raises(SourceError, match=r"rollout: 4 of the 12 sampled tokens have no log-prob of the sampler"):
        collect(context, open_stream(context), 0)


BAD = {
    "log_probs: got 1 numbers, expected 3, one for each id": row(1, 1, log_probs=[-1.0]),
    "log_probs: got [0.5, -1, -1], expected finite numbers that are not positive": row(1, 1, log_probs=[0.5, -1, -1]),
    "log_probs: missing, but not in the rows before": row(1, 1, log_probs=None),
    "log_probs: given without completion_ids": row(1, 1, completion_ids=None, completion="3"),
    "kept_ids: got 1 lists, expected 3, one for each id": row(1, 1, kept_ids=[[1]]),
    "kept_ids: got [[1], [-1], [257]], expected a list of ids for each": row(1, 1, kept_ids=[[1], [-1], [257]]),
    "kept_ids: got [2] for the completion id 1, expected it in the list": row(1, 1, kept_ids=[[1], [2], [257]]),
    "kept_ids: given without completion_ids": row(
        1, 1, completion_ids=None, log_probs=None, completion="3", kept_ids=[[1]]
    ),
    "kept_ids: given, but not in the rows before": row(1, 1, kept_ids=[[1], [1], [EOS]]),
    "completion_ids: got [264], expected a list of ids from 0 to 263": row(
        1, 1, completion_ids=[264], log_probs=[-1.0]
    ),
    "missing both completion_ids and completion": row(1, 1, completion_ids=None, log_probs=None),
    "missing both prompt_ids and prompt": row(1, 1, prompt_ids=None),
    "prompt_ids: got an empty list": row(1, 1, prompt_ids=[]),
    "rewards: got form, expected 'reward' among them": row(1, 1, reward=None, rewards={"form": 1}),
    "rewards: got form, reward, but the rows before have reward": row(1, 1, rewards={"form": 1}),
    "rewards.reward: got nan, expected a finite number": row(1, 1, reward=float("nan")),
    "finished: got 1, expected true or false": row(1, 1, finished=1),
    "routed_expert: unknown field; did you mean 'routed_experts'?": row(1, 1, routed_expert=[]),
    "logprobs: unknown field; did you mean 'log_probs'?": row(1, 1, log_probs=None, logprobs=[-1.0] * 3),
}


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_row_is_named(tmp_path, problem):
    path = write(tmp_path / "a.jsonl", [row(0, 0), row(0, 1), BAD[problem]])
    with pytest.raises(UserError) as caught:
        open_stream(context_of(path))
    assert str(caught.value).startswith(f"rollout.source.path: {path}, line 3: {problem}")


def test_unusable_files_are_named(tmp_path):
    cases = {
        "a.jsonl": ("{\n", "line 1: not JSON"),
        "b.jsonl": ("[]\n", "line 1: got b'[]\\n', expected an object a line"),
        "c.jsonl": ("\n", "line 1: got no row"),
        "d.csv": ("", "expected a file, or a directory of files, of .jsonl (JSON lines)"),
        "e.jsonl": (
            json.dumps(row(0, 0)) + "\n",
            "line 1: ends a group of 1 completions of one prompt, expected a multiple",
        ),
        # One group of two prompts: the second would be trained behind the first one.
        "g.jsonl": (
            "".join(json.dumps(row(prompt, 0, group=7)) + "\n" for prompt in range(2)),
            "line 1: ends a group of 1 completions of one prompt, expected a multiple",
        ),
    }
    for name, (text, problem) in cases.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError) as caught:
            open_stream(context_of(tmp_path / name))
        assert problem in str(caught.value)
    path = write(tmp_path / "f.jsonl", [row(0, sample, log_probs=None) for sample in range(2)])
    with pytest.raises(UserError, match="has no log_probs, which this config needs"):
        open_stream(context_of(path, "kl.rollout.coef=0.1"))


@pytest.mark.parametrize("name", ["prompt_ids", "group"])
def test_null_is_a_missing_field(tmp_path, name):
    """Prompts 0, 1, 2, 2 are no two groups of two."""
    rows = [{"prompt": f"1+{n}=", "completion": "2", "reward": 1.0, name: None} for n in (0, 1, 2, 2)]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match="line 1: ends a group of 1 completions of one prompt"):
        open_stream(context_of(path, "optim.share_prompts=false"))


def test_text_without_tokens_is_named_with_its_line(tmp_path):
    context = context_of(write(tmp_path / "a.jsonl", [row(0, 0), row(0, 1)]))
    tokenizer = Tokenizer(models.BPE({"1": 0, "<end>": 1}, []))
    few = FolderTokenizer(tokenizer, special={}, eos_ids=[1])
    write(tmp_path / "a.jsonl", [{"prompt": "1", "completion": text, "reward": 1.0} for text in ("1", "2")])
    with pytest.raises(UserError) as caught:
        open_stream(dataclasses.replace(context, tokenizer=few))
    message = (
        f"rollout.source.path: {tmp_path / 'a.jsonl'}, line 2: model.path: the tokenizer cannot spell '2' of the text"
    )
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("encode", "problem"),
    [
        (gzip.compress, "compressed by gzip, expected text; decompress it: gunzip FILE"),
        (lambda content: content.decode().encode("utf-16"), "UTF-16, expected UTF-8"),
        (lambda content: b"[" + content.replace(b"\n", b",") + b"]", "expected an object a line"),
    ],
)
def test_recording_in_another_form_is_named(tmp_path, encode, problem):
    path = write(tmp_path / "a.jsonl", [row(0, 0), row(0, 1)])
    path.write_bytes(encode(path.read_bytes().strip()))
    with pytest.raises(UserError) as caught:
        open_stream(context_of(path))
    assert str(caught.value).startswith(f"rollout.source.path: {path}, line 1: ")
    assert problem in str(caught.value)


def test_recording_may_begin_with_a_mark(tmp_path):
    path = write(tmp_path / "a.jsonl", [row(0, 0), row(0, 1)])
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    assert open_stream(context_of(path)).row_count == 2


def test_parquet_gives_the_same_rows(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    single = context_of(tmp_path / "a.parquet")
    other = context_of(write(tmp_path / "a.jsonl", ROWS))
    for step in (0, 3):
        batches = [jax.device_get(collect(context, open_stream(context), step).batch) for context in (single, other)]
        jax.tree.map(np.testing.assert_array_equal, *batches)


def test_missing_pyarrow_error_names_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"")
    with pytest.raises(UserError, match="is Parquet, which needs pyarrow; install it, or convert"):
        open_stream(context_of(tmp_path / "a.parquet"))


def test_every_damage_to_a_recorded_file_is_named(tmp_path):
    path = tmp_path / "00000000.jsonl"
    write_rows(tmp_path, 0, [row(1, sample, completion="a é") for sample in range(3)])
    content, rows = path.read_bytes(), list(JsonLinesFile(path))
    assert [record for _, _, record in rows] == [row(1, sample, completion="a é") for sample in range(3)]
    assert JsonLinesFile(path).read(rows[2][0]) == rows[2][2]
    for position in range(len(content)):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :])
        # A flip in the name of a check makes a row of others of it, whose values are unharmed.
        if path.read_bytes().count(b'"kljax_check": ') == 3:
            with pytest.raises(UserError, match=rf"{path}, line "):
                list(JsonLinesFile(path))
    lines = content.splitlines(keepends=True)
    path.write_bytes(content * 2)
    assert len(list(JsonLinesFile(path))) == 6  # two steps in one file
    for left, message in (
        (lines[:2], "got 2 rows, expected 3"),
        (lines[1:], "got row 2 of 3, expected row 1"),
        ([], "got no row"),
    ):
        path.write_bytes(b"".join(left))
        with pytest.raises(UserError, match=message):
            list(JsonLinesFile(path))
    path.write_bytes(content.replace(b"-0.5", b"-0.6"))
    with pytest.raises(ValueError, match="the row is damaged"):
        JsonLinesFile(path).read(0)


NEWER = r"a\.{suffix}.*: got 3, expected at most 2: a later release of kljax recorded it; update kljax"


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("checked", [True, False])
def test_row_of_a_later_format_is_refused(tmp_path, suffix, checked):
    """With a check that this release does not compute, too; the format of this release is no field of the user's."""
    path = tmp_path / f"a.{suffix}"

    def save(rows):
        if suffix != "parquet":
            write(path, rows)
        else:
            parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
            parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    check = {"kljax_check": "1/2 of another kind"} if checked else {}
    save([{**row(1, sample), "kljax_format": 3, **check} for sample in range(2)])
    with pytest.raises(UserError, match=NEWER.format(suffix=suffix)):
        open_stream(context_of(path))
    save(list(with_checks(ROWS[:4])) if checked else [{**one, "kljax_format": 1} for one in ROWS[:4]])
    records = [record for _, _, record in open_files(path)[0]]
    assert records == ROWS[:4]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [(b'{"format": 3, "step": 1}', NEWER), (b"{", r"a\.{suffix}: the metadata 'kljax' are damaged")],
)
def test_parquet_of_a_later_format_is_refused(tmp_path, metadata, message):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    table, path = pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet"
    parquet.write_table(table.replace_schema_metadata({"kljax": metadata}), path)
    with pytest.raises(UserError, match="rollout.source.path: .*" + message.format(suffix="parquet")):
        open_stream(context_of(path))
    (note,) = read_parquet(path.rename(tmp_path / "00000001.parquet").parent, 10).notes
    assert "00000001.parquet (" in note
    assert "'kljax' are damaged" in note or "update kljax" in note
    parquet.write_table(table.replace_schema_metadata({"kljax": b'{"format": 1}', "theirs": b"{"}), path)
    assert len(list(open_files(path)[0])) == len(ROWS)


def test_loss_of_any_recorded_file_is_named(tmp_path):
    names = [file_name(step) for step in range(3)]
    for step, name in enumerate(names):
        (tmp_path / name).write_text("{}\n")
        count_file(tmp_path, step)
    count_file(tmp_path, 1)  # a resumed run records a step again
    assert [file.name for file in list_files(tmp_path)] == names
    for name in names:
        (tmp_path / name).rename(tmp_path / "elsewhere")
        with pytest.raises(UserError, match=rf"lacks {name}, 1 of the 3 files that a run recorded there"):
            list_files(tmp_path)
        (tmp_path / "elsewhere").rename(tmp_path / name)
