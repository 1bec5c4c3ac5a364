"""The declared set-ups: settings of each system as its users configure it, and the header that states them."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.parity_outside.batches import VOCABULARY, BatchShape
from tests.parity_outside.settings import Settings, merge

_CLIP = ("clip_low", "clip_high")


@dataclasses.dataclass(frozen=True)
class Setup:
    """A system with its settings, the names that it uses for them, and the settings that the header states by value.

    `stated` maps a part of the header to settings of the same name as its arguments; `renamed` maps an argument to the
    setting that it takes; `functions` has the entries of parts whose name in the system means more than the part.
    """

    system: str
    settings: Settings
    names: dict[str, str]
    stated: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    renamed: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)
    functions: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    shape: BatchShape = dataclasses.field(default_factory=BatchShape)
    kl_place: str = "loss"
    values: bool = False

    def declared(self, changes: Settings) -> Settings:
        """The settings that the header states."""
        return merge(self.settings, changes)

    def header(self, changes: Settings, dtype: str) -> dict[str, Any]:
        """The header of a dump of this set-up with these declared changes."""
        settings = self.declared(changes)
        header: dict[str, Any] = {"kljax_parity": 1, "system": self.system, "dtype": dtype}
        for part, heat in (("log_probs", "temperature"), ("reference", "ref_temperature")):
            header[part] = {"temperature": settings[heat] or settings["temperature"], "vocab_size": VOCABULARY}
        for part, name in self.names.items():
            entry: dict[str, Any] = self.functions.get(part, {"name": name}) | {}
            entry |= {setting: settings[setting] for setting in self.stated.get(part, ())}
            entry |= {key: settings[setting] for key, setting in self.renamed.get(part, {}).items()}
            header[part] = entry
        if "kl" in self.names:
            coef = settings["kl_coef" if self.kl_place == "loss" else f"kl_{self.kl_place}_coef"]
            header["kl"] |= {"coef": coef, "place": self.kl_place}
        if settings["micro_batches"]:
            header["reduction"]["micro_batches"] = True
        return header


_UPPER = {"correction": {"upper": "correction_upper"}}
_BOTH = {"correction": {"upper": "correction_upper", "lower": "correction_lower"}}

SETUPS: dict[str, Setup] = {
    "trl_dapo": Setup(
        system="trl",
        settings={
            "temperature": 0.9,
            "eps": 1e-4,
            "clip_high": 0.28,
            "kl": "k3",
            "kl_ratio": True,
            "kl_coef": 0.04,
        },
        names={
            "loss": "dapo",
            "reduction": "dapo",
            "advantage": "scale_rewards=group",
            "kl": "k3+use_bias_correction_kl",
        },
        stated={"loss": _CLIP},
    ),
    "trl_grpo": Setup(
        system="trl",
        settings={
            "eps": 1e-4,
            "kl": "k3",
            "kl_coef": 0.04,
            "reduction": "seq_mean_token_mean",
            "empty_rows": "count",
            "correction": "clip",
            "correction_upper": 2.0,
        },
        names={
            "loss": "grpo",
            "reduction": "grpo",
            "advantage": "scale_rewards=group",
            "kl": "k3",
            "correction": "token_truncate",
        },
        stated={"loss": _CLIP},
        renamed=_UPPER,
    ),
    "trl_dr_grpo": Setup(
        system="trl",
        settings={
            "scale": "none",
            "reduction": "seq_mean_token_sum_norm",
            "empty_rows": "count",
            "max_length": 16,
            "kl": "k3",
            "kl_ratio": True,
            "kl_coef": 0.02,
        },
        names={
            "loss": "dr_grpo",
            "reduction": "dr_grpo",
            "advantage": "scale_rewards=none",
            "kl": "k3+use_bias_correction_kl",
        },
        stated={"loss": _CLIP, "reduction": ("max_length",)},
    ),
    "trl_cispo": Setup(
        system="trl",
        settings={
            "eps": 1e-4,
            "loss": "cispo",
            "clip_low": 1.0,
            "kl": "k3",
            "kl_ratio": True,
            "kl_coef": 0.04,
        },
        names={
            "loss": "cispo",
            "reduction": "cispo",
            "advantage": "scale_rewards=group",
            "kl": "k3+use_bias_correction_kl",
        },
        stated={"loss": _CLIP},
    ),
    "trl_gspo": Setup(
        system="trl",
        settings={
            "eps": 1e-4,
            "ratio_level": "sequence",
            "clip_low": 0.03,
            "clip_high": 0.04,
            "reduction": "seq_mean_token_mean",
            "empty_rows": "count",
        },
        names={
            "loss": "grpo+importance_sampling_level=sequence",
            "reduction": "grpo",
            "advantage": "scale_rewards=group",
        },
        stated={"loss": _CLIP},
    ),
    "verl_ppo": Setup(
        system="verl",
        settings={"dual_clip": 3.0, "kl": "low_var_kl", "kl_coef": 0.05, "log_ratio_clip": 20.0},
        names={"loss": "vanilla", "reduction": "token-mean", "advantage": "grpo", "kl": "low_var_kl"},
        stated={"loss": (*_CLIP, "dual_clip")},
    ),
    "verl_tis": Setup(
        system="verl",
        settings={
            "temperature": 1.1,
            "dual_clip": 3.0,
            "log_ratio_clip": 20.0,
            "kl": "low_var_kl",
            "kl_gradient": "k2",
            "kl_coef": 0.05,
            "reduction": "seq_mean_token_mean",
            "correction": "clip",
            "correction_upper": 2.0,
        },
        names={
            "loss": "vanilla",
            "reduction": "seq-mean-token-mean",
            "advantage": "grpo",
            "kl": "low_var_kl+",
            "correction": "rollout_is=token",
        },
        stated={"loss": (*_CLIP, "dual_clip")},
        renamed=_UPPER,
    ),
    "verl_rpp": Setup(
        system="verl",
        settings={
            "dual_clip": 3.0,
            "log_ratio_clip": 20.0,
            "advantage": "returns",
            "gamma": 0.97,
            "whiten": 1,
            "kl_reward": "k1",
            "kl_reward_coef": 0.05,
        },
        names={"loss": "vanilla", "reduction": "token-mean", "advantage": "reinforce_plus_plus", "kl": "kl"},
        stated={"loss": (*_CLIP, "dual_clip"), "advantage": ("gamma",)},
        kl_place="reward",
    ),
    "verl_gae": Setup(
        system="verl",
        settings={
            "dual_clip": 3.0,
            "log_ratio_clip": 20.0,
            "advantage": "gae",
            "gamma": 0.99,
            "lam": 0.95,
            "whiten": 1,
        },
        names={"loss": "vanilla", "reduction": "token-mean", "advantage": "gae"},
        stated={"loss": (*_CLIP, "dual_clip"), "advantage": ("gamma", "lam")},
        values=True,
    ),
    "openrlhf_k2": Setup(
        system="openrlhf",
        settings={
            "eps": 1e-9,
            "log_ratio_clip": 20.0,
            "kl": "k2",
            "kl_value_clip": 10.0,
            "kl_coef": 0.03,
            "correction": "clip",
            "correction_lower": 0.5,
            "correction_upper": 1.8,
        },
        names={
            "loss": "ppo",
            "reduction": "token-mean",
            "advantage": "group_norm",
            "kl": "k2",
            "correction": "token+clip+ratio",
        },
        stated={"loss": _CLIP},
        renamed=_BOTH,
        shape=BatchShape(layout="packed"),
    ),
    "openrlhf_reinforce": Setup(
        system="openrlhf",
        settings={
            "log_ratio_clip": 20.0,
            "advantage": "baseline returns",
            "scale": "none",
            "whiten": 1,
            "whiten_ddof": 0,
            "kl_reward": "k1",
            "kl_value_clip": 10.0,
            "kl_reward_coef": 0.08,
        },
        names={"loss": "ppo", "reduction": "token-mean", "advantage": "reinforce_baseline", "kl": "k1"},
        stated={"loss": _CLIP},
        kl_place="reward",
        shape=BatchShape(layout="packed", groups=2, group_size=4),
    ),
    "skyrl_dual": Setup(
        system="skyrl",
        settings={
            "dual_clip": 3.0,
            "log_ratio_clip": 20.0,
            "reduction": "seq_mean_token_mean",
            "empty_rows": "count",
            "kl": "low_var_kl",
            "kl_coef": 0.06,
            "kl_reduction": "seq_mean_token_mean",
        },
        names={"loss": "dual_clip", "reduction": "sequence_mean", "advantage": "grpo", "kl": "k3"},
        stated={"loss": (*_CLIP, "dual_clip")},
        shape=BatchShape(layout="packed"),
    ),
    "skyrl_cispo": Setup(
        system="skyrl",
        settings={
            "loss": "cispo",
            "log_ratio_clip": 20.0,
            "clip_low": 1.0,
            "clip_high": 0.4,
            "empty_rows": "count",
            "kl": "low_var_kl",
            "kl_coef": 0.02,
            "kl_reduction": "seq_mean_token_mean",
            "correction": "clip",
            "correction_upper": 2.0,
        },
        names={
            "loss": "cispo",
            "reduction": "token_mean",
            "advantage": "grpo",
            "kl": "k3",
            "correction": "tis_ratio_type=token",
        },
        stated={"loss": _CLIP},
        renamed=_UPPER,
        shape=BatchShape(layout="completions", completion=14),
    ),
    "trinity_ppo": Setup(
        system="trinity",
        settings={"dual_clip": 3.0, "log_ratio_clip": 20.0, "kl": "k2", "kl_coef": 0.03},
        names={"loss": "ppo", "reduction": "token-mean", "advantage": "grpo", "kl": "k2"},
        stated={"loss": (*_CLIP, "dual_clip")},
        shape=BatchShape(groups=2, group_size=5),
    ),
    "trinity_sapo": Setup(
        system="trinity",
        settings={
            "loss": "sapo",
            "reduction": "seq_mean_token_mean",
            "empty_rows": "count",
            "kl": "k3",
            "kl_coef": 0.03,
        },
        names={"loss": "sapo", "reduction": "seq-mean-token-mean", "advantage": "grpo", "kl": "k3"},
        stated={"loss": ("tau_positive", "tau_negative")},
    ),
    "slime_tis": Setup(
        system="slime",
        settings={
            "clip_high": 0.28,
            "reduction": "seq_mean_token_mean",
            "empty_rows": "count",
            "kl": "k3",
            "kl_value_clip": 10.0,
            "kl_coef": 0.04,
            "correction": "clip",
            "correction_lower": 0.0,
            "correction_upper": 1.7,
        },
        names={
            "loss": "policy_loss",
            "reduction": "sum_of_sample_mean",
            "advantage": "grpo",
            "kl": "low_var_kl",
            "correction": "vanilla_tis",
        },
        stated={"loss": _CLIP},
        renamed=_BOTH,
        # The name means one mean for all samples of a rollout, and a rollout has one sample here.
        functions={"reduction": {"mode": "seq_mean_token_mean", "empty_rows": "count"}},
        shape=BatchShape(layout="completions", completion=12),
    ),
    "art_cispo": Setup(
        system="art",
        settings={
            "loss": "cispo",
            "clip_low": 1.0,
            "clip_high": 0.5,
            "ddof": 0,
            "kl_advantage": "k1",
            "kl_advantage_coef": 0.15,
        },
        names={"loss": "cispo", "reduction": "mean", "advantage": "scale_rewards", "kl": "k1"},
        stated={"loss": _CLIP},
        kl_place="advantage",
        shape=BatchShape(layout="packed", groups=2, group_size=4),
    ),
    "prime_default": Setup(
        system="prime-rl",
        settings={
            "loss": "dppo",
            "old": "rollout",
            "clip_low": 0.05,
            "clip_high": 0.05,
            "scale": "none",
            "kl": "squared",
            "kl_against": "rollout",
            "kl_coef": 0.02,
        },
        names={"loss": "default", "reduction": "token", "advantage": "grpo", "kl": "kl_tau"},
        stated={"loss": _CLIP},
        # The name of the loss has the KL in it; the KL stands apart here.
        functions={
            "loss": {
                "function": "dppo_loss",
                "divergence": "tv",
                "through": "ratio",
                "arrays": {"old_log_probs": "rollout_log_probs"},
            }
        },
        shape=BatchShape(layout="packed", groups=2, group_size=4),
    ),
}
