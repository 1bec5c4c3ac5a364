"""A setting that a row of the table takes from an option of its system is the option's default, or follows from it."""

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

import kljax
from kljax.systems import Call, Entry
from kljax.systems._table import SYSTEMS
from tests.goldens import generate
from tests.goldens.plans.defaults import PLACES
from tests.goldens.systems import defaults

RECORDED = defaults.recorded()
ENTRIES = [entry for entry in kljax.systems.entries() if entry.call]
REQUIRED = inspect.Parameter.empty

# The rows of TRL whose options are those of another config than GRPOConfig.
TRL_CONFIGS = {
    "rloo": "RLOOConfig",
    "rloo_beta": "RLOOConfig",
    "gmpo": "GMPOConfig",
    "async_grpo": "AsyncGRPOConfig",
    "online_dpo": "OnlineDPOConfig",
    "a2po": "A2POConfig",
    "bema_for_ref_model": "BEMACallback",
    **{name: f"{name.upper()}Config" for name in ("dpo", "kto", "cpo", "orpo", "tpo")},
    "gkd": "GKDConfig",
    "gold": "GOLDConfig",
    "distillation": "DistillationConfig",
    "server_distillation": "ServerDistillationConfig",
    "async_distillation": "AsyncDistillationConfig",
    "iw_opd": "IWOPDConfig",
    "full_logits": "SDPOConfig",
    "topk_logits": "SDFTConfig",
}
# The functions of Trinity-RFT whose arguments the corrections are.
TRINITY_CORRECTIONS = {
    "enable_sequence_masking": "policy_loss.ppo",
    "clipb": "advantage.clipb",
    "clipv": "advantage.clipv",
}
USED: set[tuple[str, str]] = set()


def scope(entry: Entry) -> str:
    """The part of the system that the options of a row belong to, as `defaults.json` spells it."""
    name = entry.name.partition("+")[0]
    if entry.system == "trinity":
        return TRINITY_CORRECTIONS.get(name, f"{entry.kind}.{name}")
    if entry.system == "trl":
        return TRL_CONFIGS.get(name, "GRPOConfig")
    return {"fixed": "default"}.get(name, name)


@dataclasses.dataclass(frozen=True)
class Options:
    """The recorded defaults as a row of the table sees them."""

    entry: Entry

    def __contains__(self, name: str) -> bool:
        return self._key(name) in RECORDED[self.entry.system]["options"]

    def __getitem__(self, name: str) -> Any:
        USED.add((self.entry.system, self._key(name)))
        return RECORDED[self.entry.system]["options"][self._key(name)]["value"]

    def _key(self, name: str) -> str:
        scoped = f"{scope(self.entry)}.{name}"
        return scoped if scoped in RECORDED[self.entry.system]["options"] else name

    def first(self, *names: str) -> Any:
        """The first default that is not None."""
        return next((value for name in names if (value := self[name]) is not None), None)

    def estimator(self, name: str) -> str:
        """This library's estimator for the KL that an option names."""
        return kljax.systems.arguments(f"{self.entry.system}/{self[name]}", kind="kl")["estimator"]

    def common(self, *names: str) -> Any:
        """The default that several options share."""
        (value,) = {self[name] for name in names}
        return value

    def named(self) -> Any:
        """The default of the option that the row is about."""
        return self[self.entry.option.rpartition(".")[2]]

    def below(self, *names: str) -> Any:
        """The first default that is not None, at most the option that the row is about less 1."""
        bound = self.named()
        return self.first(*names) if bound is None else min(self.first(*names), bound - 1)


