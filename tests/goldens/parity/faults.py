"""Faults to plant in an update of verl: the switches of each, and the causes that name it."""

import dataclasses
from typing import Any

import torch

from tests.goldens.parity import batch
from tests.goldens.parity.verl_update import Scoring


@dataclasses.dataclass(frozen=True)
class DumpFault:
    """A fault: what it changes in the settings, and the keys of causes that are right."""

    name: str
    changes: dict[str, Any]
    causes: tuple[str, ...]


def _scoring(which: str, name: str, cause: str, **changes: Any) -> DumpFault:
    stage = "log_probs" if which == "policy" else "reference"
    return DumpFault(f"{stage} {name}", {which: dataclasses.replace(Scoring(), **changes)}, (f"{stage}: {cause}",))


MASKS = {
    "right": "shifted right by one",
    "left": "shifted left by one",
    "prompt": "prompt tokens",
    "pad": "pad tokens",
    "no_eos": "end of sequence left out",
}
DR_GRPO = "seq-mean-token-sum-norm"

FAULTS = (
    *(DumpFault(f"mask {m}", {"recorded_mask": m}, (f"mask_rule: {cause}",)) for m, cause in MASKS.items()),
    _scoring("policy", "temperature missing", "temperature missing", temperature=1.0),
    _scoring("policy", "temperature twice", "temperature twice", temperature=0.8**2),
    _scoring("policy", "off by one", "alignment off by one", shift=1),
    _scoring("policy", "softcap", "softcap left out", softcap=None),
    _scoring("policy", "logit scale", "logit scale left out", logit_scale=1.0),
    _scoring("policy", "vocabulary padding", "vocabulary padding", vocabulary=batch.PADDED),
    _scoring("policy", "top-p", "top-p 0.9 renormalised", top_p=0.9),
    _scoring("policy", "bfloat16", "logits in bfloat16", dtype=torch.bfloat16),
    DumpFault("log_probs adapter off", {"policy_hidden": "ref_hidden"}, ("log_probs: adapter off",)),
    _scoring("reference", "temperature missing", "temperature missing", temperature=1.0),
    _scoring("reference", "softcap", "softcap left out", softcap=None),
    _scoring("reference", "off by one", "alignment off by one", shift=1),
    DumpFault("reference adapter on", {"reference_hidden": "hidden"}, ("reference: adapter on",)),
    DumpFault("ratio swapped", {"ratio_sign": -1}, ("ratio: direction swapped",)),
    DumpFault("old off by one", {"old_shift": 1}, ("ratio: old log-probs off by one (right)",)),
    DumpFault("rollout as old", {"old": "rollout"}, ("ratio: rollout_log_probs as the old policy",)),
    DumpFault("weights swapped", {"weights_sign": -1}, ("correction: direction swapped",)),
    DumpFault("weights uncapped", {"weights_cap": 1e6}, ("correction: no cap",)),
    DumpFault("weights of sequences", {"weights_level": "sequence"}, ("correction: level sequence",)),
    DumpFault("weights left out", {"weights_power": 0}, ("loss: weights left out",)),
    DumpFault("weights twice", {"weights_power": 2}, ("loss: weights twice",)),
    DumpFault("KL k1", {"kl": "k1"}, ("kl: estimator k1",)),
    DumpFault("KL k2", {"kl": "k2"}, ("kl: estimator k2",)),
    DumpFault("KL abs", {"kl": "abs"}, ("kl: estimator abs",)),
    DumpFault("KL swapped", {"kl_sign": -1}, ("kl: direction swapped",)),
    DumpFault("KL reference off by one", {"kl_shift": 1}, ("kl: reference off by one (right)",)),
    DumpFault("KL of the old policy", {"kl_of": "old"}, ("kl: of old_log_probs",)),
    DumpFault("KL to the rollout", {"kl_to": "rollout"}, ("kl: against rollout_log_probs",)),
    DumpFault("KL gradient k2", {"kl": "low_var_kl+"}, ("kl: gradient k2",)),
    DumpFault("KL detached", {"kl_attached": False}, ("kl: gradient none", "gradient: KL detached")),
    DumpFault("KL coefficient missing", {"kl_coef": 1.0}, ("kl: coefficient missing",)),
    DumpFault("KL left out", {"kl_coef": 0.0}, ("kl: term missing",)),
    DumpFault("ddof 0", {"ddof": 0}, ("advantage: ddof 0",)),
    DumpFault("eps 1e-3", {"eps": 1e-3}, ("advantage: eps 0.001",)),
    DumpFault("eps 1e-4", {"eps": 1e-4}, ("advantage: eps 0.0001",)),
    DumpFault("not scaled", {"scaled": False}, ("advantage: scale none",)),
    DumpFault("advantage sign", {"advantage_sign": -1}, ("advantage: sign flipped",)),
    DumpFault("groups interleaved", {"interleaved": True}, ("advantage: groups interleaved",)),
    DumpFault("no dual clip", {"clips": (("clip_ratio_c", 1e6),)}, ("loss: no dual clip",)),
    DumpFault("symmetric clip", {"clips": (("clip_ratio_high", 0.2),)}, ("loss: clip_high 0.2", "loss: clip_high 0.2")),
    DumpFault("sequence mean", {"mode": "seq-mean-token-mean"}, ("reduction: sequence mean of token means",)),
    DumpFault("sequence sum", {"mode": "seq-mean-token-sum"}, ("reduction: sequence mean of token sums",)),
    DumpFault("Dr. GRPO", {"mode": DR_GRPO}, ("reduction: Dr. GRPO over the padded length",)),
    DumpFault("token sum", {"mode": "token-sum"}, ("reduction: token sum",)),
    DumpFault("2 micro-batches", {"micro_batches": 2}, ("reduction: mean of 2 micro-batches",)),
    DumpFault("4 micro-batches", {"micro_batches": 4}, ("reduction: mean of 4 micro-batches",)),
    *(DumpFault(f"loss mask {m}", {"used_mask": m}, (f"mask: {cause}",)) for m, cause in MASKS.items()),
    DumpFault("gradient halved", {"grad_scale": 0.5}, ("gradient: scale 0.5",)),
    DumpFault("gradient times 4", {"grad_scale": 4.0}, ("gradient: scale 4",)),
)
