"""A source of the user: whatever its methods do is an error that names it, and its rows are checked on devices too."""

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.errors import UserError
from train.data.prompts import encode_prompts
from train.data.tasks import Example
from train.data.tokenizers import ByteTokenizer
from train.process import waiting
from train.rollouts import collect
from train.rollouts.jax_source import JaxSource
from train.rollouts.source import Completions, Request, SourceError
from train.rollouts.stream import Stream
from train.rollouts.user_source import UserSource

CONFIG = tiny.config_of("rollout={prompts_per_step: 2, samples_per_prompt: 2}")
CONTEXT = tiny.context_of(CONFIG)
LONGEST = CONFIG.data.max_completion_length
ROWS = 4


def right_rows(request: Request) -> Completions:
    """Completions of two tokens each, on the host."""
    tokens, mask = encode_prompts(request.examples, ByteTokenizer(), tiny.PROMPT)
    rows = np.arange(ROWS) // request.samples
    completion = np.zeros((ROWS, tiny.PROMPT + LONGEST), bool)
    completion[:, tiny.PROMPT : tiny.PROMPT + 2] = True
    ids = np.full(completion.shape, 7, np.int32)
    ids[:, : tiny.PROMPT] = tokens[rows]
    return Completions(
        examples=[request.examples[row] for row in rows],
        tokens=ids,
        token_mask=completion | np.pad(mask[rows], ((0, 0), (0, LONGEST))),
        completion_mask=completion,
        fields={"rollout_log_probs": np.where(completion, -1.0, 0.0).astype(np.float32)},
        texts=["x"] * ROWS,
        finished=np.ones(ROWS, bool),
    )


class Changed:
    """Changes right rows; everything else is as in a source."""

    def __init__(self, change: Any = lambda rows: rows, **methods: Any) -> None:
        self.change = change
        vars(self).update(methods)

    def update(self, policy: Any, step: int) -> None:
        pass

    def sample(self, request: Request) -> Any:
        return self.change(right_rows(request))

    def close(self) -> None:
        pass


def opened(change: Any = lambda rows: rows, **methods: Any) -> UserSource:
    return UserSource(CONTEXT, "mine.py:make", Changed(change, **methods))


def collected(change: Any) -> Completions:
    """The completions of a step, when the devices have sampled them."""
    drawn = collect.draw(CONTEXT, Stream(CONTEXT, opened(change)), 0)
    return drawn.completions.completed()


def on_devices(rows: Completions) -> Completions:
    arrays = {name: jnp.asarray(getattr(rows, name)) for name in ("tokens", "token_mask", "completion_mask")}
    return dataclasses.replace(rows, **arrays, fields=jax.tree.map(jnp.asarray, dict(rows.fields)))


def in_flight(rows: Completions) -> Completions:
    """Rows that the devices still sample: texts and ends come when they are done."""
    later = {name: getattr(rows, name) for name in ("texts", "finished", "metrics", "timings")}
    empty = {"texts": (), "finished": np.zeros(0, bool), "metrics": {}, "timings": {}}
    return dataclasses.replace(on_devices(rows), **empty, finish=lambda: later)


PLACES = {"host": lambda rows: rows, "devices": on_devices, "in flight": in_flight}


def without_log_prob(rows: Completions, floor: float) -> Completions:
    log_probs = np.array(rows.fields["rollout_log_probs"])
    log_probs[0, tiny.PROMPT] = floor
    return dataclasses.replace(rows, fields={"rollout_log_probs": log_probs})


@pytest.mark.parametrize("floor", [-np.inf, -9999.0, -100.0])
def test_token_without_log_prob_is_left_out_of_the_batch(floor):
    drawn = collect.draw(CONTEXT, Stream(CONTEXT, opened(lambda rows: without_log_prob(rows, floor))), 0)
    mask = np.asarray(drawn.batch.completion_mask)
    assert not mask[0, tiny.PROMPT]
    assert mask.sum() == 2 * ROWS - 1


@pytest.mark.parametrize("floor", [-np.inf, -9999.0])
def test_token_without_log_prob_on_devices_is_refused(floor):
    with pytest.raises(
        SourceError, match=r"mine\.py:make: rollout_log_probs: got some below -50.*return a NumPy array"
    ):
        collected(lambda rows: on_devices(without_log_prob(rows, floor)))


def edited(name: str, at: Any, value: Any) -> Any:
    """Makes a change of one value of an array."""

    def change(rows: Completions) -> Completions:
        if name == "rollout_log_probs":
            log_probs = rows.fields["rollout_log_probs"].copy()
            log_probs[at] = value
            return dataclasses.replace(rows, fields={"rollout_log_probs": log_probs})
        array = getattr(rows, name).copy()
        array[at] = value
        return dataclasses.replace(rows, **{name: array})

    return change


def replaced(**fields: Any) -> Any:
    return lambda rows: dataclasses.replace(rows, **fields)


def without(row: int) -> Any:
    return lambda rows: dataclasses.replace(rows, examples=rows.examples[:row], texts=rows.texts[:row])