Formula = Callable[[Options, str], Any]
# What a source says where it is not just the name of an option; the second argument is that of the call.
FORMULAS: Mapping[str, Formula] = types.MappingProxyType(
    {
        "clip_range_low, else clip_range": lambda o, _: o["clip_range_low"] or o["clip_range"],
        "clip_range_high, else clip_range": lambda o, _: o["clip_range_high"] or o["clip_range"],
        "cutoff_prob": lambda o, _: None if o["cutoff_prob"] == 1 else o["cutoff_prob"],
        "regularizer_coef, doubled for k2": lambda o, _: o["regularizer_coef"],
        "any name of kind kl": lambda o, _: o.estimator("kl_loss_fn"),
        "rollout_is": lambda o, _: o["RolloutCorrectionConfig.rollout_is"],
        "the lower part of rollout_is_threshold": lambda o, _: o["icepop.threshold_lower"],
        "the upper part of rollout_is_threshold": lambda o, _: o["icepop.threshold"],
        "log of the lower part of rollout_rs_threshold": lambda o, _: o["rollout_rs_threshold"],
        "log of the upper part of rollout_rs_threshold": lambda o, _: o["rollout_rs_threshold"],
        "algorithm.kl_ctrl": lambda o, _: o["algorithm.kl_ctrl.kl_coef"],
        "algorithm.kl_penalty": lambda o, _: o.estimator("algorithm.kl_penalty"),
        "actor.kl_loss_type": lambda o, _: o.estimator("actor.kl_loss_type"),
        "unbiased": lambda o, _: int(o["unbiased"]),
        "kl_ctrl, at least 0": lambda o, _: o["trainer.algorithm.kl_loss_coef"],
        "kl_estimator_type": lambda o, _: o.estimator("kl_estimator_type"),
        "1 - eps_clip_low": lambda o, _: 1 - o["eps_clip_low"],
        "1 + eps_clip_high": lambda o, _: 1 + o["eps_clip_high"],
        "clip_eps_low": lambda o, _: o.first("--actor.eps_clip_low_high", "--actor.eps_clip"),
        "clip_eps_high": lambda o, _: o.first("--actor.eps_clip_low_high", "--actor.eps_clip"),
        "dual_clip": lambda o, _: o["--actor.dual_clip"],
        "clip_eps": lambda o, _: o["--critic.value_clip"],
        "gamma": lambda o, _: o["--algo.advantage.gamma" if o.entry.system == "openrlhf" else "gamma"],
        "lambd": lambda o, _: o["--algo.advantage.lambd"],
        "is_correction_threshold": lambda o, name: dict(
            zip(("lower", "upper"), o["--algo.advantage.is_correction_threshold"], strict=True)
        )[name],
        "the controller's value, at least 0": lambda o, _: o["--algo.kl.init_coef"],
        "--algo.kl.estimator": lambda o, _: o.estimator("--algo.kl.estimator"),
        "epsilon_high, else epsilon": lambda o, _: o.first("epsilon_high", "epsilon"),
        "epsilon_high - 1, else epsilon - 1": lambda o, _: o.first("epsilon_high", "epsilon") - 1,
        "off_policy_mask_threshold, else off_policy_threshold": lambda o, _: o["off_policy_mask_threshold"],
        "beta, else that of the epoch in the list": lambda o, _: o["beta"][0],
        "distillation_is_clip": lambda o, _: o.common(f"SDPOConfig.{o.entry.name}", f"SDFTConfig.{o.entry.name}"),
        "1 - ref_model_mixup_alpha": lambda o, _: 1 - o["ref_model_mixup_alpha"],
        "the option": lambda o, _: o.named(),
        "min(epsilon_high, the option - 1)": lambda o, _: o.below("epsilon_high", "epsilon"),
        "--eps-clip-high, else --eps-clip": lambda o, _: o.first("--eps-clip-high", "--eps-clip"),
        "--kl-coef, --kl-loss-coef": lambda o, _: o.common("--kl-coef", "--kl-loss-coef"),
        "--kl-loss-type": lambda o, _: o.estimator("--kl-loss-type"),
        "10 with the type low_var_kl, a k3": lambda o, _: 10 if o["--kl-loss-type"] == "low_var_kl" else None,
        "value_clip": lambda o, _: o["--value-clip" if o.entry.system == "slime" else "value_clip"],
        "2 kl_tau": lambda o, _: 2 * o["kl_tau"],
        "eps, ipo_threshold before 2026-08-27": lambda o, _: o["ipo_threshold"],
        "trainer.loss.kl_tau": lambda o, _: o["kl_tau"],
    }
)

