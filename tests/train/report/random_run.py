"""A run of random numbers and words, for the page of a run: metrics of every step, and recorded rollouts."""

import json
import pathlib

import numpy as np

from train.rollouts.recorded.table import TokenRows, TokenTexts, write_table

WORDS = ["the", "sum", "of", "12", "and", "30", "is", "42", "so", "we", "carry", "one", "then", "check", "again"]
WORDS += ["(", ")", "=", ""]
PROMPT = 64
IDS = 264
SAMPLES = 8
TEXTS = TokenTexts([f" {WORDS[number % len(WORDS)]}".encode() for number in range(IDS)])


def make_run(root: pathlib.Path, *, rollouts: int, tokens: int, per_step: int = 16, seed: int = 0) -> pathlib.Path:
    """Writes a run of random numbers: metrics of every step, and recorded rollouts."""
    rng, steps = np.random.default_rng(seed), -(-rollouts // per_step)
    (root / "rollouts").mkdir(parents=True)
    for step in (0, steps // 2, steps):
        (root / "checkpoints" / str(step)).mkdir(parents=True)
    (root / "config.yaml").write_text(
        f"name: {root.name}\nseed: {seed}\nsteps: {steps}\noptim:\n  learning_rate: 1.0e-3\n"
    )
    with (root / "metrics.jsonl").open("w") as file:
        for step in range(steps + 1):
            if step % 10 == 0:
                accuracy = 100 * (1 - np.exp(-step / steps * 3)) + rng.normal()
                file.write(json.dumps({"phase": "eval", "step": step, "accuracy": accuracy}) + "\n")
            if step:
                file.write(json.dumps({"phase": "train", "step": step, **_metrics(rng, step / steps)}) + "\n")
    for step in range(1, steps + 1):
        write_table(
            root / "rollouts" / f"{step:08d}.parquet", _rows(rng, step, per_step, tokens), TEXTS, {"step": step}
        )
    return root


def _metrics(rng: np.random.Generator, done: float) -> dict[str, float]:
    spike = 1000.0 if rng.random() < 0.02 else 1.0
    return {
        "reward": float(1 - np.exp(-3 * done) + rng.normal() / 30),
        "entropy": float(2 * np.exp(-2 * done) + rng.normal() / 50),
        "kl_reference": float(spike * 1e-3 * (1 + 50 * done) * np.exp(rng.normal() / 3)),
        "kl_reference_exact": float(1e-3 * (1 + 50 * done)),
        "kl_reference_forward": float(2e-3 * (1 + 50 * done)) if done > 1 / 3 else 1e-17,
        "kl_reference_exact_max": 0.1241 * 10 ** (6 * done - 1),
        "rollout_kl": float(1e-6 * np.exp(rng.normal())),
        "grad_norm": float(spike * np.exp(rng.normal() / 3)),
        "clip_fraction": float(rng.random() / 10),
        "completion_length": float(400 + 60 * done + rng.normal() * 9),
        "skipped_updates": float(rng.random() < 0.01),
    }


def _rows(rng: np.random.Generator, step: int, count: int, tokens: int) -> TokenRows:
    width = PROMPT + tokens
    column, rewards = np.arange(width), rng.integers(0, 2, count)
    completion_mask = np.broadcast_to(column >= PROMPT, (count, width))
    ids = rng.integers(0, IDS, (count, width)).astype(np.int32)
    ids[:, :PROMPT] = ids[::SAMPLES, :PROMPT].repeat(SAMPLES, axis=0)[:count]
    sampler = -rng.exponential(0.7, (count, width)).astype(np.float32)
    policy = sampler + (rng.normal(size=sampler.shape) * 1e-3).astype(np.float32)
    gap = rng.standard_t(3, sampler.shape).astype(np.float32) * np.float32(0.05)
    arrays = {
        "tokens": ids,
        "token_mask": np.ones((count, width), bool),
        "completion_mask": completion_mask,
        "log_probs": sampler,
        "policy_log_probs": policy,
        "ref_log_probs": policy - gap,
        "kl": np.expm1(-gap) + gap,
        "entropy": rng.exponential(0.5, sampler.shape).astype(np.float32),
        "advantages": np.broadcast_to((2.0 * rewards - 1)[:, None], sampler.shape).astype(np.float32),
        "loss_weights": np.full(sampler.shape, 1 / count / tokens, np.float32),
    }
    rows = [
        {
            "step": step,
            "row": row,
            "group": row // SAMPLES,
            "policy_version": step - 1,
            "prompt": f"question {row // SAMPLES} of step {step}",
            "completion": "".join(TEXTS.of(ids[row, PROMPT:])),
            "answer": "42",
            "finished": bool(rng.random() < 0.9),
            "reward": float(rewards[row]),
            "rewards": {"correct": float(rewards[row])},
        }
        for row in range(count)
    ]
    return TokenRows(rows, arrays)
