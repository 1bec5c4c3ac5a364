"""Evaluation: every held-out example counts once, whatever the batch size, and the answer is in percent."""

import jax
import numpy as np
import pytest

import kljax
from tests import tiny
from train.data.prompts import encode_prompts
from train.data.tasks import Example, Task
from train.data.tasks.arithmetic import score
from train.data.tokenizers import ByteTokenizer
from train.rollouts.jax_source import JaxSource, begin_samples, make_sampler
from train.rollouts.open import open_evaluation
from train.rollouts.sampler import Samples
from train.run.evaluate import evaluate
from train.run.loop import write_evaluation

TOKENIZER = ByteTokenizer()
EXAMPLES = [Example(f"{digit}+1=", str(digit + 1), str(digit + 1)) for digit in range(5)]


def knows(digits: set[int], seen: list[int]):
    """A sampler that is right about the sums of some digits, and writes "?" for the others."""

    def draw(policy, prompts, prompt_mask, key, rows) -> Samples:
        seen.append(prompts.shape[0])
        first = np.asarray(prompts)[:, tiny.PROMPT - 4] - ord("0")
        answers = [ord(str(digit + 1)) if digit in digits else ord("?") for digit in first.tolist()]
        tokens = np.array([[answer, TOKENIZER.eos_id] for answer in answers], np.int32)
        mask = np.concatenate([np.zeros(prompts.shape, bool), np.ones(tokens.shape, bool)], axis=1)
        real = np.concatenate([np.asarray(prompt_mask), np.ones(tokens.shape, bool)], axis=1)
        return Samples(
            tokens=jax.numpy.concatenate([prompts, tokens], axis=1),
            token_mask=jax.numpy.asarray(real),
            completion_mask=jax.numpy.asarray(mask),
            prompt_lengths=prompt_mask.sum(1),
            fields={"rollout_log_probs": jax.numpy.zeros(mask.shape)},
            finished=jax.numpy.ones(len(answers), bool),
        )

    return draw


def stream_of(context, sampler):
    """The stream whose sampler for held-out prompts is this one."""
    return tiny.stream_of(context, JaxSource(context, {"held_out": sampler}))


def measure(digits: set[int], batch_size: int, examples=EXAMPLES):
    seen: list[int] = []
    task = Task("plus one", EXAMPLES, EXAMPLES, score)
    config = tiny.config_of(f"eval.batch_size={batch_size}")
    context = tiny.context_of(config, task=task, held_out=examples)
    metrics = evaluate(context, stream_of(context, knows(digits, seen)), kljax.Policy({}), jax.random.key(0), step=0)
    return metrics, seen


def test_stand_in_sampler_finds_the_encoded_prompts():
    tokens, _ = encode_prompts(EXAMPLES, TOKENIZER, tiny.PROMPT)
    assert tokens[:, tiny.PROMPT - 4].tolist() == [ord(str(digit)) for digit in range(5)]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("right", [set(), {4}, {0, 1, 2}, set(range(5))])