FIRST, BEFORE = (1, tiny.PROMPT), (1, tiny.PROMPT - 1)
WRONG = {
    "id": (edited("tokens", FIRST, 9999), r"1 tokens outside of the vocabulary of 264"),
    "token mask": (edited("token_mask", FIRST, False), r"1 completion tokens that the token mask leaves out"),
    "completion in the prompt": (edited("completion_mask", BEFORE, True), r"1 completion tokens in their prompts"),
    "log-prob above 0": (edited("rollout_log_probs", FIRST, 5.0), r"1 rollout_log_probs above 0"),
    "log-prob": (edited("rollout_log_probs", FIRST, np.nan), r"1 rollout_log_probs that are not finite"),
    "nothing sampled": (edited("completion_mask", ..., False), r"completion_mask: got no completion token in 4 rows"),
    "prompt": (edited("tokens", BEFORE, 8), r"tokens: row 1 begins with other tokens than the prompt '\d"),
    "padding of a prompt": (edited("token_mask", BEFORE, False), r"the completions have 1 tokens after padding"),
    "order of examples": (
        lambda rows: dataclasses.replace(rows, examples=rows.examples[::-1]),
        r"examples\[0\]: got '.*', expected '.*', the example of row 0 of the request",
    ),
    "no example": (replaced(examples=[None] * ROWS), r"examples\[0\]: got NoneType, expected '.*'"),
    "examples": (without(2), r"examples: got 2, expected 4, one for each row"),
    "texts": (replaced(texts=["x"]), r"texts: got 1, expected 4, one for each row"),
    "no text": (replaced(texts=[None] * ROWS), r"texts\[0\]: got NoneType, expected text"),
    "ends": (replaced(finished=np.ones(2, bool)), r"finished: got 2, expected 4, one for each row"),
    "kind of ends": (replaced(finished=np.ones(ROWS)), r"finished: got float64, expected bool"),
    "metric": (replaced(metrics={"a": float("nan")}), r"metrics\['a'\]: got nan, expected a finite number"),
    "rewards": (replaced(rewards={"reward": np.ones(2)}), r"rewards\['reward'\]: got float64\[2\], expected finite"),
    "infinite reward": (replaced(rewards={"reward": np.full(ROWS, np.inf)}), r"rewards\['reward'\]: got float64\[4\]"),
    "form of tokens": (replaced(tokens=np.zeros((ROWS, 3), np.int32)), r"tokens: got int32\[4, 3\], expected integers"),
    "kind of a mask": (replaced(token_mask=np.ones((ROWS, 9))), r"token_mask: got float64\[4, 9\], expected booleans"),
    "a list": (lambda rows: dataclasses.replace(rows, tokens=rows.tokens.tolist()), r"tokens: got list, expected an"),
    "field": (replaced(fields={"logprobs": np.zeros((ROWS, 9))}), r"got the field 'logprobs', expected one of"),
}
ON_HOST = ("form of tokens", "kind of a mask", "a list", "field")
"""Of the arrays themselves."""


@pytest.mark.parametrize(
    ("name", "where"), [(name, where) for name in WRONG for where in PLACES if where == "host" or name not in ON_HOST]
)
def test_wrong_rows_are_named_wherever_they_lie(name, where) -> None:
    change, message = WRONG[name]
    with pytest.raises(SourceError, match=r"^rollout(\.source: mine\.py:make)?: .*" + message):
        collected(lambda rows: PLACES[where](change(rows)))


@pytest.mark.parametrize("name", ["id", "token mask", "log-prob above 0"])
def test_arrays_of_both_kinds_are_checked(name) -> None:
    """An array on the devices beside others of the host."""
    change, message = WRONG[name]
    for field in ("tokens", "completion_mask"):
        with pytest.raises(SourceError, match=message):
            collected(lambda rows, field=field: _moved(change(rows), field))


def _moved(rows: Completions, field: str) -> Completions:
    return dataclasses.replace(rows, **{field: jnp.asarray(getattr(rows, field))})


@pytest.mark.parametrize("place", PLACES)
def test_right_rows_pass_as_they_are(place) -> None:
    metrics = {"a": np.float32(1.5), "b": 2}
    completions = collected(lambda rows: PLACES[place](dataclasses.replace(rows, metrics=metrics)))
    assert dict(completions.metrics) == {"a": 1.5, "b": 2.0}
    assert all(type(value) is float for value in completions.metrics.values())
    # Equal examples need not be the same objects, and log-probs are rounded.
    copies = [Example(e.prompt, e.answer, e.solution) for e in completions.examples]
    rounded = edited("rollout_log_probs", FIRST, 1e-4)
    collected(lambda rows: PLACES[place](dataclasses.replace(rounded(rows), examples=copies)))


def test_rows_may_have_holes() -> None:
    """Observations between turns, which the trainer does not train."""
    completions = collected(edited("completion_mask", (slice(None), tiny.PROMPT), False))
    assert not completions.completion_mask[:, tiny.PROMPT].any()


