"""GSM8K and MATH by math-verify; records from files and by name; Countdown; a reward function of one's own."""

import ast
import itertools
import json
import multiprocessing
import operator
import pickle
import random
import signal
import subprocess
import sys
import time
from fractions import Fraction
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from train.config.errors import UserError
from train.config.load import parse
from train.data.tasks import Example, boxed_math, countdown, gsm8k, jsonl, load_task, rewards
from train.data.tasks.arithmetic_text import MAX_LENGTH, NotArithmetic, evaluate
from train.data.tasks.equality import Judge
from train.data.tasks.records import read_records

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")


def write_lines(path, *lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")
    return str(path)


@pytest.fixture(scope="module")
def judge():
    judge = Judge(workers=1, seconds=20)
    yield judge
    judge.close()


# ---- math-verify


def test_sampled_text_cannot_stall_the_verifier(judge):
    assert judge.equal("1/2", r"so \boxed{0.5}")  # started
    patient, judge._seconds = judge._seconds, 0.3
    try:
        assert not judge.equal("9", r"\boxed{9^{9^{9^9}}}")
    finally:
        judge._seconds = patient
    assert judge.gave_up == 1
    assert judge.equal(r"\frac{3\sqrt{2}}{2}", r"$$\boxed{\frac{3}{\sqrt2}}$$")  # a new one was started


# Refuses the limit of memory as macOS does, or sets it; answers a question with a number of bytes that it could get.
SERVE = """
import resource, sys
from train.data.workers.serve import serve
def refuse(*_):
    raise ValueError("current limit exceeds maximum limit")
if sys.argv[1] == "refused":
    resource.setrlimit = refuse
def answer(size):
    try:
        return len(bytes(size))
    except MemoryError:
        return 0
serve(answer, memory=1 << 30)
"""


@pytest.mark.parametrize("limit", ["refused", pytest.param("set", marks=ON_LINUX)])
def test_worker_answers_without_a_memory_limit(limit):
    pipe, child_end = multiprocessing.Pipe()
    with child_end:
        command = [sys.executable, "-c", SERVE, limit, str(child_end.fileno())]
        process = subprocess.Popen(command, pass_fds=[child_end.fileno()])
    answers = []
    with pipe:
        for size in (8, 2 << 30):
            pipe.send_bytes(pickle.dumps({"question": size, "seconds": 60, "cpu_seconds": 60}))
            answers.append(json.loads(pipe.recv_bytes()))
    assert (process.wait(60), answers) == (0, [8, 0 if limit == "set" else 2 << 30])


def test_math_verify_limit_counts_working_time(monkeypatch):
    from math_verify.errors import TimeoutException

    from train.data.workers import equality

    def ring(*_):
        raise TimeoutException

    monkeypatch.setattr(equality, "SECONDS", 0.05)
    before = signal.signal(signal.SIGVTALRM, ring)
    try:
        with equality._limit():
            time.sleep(0.3)  # as on a machine that is busy with others
        with pytest.raises(TimeoutException), equality._limit():
            sum(1 for _ in itertools.count())
    finally:
        signal.signal(signal.SIGVTALRM, before)


@pytest.mark.parametrize(
    ("gold", "text", "equal"),
    [
        ("42", "The answer is 42.", True),
        ("42", "41 and 42, no, 43", False),
        ("1000", r"\boxed{1,000}", True),
        (r"\text{Evelyn}", r"\boxed{Evelyn}", True),
        (r"(3, \pi)", r"\boxed{(3,\pi)}", True),
        (r"x+1", r"\boxed{1+x}", True),
        (r"x+1", r"\boxed{2+x}", False),
        ("42", "", False),
        ("42", "\ud800 \\boxed{", False),
    ],
)
def test_math_verify_knows_equal_answers(judge, gold, text, equal):
    assert judge.equal(gold, text) is equal


@pytest.mark.parametrize(
    ("completion", "finished", "correct", "format_"),
    [
        ("so #### 42", True, 1, 1),
        ("so #### 42", False, 1, 0),
        ("The answer is 42.", True, 1, 0),
        (r"so $\boxed{42}$", True, 1, 0),
        (r"#### \frac{84}{2}", True, 1, 0),
        ("42, I think. #### 41", True, 0, 1),
        ("42 ####", True, 0, 0),
        ("no number", True, 0, 0),
        ("", True, 0, 0),
    ],
)
def test_gsm8k_verified_by_math_verify(judge, completion, finished, correct, format_):
    rewards = gsm8k.score_mathematically(Example("", "42", ""), completion, finished, equal=judge.equal)
    assert rewards == {"reward": correct + 0.1 * format_, "correct": correct, "format": format_}


MATH = {
    "problem": "What is $1/2+1/2$?",
    "solution": r"It is $\boxed{\frac{2}{2}}$, or $\boxed{1}$.",
    "level": "Level 1",
}


def test_math_reads_problem_and_the_last_box(tmp_path):
    path = write_lines(tmp_path / "math.jsonl", MATH, {**MATH, "answer": "one"})
    first, second = boxed_math.read_examples(path, "data.train")
    assert (first.answer, second.answer) == ("1", "one")
    assert first.prompt == "Problem: What is $1/2+1/2$?\nSolution:"
    assert first.messages == (("user", f"What is $1/2+1/2$?\n\n{boxed_math.INSTRUCTION}"),)
    bad = write_lines(tmp_path / "bad.jsonl", {**MATH, "solution": r"It is \boxed{1."})
    with pytest.raises(UserError, match=r"bad\.jsonl, line 1: field 'solution': expected a text with \\boxed"):
        boxed_math.read_examples(bad, "data.train")


@pytest.mark.parametrize(
    ("completion", "finished", "correct", "format_"),
    [
        (r"so \boxed{\frac12}", True, 1, 1),
        (r"so \boxed{0.5}", True, 1, 1),
        (r"so \boxed{0.5}", False, 1, 0),
        ("so $1/2$.", True, 1, 0),
        (r"<think>\boxed{1/2}</think> so \boxed{1/3}", True, 0, 1),
        (r"<think>\boxed{1/2}</think> ", True, 0, 0),
        (r"\boxed{1}", True, 0, 1),
        ("", True, 0, 0),
    ],
)
def test_math_rewards(judge, completion, finished, correct, format_):
    rewards = boxed_math.score(Example("", r"\frac{1}{2}", ""), completion, finished, equal=judge.equal)
    assert rewards == {"reward": correct + 0.1 * format_, "correct": correct, "format": format_}


# ---- records


def test_records_by_the_name_of_a_data_set(monkeypatch):
    calls = []

    def load_dataset(*arguments, **settings):
        calls.append((arguments, settings))
        return [] if arguments[0] == "empty" else [{"question": "Q?", "answer": "#### 7"}]

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    for name in ("datasets:openai/gsm8k", "datasets:openai/gsm8k:test", "datasets:openai/gsm8k:main:test"):
        assert gsm8k.read_examples(name, "data.train")[0].answer == "7"
    assert calls == [
        (("openai/gsm8k", None), {"split": "train"}),
        (("openai/gsm8k", None), {"split": "test"}),
        (("openai/gsm8k", "main"), {"split": "test"}),
    ]
    with pytest.raises(UserError, match=r"datasets:math, row 0: field 'problem' is missing, got answer, question"):
        boxed_math.read_examples("datasets:math", "data.train")
    with pytest.raises(UserError, match=r"data\.eval: datasets:empty holds no examples"):
        gsm8k.read_examples("datasets:empty", "data.eval")
    with pytest.raises(UserError, match=r"data\.eval: got 'datasets:a:b:c:d'"):
        gsm8k.read_examples("datasets:a:b:c:d", "data.eval")


def test_missing_library_error_tells_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"data\.train: 'datasets:a/b' is read by the library datasets, which is not"):
        read_records("datasets:a/b", "data.train", expected="'question'")