# (system, kind) -> the option whose default is the name of a row.
NAMES: Mapping[tuple[str, str], str] = types.MappingProxyType(
    {
        ("trinity", "reduction"): "loss_agg_mode",
        ("verl", "policy_loss"): "actor.policy_loss.loss_mode",
        ("verl", "advantage"): "algorithm.adv_estimator",
        ("verl", "reduction"): "actor.loss_agg_mode",
        ("verl", "controller"): "algorithm.kl_ctrl.type",
        ("verl", "distillation"): "loss_mode",
        ("skyrl", "policy_loss"): "policy_loss_type",
        ("skyrl", "advantage"): "advantage_estimator",
        ("skyrl", "reduction"): "loss_reduction",
        ("skyrl", "controller"): "trainer.algorithm.kl_ctrl.type",
        ("openrlhf", "policy_loss"): "--actor.policy_loss_type",
        ("openrlhf", "advantage"): "--algo.advantage.estimator",
        ("openrlhf", "reduction"): "--actor.loss_agg_mode",
        ("trl", "policy_loss"): "GRPOConfig.loss_type",
        ("trl", "reduction"): "GRPOConfig.loss_type",
        ("trl", "advantage"): "GRPOConfig.scale_rewards",
        ("trl", "correction"): "GRPOConfig.vllm_importance_sampling_mode",
        ("art", "policy_loss"): "ppo",
        ("slime", "policy_loss"): "--loss-type",
        ("slime", "advantage"): "--advantage-estimator",
    }
)
# (system, row) -> the option that switches it on.
SWITCHES: Mapping[tuple[str, str], str] = types.MappingProxyType(
    {
        ("trinity", "ppo+enable_sequence_masking"): "policy_loss.ppo.enable_sequence_masking",
        ("trinity", "enable_sequence_masking"): "policy_loss.ppo.enable_sequence_masking",
        ("trinity", "ppo+fallback_to_policy_gradient"): "policy_loss.ppo.fallback_to_policy_gradient",
        ("trinity", "cispo+enable_mask_clip"): "policy_loss.cispo.enable_mask_clip",
        ("verl", "use_kl_in_reward"): "algorithm.use_kl_in_reward",
        ("verl", "use_kl_loss"): "actor.use_kl_loss",
        ("verl", "rollout_is=sequence"): "rollout_is",
        ("skyrl", "use_kl_in_reward"): "use_kl_in_reward",
        ("skyrl", "use_kl_loss"): "use_kl_loss",
        ("skyrl", "advantage_batch_normalize"): "advantage_batch_normalize",
        ("skyrl", "tis_ratio_type=token"): "tis_ratio_type",
        ("skyrl", "tis_ratio_type=sequence"): "tis_ratio_type",
        ("skyrl", "sequence_mask_metric=geometric"): "sequence_mask_metric",
        ("skyrl", "sequence_mask_metric=product"): "sequence_mask_metric",
        ("openrlhf", "use_loss"): "--algo.kl.use_loss",
        ("openrlhf", "token+mask+ratio"): "--algo.advantage.is_correction_level",
        ("openrlhf", "seq+mask+ratio"): "--algo.advantage.is_correction_level",
        ("trl", "use_adaptive_entropy"): "GRPOConfig.use_adaptive_entropy",
        ("trl", "sync_ref_model"): "GRPOConfig.sync_ref_model",
        ("art", "mask_prob_ratio"): "mask_prob_ratio",
        ("slime", "use_kl_loss"): "--use-kl-loss",
        ("slime", "normalize_advantages"): "--normalize-advantages",
        ("slime", "vanilla_tis"): "--use-tis",
        ("slime", "opsm"): "--use-opsm",
        ("slime", "use_opd"): "--use-opd",
    }
)

