"""Reference and policy on one base: one argument, one copy, and on a mesh that splits it one pass over the layers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.config.plan import Plan
from train.models.parameters import abstract_params, init_adapter
from train.models.sharding import batch_sharding
from train.rl.policy import ScoredPolicy
from train.rl.step import make_score
from train.sequences.batch import Batch

LORA = "lora={rank: 2, alpha: 4.0, targets: [q_proj, v_proj, down_proj]}"
EXACT = ("kl.loss={coef: 0.1, estimator: exact}", "kl.reward={coef: 0.1, estimator: exact}", "reference.monitor=true")


def adapter_of(model, mesh, seed: int):
    """Neither half of it is 0."""
    return jax.tree.map(lambda x: x + 0.05 * (1 + seed), init_adapter(model, jax.random.key(seed), mesh))


def setting(shape: tuple[int, int, int], *overrides: str):
    """The config, its program, trained weights and base on a mesh."""
    config, mesh = tiny.config_of(LORA, *overrides), tiny.mesh_of(*shape)
    model = tiny.model_of(config)
    shardings = jax.tree.map(lambda x: x.sharding, abstract_params(model, mesh))
    base = jax.tree.map(jax.device_put, tiny.host_params(), shardings)
    batch = jax.device_put(tiny.rollout_batch(), batch_sharding(mesh))
    return make_score(Plan.of(config), model, mesh), model, {"adapter": adapter_of(model, mesh, 1)}, base, batch


def test_the_base_is_one_argument_of_scoring():
    """The compiler plans for the weights once: with the adapter off they are policy and reference."""
    score, model, trainable, base, batch = setting((1, 1, 1), "kl.loss.coef=0.1", "optim.epochs=2")
    reference = ScoredPolicy(model, kljax.Policy(None))
    compiled = score.lower(trainable, base, reference, batch).compile()
    arguments = sum(leaf.nbytes for leaf in jax.tree.leaves((trainable, base, batch)))
    assert compiled.memory_analysis().argument_size_in_bytes == arguments


def test_policy_on_the_shared_base_has_its_arrays():
    base, adapter = {"w": jnp.ones(2)}, {"a": jnp.ones(1)}
    model = tiny.model_of(tiny.config_of())
    shared, separate = (ScoredPolicy(model, kljax.Policy(params, adapter)) for params in (None, {"w": base["w"]}))
    assert shared.shares_base
    assert not separate.shares_base
    assert shared.on_base(base).policy.params is base
    assert shared.on_base(base).policy.adapter is adapter
    assert separate.on_base(base) is separate


@pytest.fixture(scope="module")
def scored() -> dict[str, tuple[Batch, str]]:
    """Batch and program with an adapter as the reference, whose base is the policy's, or a copy to go over apart."""
    results = {}
    with jax.set_mesh(tiny.mesh_of(1, 4, 1)):
        for name in ("together", "apart"):
            score, model, trainable, base, batch = setting((1, 4, 1), *EXACT)
            params = None if name == "together" else tiny.copied(base)
            reference = ScoredPolicy(model, kljax.Policy(params, adapter_of(model, tiny.mesh_of(1, 4, 1), 2)))
            arguments = (trainable, base, reference, batch)
            compiled = score.lower(*arguments).compile()
            results[name] = jax.device_get(compiled(*arguments)), compiled.as_text()
    return results


def test_both_policies_in_one_pass_are_both_alone(scored):
    together, apart = (scored[name][0] for name in ("together", "apart"))
    for name in ("old_log_probs", "ref_log_probs", "ref_exact_kl", "ref_hidden"):
        chex.assert_trees_all_close(getattr(together, name), getattr(apart, name), rtol=0, atol=2e-6)
    assert np.abs(together.old_log_probs - together.ref_log_probs).max() > 1e-2


def test_one_pass_gathers_the_weights_once(scored):
    gathers = {
        name: text.count(" all-gather(") + text.count(" all-gather-start(") for name, (_, text) in scored.items()
    }
    layers = len(jax.tree.leaves(tiny.host_params()["layers"]))
    assert gathers["together"] <= gathers["apart"] - layers // 2
    others = [" all-reduce(", " all-to-all(", " collective-permute("]
    counts = {name: [text.count(kind) for kind in others] for name, (_, text) in scored.items()}
    assert counts["together"] == counts["apart"], "nothing else goes from device to device"
