"""Records the load-balance loss of transformers and its gradient, for `tests/train/rl/test_router_losses.py`.

python tests/goldens/router_losses.py    # with torch and transformers 5.23
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

LAYERS, ROWS, TOKENS, EXPERTS, ACTIVE = 2, 2, 4, 5, 2


def main() -> None:
    rng = np.random.default_rng(0)
    values = np.round(rng.normal(size=(ROWS, TOKENS, LAYERS, EXPERTS)) * 2, 3)
    mask = np.array([[0, 1, 1, 1], [1, 1, 0, 0]])
    logits = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    flat = tuple(logits[:, :, layer].reshape(-1, EXPERTS) for layer in range(LAYERS))
    together = load_balancing_loss_func(flat, EXPERTS, ACTIVE, torch.tensor(mask))
    (gradient,) = torch.autograd.grad(together, logits, retain_graph=True)
    each = [load_balancing_loss_func((layer,), EXPERTS, ACTIVE, torch.tensor(mask)).item() for layer in flat]
    recorded = {
        "active": ACTIVE,
        "logits": values.tolist(),
        "mask": mask.tolist(),
        "model": together.item(),
        "model_gradient": gradient.numpy().round(9).tolist(),
        "layers": each,
    }
    Path(__file__).with_suffix(".json").write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    main()