def test_each_example_counts_once(right, batch_size):
    (metrics, samples), seen = measure(right, batch_size)
    assert metrics.keys() == {"reward", "correct", "accuracy"}
    np.testing.assert_allclose(metrics["accuracy"], 20 * len(right), rtol=1e-12)
    np.testing.assert_allclose(metrics["correct"], len(right) / 5, rtol=1e-6)
    assert [sample["prompt"] for sample in samples] == [example.prompt for example in EXAMPLES]
    answers = [digit + 1 if digit in right else "?" for digit in range(5)]
    seen_texts = [f"<bos>{digit}+1={answer}<eos>" for digit, answer in enumerate(answers)]
    assert [sample["conversation"] for sample in samples] == seen_texts, "the text that the model sees"
    assert [sample["correct"] for sample in samples] == [float(digit in right) for digit in range(5)]
    assert seen == [batch_size] * -(-5 // batch_size), "one program serves every batch"


@pytest.mark.parametrize("greedy", [True, False])
def test_greedy_evaluation_can_be_left_out(greedy):
    config = tiny.config_of("eval.batch_size=5", f"eval.greedy={str(greedy).lower()}")
    task, drawn = Task("plus one", EXAMPLES, EXAMPLES, score), {"held_out": [], "greedy": []}
    context = tiny.context_of(config, task=task, held_out=EXAMPLES)
    samplers = {name: knows({0, 1}, seen) for name, seen in drawn.items()}
    writer = MetricsRecorder()
    write_evaluation(context, tiny.stream_of(context, JaxSource(context, samplers)), kljax.Policy({}), writer, 3)
    assert drawn == {"held_out": [5], "greedy": [5] * greedy}
    assert writer.written["accuracy"] == 40
    assert ("accuracy_greedy" in writer.written) == greedy


class MetricsRecorder:
    """The metrics of an evaluation, in memory."""

    def write(self, phase: str, step: int, metrics: dict[str, float]) -> None:
        assert (phase, step) == ("eval", 3)
        self.written = metrics

    def samples(self, step: int, samples: list) -> None:
        assert len(samples) == 5


def test_chunk_is_scored_while_the_next_samples():
    events: list[str] = []
    config = tiny.config_of("eval.batch_size=2")
    draw = knows({0}, [])

    def sampler(*arguments) -> Samples:
        events.append("sample")
        return draw(*arguments)

    def judged(example, text, finished):
        events.append("judge")
        return score(example, text, finished)

    task = Task("plus one", EXAMPLES, EXAMPLES, judged)
    context = tiny.context_of(config, task=task, held_out=EXAMPLES)
    evaluate(context, stream_of(context, sampler), kljax.Policy({}), jax.random.key(0), step=0)
    judging = ["judge", "judge"]
    assert events == ["sample", "sample", *judging, "sample", *judging, "judge"]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 8])
def test_judge_is_asked_once_for_each_example(batch_size):
    questions: list[tuple[str, str]] = []

    def judged(example, text, finished):
        questions.append((example.prompt, text))
        return score(example, text, finished)

    config = tiny.config_of(f"eval.batch_size={batch_size}")
    context = tiny.context_of(config, task=Task("plus one", EXAMPLES, EXAMPLES, judged), held_out=EXAMPLES)
    result = evaluate(context, stream_of(context, knows({0}, [])), kljax.Policy({}), jax.random.key(0), step=0)
    assert questions == [(example.prompt, "1" if example is EXAMPLES[0] else "?") for example in EXAMPLES]
    assert result.metrics["accuracy"] == 20


def test_completions_do_not_depend_on_the_batch_size():
    """Nor on other examples: the first three of the five have the same completions alone."""

    def completions(batch_size, examples=EXAMPLES):
        config = tiny.config_of(f"eval.batch_size={batch_size}")
        context = tiny.context_of(config, task=Task("plus one", EXAMPLES, EXAMPLES, score), held_out=examples)
        policy = kljax.Policy(jax.device_put(tiny.host_params()))
        _, samples = evaluate(context, open_evaluation(context), policy, jax.random.key(0), step=0)
        return [(sample["prompt"], sample["completion"], sample["conversation"]) for sample in samples]

    whole = completions(8)
    assert len({completion for _, completion, _ in whole}) == 5
    assert completions(2) == completions(5) == whole
    assert completions(2, EXAMPLES[:3]) == whole[:3]


@pytest.mark.parametrize("greedy", [True, False])
def test_draws_are_those_of_the_bare_sampler(greedy):
    """Through the protocol the programs get the same keys, rows and padding, and draw the same tokens to the bit."""
    config = tiny.config_of("eval.batch_size=2")
    context = tiny.context_of(config, task=Task("plus one", EXAMPLES, EXAMPLES, score), held_out=EXAMPLES)
    policy, key = kljax.Policy(jax.device_put(tiny.host_params())), jax.random.key(7)
    drawn: list[Samples] = []

    def keeping(*arguments):
        drawn.append(make(*arguments))
        return drawn[-1]

    name = "greedy" if greedy else "held_out"
    make = make_sampler(context, name)
    stream = tiny.stream_of(context, JaxSource(context, {name: keeping}))
    evaluate(context, stream, policy, key, step=3, greedy=greedy)
    assert len(drawn) == 3
    for number, samples in enumerate(drawn):
        chunk = EXAMPLES[2 * number : 2 * number + 2]
        expected = begin_samples(context, make, policy, (chunk * 2)[:2], key, first_row=2 * number)
        jax.tree.map(np.testing.assert_array_equal, samples, expected)
