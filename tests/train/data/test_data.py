import jax
import numpy as np
import pytest

from train.config.errors import UserError
from train.data.prompts import Prompts, Supervised, decode_completions, encode_prompts, encode_solutions, keep_prompts
from train.data.tasks import Example
from train.data.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
BOS, EOS, PAD = TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id


def examples(count):
    return [Example(prompt=f"{i}=", answer=str(i), solution=str(i)) for i in range(count)]


def prompts(count=10, batch_size=4, seed=3, **shard):
    return Prompts(examples(count), TOKENIZER, length=8, batch_size=batch_size, seed=seed, **shard)


def places(source, start, stop, batch_size):
    drawn = [example for step in range(start, stop) for example in source.batch(step)]
    assert len(drawn) == (stop - start) * batch_size
    return [int(example.answer) for example in drawn]


def test_prompts_are_left_padded_after_bos():
    tokens, mask = encode_prompts([Example("1+2=", "3", "3"), Example("", "", "")], TOKENIZER, 6)
    np.testing.assert_array_equal(tokens, [[PAD, BOS, *b"1+2="], [PAD] * 5 + [BOS]])
    np.testing.assert_array_equal(mask, [[False] + [True] * 5, [False] * 5 + [True]])
    assert (tokens.dtype, mask.dtype) == (np.int32, np.bool_)


def test_solutions_are_right_padded_and_trained_through_eos():
    batch = encode_solutions([Example("a", "", "xy"), Example("bc", "", "")], TOKENIZER, length=7)
    np.testing.assert_array_equal(
        batch.tokens, [[BOS, *b"a", *b"xy", EOS, PAD, PAD], [BOS, *b"bc", EOS, PAD, PAD, PAD]]
    )
    np.testing.assert_array_equal(batch.token_mask, batch.tokens != PAD)
    np.testing.assert_array_equal(batch.completion_mask, [[0, 0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0]])
    arrays = batch.tokens, batch.token_mask, batch.completion_mask
    assert [array.dtype for array in arrays] == [np.int32, np.bool_, np.bool_]


def test_text_of_the_exact_length_fits_not_longer():
    example = Example("1+2=", "", "")
    assert encode_prompts([example], TOKENIZER, 5)[1].all()
    with pytest.raises(ValueError, match=r"row 0: got 5 \+ 0 tokens, expected at most 4 together"):
        encode_prompts([example], TOKENIZER, 4)


def test_decode_completions_reads_the_mask_not_pad_ids():
    tokens = np.array([[BOS, 65, 66, EOS, 67], [BOS, 65, PAD, 66, PAD]], np.int32)
    completions = np.array([[0, 0, 1, 1, 0], [0, 1, 1, 1, 0]], bool)
    tokens_mask = np.array([[1, 1, 1, 1, 0], [1, 1, 1, 1, 0]], bool)
    assert decode_completions(tokens, tokens_mask, completions, TOKENIZER) == ["B", "A\N{REPLACEMENT CHARACTER}B"]


def test_supervised_solutions_decode_to_themselves():
    source = Supervised(examples(12), TOKENIZER, prompt_length=5, completion_length=3, batch_size=5, seed=0)
    batch = source.batch(7)
    assert batch.tokens.shape == (5, 8)
    solutions = decode_completions(batch.tokens, batch.token_mask, batch.completion_mask, TOKENIZER)
    rows = decode_completions(batch.tokens, batch.token_mask, batch.token_mask, TOKENIZER)
    assert rows == [f"\N{REPLACEMENT CHARACTER}{solution}={solution}" for solution in solutions]


