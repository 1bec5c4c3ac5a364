"""Adapters of routers and experts in PEFT folders: `target_parameters` of a config, and matrices of all experts.

transformers 5 has two parameters for the experts of a layer, `gate_up_proj` and `down_proj`, and PEFT an adapter of
rank R for each: A [E R, I], the ranks of an expert together, and B [O, R E], the experts of a rank together.
`gate_proj` and `up_proj` of rank r, each with its own A, are one adapter of rank R = 2 r: A has the ranks of both, and
each of the two outputs of B has zeros in the ranks of the other. An adapter of rank R = r has one A for both.

E experts, I inputs, O outputs of the parameter. GPT-OSS has gates at even outputs, other families in the first half.
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from train.config.adapter import PARAMETERS
from train.models.config import ROUTER, DecoderConfig
from train.weights.huggingface.fused import PROJECTIONS, is_gpt_oss

# As PEFT writes it when it fuses an adapter of transformers 4.
PAIR_KEY = r".*\.gate_up_proj"
GATE_UP = "mlp.experts.gate_up_proj"
DOWN = "mlp.experts.down_proj"
_OUTER = "mlp.experts"
_INNER = "mlp.experts.base_layer"
_PAIR = PROJECTIONS["gate_up_proj"]


def parameter_of(config: DecoderConfig, module: str) -> str | None:
    """Returns the parameter of transformers that has a module of the decoder; None: it is a module there too.

    Example: `mlp.experts.up_proj` is in `mlp.experts.gate_up_proj`.
    """
    if module == f"mlp.{ROUTER}":
        return "mlp.router.weight" if is_gpt_oss(config) else "mlp.gate.weight"
    if not module.startswith(f"{_OUTER}."):
        return None
    return GATE_UP if module.rpartition(".")[2] in _PAIR else DOWN


def module_of(parameter: str, parameters: Collection[str]) -> str:
    """Returns the module of PEFT with the adapter of a parameter; the adapter of `down_proj` wraps the other one."""
    if parameter == GATE_UP:
        return _INNER if DOWN in parameters else _OUTER
    return parameter.rpartition(".")[0]


def stacked_targets(config: DecoderConfig) -> list[str]:
    """Lists the targets of an adapter that are no modules of transformers: projections of experts, and the router."""
    if config.lora is None or config.experts is None:
        return []
    return sorted({*config.lora.targets} & {*_PAIR, "down_proj", ROUTER})


def config_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of `adapter_config.json` that say where the adapter of a decoder is.

    Raises:
      ValueError: it has one of `gate_proj` and `up_proj` alone.
    """
    assert config.lora is not None
    stacked = stacked_targets(config)
    lora = config.lora
    fields: dict[str, Any] = {"target_modules": sorted(set(lora.targets) - set(stacked))}
    if not stacked:
        return fields
    modules = [f"mlp.{name}" if name == ROUTER else f"{_OUTER}.{name}" for name in stacked]
    fields["target_parameters"] = sorted({str(parameter_of(config, module)) for module in modules})
    pair = [name for name in _PAIR if name in stacked]
    if len(pair) == 1:
        raise ValueError(f"lora.targets: got {pair[0]} of experts alone, which PEFT has as one with {_other(pair[0])}")
    if pair:
        # The scale of twice the rank stays.
        alpha = lora.alpha * (2**0.5 if lora.rslora else 2)
        fields |= {"rank_pattern": {PAIR_KEY: 2 * lora.rank}, "alpha_pattern": {PAIR_KEY: alpha}}
    return fields


def _other(projection: str) -> str:
    return next(name for name in _PAIR if name != projection)


def has_pairs(raw: Mapping[str, Any]) -> bool:
    """Checks whether rank and alpha of a config differ for `gate_up_proj` alone: twice the rank, and the same scale."""
    ranks = raw.get("rank_pattern")
    alphas = raw.get("alpha_pattern")
    if not isinstance(ranks, dict) or not isinstance(alphas, dict):
        return False
    rank = raw.get("r")
    alpha = raw.get("lora_alpha")
    if list(ranks) != [PAIR_KEY] or list(alphas) != [PAIR_KEY] or not isinstance(rank, int):
        return False
    wide = ranks[PAIR_KEY]
    scaled = alphas[PAIR_KEY]
    if wide != 2 * rank or not isinstance(alpha, int | float) or not isinstance(scaled, int | float):
        return False
    return bool(np.isclose(scaled, alpha * (2**0.5 if raw.get("use_rslora") else 2), rtol=1e-12, atol=0))


