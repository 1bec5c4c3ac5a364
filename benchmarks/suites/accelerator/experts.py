"""Experts: the grouped product against products that bound it, and sampling against a dense decoder."""

from typing import Any

import jax

from benchmarks.grouped import (
    DECODERS,
    KINDS,
    TITLES,
    DecoderSizes,
    GroupSizes,
    measure_decoders,
    measure_size,
)
from benchmarks.harness.report import ContenderResult, ratio

ROUNDS = 5
# The rows of 16,384 tokens.
PRODUCTS = {
    "Qwen3-30B-A3B, 1,024 rows an expert": GroupSizes(128, 1024, 2048, 768),
    "tiny product": GroupSizes(3, 7, 5, 4),
}
SAMPLED = {
    "4 layers of its experts, 64 slots": DecoderSizes(2048, 128, 8, 768, new_tokens=64, layers=4),
    "tiny sampling": DecoderSizes(16, 4, 2, 8, slots=2, new_tokens=2, layers=1, vocab_size=32, prompt_length=2),
}


class ExpertsContender:
    """Times one size after the other, in bfloat16."""

    def versions(self) -> dict[str, str]:
        return {"jax": jax.__version__}

    def rows(self, of: str, seconds: float) -> list[dict[str, Any]]:
        """Returns a row for each contender of a size, in interleaved rounds."""
        if of in SAMPLED:
            results = measure_decoders(SAMPLED[of], ROUNDS, "bfloat16").results
            return [
                {"name": f"{of}: {title}", **_times(results[name], {"dense": results["dense"]})}
                for name, title in DECODERS.items()
            ]
        size = PRODUCTS[of]
        results = measure_size(size, ROUNDS, "bfloat16").results
        flops = 2 * size.experts * size.rows * size.inputs * size.outputs
        rows = []
        for kind, products in zip(KINDS, (1, 3), strict=True):
            bounds = {name: results[f"{name}_{kind}"] for name in ("equal", "dense")}
            for name, title in TITLES.items():
                result = results[f"{name}_{kind}"]
                rate = ratio(products * flops, result.best("wall"))
                row = {"name": f"{title}, {KINDS[kind]}", "rate": rate and rate / 1e12, "bytes": result.temp_bytes}
                rows.append({**row, **_times(result, bounds)})
        return rows


def _times(result: ContenderResult, bounds: dict[str, ContenderResult]) -> dict[str, Any]:
    seconds = result.best("wall")
    over = {f"of_{name}": ratio(seconds, bound.best("wall")) for name, bound in bounds.items()}
    return {"ms": seconds and 1e3 * seconds, **over, **({"problem": result.problem} if result.problem else {})}


def load(tiny: bool) -> ExpertsContender:
    """Returns the contender, which knows both sizes."""
    return ExpertsContender()
