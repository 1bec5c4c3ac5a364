"""Names of other systems in a config: what they are replaced by, what contradicts them, and that it is saved."""

import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from train.config.errors import ConfigError
from train.config.load import dump_yaml, parse
from train.config.yaml_text import parse_yaml


def config_of(**sections):
    return parse({"steps": 1, **sections})


def test_name_sets_every_implied_field() -> None:
    config, notes = config_of(kl={"loss": {"coef": 0.1, "estimator": "verl/low_var_kl"}})
    assert (config.kl.loss.estimator, config.kl.loss.gradient) == ("low_var_kl", "value")
    assert notes[0] == (
        "kl.loss: verl/low_var_kl means gradient value, estimator low_var_kl, importance_corrected false"
    )
    config, _ = config_of(kl={"loss": {"coef": 0.1, "estimator": "verl/k3+"}})
    assert (config.kl.loss.estimator, config.kl.loss.gradient) == ("low_var_kl", "k2")
    config, _ = config_of(kl={"loss": {"coef": 0.1, "estimator": "trinity/corrected_k3"}})
    assert (config.kl.loss.estimator, config.kl.loss.importance_corrected, config.kl.loss.max_ratio) == ("k3", True, 2)


def test_reward_and_advantages_take_the_value_alone() -> None:
    reward = {"coef": 0.1, "estimator": "openrlhf/k1"}
    config, _ = config_of(kl={"reward": reward, "advantage": {"coef": 0.1, "estimator": "art/k1"}})
    assert (config.kl.reward.estimator, config.kl.reward.value_clip) == ("k1", 10.0)
    assert config.kl.advantage.estimator == "k1"
    with pytest.raises(ConfigError) as error:
        config_of(kl={"advantage": {"coef": 0.1, "estimator": "openrlhf/k1"}})
    (line,) = error.value.problems
    assert line.startswith("kl.advantage.estimator: got 'openrlhf/k1'; it needs value_clip=10.0, which this section")


@pytest.mark.parametrize(
    "name", [entry.name for entry in kljax.systems.entries(system="verl", kind="kl") if entry.call]
)
def test_the_fields_give_the_numbers_of_the_name(name: str) -> None:
    loss = {"coef": 0.1, "estimator": f"verl/{name}"}
    if name in ("kl", "k1"):
        with pytest.raises(ConfigError, match="trains on noise"):
            config_of(kl={"loss": loss})
        return
    section = config_of(kl={"loss": loss})[0].kl.loss
    lp, ref = jnp.array([-1.0, -40.0]), jnp.array([-2.0, -1.0])
    arguments = {"estimator": section.estimator, "gradient": section.gradient, "value_clip": section.value_clip}
    expected = kljax.estimate_kl(lp, ref, **kljax.systems.arguments(f"verl/{name}"))
    np.testing.assert_array_equal(kljax.estimate_kl(lp, ref, **arguments), expected)


def test_reductions_have_names_too() -> None:
    config, notes = config_of(loss={"aggregation": "trinity/seq-mean-token-mean"})
    assert (config.loss.aggregation, config.loss.empty_rows) == ("seq_mean_token_mean", "count")
    assert notes == ("loss: trinity/seq-mean-token-mean means empty_rows count, aggregation seq_mean_token_mean",)
    with pytest.raises(ConfigError, match=r"loss.aggregation: got 'trinity/seq-mean-token-sum-norm'; it needs denomin"):
        config_of(loss={"aggregation": "trinity/seq-mean-token-sum-norm"})


def test_field_contradicting_the_name_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        config_of(kl={"loss": {"coef": 0.1, "estimator": "verl/low_var_kl", "gradient": "k2"}})
    assert list(error.value.problems) == [
        "kl.loss.gradient: got k2, but kl.loss.estimator verl/low_var_kl means value; set only one of them"
    ]
    config_of(kl={"loss": {"coef": 0.1, "estimator": "verl/low_var_kl", "gradient": "value"}})


def test_unknown_names_are_reported_with_other_problems() -> None:
    with pytest.raises(ConfigError) as error:
        config_of(kl={"loss": {"coef": -1.0, "estimator": "verl/low_var"}, "reward": {"estimator": "verk/k1"}})
    reward, loss, coef = error.value.problems
    assert reward.startswith("kl.reward.estimator: got 'verk/k1'; system: got 'verk', expected one of trinity, ")
    assert reward.endswith("did you mean 'verl'?")
    assert loss.startswith("kl.loss.estimator: got 'verl/low_var'; verl kl: got 'low_var', expected one of ")
    assert "did you mean 'low_var_kl'?" in loss
    assert coef.startswith("kl.loss.coef: got -1.0")


def test_saved_config_has_the_meaning_of_names() -> None:
    config, _ = config_of(kl={"loss": {"coef": 0.1, "estimator": "slime/low_var_kl"}})
    raw, _ = parse_yaml(dump_yaml(config))
    assert raw["kl"]["loss"] | {"coef": 0.1} == {
        "coef": 0.1,
        "estimator": "k3",
        "direction": "reverse",
        "aggregation": None,
        "empty_rows": "drop",
        "gradient": "value",
        "importance_corrected": False,
        "importance_level": "token",
        "max_ratio": None,
        "log_ratio_clip": None,
        "value_clip": 10.0,
        "controller": {"type": "fixed"},
    }
    assert parse(raw)[0] == config