SIZE = "a size of the batch, not a setting"
EXAMPLE = "an option of an example script, which no command has"
GIVEN = "the coefficient of the moment, which the caller passes"
ONE_BOUND = "the default is the two bounds of a ratio; a divergence needs one number of its own"
OFF = "off: its default in the reward is none"
SUGGESTED = "None: off; the config suggests 1e-4 and 100"
PULL_REQUEST = "an option of a pull request that no release has"
RECIPE = "an option of a recipe beside verl, which no release has"
REQUEST = "a bound of a request, whose default is the server's"
OLDER = "a default of an older release than the recorded ones, which have no such option"
OF_MAIN = "a default of the main branch, after the release whose defaults are recorded"
# (system, row, argument) -> why the call does not hold the default of the option; a row may stand for those after a +.
EXCEPTIONS: Mapping[tuple[str, str, str], str] = types.MappingProxyType(
    {
        ("trinity", "kl_penalty_fn", "estimator"): OFF,
        ("trinity", "seq-mean-token-sum-norm", "max_length"): SIZE,
        ("verl", "seq-mean-token-sum-norm", "max_length"): SIZE,
        ("skyrl", "seq_mean_token_sum_norm", "max_length"): SIZE,
        ("skyrl", "token_mean_legacy", "num_groups"): SIZE,
        ("skyrl", "prompt_mean", "num_groups"): SIZE,
        ("slime", "sum_of_sample_mean", "num_groups"): SIZE,
        ("trl", "dr_grpo", "max_length"): SIZE,
        ("trl", "kto", "kl"): "a statistic of the batch, not a setting",
        ("skyrl", "outlier_token_is_threshold", "min_ratio"): SUGGESTED,
        ("skyrl", "outlier_token_is_threshold", "max_ratio"): SUGGESTED,
        ("skyrl", "use_rollout_kl_loss", "estimator"): PULL_REQUEST,
        ("trinity", "m2po", "threshold"): PULL_REQUEST,
        ("verl", "gvpo", "coef"): RECIPE,
        **{
            ("skyrl", f"tinker:{name}", bound): REQUEST
            for name in ("ppo", "cispo", "gspo", "dppo")
            for bound in ("clip_low", "clip_high")
        },
        **{("prime-rl", row, bound): OLDER for row in ("token_mask", "geo_mask") for bound in ("lower", "upper")},
        **{("prime-rl", "sequence_mask", bound): OLDER for bound in ("min_ratio", "max_ratio")},
        ("prime-rl", "topd", "alpha"): PULL_REQUEST,
        ("prime-rl", "turn_credit", "coef"): OF_MAIN,
        ("prime-rl", "turn_credit", "gamma"): OF_MAIN,
        ("verl", "flowrl", "reward_scale"): RECIPE,
        ("skyrl", "cispo+cispo_anchor=rollout", "clip_low"): OF_MAIN,
        ("skyrl", "cispo+cispo_anchor=rollout", "clip_high"): OF_MAIN,
        ("slime", "reinforce_plus_plus_baseline", "coef"): GIVEN,
        **{("openrlhf", name, "coef"): GIVEN for name in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")},
        ("openrlhf", "flash_reinforce", "coef"): GIVEN,
        **{
            ("openrlhf", f"{level}+mask+{statistic}", "max_divergence"): ONE_BOUND
            for level in ("token", "seq")
            for statistic in ("binary_kl", "tv")
        },
        **{
            ("slime", f"mis:{level}+{mode}", name): EXAMPLE
            for level in ("token", "sequence", "geometric")
            for mode, names in (("truncate", ["upper"]), ("clip", ["lower", "upper"]), ("mask", ["lower", "upper"]))
            for name in names
        },
        **{
            ("slime", f"mis:rs_level={level}", name): EXAMPLE
            for level in ("token", "sequence", "geometric")
            for name in ("lower", "upper")
        },
        ("slime", "mis:rs_veto_threshold", "min_ratio"): EXAMPLE,
        ("slime", "mis:tis_batch_normalize", "upper"): EXAMPLE,
    }
)


# Arguments that no system takes from an option: their values stand in its code.
CONSTANTS = ("ddof", "eps", "log_ratio_clip", "max_log_ratio", "max_ratio", "min_mass", "value_clip")
CONSTANTS_OF_A_ROW = (
    ("trinity/seq-mean-token-sum-norm", "denominator"),  # the rows are summed
    *[(f"openrlhf/{name}", "gamma") for name in ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")],
    ("openrlhf/flash_reinforce", "gamma"),  # OpenRLHF sets 1 for every estimator but gae and reinforce
    ("openrlhf/flash_reinforce", "num_groups"),  # the batch is one group
    ("trl/kto+loss_type=apo_zero_unpaired", "kl"),
    ("trl/cispo", "clip_low"),  # no lower bound
    ("verl/flowrl", "max_weight"),
    ("prime-rl/ref_kl", "clip_low"),
    ("prime-rl/ref_kl", "clip_high"),  # no upper bound
)


def steps_of(call: Call, after: bool = False) -> Iterator[tuple[Call, bool]]:
    """A call and those inside it, each with whether it takes the result of another."""
    yield call, after
    for inner in (*call.times, *call.plus):
        yield from steps_of(inner)
    for step in call.then:
        yield from steps_of(step, after=True)


def settings(entry: Entry) -> dict[str, Any]:
    """The settings that come from an option, and their values in the call: its arguments, then the function's defaults.

    An argument that has to be given and that the call leaves out is None.
    """
    collected: dict[str, Any] = {}
    for call, _ in steps_of(entry.call) if entry.call else ():
        if "scale" in entry.sources and call.scale != 1:
            collected["scale"] = call.scale
        for name, parameter in inspect.signature(getattr(kljax, call.function)).parameters.items():
            array = any(word in str(parameter.annotation) for word in ("ArrayLike", "Callable", "Mask"))
            arguments = name in call.arguments
            if name in entry.sources and (arguments or (parameter.kind is parameter.KEYWORD_ONLY and not array)):
                default = None if parameter.default is REQUIRED else parameter.default
                collected[name] = call.arguments.get(name, default)
    return collected


def expected(entry: Entry, name: str) -> Any:
    """The value that the recorded defaults give for an argument; `LookupError` if none is recorded."""
    source, options = entry.sources[name], Options(entry)
    if source in FORMULAS:
        return FORMULAS[source](options, name)
    if source not in options:
        raise LookupError(
            f"{entry.key}: {name} comes from {source!r}, whose default is not recorded; add its place to "
            "tests/goldens/plans/defaults.py, a formula to FORMULAS, or a reason to EXCEPTIONS"
        )
    return options[source]


def checked() -> list[Any]:
    """Every (row, argument) whose value is compared."""
    pairs = [(entry, name) for entry in ENTRIES for name in settings(entry)]
    return [
        pytest.param(entry, name, id=f"{entry.kind}-{entry.key}-{name}")
        for entry, name in pairs
        if (entry.system, entry.name, name) not in EXCEPTIONS
    ]


@pytest.mark.parametrize(("entry", "name"), checked())
def test_row_has_the_default_of_its_system(entry: Entry, name: str) -> None:
    value, default = settings(entry)[name], expected(entry, name)
    assert value == (pytest.approx(default, rel=1e-15) if isinstance(default, float) else default)


def default_of(system: str, option: str) -> Any:
    """The recorded default of an option."""
    return RECORDED[system]["options"][option]["value"]


@pytest.mark.parametrize(("system", "kind"), NAMES)
def test_only_the_default_name_is_marked_as_default(system: str, kind: str) -> None:
    name = default_of(system, NAMES[system, kind])
    if (system, kind) == ("trl", "advantage"):
        name = f"scale_rewards={name}"
    if (system, kind) == ("verl", "distillation"):
        name += "+use_policy_gradient" + ("" if default_of(system, "use_policy_gradient") else "=false")
    if system == "art":
        name = "ppo" if name else "cispo"
    (entry,) = kljax.systems.entries(system=system, kind=kind, name=name)
    others = [other for other in kljax.systems.entries(system=system, kind=kind) if other is not entry]
    assert entry.defaults.startswith(("the default", name))
    assert [other.key for other in others if re.match("the default(?! of)", other.defaults)] == []


@pytest.mark.parametrize(("system", "name"), SWITCHES)
def test_a_row_says_whether_it_is_on(system: str, name: str) -> None:
    (entry,) = kljax.systems.entries(system=system, name=name)
    value = default_of(system, SWITCHES[system, name])
    assert entry.defaults.startswith("off" if value in (None, False, "off") else "on")


def test_every_exception_is_about_an_argument() -> None:
    assert set(EXCEPTIONS) <= {(entry.system, entry.name, name) for entry in ENTRIES for name in settings(entry)}


def test_number_without_a_source_is_a_code_constant() -> None:
    without = {
        (f"{entry.system}/{entry.name}", name)
        for entry in ENTRIES
        for call, _ in steps_of(entry.call)
        for name, value in call.arguments.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in entry.sources
    }
    # `test_verl_presets.py` compares the numbers of the presets.
    without = {(row, name) for row, name in without if not row.startswith(("verl/decoupled_", "verl/bypass_"))}
    assert {(row, name) for row, name in without if name not in CONSTANTS} == set(CONSTANTS_OF_A_ROW)


def test_every_recorded_default_has_its_row() -> None:
    for parameters in checked():
        expected(*parameters.values)
    USED.update((system, option) for (system, _), option in [*NAMES.items(), *SWITCHES.items()])
    USED.add(("verl", "use_policy_gradient"))
    assert {(system, option) for system, options in PLACES.items() for option in options} == USED


def test_recorded_file_covers_the_planned_places() -> None:
    assert {
        system: {option: value["place"] for option, value in read["options"].items()}
        for system, read in RECORDED.items()
    } == PLACES
    for system, read in RECORDED.items():
        release, commit = generate.RELEASES.get(system), generate.COMMITS.get(system)
        assert read["version"] == (release.replace("==", " ") if release else f"commit {commit}")
        assert read["version"].split()[1] in SYSTEMS[system].version
