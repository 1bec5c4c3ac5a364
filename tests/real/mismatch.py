"""Sampler against trainer on SmolLM2-135M-Instruct: the log-probs of the same sampled tokens in several dtypes.

    python -m tests.real.mismatch      # a table for docs/real-model.md; a few minutes on two cores

Each row samples replies to word problems, and scores the tokens as an update does. A random adapter of rank 16, whose B
is not zero, takes the part of a trained one.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from tests.real.replies import score
from train import real
from train.config.load import load
from train.data.tasks import load_task
from train.data.tokenizers import load_tokenizer
from train.models import Decoder
from train.models.int8 import quantise_params
from train.models.merge import merge
from train.models.parameters import init_adapter
from train.models.sharding import make_mesh
from train.rl.policy import Sequences
from train.rollouts.sampler import Sampling, sample
from train.weights.huggingface import load_params
from train.weights.model import make_model

PROMPTS, SAMPLES, NEW_TOKENS = 4, 4, 32
TEMPERATURE = 0.7
# Standard deviation of B: effects as large as after the recipe's training.
SPREAD = 0.01


class Side(NamedTuple):
    """A decoder with the policy that it runs."""

    model: Decoder
    policy: kljax.Policy


def sides() -> Iterator[tuple[str, Side, Side]]:
    """Yields the name, the sampler and the trainer of each comparison."""
    config = load(real.ROOT / real.CONFIG, [f"model.path={real.CHECKPOINTS / real.FOLDER}"]).config
    mesh, model = make_mesh(), make_model(config, load_tokenizer(config))
    bare = Decoder(dataclasses.replace(model.config, lora=None))
    params = load_params(real.CHECKPOINTS / real.FOLDER, bare, mesh)
    drawn = init_adapter(model, jax.random.key(0), mesh)
    leaves, structure = jax.tree_util.tree_flatten_with_path(drawn)
    values = [
        SPREAD * jax.random.normal(jax.random.key(number), x.shape) if path[-1].key == "lora_B" else x
        for number, (path, x) in enumerate(leaves)
    ]
    if all(value is x for value, (_, x) in zip(values, leaves, strict=True)):
        raise RuntimeError("the adapter has no lora_B")
    adapter = jax.tree.unflatten(structure, values)

    def of(dtype: str, source: Decoder = model, **more: Any) -> Decoder:
        return Decoder(dataclasses.replace(source.config, dtype=dtype, **more))

    exact, adapted = Side(bare, kljax.Policy(params)), Side(model, kljax.Policy(params, adapter))
    yield "float32 / float32", exact, exact
    yield "float32, adapter / float32, adapter", adapted, adapted
    merged = Side(bare, kljax.Policy(merge(model, params, adapter)))
    yield "float32, merged / float32, adapter", merged, adapted
    half = Side(of("bfloat16"), adapted.policy)
    yield "bfloat16, adapter / bfloat16, adapter", half, half
    yield "bfloat16, adapter / float32, adapter", half, adapted
    int8 = Side(of("float32", quantization="int8"), kljax.Policy(quantise_params(params), adapter))
    yield "int8, adapter / int8, adapter", int8, int8
    yield "int8, adapter / float32, adapter", int8, adapted


def compare(sampler: Side, trainer: Side, ids: jax.Array, mask: jax.Array, eos_ids: tuple[int, ...]) -> list[float]:
    """Samples and scores; returns differing share, mean and largest difference, k3 and the effective sample size."""

    def draw(policy: kljax.Policy) -> Any:
        return sample(
            sampler.model,
            policy,
            ids,
            mask,
            key=jax.random.key(1),
            group=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            sampling=Sampling(temperature=TEMPERATURE),
            eos_ids=eos_ids,
        )

    drawn = jax.jit(draw)(sampler.policy)
    sequences = Sequences.rows(drawn.tokens, drawn.token_mask, drawn.completion_mask)
    scored = score(trainer.model, trainer.policy, sequences, temperature=TEMPERATURE)
    where = np.asarray(drawn.completion_mask)
    ratio = (scored.astype(np.float64) - np.asarray(drawn.fields["rollout_log_probs"], np.float64))[where]
    weights = np.exp(ratio)
    k3 = np.mean(np.expm1(ratio) - ratio)
    differing = np.mean(np.abs(ratio) > 1e-3)
    return [
        differing,
        np.abs(ratio).mean(),
        np.abs(ratio).max(),
        k3,
        weights.sum() ** 2 / (weights**2).sum() / len(weights),
    ]


def main() -> None:
    """Prints the table in Markdown."""
    config = load(real.ROOT / real.CONFIG, [f"model.path={real.CHECKPOINTS / real.FOLDER}"]).config
    tokenizer = load_tokenizer(config)
    rows = [tokenizer.prompt_ids(example) for example in load_task(config).eval[:PROMPTS]]
    longest = max(map(len, rows))
    ids = jnp.array([[tokenizer.pad_id] * (longest - len(row)) + row for row in rows])
    mask = jnp.array([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    print("| sampler / trainer | tokens off by 1e-3 nats | mean difference | largest | k3 | ESS |", flush=True)
    print("|---|--:|--:|--:|--:|--:|")
    with jax.set_mesh(make_mesh()):
        for name, sampler, trainer in sides():
            share, mean, largest, k3, ess = compare(sampler, trainer, ids, mask, tokenizer.eos_ids)
            print(
                f"| {name} | {100 * share:.0f} % | {mean:.1e} | {largest:.1e} | {k3:.1e} | {100 * ess:.2f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
