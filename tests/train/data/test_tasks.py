import bz2
import gzip
import json
import lzma
import os
from types import SimpleNamespace

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from train.config.errors import UserError
from train.data.tasks import Example, arithmetic, gsm8k, load_task
from train.data.tasks.jsonl import read_examples
from train.data.tasks.records import read_records
from train.data.tasks.task import FORMAT_WEIGHT


def config(**data):
    fields = {"max_operand": 9, "operations": "+", "error_rate": 0.0, "solutions": 1}
    fields |= {"train": None, "eval": None, "judge": "strict"}
    task = "gsm8k" if data.get("train") else "arithmetic"
    return SimpleNamespace(
        task=task,
        data=SimpleNamespace(**(fields | data)),
        eval=SimpleNamespace(prompts=20),
        rewards=SimpleNamespace(weights=None),
    )


def prompts(examples):
    return [example.prompt for example in examples]


def write_lines(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


# ---- arithmetic


@pytest.mark.parametrize(("operations", "total"), [("+", 100), ("+-", 200)])
def test_arithmetic_splits_are_disjoint_and_complete(operations, total):
    task = load_task(config(operations=operations))
    everything = prompts(task.train) + prompts(task.eval)
    assert len(task.eval) == 20
    assert len(everything) == len(set(everything)) == total
    assert {p[1] for p in prompts(task.eval)} == set(operations)


@given(st.sampled_from(arithmetic.load(max_operand=12, operations="+-", held_out=10).train))
def test_arithmetic_answers_are_right(example):
    assert int(example.answer) == eval(example.prompt.removesuffix("="))
    assert example.solution == example.answer


def test_arithmetic_split_depends_on_its_seed_only():
    first, again, other = (arithmetic.load(max_operand=9, operations="+", held_out=20, seed=s) for s in (0, 0, 1))
    assert first == again
    assert set(prompts(first.eval)) != set(prompts(other.eval))
    assert prompts(first.eval) != sorted(prompts(first.eval))


def test_arithmetic_rewards_only_exact_finished_answers():
    task = load_task(config())
    example = Example("2-5=", "-3", "-3")
    assert task.score(example, "-3", True) == {"reward": 1.0, "correct": 1.0}
    for completion, finished in [("-3", False), ("-3 ", True), ("3", True), ("", True), ("-33", True), ("-03", True)]:
        assert task.score(example, completion, finished) == {"reward": 0.0, "correct": 0.0}


# ---- gsm8k

GOOD = {"question": "How many?", "answer": "6*7 = <<6*7=42>>42\n#### 42"}


def test_gsm8k_reads_question_and_answer(tmp_path):
    train = write_lines(tmp_path / "train.jsonl", GOOD, "", {**GOOD, "answer": "#### $1,250.", "extra": 1})
    held_out = write_lines(tmp_path / "eval.jsonl", {"question": "Ünï?", "answer": "#### -3"})
    task = load_task(config(train=str(train), eval=str(held_out)))
    assert task.name == "gsm8k"
    assert task.train[0] == Example(
        prompt="Question: How many?\nAnswer:",
        answer="42",
        solution=" 6*7 = <<6*7=42>>42\n#### 42",
        messages=(("user", f"How many?\n\n{gsm8k.INSTRUCTION}"),),
    )
    assert task.train[1].answer == "1250"
    assert [(e.prompt, e.answer) for e in task.eval] == [("Question: Ünï?\nAnswer:", "-3")]


def test_gsm8k_solutions_get_the_full_reward(tmp_path):
    example = gsm8k.read_examples(write_lines(tmp_path / "a.jsonl", GOOD), "data.train")[0]
    total = 1 + FORMAT_WEIGHT
    assert gsm8k.score(example, example.solution, True) == {"reward": total, "correct": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("completion", "finished", "correct", "format_"),
    [
        ("so #### 42", True, 1, 1),
        ("so #### 42", False, 1, 0),
        ("so #### 42.0", True, 1, 1),
        ("so #### $42.", True, 1, 1),
        ("so #### +42\n", True, 1, 1),
        ("so ####42", True, 1, 1),
        ("so #### 42 apples", True, 1, 0),
        ("#### 41 then #### 42", True, 1, 0),
        ("#### 42 then #### 41", True, 0, 0),
        ("#### 41", True, 0, 1),
        ("#### 42abc", True, 0, 0),
        ("42", True, 0, 0),
        ("42 ####", True, 0, 0),
        ("#### nan", True, 0, 0),
        ("#### 4_2", True, 0, 0),
        ("#### ٤٢", True, 0, 0),
        ("", True, 0, 0),
    ],
)
def test_gsm8k_verifier(completion, finished, correct, format_):
    rewards = gsm8k.score(Example("", "42", ""), completion, finished)
    assert rewards == {"reward": correct + 0.1 * format_, "correct": correct, "format": format_}


def test_gsm8k_numbers_compare_as_decimals():
    assert gsm8k.parse_number("-$1,234.50") == gsm8k.parse_number("-1234.5")
    assert gsm8k.parse_number(".5") == gsm8k.parse_number("0.50")
    assert gsm8k.score(Example("", "0.1", ""), "#### 0.1000000000000000055", True)["correct"] == 0
    assert gsm8k.score(Example("", "1000000", ""), "#### 1,000,000", True)["correct"] == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "How many?"}, "line 2: field 'answer' is missing, got question"),
        ({"answer": "#### 1"}, "line 2: field 'question' is missing, got answer"),
        ({}, "line 2: field 'question' is missing, got no fields"),
        ({**GOOD, "question": 3}, "line 2: field 'question': got 3, expected a non-empty string"),
        ({**GOOD, "answer": " "}, "line 2: field 'answer': got ' ', expected a non-empty string"),
        ({**GOOD, "answer": "42"}, "line 2: field 'answer': expected a text that ends in '#### number', got '42'"),
        ({**GOOD, "answer": "#### many"}, "line 2: field 'answer'"),
        ("[1]", "line 2: got list, expected an object"),
        ('{"question": "a', r"line 2: not JSON \("),
    ],
)
def test_gsm8k_malformed_lines_are_named(tmp_path, line, message):
    path = write_lines(tmp_path / "bad.jsonl", GOOD, line)
    with pytest.raises(UserError, match=rf"bad\.jsonl, {message}"):
        gsm8k.read_examples(path, "data.train")