# ---- countdown

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def python_value(node) -> Fraction:
    """An oracle of its own: Python's grammar, in fractions."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp):
        return -python_value(node.operand)
    return OPERATIONS[type(node.op)](python_value(node.left), python_value(node.right))


def random_expression(draw: random.Random, depth: int) -> str:
    if depth == 0 or draw.random() < 0.2:
        return str(draw.randrange(0, 20))
    left, right = (random_expression(draw, depth - 1) for _ in range(2))
    text = f"{left}{draw.choice(['', ' '])}{draw.choice('+-*/')}{right}"
    return draw.choice([text, f"({text})", f"-({text})"])


def test_arithmetic_is_parsed_like_python():
    draw, values = random.Random(0), 0
    for _ in range(500):
        text = random_expression(draw, 4)
        if len(text) > MAX_LENGTH:
            continue
        try:
            expected = python_value(ast.parse(text.strip(), mode="eval").body)
        except ZeroDivisionError:
            with pytest.raises(NotArithmetic, match="division by zero"):
                evaluate(text)
            continue
        assert evaluate(text).value == expected, text
        values += 1
    assert values > 200


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1+",
        "(1",
        "1)",
        "1 2",
        "2**3",
        "2//1",
        "1.5",
        "a",
        "1,000",
        "٣",
        "__import__('os')",
        "9" * 300,
        "(" * 150 + "1",
    ],
)
def test_other_expressions_are_not_arithmetic(text):
    with pytest.raises(NotArithmetic):
        evaluate(text)


PROBLEM = Example("", "46: 3 7 25", "")


@pytest.mark.parametrize(
    ("completion", "finished", "correct", "format_"),
    [
        (" 25+7*3", True, 1, 1),
        (" 25+7*3", False, 1, 0),
        ("hm, 3*7\n3*7+25\n\n", True, 1, 1),
        ("<think>7</think> <answer> (3*7)+25 </answer> done", True, 1, 1),
        ("<answer>1</answer><answer>25+7*3</answer>", True, 1, 1),
        ("25+7*3 <answer>46</answer>", True, 0, 1),
        ("25+7+7+7", True, 0, 1),
        ("46", True, 0, 1),
        ("25+7*3=46", True, 0, 0),
        ("25+7*3 is it", True, 0, 0),
        ("", True, 0, 0),
    ],
)
def test_countdown_rewards_the_target_with_each_number_once(completion, finished, correct, format_):
    rewards = countdown.score(PROBLEM, completion, finished)
    assert rewards == {"reward": correct + 0.1 * format_, "correct": correct, "format": format_}


def test_countdown_problems_differ_fit_and_are_solvable(caplog):
    config, _ = parse(
        {"steps": 1, "task": "countdown", "data": {"problems": 300, "numbers": 4}, "eval": {"prompts": 40}}
    )
    task = load_task(config)
    assert (len(task.train), len(task.eval)) == (300, 40)
    everything = [*task.train, *task.eval]
    assert len({(e.answer.split(":")[0], *sorted(e.answer.split()[1:])) for e in everything}) == 340
    assert all(task.score(e, e.solution, True) == {"reward": 1.1, "correct": 1, "format": 1} for e in everything)
    assert all(len(e.prompt) < 96 and len(e.solution) < 64 for e in everything)
    assert load_task(config).train[:5] == task.train[:5]
    assert not caplog.text
    small = countdown.load(problems=500, numbers=2, max_number=3, held_out=10)
    assert "500" in caplog.text
    assert small.train
    assert small.eval


# ---- one's own

REWARD = """
def length(record, completion, finished):
    return {"reward": len(completion) / record["goal"], "ended": finished}
