"""Environments in worker processes: two forms, and failures that are told apart from those of the policy."""

from contextlib import closing

import pytest

from tests import tiny
from tests.train.data.test_tokenizer_folder import FOLDERS
from train.config.environment import EnvironmentSection
from train.config.errors import UserError
from train.data.tokenizers import ByteTokenizer
from train.data.tokenizers.files import load_folder
from train.rollouts.episodes.environments import Environments
from train.run.setup import tell_tools

SOURCE = '''
import os, time

class Tools:
    def __init__(self, bonus=0.0):
        self.bonus = bonus

    def reset(self, answer):
        self.answer, self.seen = answer, []
        return None

    def calc(self, expression: str, times: int = 1) -> str:
        """Computes."""
        self.seen.append(expression)
        if expression == "hang":
            time.sleep(60)
        if expression == "die":
            os._exit(3)
        return str(sum(map(int, expression.split("+"))) * times)

    def reward(self):
        return {"reward": float(self.answer in self.seen) + self.bonus}

class Steps:
    def reset(self, **row):
        self.row = row
        return " (" + ", ".join(sorted(row)) + ")"

    def step(self, text):
        if text == "dict":
            return {"observations": [{"role": "user", "content": "seen"}], "reward": 0.5, "done": True, "metadata": {}}
        if text == "wrong":
            return "seen"
        return text[::-1], 1, False

class Scored(Steps):
    def step(self, text):
        self.text = text
        return "", 0.0, False

    def turn_score(self):
        return {"0": 0, "half": 0.5, "dict": {"a": 1}}.get(self.text)

class Typed:
    def reset(self):
        pass

    def all(self, a: int, b: float = 0.5, c: bool = True, d: "list[str]" = (), e: dict | None = None, f=None) -> str:
        """Shows its arguments."""
        return repr((a, b, c, d, e, f))

class Closing:
    made = 0

    def __init__(self, folder):
        Closing.made += 1
        self.path = os.path.join(folder, f"closed {self.made}")

    def reset(self, wrong=False):
        if wrong:
            raise ValueError("wrong")

    def look(self) -> str:
        """Looks."""
        return ""

    def reward(self):
        raise ConnectionError("no answer")

    def close(self):
        open(self.path, "w").close()

class Nothing:
    def reset(self):
        pass
'''


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    file = tmp_path_factory.mktemp("environments") / "mine.py"
    file.write_text(SOURCE)
    return file


def opened(source, name, **options):
    return closing(Environments(EnvironmentSection(name=f"{source}:{name}", **options)))


def ask(environments, *questions):
    return environments.answer(
        [dict(zip(("do", "episode"), question[:2], strict=True), **question[2]) for question in questions]
    )