def shifted(rows: Completions, begins: int, width: int) -> Completions:
    """Rows that begin at another column of so many."""
    columns = ((0, 0), (begins, width - rows.tokens.shape[1] - begins))
    arrays = {name: np.pad(getattr(rows, name), columns) for name in ("tokens", "token_mask", "completion_mask")}
    return dataclasses.replace(rows, **arrays, fields={name: np.pad(x, columns) for name, x in rows.fields.items()})


@pytest.mark.parametrize("place", PLACES)
def test_rows_padded_on_the_left_are_moved(place) -> None:
    config = tiny.config_of("rollout={prompts_per_step: 2, samples_per_prompt: 2}", "data.max_prompt_length=8")
    context, batches = tiny.context_of(config), []
    for begins in (0, 8 - tiny.PROMPT):
        source = Changed(lambda rows, begins=begins: PLACES[place](shifted(rows, begins, config.data.row_length())))
        drawn = collect.draw(context, Stream(context, UserSource(context, "mine.py:make", source)), 0)
        drawn.completions.completed()
        batches.append(drawn.batch)
    jax.tree.map(np.testing.assert_array_equal, *batches)
    assert batches[0].prompt_lengths.tolist() == [tiny.PROMPT] * ROWS
    assert batches[0].token_mask.sum(1).tolist() == [tiny.PROMPT + 2] * ROWS


def test_completion_after_a_short_prompt_may_not_use_its_columns() -> None:
    config = tiny.config_of("rollout={prompts_per_step: 2, samples_per_prompt: 2}", "data.max_prompt_length=8")
    longest = config.data.max_completion_length

    def change(rows: Completions) -> Completions:
        rows = shifted(rows, 0, config.data.row_length())
        columns = np.arange(config.data.row_length())
        rows.token_mask[0] = columns < tiny.PROMPT + longest + 1
        rows.completion_mask[0] = rows.token_mask[0] & (columns >= tiny.PROMPT)
        return rows

    context = tiny.context_of(config)
    source = UserSource(context, "mine.py:make", Changed(change))
    with pytest.raises(SourceError, match=f"have 1 tokens beyond data.max_completion_length = {longest}"):
        collect.draw(context, Stream(context, source), 0)


def fail(error: BaseException) -> Any:
    def method(*_: Any) -> Any:
        raise error

    return method


ERRORS = [SystemExit(0), KeyError("a"), UserError("a server is gone"), GeneratorExit(), MemoryError("too much")]


@pytest.mark.parametrize("method", ["update", "sample", "close"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_error_of_a_method_names_source_and_method(method, error) -> None:
    source = opened(**{method: fail(error)})
    calls = {
        "update": lambda: source.update(None, 0),
        "sample": lambda: collect.draw(CONTEXT, Stream(CONTEXT, source), 0),
    }
    with pytest.raises(SourceError, match=rf"^rollout\.source: mine\.py:make: {method}: ") as caught:
        calls.get(method, source.close)()
    assert str(error) in str(caught.value)
    assert ("test_user_source.py" in str(caught.value)) == (not isinstance(error, UserError))


def test_error_of_finish_names_the_source() -> None:
    with pytest.raises(SourceError, match=r"^rollout\.source: mine\.py:make: finish: SystemExit: 3"):
        collected(lambda rows: dataclasses.replace(in_flight(rows), finish=fail(SystemExit(3))))


def test_interrupt_and_source_error_pass_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        tiny.sampled(CONTEXT, opened(sample=fail(KeyboardInterrupt())), Request.of(CONTEXT, 0))
    with pytest.raises(SourceError, match=r"^mine$"):
        tiny.sampled(CONTEXT, opened(sample=fail(SourceError("mine"))), Request.of(CONTEXT, 0))


@pytest.mark.parametrize("returned", [None, 3, {"tokens": []}])
def test_other_results_of_sample_are_named(returned) -> None:
    message = rf"^rollout\.source: mine\.py:make: sample returned {type(returned).__name__}, expected Completions"
    with pytest.raises(SourceError, match=message):
        collected(lambda rows: returned)


def test_wait_for_a_source_is_told(monkeypatch, capsys) -> None:
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.1)
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(waiting, "_WAITS", waiting._Waits())
    opened(update=lambda policy, step: time.sleep(0.3)).update(None, 0)
    assert "still waiting for rollout.source: mine.py:make: update, 0 s by now" in capsys.readouterr().err


def test_rows_of_the_own_sampler_stay_unread(monkeypatch) -> None:
    """Its rows are right by construction, and a copy would wait for the devices."""

    def check(*_: Any, **__: Any) -> None:
        raise AssertionError("checked")

    monkeypatch.setattr(collect, "check_values", check)
    source = JaxSource(CONTEXT)
    source.update(kljax.Policy({}), 0)
    rows = in_flight(right_rows(Request.of(CONTEXT, 0)))
    monkeypatch.setattr(source, "sample", lambda request: rows)
    assert collect.draw(CONTEXT, Stream(CONTEXT, source), 0).completions is rows