def number(record, completion, finished):
    return 1
def broken(record, completion, finished):
    return record["nothing"]
def nan(record, completion, finished):
    return float("nan")
constant = 3
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "my_reward.py").write_text(REWARD)
    lines = (
        {"prompt": "Say a", "goal": 4, "answer": 7},
        {"prompt": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Say b"}], "goal": 2},
    )
    path = write_lines(tmp_path / "own.jsonl", *lines)

    def settings(function):
        return {"train": path, "eval": path, "reward": f"{tmp_path / 'my_reward.py'}:{function}"}

    def load(function="length", **data):
        config, _ = parse({"steps": 1, "task": "jsonl", "data": settings(function) | data})
        return load_task(config)

    load.settings = settings
    return load


def test_a_reward_function_sees_the_record(own):
    task = own()
    first, second = task.train
    assert (first.prompt, first.answer, first.solution, first.messages) == ("Say a", "7", "", ())
    assert second.conversation() == (("system", "Be brief"), ("user", "Say b"))
    assert second.prompt == "system: Be brief\nuser: Say b"
    assert task.score(first, "aaaa", True) == {"reward": 1.0, "ended": 1.0, "correct": 1.0}
    assert task.score(second, "b", False) == {"reward": 0.5, "ended": 0.0, "correct": 0.0}
    assert own("number").score(first, "", True) == {"reward": 1.0, "correct": 1.0}


def test_worker_processes_score_as_this_process_does(own):
    """Also numbers of NumPy, and records and completions with characters that UTF-8 does not have."""
    config, _ = parse({"steps": 1, "task": "jsonl", "rewards": {"workers": 2}, "data": own.settings("length")})
    alone, tasks = own(), load_task(config)
    assert tasks.workers == 2
    texts = ["", "a", "\ud800 \n", "abc" * 5]
    examples, finished = [alone.train[row % 2] for row in range(4)], np.array([True, False, True, True])
    expected = rewards.judge(alone, examples, texts, finished)
    scored = rewards.judge(tasks, examples, texts, finished)
    assert expected["ended"].tolist() == [1, 0, 1, 1]
    assert {name: values.tolist() for name, values in scored.items()} == {
        name: values.tolist() for name, values in expected.items()
    }


def test_only_user_tasks_have_worker_processes():
    with pytest.raises(UserError, match=r"rewards\.workers: task gsm8k does not read it, only jsonl"):
        parse({"steps": 1, "task": "gsm8k", "rewards": {"workers": 2}})
    with pytest.raises(UserError, match=r"rewards\.timeout: got .*, expected a number > 0 and <= 1_000_000"):
        parse({"steps": 1, "task": "jsonl", "rewards": {"timeout": 1e300}})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("broken", r"my_reward\.py:broken for the prompt 'Say a' and the completion 'x': KeyError: 'nothing'"),
        (
            "nan",
            r"my_reward\.py:nan for the prompt 'Say a' .* returned 'reward': nan, expected names and finite numbers",
        ),
    ],
)
def test_reward_function_error_shows_its_example(own, function, message):
    task = own(function)
    with pytest.raises(UserError, match=message):
        task.score(task.train[0], "x", True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"reward": "no_such_module:f"}, r"data\.reward: cannot import 'no_such_module:f': ModuleNotFoundError"),
        (
            {"reward": "missing/file.py:f"},
            r"cannot import '.*missing/file\.py:f': ModuleNotFoundError: there is no file",
        ),
        ({"reward": "json:nothing"}, r"data\.reward: cannot import 'json:nothing': AttributeError"),
        ({"reward": "json:__doc__"}, r"data\.reward: got 'json:__doc__', a str, expected a function"),
        ({"reward": "json"}, r"data\.reward: got 'json', expected module:function"),
        ({"reward": None}, r"data\.reward: missing; task jsonl needs a reward function"),
        ({"prompt_field": "goal"}, r"own\.jsonl, line 1: field 'goal': got 4, expected a non-empty string"),
        ({"prompt_field": "text"}, r"own\.jsonl, line 1: field 'text' is missing, got answer, goal, prompt"),
        ({"eval": None}, r"data\.eval: missing; task jsonl needs a file"),
        ({"numbers": 4}, r"data\.numbers: task jsonl does not read it, only countdown"),
    ],
)
def test_mistakes_of_a_user_task_are_named(own, data, message):
    with pytest.raises(UserError, match=message):
        own(**data)


def test_messages_without_role_and_content_are_named(tmp_path):
    path = write_lines(tmp_path / "bad.jsonl", {"prompt": [{"role": "user"}]})
    with pytest.raises(
        UserError, match=r"line 1: field 'prompt': expected text, or messages with 'role' and 'content'"
    ):
        jsonl.read_examples(path, "data.train", prompt="prompt", answer="answer", solution="solution")


def test_verifier_of_gsm8k_is_chosen_by_config(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", {"question": "How many?", "answer": "#### 42"})
    data = SimpleNamespace(train=path, held_out=path)
    strict = gsm8k.load(train=data.train, held_out=data.held_out, judge="strict")
    lenient = gsm8k.load(train=data.train, held_out=data.held_out, judge="math_verify")
    assert (strict.workers, lenient.workers) == (1, 2)
    assert strict.score(strict.train[0], "#### 42", True) == lenient.score(strict.train[0], "#### 42", True)