def test_methods_of_a_class_are_tools(source):
    with opened(source, "Tools", arguments={"bonus": 0.25}) as environments:
        assert environments.form == "tools"
        (tool,) = environments.tools
        assert tool["function"]["name"] == "calc"
        assert tool["function"]["description"] == "Computes."
        assert tool["function"]["parameters"] == {
            "type": "object",
            "properties": {"expression": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["expression"],
        }
        assert ask(environments, ("reset", 0, {"row": {"answer": "5", "prompt": "?"}})) == [{"text": ""}]
        call = {"tool": "calc", "arguments": {"expression": "2+3", "times": 2}}
        assert ask(environments, ("call", 0, call)) == [{"text": "10"}]
        assert ask(environments, ("call", 0, {"tool": "calc", "arguments": "5"})) == [{"text": "5"}]
        wrong = [{"tool": "other", "arguments": {}}, {"tool": "calc", "arguments": {"e": 1}}]
        refused = ask(environments, *(("call", 0, call) for call in wrong))
        assert refused[0] == {"refused": "there is no tool 'other'; the tools are calc"}
        assert refused[1]["refused"].startswith("calc: ")
        (failed,) = ask(environments, ("call", 0, {"tool": "calc", "arguments": "x"}))
        assert failed["failure"][0] == "exception"
        assert "ValueError" in failed["failure"][1]
        assert ask(environments, ("end", 0, {})) == [{"rewards": {"reward": 1.25}}]


def test_steps_return_tuples_or_mappings(source):
    with opened(source, "Steps") as environments:
        assert environments.form == "text"
        assert ask(environments, ("reset", 3, {"row": {"a": 1, "b": 2}})) == [{"text": " (a, b)"}]
        assert ask(environments, ("step", 3, {"text": "ab"})) == [
            {"text": "ba", "rewards": {"reward": 1.0}, "done": False}
        ]
        assert ask(environments, ("step", 3, {"text": "dict"})) == [
            {"text": "seen", "rewards": {"reward": 0.5}, "done": True}
        ]
        ((name, text),) = [answer["failure"] for answer in ask(environments, ("step", 3, {"text": "wrong"}))]
        assert (name, text) == ("exception", "step returned str, expected (observation, reward, done)")


def test_arguments_of_another_type_are_refused(source):
    with opened(source, "Typed") as environments:
        (tool,) = environments.tools
        types = {name: p["type"] for name, p in tool["function"]["parameters"]["properties"].items()}
        assert types == dict(zip("abcdef", ["integer", "number", "boolean", "array", "object", "string"], strict=True))
        ask(environments, ("reset", 0, {"row": {}}))

        def call(arguments):
            (answer,) = ask(environments, ("call", 0, {"tool": "all", "arguments": arguments}))
            return answer

        assert call({"a": 1}) == {"text": "(1, 0.5, True, (), None, None)"}
        assert call({"a": 2, "b": 3, "c": False, "d": ["x"], "e": None, "f": [4]})["text"].startswith("(2, 3, False, [")
        assert call("7") == call({"a": 7})
        for arguments, name in [
            ({"a": "1"}, 'a: got "1", expected integer'),
            ({"a": 1.5}, "a: got 1.5, expected integer"),
            ({"a": True}, "a: got true, expected integer"),
            ({"a": 1, "b": "x"}, 'b: got "x", expected number'),
            ({"a": 1, "c": 0}, "c: got 0, expected boolean"),
            ({"a": 1, "d": {}}, "d: got {}, expected array"),
            ({"a": 1, "e": [1] * 100}, "e: got [1, 1, 1,"),
            ({"a": 1, "e": "x"}, 'e: got "x", expected object or null'),
            ("seven", 'a: got "seven", expected integer'),
        ]:
            assert call(arguments)["refused"].startswith(f"all: {name}"), arguments


def test_turns_are_scored_where_the_environment_says_so(source):
    with opened(source, "Tools") as environments:
        assert not environments.has_scores
    with opened(source, "Scored") as environments:
        assert environments.has_scores
        ask(environments, ("reset", 0, {"row": {}}))
        questions = [("step", 0, {"text": text}) for text in ("0", "half", "none", "dict")]
        *answers, failed = ask(environments, *questions)
        assert [answer.get("score") for answer in answers] == [0.0, 0.5, None]
        assert failed["failure"] == ("exception", "turn_score returned {'a': 1}, expected a number or None")


@pytest.mark.parametrize("field", ["turn_seconds", "episode_seconds"])
def test_call_longer_than_its_turn_fails(source, field):
    with opened(source, "Tools", **{field: 2.0}) as environments:
        ask(environments, ("reset", 0, {"row": {"answer": "1"}}))
        (answer,) = ask(environments, ("call", 0, {"tool": "calc", "arguments": "hang"}))
        assert answer["failure"] == (field, "no answer within 2 s")


def test_environment_is_closed_also_without_rewards(source, tmp_path):
    with opened(source, "Closing", arguments={"folder": str(tmp_path)}) as environments:
        ask(environments, *(("reset", number, {"row": {}}) for number in range(2)))
        assert ask(environments, ("close", 0, {})) == [{}]
        (failed,) = ask(environments, ("end", 1, {}))
        assert failed["failure"][0] == "exception"
        (failed,) = ask(environments, ("reset", 2, {"row": {"wrong": True}}))
        ask(environments, ("close", 2, {}))
        assert sorted(file.name for file in tmp_path.iterdir()) == ["closed 1", "closed 2", "closed 3"]


@pytest.mark.parametrize(("call", "failure"), [("hang", "step_seconds"), ("die", "ended")])
def test_lost_process_loses_its_own_episodes(source, call, failure):
    with opened(source, "Tools", step_seconds=3.0, processes=2) as environments:
        ask(environments, *(("reset", number, {"row": {"answer": "1"}}) for number in range(4)))
        answers = ask(
            environments,
            ("call", 0, {"tool": "calc", "arguments": call}),
            ("call", 1, {"tool": "calc", "arguments": "1"}),
            ("call", 2, {"tool": "calc", "arguments": "1"}),
            ("call", 3, {"tool": "calc", "arguments": "1"}),
        )
        assert [answer.get("failure", ("",))[0] for answer in answers] == [failure, "", "lost", ""]
        # The next episode of that process starts it again.
        assert ask(environments, ("reset", 0, {"row": {"answer": "1"}})) == [{"text": ""}]


@pytest.mark.parametrize(
    ("name", "message"),
    [("Missing", "cannot import"), ("Nothing", "neither a method step nor tools"), ("SOURCE", "cannot import")],
)
def test_class_that_is_no_environment_is_refused(source, name, message):
    with pytest.raises(UserError, match=f"^environment.name: got .*{message}"):
        opened(source, name)


def test_prompts_of_a_chat_template_tell_the_tools_of_the_environment(source):
    """Those of the warm start too, which are the rollouts' own."""
    tokenizer = load_folder(FOLDERS / "chatml")
    config = tiny.config_of(f"environment={{name: '{source}:Tools'}}")
    assert [tool["function"]["name"] for tool in tell_tools(config, tokenizer).tools] == ["calc"]
    assert tokenizer.tools is None
    assert tell_tools(tiny.config_of(), tokenizer) is tokenizer
    assert isinstance(tell_tools(config, ByteTokenizer()), ByteTokenizer)
