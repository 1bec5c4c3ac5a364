"""Model, weights and prompts of every contender. NumPy only, which every environment has."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

LEARNING_RATE = 1e-4
KL_COEF = 0.04
CLIP = 0.2
# Tunix's Qwen 3 has this value, whatever its config says.
ROPE_THETA = 1e6
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Work:
    """A Qwen 3 with a tied head, and a batch whose completions all have full length.

    Attributes:
      vocab, layers, width, heads, kv_heads, head_dim, mlp_width: of the model.
      prompts, samples: prompts of a batch, and completions per prompt.
      prompt_length, completion_length: tokens, none of them padding.
    """

    vocab: int = 4096
    layers: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    mlp_width: int = 768
    prompts: int = 2
    samples: int = 4
    prompt_length: int = 128
    completion_length: int = 128

    def __str__(self) -> str:
        return f"V={self.vocab}"

    @property
    def rows(self) -> int:
        """Returns the number of completions."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """Returns the tokens of a prompt with its completion."""
        return self.prompt_length + self.completion_length

    @property
    def new_tokens(self) -> int:
        """Returns the number of sampled tokens of a rollout."""
        return self.rows * self.completion_length

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of an update, prompts included."""
        return self.rows * self.length

    @property
    def end(self) -> int:
        """Returns the end id, which is outside the vocabulary: no completion ends early."""
        return self.vocab


QUICK = Work(vocab=160, layers=2, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=48,
             prompts=2, samples=2, prompt_length=6, completion_length=5)  # fmt: skip


def shapes(work: Work) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights by their Hugging Face names; matrices are `[out, in]`."""
    query, keys = work.heads * work.head_dim, work.kv_heads * work.head_dim
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (work.vocab, work.width)}
    for layer in range(work.layers):
        inside = {
            "input_layernorm": (work.width,),
            "self_attn.q_proj": (query, work.width),
            "self_attn.k_proj": (keys, work.width),
            "self_attn.v_proj": (keys, work.width),
            "self_attn.o_proj": (work.width, query),
            "self_attn.q_norm": (work.head_dim,),
            "self_attn.k_norm": (work.head_dim,),
            "post_attention_layernorm": (work.width,),
            "mlp.gate_proj": (work.mlp_width, work.width),
            "mlp.up_proj": (work.mlp_width, work.width),
            "mlp.down_proj": (work.width, work.mlp_width),
        }
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in inside.items()}
    return found | {"model.norm.weight": (work.width,)}


def make_weights(work: Work, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws float32 weights: matrices that preserve the scale of their inputs, norms near 1."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in shapes(work).items():
        drawn = rng.standard_normal(shape, np.float32)
        found[name] = np.float32(1) + np.float32(0.1) * drawn if len(shape) == 1 else drawn / np.sqrt(shape[-1])
    return found


def make_prompts(work: Work, seed: int = 1) -> np.ndarray:
    """Draws `[prompts, prompt_length]` int32 ids, uniform."""
    return np.random.default_rng(seed).integers(0, work.vocab, (work.prompts, work.prompt_length), np.int32)


def make_sequences(work: Work, seed: int = 2) -> np.ndarray:
    """Draws `[rows, length]` int32 prompts with completions, to compare log-probs on."""
    drawn = np.random.default_rng(seed).integers(0, work.vocab, (work.rows, work.completion_length), np.int32)
    return np.concatenate([np.repeat(make_prompts(work), work.samples, axis=0), drawn], axis=1)


def rewards(tokens: np.ndarray) -> np.ndarray:
    """Returns the `[rows]` float32 share of even ids among `[rows, completion]` tokens."""
    return np.asarray(np.mean(tokens % 2 == 0, axis=1), np.float32)


def save_weights(work: Work, directory: pathlib.Path) -> None:
    """Writes the weights where `load_weights` finds them."""
    arrays: dict[str, Any] = make_weights(work)
    np.savez(directory / "weights.npz", **arrays)


def load_weights(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the weights of a directory, by name."""
    with np.load(directory / "weights.npz") as file:
        return {name: file[name] for name in file.files}
