"""A reference with a decoder of its own: found, refused where its tokens are others, and distilled from."""

import dataclasses
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.load import dump_yaml
from train.config.plan import Plan
from train.config.schema import Config
from train.models import Decoder
from train.models.parameters import init_params
from train.references.find import check_vocabulary, find_reference
from train.references.load import check_reference, load_reference
from train.rl.objective import coefficients
from train.rl.policy import ScoredPolicy, Sequences, hidden_states
from train.rl.reference import reference_head
from train.rl.step import make_prepare, make_score, make_update
from train.weights.orbax import save_base

DISTIL = ("loss.type=none", "rollout.samples_per_prompt=2")
WIDER = tiny.config_of("model={layers: 2, width: 24, heads: 3, kv_heads: 1, head_dim: 8, mlp_width: 40}")
# The cap is below the largest logits, so that a policy's cap in its place would show.
TEACHER = Decoder(dataclasses.replace(tiny.model_of(WIDER).config, tie_embeddings=False, final_softcap=1.0))


def teacher_params() -> dict:
    params = init_params(TEACHER, jax.random.key(3), tiny.mesh_of())
    return jax.tree.map(lambda x: x * (3 if x.ndim > 1 else 1), params)


def distil(*overrides: str) -> Config:
    return tiny.config_of(*DISTIL, "kl.loss={coef: 1.0, estimator: exact}", *overrides)


def load(config: Config) -> ScoredPolicy:
    model, mesh = tiny.model_of(config), tiny.mesh_of()
    saved = check_reference(Plan.of(config), model, mesh, [])
    return load_reference(Plan.of(config), model, mesh, saved=saved, read_base=lambda: None, checkpoints=None)


def log_probs(model: Decoder, params: dict, hidden: jax.Array) -> jax.Array:
    """Log-probs of the whole vocabulary, as the library never has them."""
    tied = model.config.tie_embeddings
    head = params["embed_tokens"]["embedding"].T if tied else params["lm_head"]["kernel"]
    logits, cap = hidden @ head, model.config.final_softcap
    return jax.nn.log_softmax(logits if cap is None else cap * jnp.tanh(logits / cap))


def divergences(params: dict, teacher: dict) -> dict[str, jax.Array]:
    """The means over the completions, from the logits of all positions."""
    batch, model = tiny.rollout_batch(), tiny.model_of(tiny.config_of())
    actual, expected = (
        log_probs(
            item,
            weights,
            hidden_states(ScoredPolicy(item, kljax.Policy(weights)), Sequences.rows(batch.tokens, batch.token_mask)),
        )
        for item, weights in ((model, params), (TEACHER, teacher))
    )

    def mean(p: jax.Array, q: jax.Array) -> jax.Array:
        per_prefix = jnp.sum(jnp.exp(p) * (p - q), -1)
        before = jnp.roll(per_prefix, 1, axis=1)  # the state of a token predicts the next
        return jnp.where(batch.completion_mask, before, 0).sum() / batch.completion_mask.sum()

    return {"reverse": mean(actual, expected), "forward": mean(expected, actual)}


@jax.jit
def values_and_gradients(params: dict, teacher: dict) -> dict[str, tuple[jax.Array, dict]]:
    """Both divergences, each with its gradient."""
    values, pull = jax.vjp(lambda params: divergences(params, teacher), params)
    slopes = {name: {item: jnp.float32(item == name) for item in values} for name in values}
    return {name: (value, pull(slopes[name])[0]) for name, value in values.items()}


