"""Model, prompts and requests of every contender. NumPy only, which every environment has."""

import dataclasses
import pathlib
from typing import Any

import numpy as np

from benchmarks.harness.measure import Clock, Memory, Seconds

LEARNING_RATE = 1e-4
KL_COEF = 0.04
CLIP = 0.2
# Tunix's Qwen 3 has this value, whatever its config says.
ROPE_THETA = 1e6
NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class ModelWork:
    """A Qwen 3 with a tied head, and a batch without padding; `isa` limits its contenders, "" to all of the machine."""

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
    isa: str = ""

    def __str__(self) -> str:
        return f"V={self.vocab}{f', {self.isa}' if self.isa else ''}"

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        return self.prompt_length + self.completion_length

    @property
    def end(self) -> int:
        """Returns the end id, which is outside the vocabulary: no completion ends early."""
        return self.vocab


QUICK = ModelWork(vocab=160, layers=2, width=32, heads=2, kv_heads=1, head_dim=16, mlp_width=48,
             prompts=2, samples=2, prompt_length=6, completion_length=5)  # fmt: skip


def hf_config(work: ModelWork) -> dict[str, Any]:
    """Returns the fields of the configuration of transformers."""
    return {
        "vocab_size": work.vocab,
        "hidden_size": work.width,
        "intermediate_size": work.mlp_width,
        "num_hidden_layers": work.layers,
        "num_attention_heads": work.heads,
        "num_key_value_heads": work.kv_heads,
        "head_dim": work.head_dim,
        "rms_norm_eps": NORM_EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "tie_word_embeddings": True,
        "max_position_embeddings": work.length,
    }


def make_prompts(work: ModelWork) -> np.ndarray:
    """Draws `[prompts, prompt_length]` int32 ids, uniform."""
    return np.random.default_rng(1).integers(0, work.vocab, (work.prompts, work.prompt_length), np.int32)


def make_sequences(work: ModelWork) -> np.ndarray:
    """Draws `[rows, length]` int32 prompts with completions, to compare log-probs on."""
    drawn = np.random.default_rng(2).integers(0, work.vocab, (work.rows, work.completion_length), np.int32)
    return np.concatenate([np.repeat(make_prompts(work), work.samples, axis=0), drawn], axis=1)


def rewards(tokens: np.ndarray) -> np.ndarray:
    """Returns the `[rows]` float32 means of ids, which hardly ever tie: without an advantage there is no update."""
    return np.asarray(np.mean(tokens, axis=1), np.float32)


def load_weights(directory: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the weights of a directory by their Hugging Face names; matrices are `[out, in]`."""
    with np.load(directory / "weights.npz") as file:
        return {name: file[name] for name in file.files}


class ModelContender:
    """Answers the requests about one model: "versions" and the methods below, most of which a subclass computes."""

    def __init__(self, work: dict[str, Any], directory: str) -> None:
        self.work = ModelWork(**work)

    def log_probs(self) -> np.ndarray:
        """Returns the `[rows, completion]` log-probs of the sequences that all contenders score."""
        raise NotImplementedError

    def rollout(self) -> np.ndarray:
        """Returns the `[rows, completion]` tokens of a rollout."""
        raise NotImplementedError

    def step(self, parts: Clock | Memory) -> None:
        """Does one RL step, with the parts "rollout" and "update"."""
        raise NotImplementedError

    def score(self, path: str) -> None:
        """Writes the log-probs."""
        np.save(path, self.log_probs())

    def run(self, part: str) -> dict[str, Seconds]:
        """Times a rollout, or a step, by its parts."""
        clock = Clock()
        self._run(part, clock)
        return clock.parts

    def peak(self, part: str) -> dict[str, int]:
        """Measures the bytes that the parts of a run add to the memory of the process."""
        memory = Memory()
        self._run(part, memory)
        return memory.parts

    def _run(self, part: str, parts: Clock | Memory) -> None:
        if part == "step":
            self.step(parts)
            return
        with parts.part("rollout"):
            tokens = self.rollout()
        expected = (self.work.rows, self.work.completion_length)
        if tokens.shape != expected or not ((tokens >= 0) & (tokens < self.work.vocab)).all():
            raise ValueError(f"tokens: got {tokens.shape}, expected {expected} ids of the vocabulary")