def shape_in_file(parameter: str, kind: str, shape: tuple[int, ...], *, pairs: bool) -> tuple[int, ...]:
    """Returns the shape in a file of `lora_A` or `lora_B` of a parameter of experts, from [E, ...] of a projection."""
    experts, rows, columns = shape
    if parameter != GATE_UP:
        return (experts * columns, rows) if kind == "lora_A" else (columns, rows * experts)
    ways = 2 if pairs else 1
    return (experts * columns * ways, rows) if kind == "lora_A" else (2 * columns, rows * ways * experts)


def join(config: DecoderConfig, parameter: str, kind: str, matrices: Mapping[str, np.ndarray]) -> np.ndarray:
    """Joins the matrices [E, I, r] or [E, r, O] of the projections of a parameter to the matrix of a file."""
    if parameter == GATE_UP:
        experts, rows, columns = next(iter(matrices.values())).shape
        is_a = kind == "lora_A"
        joined = np.zeros((experts, rows if is_a else 2 * rows, 2 * columns), np.float32)
        for projection, matrix in matrices.items():
            ranks, outputs = _places(config, projection, columns if is_a else rows)
            if is_a:
                joined[..., ranks] = matrix
            else:
                joined[:, ranks, outputs] = matrix
    else:
        (joined,) = matrices.values()
    if kind == "lora_A":
        stacked = joined.transpose(0, 2, 1)
        return np.ascontiguousarray(stacked.reshape(-1, stacked.shape[2]))
    return np.ascontiguousarray(joined.transpose(2, 1, 0).reshape(joined.shape[2], -1))


def split(config: DecoderConfig, projection: str, kind: str, matrix: np.ndarray, *, pairs: bool) -> np.ndarray:
    """Returns the matrices [E, I, r] or [E, r, O] of a projection from the matrix of a file: the inverse of `join`.

    Raises:
      ValueError: twice the rank, and an output has weights in the ranks of the other.
    """
    assert config.experts is not None
    assert config.lora is not None
    count = config.experts.count
    rank = config.lora.rank
    if kind == "lora_A":
        turned = matrix.reshape(count, -1, matrix.shape[1]).transpose(0, 2, 1)
    else:
        turned = matrix.reshape(matrix.shape[0], -1, count).transpose(2, 1, 0)
    if projection not in _PAIR:
        return turned
    ranks, outputs = _places(config, projection, rank)
    if kind == "lora_A":
        return turned[..., ranks] if pairs else turned
    if not pairs:
        return turned[..., outputs]
    if turned[:, _places(config, _other(projection), rank)[0], outputs].any():
        raise ValueError(
            f"{projection} has weights in the ranks of {_other(projection)}, expected zeros: an adapter of twice the "
            "rank is read if each has its own half of the ranks; merge it with PEFT"
        )
    return turned[:, ranks, outputs]


def _places(config: DecoderConfig, projection: str, rank: int) -> tuple[slice, slice]:
    """Returns the ranks and the outputs of a projection in `gate_up_proj` with twice the rank."""
    assert config.experts is not None
    number = _PAIR.index(projection)
    width = config.experts.width
    outputs = slice(number, None, 2) if is_gpt_oss(config) else slice(number * width, (number + 1) * width)
    return slice(number * rank, (number + 1) * rank), outputs


def parameter_in_file(module: str, parameters: Collection[str]) -> str | None:
    """Returns the parameter whose adapter a module of PEFT has; None: it is a module of its own.

    Args:
      module: of a tensor, within its layer.
      parameters: the keys of `PARAMETERS` with an adapter.
    """
    return next((name for name in PARAMETERS if name in parameters and module_of(name, parameters) == module), None)
