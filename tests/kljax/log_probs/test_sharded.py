"""On eight devices as on one: every field and gradient, at 2e-6 in float32, and each where its input is."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from scipy.special import softmax

import kljax
from kljax import Head, HeadSharding, ReferenceStates, Tile
from tests.kljax.calls import known_options
from train.plan.compiler.collectives import collectives
from train.plan.compiler.hlo import parse

ROWS, LENGTH, WIDTH, COLUMNS = 8, 4, 8, 24
# The last of two shards of the vocabulary, and the last two of four, are all padding.
PADDED = 11
MESHES = {
    "data 8": (("data", "fsdp", "tensor"), (8, 1, 1)),
    "data 2, fsdp 2, tensor 2": (("data", "fsdp", "tensor"), (2, 2, 2)),
    "fsdp 4, tensor 2": (("data", "fsdp", "tensor"), (1, 4, 2)),
    "data 2, tensor 4": (("data", "fsdp", "tensor"), (2, 1, 4)),
    "fsdp 2, context 2, tensor 2": (("data", "fsdp", "context", "tensor"), (1, 2, 2, 2)),
}
KEPT = np.random.default_rng(0).random((ROWS, LENGTH)) < 0.6
MASKS = {
    "some": KEPT,
    # The devices that hold these rows have no token.
    "a device without tokens": KEPT & (np.arange(ROWS) >= 4)[:, None],
    "none left": np.zeros_like(KEPT),
    "all": np.ones_like(KEPT),
}


class ShardedCase(NamedTuple):
    """A computation, by its options, and the arrays of which the gradient is taken."""

    kind: str = "reverse"
    own_head: bool = True
    own_options: bool = False
    layout: str = "dv"
    vocab_size: int | None = None
    masked: bool = True
    softcap: bool = True
    bias: bool = True
    to: tuple[str, ...] = ("hidden", "head", "bias", "ref_hidden", "ref_head", "ref_bias")


EVERYTHING = ShardedCase()
OTHER = {"dv": "vd", "vd": "dv"}
CASES = {
    "padding": ShardedCase(vocab_size=PADDED),
    "padding, forward, shared head, vd": ShardedCase(
        "forward", own_head=False, layout="vd", vocab_size=PADDED, softcap=False
    ),
    "jsd, vd, no mask": ShardedCase("jsd", layout="vd", masked=False, bias=False),
    "jsd, padding": ShardedCase("jsd", own_head=False, vocab_size=PADDED),
    "frozen head": ShardedCase("log_prob", to=("hidden",), vocab_size=PADDED),
    "frozen head, vd, no mask": ShardedCase(
        "log_prob", layout="vd", to=("hidden",), masked=False, softcap=False, bias=False
    ),
    "log-prob alone": ShardedCase("log_prob", to=("hidden", "head", "bias")),
    "a reference with a head of its own": ShardedCase("forward", own_options=True, vocab_size=PADDED),
    "kept tokens, padding": ShardedCase("kept", vocab_size=PADDED),
    "whole sequences": ShardedCase("tokens", own_head=False),
    "loss, padding": ShardedCase("loss", vocab_size=PADDED),
    "loss, vd, no mask": ShardedCase("loss", own_head=False, layout="vd", masked=False, softcap=False, bias=False),
    "loss, frozen head": ShardedCase("loss", own_options=True, to=("hidden", "temperature")),
}


def arrays_of(case: ShardedCase) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    draws = {
        "hidden": 0.5 * rng.normal(size=(ROWS, LENGTH, WIDTH)),
        "head": rng.normal(size=(WIDTH, COLUMNS)),
        "bias": 0.5 * rng.normal(size=COLUMNS),
        "ref_hidden": 0.5 * rng.normal(size=(ROWS, LENGTH, WIDTH)),
        "ref_head": rng.normal(size=(WIDTH, COLUMNS)),
        "temperature": rng.uniform(0.7, 1.5, (ROWS, LENGTH)),
        "ref_bias": 0.5 * rng.normal(size=COLUMNS),
    }
    alone = case.kind in ("log_prob", "kept")
    absent = {"bias": not case.bias, "ref_head": not case.own_head or alone}
    absent |= {"ref_hidden": alone, "ref_bias": not case.own_options}
    layouts = {"head": case.layout, "ref_head": OTHER[case.layout] if case.own_options else case.layout}
    arrays = {name: x.T if layouts.get(name) == "vd" else x for name, x in draws.items()}
    return {name: np.float32(x) for name, x in arrays.items() if not absent.get(name)}


def data_of(case: ShardedCase) -> dict[str, np.ndarray]:
    targets = np.random.default_rng(2).integers(0, case.vocab_size or COLUMNS, (ROWS, LENGTH))
    return {"targets": targets, "cotangents": np.float32(np.cos(np.arange(ROWS * LENGTH)).reshape(ROWS, LENGTH))}


def fields_of(
    case: ShardedCase, arrays: Mapping[str, Any], targets: Any, mask: Any, sharding: HeadSharding | None
) -> Any:
    options: dict[str, Any] = {"mask": mask if case.masked else None, "temperature": arrays["temperature"]}
    head = Head(
        arrays["head"],
        bias=arrays.get("bias"),
        softcap=3.0 if case.softcap else None,
        vocab_size=case.vocab_size,
        layout=case.layout,
        tile=Tile(3, 5),
        sharding=sharding,
    )
    ref_hidden, ref_head = arrays.get("ref_hidden"), arrays.get("ref_head")
    if "ref_bias" in arrays:
        layout = OTHER[case.layout]
        ref_head = Head(ref_head, bias=arrays["ref_bias"], softcap=2.0, vocab_size=case.vocab_size, layout=layout)
    if case.kind == "jsd":
        options["hidden_mask"] = options.pop("mask")
        return {"jsd": kljax.jsd_from_hidden(arrays["hidden"], head, ref_hidden, ref_head, **options)}
    if case.kind == "loss":
        return loss_of(arrays, head, targets, {**options, "reference": (ref_hidden, ref_head), "entropy": True})
    if case.kind == "kept":
        kept_ids = jnp.stack([targets, (targets + 3) % 8, jnp.full_like(targets, -1)], -1)
        stats = kljax.renormalized_log_probs(arrays["hidden"], head, targets, kept_ids, **options)
    elif case.kind == "tokens":
        options |= {"reference": (ref_hidden, ref_head), "sum_squared_probs": True}
        stats = kljax.token_log_probs(arrays["hidden"], head, targets, **options)
    else:
        if case.kind != "log_prob":
            options |= {"reference": ReferenceStates(ref_hidden, ref_head, case.kind), "entropy": True}
        stats = kljax.log_probs_from_hidden(arrays["hidden"], head, targets, **options)
    return {name: x for name, x in vars(stats).items() if x is not None}


def loss_of(arrays: Mapping[str, Any], head: Head, targets: Any, options: dict[str, Any]) -> Any:
    """The statistics as metrics, and a loss of them, on every token."""

    def token_loss(stats: kljax.TokenStats, inputs: dict[str, Any]) -> Any:
        loss = stats.log_prob * inputs["weights"] + inputs["coef"] * stats.kl - 0.1 * stats.entropy
        return loss, {"log_prob": stats.log_prob, "kl": stats.kl}

    inputs = {"weights": arrays["temperature"], "coef": jnp.float32(0.3)}
    loss, metrics = kljax.token_loss_from_hidden(
        arrays["hidden"], head, targets, token_loss, inputs, token_chunk=3, **options
    )
    return {**metrics, "loss": loss}


def run(case: ShardedCase, arrays: Any, data: Any, mask: Any, sharding: HeadSharding | None) -> Any:
    """Fields and gradients."""

    def loss(given: dict[str, Any]) -> tuple[jax.Array, Any]:
        fields = fields_of(case, {**arrays, **given}, data["targets"], mask, sharding)
        weighted = [(x * (data["cotangents"] + i if x.ndim else 1)).sum() for i, x in enumerate(fields.values())]
        return sum(weighted[1:], weighted[0]), fields

    grads, fields = jax.grad(loss, has_aux=True)({name: arrays[name] for name in case.to if name in arrays})
    return fields, grads


@functools.cache
def on_one_device(case: ShardedCase) -> dict[str, Any]:
    arrays, data = jax.tree.map(jnp.asarray, (arrays_of(case), data_of(case)))
    program = jax.jit(lambda *x: run(case, *x, None)).lower(arrays, data, jnp.asarray(KEPT))
    compiled = program.compile(compiler_options=known_options())
    return {name: jax.device_get(compiled(arrays, data, mask)) for name, mask in MASKS.items()}


def specs_of(case: ShardedCase, sharding: HeadSharding) -> dict[str, P]:
    tokens, head = sharding.tokens, sharding.head
    vocab = head[1 if case.layout == "dv" else 0] if len(head) == 2 else None
    ref_head = P(*reversed(head)) if case.own_options else head
    of_tokens = dict.fromkeys(("temperature", "targets", "cotangents", "mask", *FIELDS), tokens)
    biases = {"bias": P(vocab), "ref_bias": P(vocab), "loss": P()}
    return {"hidden": tokens, "ref_hidden": tokens, "head": head, "ref_head": ref_head, **biases, **of_tokens}


FIELDS = ("log_prob", "entropy", "logsumexp", "kl", "jsd", "sum_squared_probs", "log_kept_mass")


def check(case: ShardedCase, sharding: HeadSharding) -> None:
    mesh, specs = sharding.mesh, specs_of(case, sharding)

    def put(name: str, x: Any) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, specs[name]))

    arrays, data = ({name: put(name, x) for name, x in some.items()} for some in (arrays_of(case), data_of(case)))
    program = jax.jit(lambda *x: run(case, *x, sharding)).lower(arrays, data, put("mask", KEPT))
    compiled = program.compile(compiler_options=known_options())
    for mask_name, mask in MASKS.items():
        actual, expected = compiled(arrays, data, put("mask", mask)), on_one_device(case)[mask_name]
        for (path, leaf), other in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
            where = f"mask: {mask_name}, {jax.tree_util.keystr(path)}"
            assert (leaf.dtype, leaf.shape) == (other.dtype, other.shape), where
            bound = 2e-6 * max(1.0, np.abs(other).max())
            np.testing.assert_allclose(leaf, other, rtol=2e-6, atol=bound, err_msg=where)
            wanted = NamedSharding(mesh, specs[path[-1].key])
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), f"{where}: {leaf.sharding}"


def sharding_of(mesh: str, layout: str, axis_type: AxisType = AxisType.Auto) -> HeadSharding:
    names, shape = MESHES[mesh]
    devices = np.array(jax.devices()[:8]).reshape(shape)
    head = P("fsdp", "tensor") if layout == "dv" else P("tensor", "fsdp")
    tokens = P(("data", "fsdp"), "context") if "context" in names else P(("data", "fsdp"))
    return HeadSharding(tokens, head, Mesh(devices, names, axis_types=(axis_type,) * len(names)))


def test_squared_probabilities_of_two_shards() -> None:
    """Each shard has a maximum of its own: the probabilities of a shard are rescaled before they are squared."""
    arrays = arrays_of(ShardedCase("log_prob"))
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))
    head = Head(arrays["head"], sharding=HeadSharding(P(), P(None, "tensor"), mesh))
    targets = np.zeros((ROWS, LENGTH), np.int32)
    stats = kljax.log_probs_from_hidden(arrays["hidden"], head, targets, sum_squared_probs=True)
    logits = np.float64(arrays["hidden"]) @ np.float64(arrays["head"])
    halves = logits.reshape(ROWS, LENGTH, 2, -1).max(-1)
    assert (abs(halves[..., 0] - halves[..., 1]) > 0.1).any()
    np.testing.assert_allclose(stats.sum_squared_probs, (softmax(logits, -1) ** 2).sum(-1), 1e-5)


AXIS_TYPES = (AxisType.Auto, AxisType.Explicit)
ALSO = [(AxisType.Auto, "fsdp 2, context 2, tensor 2")]
MAIN_MESH = "data 2, fsdp 2, tensor 2"
# The other meshes hold the same statements, with fewer ways to split.
ON_MESHES = [
    pytest.param(mesh, kind, marks=[] if (mesh == MAIN_MESH or (kind, mesh) in ALSO) else [pytest.mark.thorough])
    for mesh in MESHES
    for kind in AXIS_TYPES
]
CASES_ON_MESHES = [
    pytest.param(case, mesh, marks=[] if mesh == MAIN_MESH or case == "padding" else [pytest.mark.thorough])
    for case in CASES
    for mesh in (MAIN_MESH, "data 2, tensor 4")
]


@pytest.mark.parametrize(("mesh", "axis_type"), ON_MESHES)
def test_fields_and_gradients_on_a_mesh(mesh: str, axis_type: AxisType) -> None:
    sharding = sharding_of(mesh, "dv", axis_type)
    with jax.set_mesh(sharding.mesh):
        check(EVERYTHING, sharding)


@pytest.mark.parametrize(("case", "mesh"), CASES_ON_MESHES)
def test_options_on_a_mesh(case: str, mesh: str) -> None:
    check(CASES[case], sharding_of(mesh, CASES[case].layout))


def test_replicated_head_on_every_device() -> None:
    names, shape = MESHES["data 2, fsdp 2, tensor 2"]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(shape), names)
    check(CASES["padding"], HeadSharding(P(("data", "fsdp", "tensor")), P(), mesh))


def test_current_mesh_is_used() -> None:
    sharding = sharding_of("data 2, fsdp 2, tensor 2", "dv")
    arrays, data = arrays_of(CASES["log-prob alone"]), data_of(CASES["log-prob alone"])
    unset = HeadSharding(sharding.tokens, sharding.head)
    with pytest.raises(ValueError, match=r"sharding\.mesh: got None and no mesh is set, expected a mesh or"):
        kljax.log_probs_from_hidden(arrays["hidden"], Head(arrays["head"], sharding=unset), data["targets"])
    with jax.set_mesh(sharding.mesh):
        log_prob = jax.jit(lambda hidden, head: kljax.log_probs_from_hidden(hidden, head, data["targets"]).log_prob)(
            arrays["hidden"], Head(arrays["head"], sharding=unset)
        )
    expected = kljax.log_probs_from_hidden(arrays["hidden"], arrays["head"], data["targets"]).log_prob
    np.testing.assert_allclose(log_prob, expected, rtol=2e-6)
    assert log_prob.sharding.is_equivalent_to(NamedSharding(sharding.mesh, sharding.tokens), 2)


def test_a_fused_loss_exchanges_no_more_bytes() -> None:
    # Chunks of three tokens, of which every device has sixteen; the mask would make the number of chunks unknown.
    sharding = sharding_of("fsdp 4, tensor 2", "dv")
    bytes_of = {}
    for kind in ("reverse", "loss"):
        case = ShardedCase(kind, own_head=False, masked=False, to=("hidden", "head", "bias"))
        specs = specs_of(case, sharding)
        arrays, data = (
            {name: jax.device_put(x, NamedSharding(sharding.mesh, specs[name])) for name, x in some.items()}
            for some in (arrays_of(case), data_of(case))
        )
        grads = jax.jit(lambda *x, case=case: run(case, *x, None, sharding)[1])
        module = parse(grads.lower(arrays, data).compile().as_text())
        operations = collectives(module)
        assert {"all-gather", "all-reduce"} <= {each.kind for each in operations}
        bytes_of[kind] = sum(each.total for each in operations)
    assert bytes_of["loss"] <= bytes_of["reverse"]
