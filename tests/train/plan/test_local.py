"""The least time of a step on this machine's CPU, with the products of a small decoder counted by hand."""

import pytest

from train.config.load import load
from train.config.plan import Plan
from train.data.tokenizers import load_tokenizer
from train.plan.compiler.work import Work
from train.plan.local import Rates, StepTokens, step_work
from train.weights.model import make_model

MODEL = "model={layers: 2, width: 16, heads: 4, kv_heads: 2, head_dim: 8, mlp_width: 32}"
# Query, key, value, output, and the three matrices of the MLP.
LAYERS = 2 * (16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 32)
# The base is frozen: forward and the backward of activations, and the reference, if a term or metric reads it.
LORA = ("lora={rank: 2, alpha: 4.0}", "reference={source: base}", "optim.updates_per_batch=1")


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ((*LORA, "kl.loss.coef=0.1"), 3),
        ((*LORA, "kl.loss.coef=0.0", "reference.monitor=false"), 2),
        (("kl.loss.coef=0.1", "optim.epochs=2"), 8),
    ],
)
def test_work_of_a_step_equals_a_hand_count(changes, passes):
    config = load("configs/quickstart.yaml", [MODEL, *changes]).config
    tokenizer = load_tokenizer(config)
    head = 16 * tokenizer.vocab_size
    work = step_work(Plan.of(config), make_model(config, tokenizer), StepTokens(10, 40, 5))
    forward = 2 * (LAYERS * 50 + head * 40)
    assert work["rollout"] == Work(forward, 4 * (LAYERS + head) * 5)
    assert work["update"] == Work(passes * forward)


def test_least_seconds_are_of_the_slower_resource():
    rates = Rates(flops=10, bandwidth=2)
    assert rates.least_seconds(Work(flops=40, memory=2)) == 4
    assert rates.least_seconds(Work(flops=10, memory=6)) == 3
