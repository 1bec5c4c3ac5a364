"""Norms and projections on their own: what their weights get as gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from train.models import Decoder, DecoderConfig
from train.models.layers import over_all_tokens


def sums(jaxpr):
    """The types of what is summed, inner programs included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "reduce_sum":
            yield equation.invars[0].aval.dtype
        for inner in jaxprs_in_params(equation.params):
            yield from sums(inner)


@pytest.mark.parametrize("offset", [False, True])
def test_scale_and_bias_gradients_are_summed_in_float32(offset):
    """Read from the program: how far a sum in bfloat16 goes wrong, up to stopping at 256, is up to the compiler."""
    shape = {"vocab_size": 20, "layers": 2, "width": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "mlp_width": 24}
    biases = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
    model = Decoder(DecoderConfig(dtype="bfloat16", qk_norm=True, norm_offset=offset, **shape, **biases))
    tokens, mask = jnp.zeros((3, 5), jnp.int32), jnp.ones((3, 5), bool)
    params = model.structure().params

    def loss(params):
        return model.bind(params)(tokens, mask).astype(jnp.float32).sum()

    collected = list(sums(jax.make_jaxpr(jax.grad(loss))(params).jaxpr))
    # Of scales: two norms of a layer, two of its heads, the last one; and seven biases.
    assert len(collected) >= 12
    assert jnp.bfloat16 not in collected


def test_scales_and_biases_round_once_to_activation_dtype():
    x, weight = (jax.random.normal(jax.random.key(seed), (5, 8)).astype(jnp.bfloat16) for seed in range(2))
    for function in (np.multiply, np.add):
        exact = function(np.asarray(x, np.float64), np.asarray(weight[0], np.float64))
        np.testing.assert_array_equal(
            over_all_tokens(getattr(jnp, function.__name__), x, weight[0]), exact.astype(x.dtype)
        )
