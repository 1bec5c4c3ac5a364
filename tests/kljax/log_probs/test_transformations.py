"""Transformations that `test_everywhere` leaves out: a caller's own `shard_map`, tracing once, derivatives."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import kljax
from kljax import Head, Tile
from tests.kljax.calls import compiled, known_options

TOKENS, WIDTH, VOCABULARY = 16, 4, 11
TILE = Tile(4, 4)
MASK = np.random.default_rng(0).random(TOKENS) < 0.6


def arrays() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    shapes = {"hidden": (TOKENS, WIDTH), "head": (WIDTH, VOCABULARY), "ref_hidden": (TOKENS, WIDTH)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def loss(given: dict[str, Any], mask: Any, **options: Any) -> jax.Array:
    targets = jnp.arange(given["hidden"].shape[0], dtype=jnp.int32) % VOCABULARY
    fields = {name: options.pop(name) for name in ("softcap", "logit_scale", "implementation") if name in options}
    options = {"mask": mask, "entropy": True, "reference": (given["ref_hidden"], None), **options}
    stats = kljax.log_probs_from_hidden(given["hidden"], Head(given["head"], tile=TILE, **fields), targets, **options)
    return (stats.log_prob + 0.3 * stats.entropy + 0.2 * stats.kl).sum()


def frozen_log_prob(given: dict[str, Any], mask: Any) -> jax.Array:
    head = Head(jax.lax.stop_gradient(given["head"]), tile=TILE)
    targets = jnp.zeros(given["hidden"].shape[0], jnp.int32)
    return kljax.log_probs_from_hidden(given["hidden"], head, targets, mask=mask).log_prob.sum()


def by_rows(given: dict[str, Any], mask: Any) -> jax.Array:
    return loss(given, mask) + frozen_log_prob(given, mask)


@functools.cache
def in_parts() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Values and gradients on one device, every four rows for themselves, one part after the other."""

    def run(given: dict[str, Any], mask: Any) -> Any:
        cut = {name: x.reshape(4, -1, WIDTH) for name, x in given.items() if name != "head"}

        def of_part(part: tuple[dict[str, Any], Any]) -> Any:
            return jax.value_and_grad(by_rows)({**part[0], "head": given["head"]}, part[1])

        return jax.lax.map(of_part, (cut, mask.reshape(4, -1)))

    return compiled(run, arrays(), jnp.asarray(MASK))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_of_the_caller(check_vma: bool) -> None:
    # Tokens are split, the head is whole on every device. The caller adds, and with `check_vma` off also the gradient
    # of what is whole.
    mesh = Mesh(np.array(jax.devices()[:4]), ("rows",))
    specs = {"hidden": P("rows"), "head": P(), "ref_hidden": P("rows")}

    def on_one(given: dict[str, Any], mask: Any) -> Any:
        value, grads = jax.value_and_grad(by_rows)(given, mask)
        if not check_vma:
            grads["head"] = jax.lax.psum(grads["head"], "rows")
        return jax.lax.psum(value, "rows"), grads

    def spread(given: dict[str, Any], mask: Any) -> Any:
        return jax.shard_map(
            on_one, mesh=mesh, in_specs=(specs, P("rows")), out_specs=(P(), specs), check_vma=check_vma
        )(given, mask)

    value, grads = compiled(spread, arrays(), jnp.asarray(MASK))
    expected, of_parts = in_parts()
    np.testing.assert_allclose(value, expected.sum(), rtol=1e-6)
    for name in ("hidden", "ref_hidden"):
        np.testing.assert_allclose(grads[name], of_parts[name].reshape(TOKENS, WIDTH), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads["head"], of_parts["head"].sum(0), rtol=1e-5, atol=1e-6)


def test_one_program_for_all_temperatures_masks_and_coefficients() -> None:
    traces = []

    def run(given: dict[str, Any], mask: Any, temperature: Any, numbers: dict[str, Any], beta: Any) -> Any:
        traces.append(1)
        head = Head(given["head"], tile=TILE)
        jsd = kljax.jsd_from_hidden(given["hidden"], head, given["ref_hidden"], beta=beta, hidden_mask=mask)
        return loss(given, mask, temperature=temperature, **numbers) + jsd.sum()

    program = jax.jit(run, compiler_options=known_options())
    results = set()
    for count, temperature, softcap, scale, beta in ((16, 1.0, 5.0, 1.0, 0.5), (3, 0.7, 2.0, 0.5, 0.1)):
        mask = jnp.arange(TOKENS) < count
        results.add(float(program(arrays(), mask, temperature, {"softcap": softcap, "logit_scale": scale}, beta)))
    assert len(results) == 2
    assert len(traces) == 1


def test_scalar_temperature_applies_to_every_token() -> None:
    def run(given: dict[str, Any]) -> tuple[Any, Any]:
        return loss(given, None, temperature=0.7), loss(given, None, temperature=jnp.full(TOKENS, 0.7, jnp.float32))

    scalar, per_token = compiled(run, arrays())
    np.testing.assert_allclose(scalar, per_token, rtol=1e-6)


def test_forward_mode_is_refused_except_over_gradients() -> None:
    # The gradient is made of ordinary operations, so that a Hessian, forwards over backwards, is there and exact.
    inputs = {name: x[:4] if name != "head" else x for name, x in arrays().items()}
    with pytest.raises(TypeError, match="forward-mode autodiff"):
        jax.jvp(lambda x: loss(x, None), (inputs,), (inputs,))

    def run(given: dict[str, Any], mask: Any) -> list[Any]:
        def along(implementation: str) -> Any:
            gradient = jax.grad(lambda x: loss(x, mask, implementation=implementation))
            return jax.jvp(gradient, (given,), (given,))[1]

        return [along("tile"), along("reference")]

    tiled, expected = compiled(run, inputs, jnp.asarray(MASK[:4]))
    for name in inputs:
        np.testing.assert_allclose(tiled[name], expected[name], rtol=1e-4, atol=1e-5)


def test_temperature_scale_and_cap_are_constants() -> None:
    def run(numbers: dict[str, Any]) -> jax.Array:
        return loss(arrays(), None, **numbers)

    numbers = {name: jnp.float32(0.8) for name in ("temperature", "softcap", "logit_scale")}

    def gradients(numbers: dict[str, Any]) -> list[Any]:
        return [
            jax.grad(lambda x, name=implementation: run({**x, "implementation": name}))(numbers)
            for implementation in ("tile", "reference")
        ]

    for grads in compiled(gradients, numbers):
        assert grads == dict.fromkeys(numbers, 0.0)