def test_gsm8k_unusable_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"data\.train: cannot read .*missing\.jsonl: No such file"):
        gsm8k.read_examples(tmp_path / "missing.jsonl", "data.train")
    with pytest.raises(UserError, match=r"data\.eval: .*empty\.jsonl holds no examples"):
        gsm8k.read_examples(write_lines(tmp_path / "empty.jsonl", "", " "), "data.eval")
    (tmp_path / "latin.jsonl").write_bytes(b'\n{"question": "\xe9"}\n')
    with pytest.raises(UserError, match=r"latin\.jsonl, line 2: not UTF-8"):
        gsm8k.read_examples(tmp_path / "latin.jsonl", "data.eval")
    assert gsm8k.read_examples(None, "data.eval") == []


ROWS = [GOOD, {**GOOD, "question": "Wie viele, naïve?", "list": [1, {"a": "b"}]}]
LINES = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)


@pytest.mark.parametrize(
    "content",
    [
        LINES.encode(),
        LINES.encode("utf-8-sig"),
        b"\n".join(line.encode("utf-8-sig") for line in LINES.split("\n")),
        LINES.replace("\n", "\r\n\r\n").encode(),
        json.dumps(ROWS).encode(),
        json.dumps(ROWS, indent=2).encode("utf-8-sig"),
        b" \n" + json.dumps(ROWS, indent=2).replace("\n", "\r\n").encode(),
    ],
)
def test_records_are_read_in_usual_forms(tmp_path, content):
    (tmp_path / "rows").write_bytes(content)
    records = read_records(tmp_path / "rows", "data.train", expected="'question'")
    assert [dict(record.fields) for record in records] == ROWS


