"""Writes `server_routes.json`: answers with experts in the forms that vLLM and SGLang document, made from their pages.

No server has answered them. vLLM 0.21: `docs/training/routed_experts_replay.md` (lists, prompt apart, -1 where the
prompt was cached); from 0.22: `tests/entrypoints/openai/test_return_routed_experts.py` and
`vllm/entrypoints/openai/completion/serving.py` (base64 of a `.npy` file, narrow unsigned integers). SGLang:
`python/sglang/srt/entrypoints/openai/serving_completions.py` (`sglext`, base64 of int32, a slot for each layer).
The decoder has 3 layers, of which the first is dense, and 2 of 6 experts.

    python tests/goldens/server_routes.py
"""

import base64
import io
import json
from pathlib import Path

import numpy as np

PROMPT, COMPLETIONS = [3, 5, 7, 9], ([4, 2, 0], [6, 0])
LAYERS, COUNT, ACTIVE = 2, 6, 2


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64_of(file.getvalue())


def choice(index: int, ids: list[int], **fields: object) -> dict:
    log_probs = {"token_logprobs": [-0.5] * len(ids)}
    return {"index": index, "token_ids": ids, "finish_reason": "stop", "logprobs": log_probs, **fields}


def main() -> None:
    """Writes the answers, and the experts of all tokens but the last of each completion."""
    random, length = np.random.default_rng(0), len(PROMPT)
    prompt = random.permuted(np.tile(np.arange(COUNT), (length, LAYERS, 1)), axis=-1)[..., :ACTIVE]
    routes = []
    for ids in COMPLETIONS:
        computed = random.permuted(np.tile(np.arange(COUNT), (len(ids) - 1, LAYERS, 1)), axis=-1)[..., :ACTIVE]
        routes.append(np.concatenate([prompt, computed]))
    pairs = list(enumerate(COMPLETIONS))
    dense = np.pad(routes[0], ((0, 0), (1, 0), (0, 0)))
    answers = {
        "vllm 0.21": {
            "prompt_routed_experts": prompt.tolist(),
            "choices": [choice(i, ids, routed_experts=routes[i][length:].tolist()) for i, ids in pairs],
        },
        "vllm 0.22": {
            "choices": [choice(i, ids, routed_experts=npy(routes[i].astype(np.uint8))) for i, ids in pairs],
        },
        "sglang": {
            "choices": [choice(0, COMPLETIONS[0])],
            "sglext": {"routed_experts": base64_of(dense.astype("<i4").tobytes())},
        },
    }
    recorded = {"prompt": PROMPT, "routes": [array.tolist() for array in routes], "answers": answers}
    Path(__file__).with_suffix(".json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