def test_distillation_is_exact_kl_to_another_shape():
    """Both directions, also with another softcap, have the value and gradient of autodiff over the whole vocabulary."""
    config, mesh = distil(), tiny.mesh_of()
    model, teacher = tiny.model_of(config), teacher_params()
    reference = ScoredPolicy(TEACHER, kljax.Policy(teacher))
    state = tiny.state_of(config, tiny.keep_gradient())
    batch = make_score(Plan.of(config), model, mesh)(state.trainable, None, reference, tiny.rollout_batch())
    assert batch.ref_hidden.shape == (tiny.ROWS, tiny.LENGTH, 24)
    assert batch.ref_log_probs is None, "nothing reads them"
    batch, _, _ = make_prepare(Plan.of(config), mesh)(batch, state.controllers)
    assert batch.advantages is None
    head, expected = reference_head(Plan.of(config), reference), values_and_gradients(tiny.host_params(), teacher)
    for direction, name in (("reverse", "kl_reference_exact"), ("forward", "kl_reference_forward")):
        config, state = distil(f"kl.loss.direction={direction}"), tiny.state_of(config, tiny.keep_gradient())
        update = make_update(Plan.of(config), model, tiny.keep_gradient(), state, mesh)
        after, metrics = update(state, None, batch, jnp.arange(tiny.ROWS), coefficients(config), ref_head=head)
        value, gradient = expected[direction]
        values = {key: float(metric.value()) for key, metric in metrics.items()}
        np.testing.assert_allclose([values["loss"], values["kl_loss"], values[name]], float(value), rtol=2e-6)
        assert not values.keys() & {"policy_loss", "clip_fraction"}
        scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
        chex.assert_trees_all_close(after.opt_state["params"], gradient, rtol=0, atol=3e-6 * scale)


@pytest.fixture
def other_run(tmp_path) -> Path:
    """The directory of a run of a decoder of another width."""
    root = tmp_path / "teacher"
    root.mkdir()
    (root / "config.yaml").write_text(dump_yaml(WIDER))
    return root


def test_reference_from_another_run_has_its_decoder(other_run):
    weights = init_params(tiny.model_of(WIDER), jax.random.key(3), tiny.mesh_of())
    save_base(other_run / "base", weights)
    config = distil(f"reference={{source: checkpoint, path: {other_run / 'base'}}}")
    loaded = load(config)
    assert loaded.model == tiny.model_of(WIDER)
    chex.assert_trees_all_equal(loaded.policy, kljax.Policy(weights))


def test_base_of_a_quantising_run_is_a_reference(other_run):
    """The quantization of a run is allowed with its adapter, which a reference of whole weights has not."""
    shape = WIDER.model.model_copy(update={"quantization": "int8", "param_dtype": "bfloat16"})
    lora = tiny.config_of("lora={rank: 2}").lora
    steps = WIDER.warm_start.model_copy(update={"steps": 0})
    run = WIDER.model_copy(update={"model": shape, "lora": lora, "warm_start": steps})
    (other_run / "config.yaml").write_text(dump_yaml(run))
    weights = init_params(tiny.model_of(WIDER), jax.random.key(3), tiny.mesh_of())
    save_base(other_run / "base", weights)
    config = distil(
        f"reference={{source: checkpoint, path: {other_run / 'base'}}}", "lora={rank: 2}", "model.quantization=int8"
    )
    loaded = load(config)
    assert loaded.model == tiny.model_of(WIDER)
    chex.assert_trees_all_equal(loaded.policy, kljax.Policy(weights))


def test_run_directory_is_refused_with_its_steps_listed(other_run):
    for step in ("0", "10"):
        (other_run / "checkpoints" / step / "state").mkdir(parents=True)
    config = distil(f"reference={{source: checkpoint, path: {other_run}}}")
    with pytest.raises(ValueError, match=r"teacher holds the checkpoints of a run; name one as .*, of steps 0, 10$"):
        find_reference(config, tiny.model_of(config))


def test_vocabulary_of_other_tokens_is_refused(tmp_path):
    config, model = distil(), tiny.model_of(tiny.config_of())
    other = Decoder(dataclasses.replace(model.config, vocab_size=300))
    with pytest.raises(ValueError, match="has a vocabulary of 300 tokens, expected 264 as the policy has"):
        check_vocabulary(config, tmp_path, other, model)
    check_vocabulary(config, tmp_path, TEACHER, model)