def test_records_of_parquet_lack_empty_cells(tmp_path):
    rows = [
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "3", "n": 1},
        {"prompt": None, "answer": None, "n": 2, "nested": {"a": 1, "b": None}},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows[::-1]), tmp_path / "rows.parquet")
    last, first = read_records(tmp_path / "rows.parquet", "data.train", expected="'prompt'")
    assert first.fields == rows[0]
    assert last.fields == {"n": 2, "nested": {"a": 1}}
    assert last.where == f"{tmp_path / 'rows.parquet'}, row 1"
    names = {"prompt": "prompt", "answer": "answer", "solution": "solution"}
    with pytest.raises(UserError, match=r"rows\.parquet, row 1: field 'prompt' is missing, got n, nested"):
        read_examples(tmp_path / "rows.parquet", "data.train", **names)
    (example,) = read_examples(write_lines(tmp_path / "a.jsonl", {"prompt": "a", "answer": None}), "", **names)
    assert example.answer == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LINES.encode("utf-16"), r"rows: UTF-16, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW"),
        (LINES.encode("utf-16-be"), r"rows: UTF-16, expected UTF-8"),
        (gzip.compress(LINES.encode()), r"rows: compressed by gzip, expected text; decompress it: gunzip FILE"),
        (bz2.compress(LINES.encode()), r"rows: compressed by bzip2"),
        (lzma.compress(LINES.encode()), r"rows: compressed by xz"),
        (b"PAR1 or not", r"rows cannot be read as Parquet"),
        (b"[]", r"rows holds no examples"),
        (b'[{"a": 1, "a": 2}]', r"rows: JSON that cannot be used \(duplicate key 'a'\)"),
        (b"[1]", r"rows, entry 1: got int, expected an object with 'question'"),
        (b"[1]\n[2]", r"rows, line 1: got list, expected an object with 'question'"),
        (json.dumps(ROWS[0], indent=1).encode(), r"rows, line 1: not JSON \(.*\); expected one object a line"),
        (b"question,answer\n1,2\n", r"rows, line 1: not JSON \(.*\); expected one object a line"),
    ],
)
def test_records_in_other_forms_are_refused(tmp_path, content, message):
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_records(tmp_path / "rows", "data.train", expected="'question'")


def test_records_are_read_of_regular_files(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, kind in ((tmp_path / "fifo", "no regular file"), (tmp_path, "a directory")):
        with pytest.raises(UserError, match=f"data.eval: cannot read .*: it is {kind}, expected a file of JSON lines"):
            read_records(path, "data.eval", expected="'question'")


def test_wrong_solutions_are_in_the_corpus_alone():
    clean = arithmetic.load(max_operand=49, operations="+", held_out=100)
    mixed = arithmetic.load(max_operand=49, operations="+", held_out=100, error_rate=0.3)
    assert [(e.prompt, e.answer) for e in mixed.train] == [(e.prompt, e.answer) for e in clean.train]
    slips = [int(e.solution) - int(e.answer) for e in mixed.train]
    assert set(slips) == {0, *arithmetic.SLIPS}
    assert 0.25 < sum(slip != 0 for slip in slips) / len(slips) < 0.35
    assert all(e.solution == e.answer for e in clean.train)
    right = mixed.train[0]
    assert mixed.score(right, right.answer, True)["correct"] == 1


def test_extra_solutions_have_new_errors_in_training_alone():
    operation = arithmetic.load(max_operand=9, operations="+", held_out=20, error_rate=0.5)
    four = arithmetic.load(max_operand=9, operations="+", held_out=20, error_rate=0.5, solutions=4)
    assert four.eval == operation.eval
    assert four.train[:80] == operation.train
    assert len(four.train) == 4 * 80
    copies = [four.train[start : start + 80] for start in range(0, 320, 80)]
    assert all(prompts(copy) == prompts(operation.train) for copy in copies)
    assert all(example.answer == str(eval(example.prompt.removesuffix("="))) for example in four.train)
    solutions = [tuple(example.solution for example in copy) for copy in copies]
    assert len(set(solutions)) == 4
    slips = [int(example.solution) - int(example.answer) for example in four.train]
    assert set(slips) == {0, *arithmetic.SLIPS}
    assert 0.4 < sum(slip != 0 for slip in slips) / len(slips) < 0.6