def test_every_epoch_visits_each_example_in_new_order():
    drawn = places(prompts(), 0, 10, 4)
    epochs = [drawn[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert list(range(10)) not in epochs


def test_step_is_independent_of_earlier_steps():
    in_order = prompts()
    drawn = [in_order.batch(step) for step in range(6)]
    again = prompts()
    assert [again.batch(step) for step in (5, 0, 3, 3)] == [drawn[step] for step in (5, 0, 3, 3)]


def test_the_order_depends_on_the_seed():
    assert places(prompts(seed=3), 0, 5, 4) != places(prompts(seed=4), 0, 5, 4)


def test_batch_larger_than_the_data_continues_next_epoch():
    drawn = places(prompts(count=3, batch_size=7), 0, 3, 7)
    assert [sorted(drawn[start : start + 3]) for start in range(0, 21, 3)] == [[0, 1, 2]] * 7


@pytest.mark.parametrize("rows", [[0], [1, 3], [3, 0, 2, 1]])
def test_selected_rows_equal_the_rows_of_a_batch(rows):
    for step in (0, 5):
        full = prompts().batch(step)
        assert prompts().batch(step, rows) == [full[row] for row in rows]


def test_solutions_that_end_beyond_the_most_tokens_are_left_out(caplog):
    fitting, long = Example("a", "", "xy"), Example("abc", "", "xyz")
    data = Supervised([fitting, long], TOKENIZER, prompt_length=4, completion_length=4, length=7, batch_size=1, seed=0)
    assert [example.prompt for example in data.examples] == ["a"]
    assert "1 of 2 prompts with solutions are longer than data.max_tokens = 7 tokens and are left out" in caplog.text
    assert data.batch(0).tokens.shape == (1, 7)


def test_selected_supervised_rows_equal_the_rows_of_batches():
    data = Supervised(examples(9), TOKENIZER, prompt_length=5, completion_length=3, batch_size=4, seed=0)
    both = (jax.tree.leaves(batch) for batch in (data.batch(1, np.array([1, 3])), data.batch(1)))
    for some, full in zip(*both, strict=True):
        np.testing.assert_array_equal(some, full[[1, 3]])


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="batch_size: got 0, expected at least 1"):
        prompts(batch_size=0)


def test_overlong_prompts_are_dropped_counted_and_logged(caplog):
    source = Prompts(examples(12), TOKENIZER, length=3, batch_size=4, seed=0)
    assert [example.answer for example in source.examples] == [str(i) for i in range(10)]
    assert "2 of 12 prompts are longer than data.max_prompt_length = 3 tokens and are left out" in caplog.text
    assert set(places(source, 0, 5, 4)) == set(range(10))


def test_nothing_is_logged_when_everything_fits(caplog):
    prompts()
    assert not caplog.text


def test_supervised_counts_long_prompts_and_long_solutions(caplog):
    mixed = [Example("p" * 9, "", "s"), Example("p", "", "s" * 9), Example("p", "", "ss"), Example("p", "", "s")]
    source = Supervised(mixed, TOKENIZER, prompt_length=4, completion_length=3, batch_size=2, seed=0)
    assert source.examples == mixed[2:]
    assert "1 of 4 prompts" in caplog.text
    assert "1 of 3 solutions are longer than data.max_completion_length = 3" in caplog.text


def test_empty_data_names_the_length_to_raise():
    long = [Example("123", "", ""), Example("12", "", ""), Example("1234", "", "")]
    with pytest.raises(UserError, match=r"data.max_prompt_length: got 2.*3 prompts.*at least that") as error:
        keep_prompts(long, TOKENIZER, 2)
    assert "the shortest has 3 tokens" in str(error.value)
    with pytest.raises(UserError, match=r"data.max_completion_length: got 1.*the shortest has 2 tokens"):
        Supervised(examples(5), TOKENIZER, prompt_length=8, completion_length=1, batch_size=2, seed=0)
    with pytest.raises(UserError, match="none of the 0 prompts fit"):
        keep_prompts([], TOKENIZER, 2)


class Counting(ByteTokenizer):
    """Counts what is tokenized."""

    prompts: list = []  # noqa: RUF012 (of the class, as the tokenizer is frozen)
    solutions: list = []  # noqa: RUF012

    def prompt_ids(self, example):
        self.prompts.append(example.prompt)
        return super().prompt_ids(example)

    def solution_ids(self, example):
        self.solutions.append(example.prompt)
        return super().solution_ids(example)


def test_no_text_is_tokenized_twice():
    Counting.prompts.clear()
    Counting.solutions.clear()
    tokenizer = Counting()
    source = Prompts(examples(6), tokenizer, length=8, batch_size=4, seed=3)
    imitated = Supervised(source.examples, tokenizer, prompt_length=8, completion_length=4, batch_size=4, seed=3)
    tokens, mask = encode_prompts(source.batch(0), tokenizer, 8)
    rows = imitated.batch(0)
    assert sorted(Counting.prompts) == sorted(Counting.solutions) == [f"{i}=" for i in range(6)]
    # What is kept is what would be made again, and does not tell examples apart.
    again, again_mask = encode_prompts([Example(e.prompt, "", "") for e in source.batch(0)], TOKENIZER, 8)
    np.testing.assert_array_equal(tokens, again)
    np.testing.assert_array_equal(mask, again_mask)
    assert rows.tokens.shape == (4, 12)
    assert sorted(source.examples, key=lambda e: e.prompt) == examples(6)


def test_a_warm_start_without_solutions_is_named():
    without = [Example("1=", "1", "")]
    with pytest.raises(
        UserError, match=r"warm_start\.steps: a warm start trains on solutions.*'1='.*warm_start\.steps=0"
    ):
        Supervised(without, TOKENIZER, prompt_length=8, completion_length=4, batch_size=1, seed=0)
