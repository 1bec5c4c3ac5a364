"""Times the grouped product of a mixture of experts against the products that bound it, on a CPU.

    python -m benchmarks.grouped
    python -m benchmarks.grouped --rounds 20 --json PATH --markdown PATH

Rows are drawn unevenly, as a router leaves them: the largest group has about three times the mean. "Equal groups" is
one batched product with groups of equal size, which reads every matrix and writes every gradient, too. "Dense" is one
product of the same flops.

Then a decoder with experts samples against a dense one of the same active width. A decode step has few rows of each
expert, and reads the weights of all experts that a row has: "reading" takes the largest of all their weights, once for
each sampled token.

Contenders take turns, and the fastest round counts, by the CPU time of all threads. A missed target does not fail the
command.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kljax
from benchmarks.harness import cli, machine
from benchmarks.harness.race import race_programs
from benchmarks.harness.report import Check, Measured, Report, Target, ratio, table
from train.models import Decoder, DecoderConfig, ExpertsConfig, LayerKind
from train.models.config import DType
from train.models.grouped import grouped_dot
from train.models.parameters import init_params
from train.models.sharding import make_mesh
from train.rollouts.sampler import Sampling, sample

FORWARD, GRADIENT, DENSE, DECODE = 1.10, 1.20, 1.30, 1.30
"""Targets: over equal groups, forward and with gradients; over one dense product where groups are large; sampling over
a dense decoder."""
LARGE_GROUP = 512
DECODERS = {"dense": "dense", "experts": "experts", "read": "reading the experts"}
TITLES = {"dense": "dense", "equal": "equal groups", "grouped": "grouped product"}
KINDS = {"forward": "forward", "gradient": "with gradients"}
COLUMNS = (("product", ""), ("ms", ".1f"), ("CPU ms", ".1f"), ("over equal groups", ".2f"), ("over dense", ".2f"),
           ("temporary MiB", "MiB"))  # fmt: skip
DECODER_COLUMNS = (("decoder", ""), ("ms", ".1f"), ("CPU ms", ".1f"), ("over dense", ".2f"))


@dataclasses.dataclass(frozen=True)
class GroupSizes:
    """Experts, mean rows of each, inputs and outputs of a product."""

    experts: int = 64
    rows: int = 256
    inputs: int = 512
    outputs: int = 512

    def __str__(self) -> str:
        return f"{self.experts} experts, {self.rows} rows an expert, {self.inputs} to {self.outputs}"

    @property
    def drawn(self) -> np.ndarray:
        """Returns the rows of each expert, drawn with unequal probabilities."""
        random = np.random.default_rng(0)
        shares = random.dirichlet(np.full(self.experts, 2.0))
        return random.multinomial(self.experts * self.rows, shares)


SIZES = (GroupSizes(), GroupSizes(rows=LARGE_GROUP))
QUICK = (GroupSizes(3, 7, 5, 4), GroupSizes(2, LARGE_GROUP, 5, 4))


@dataclasses.dataclass(frozen=True)
class DecoderSizes:
    """A decoder whose experts each have `expert_width`, and the tokens that it samples from short prompts."""

    width: int = 256
    experts: int = 16
    active: int = 4
    expert_width: int = 128
    slots: int = 64
    new_tokens: int = 64
    layers: int = 2
    vocab_size: int = 2048
    prompt_length: int = 8

    def __str__(self) -> str:
        return (
            f"{self.slots} completions of {self.new_tokens} tokens, {self.layers} layers of width {self.width}, "
            f"{self.active} of {self.experts} experts of width {self.expert_width}"
        )

    def decoder(self, name: str, dtype: DType) -> Decoder:
        """Makes the decoder with experts, or the dense one, whose weights have the type in which it computes."""
        mlp: dict[str, Any] = {"mlp_width": self.active * self.expert_width}
        if name == "experts":
            experts = ExpertsConfig(count=self.experts, active=self.active, width=self.expert_width)
            mlp |= {"pattern": (LayerKind(mlp="experts"),), "experts": experts}
        return Decoder(
            DecoderConfig(
                vocab_size=self.vocab_size,
                layers=self.layers,
                width=self.width,
                heads=8,
                kv_heads=4,
                head_dim=self.width // 8,
                dtype=dtype,
                param_dtype=dtype,
                **mlp,
            )
        )


DECODED = (DecoderSizes(), DecoderSizes(512, 64, 8, 256, new_tokens=32))
QUICK_DECODED = (DecoderSizes(16, 4, 2, 8, slots=2, new_tokens=2, layers=1, vocab_size=32, prompt_length=2),)


def measure_decoders(size: DecoderSizes, rounds: int, dtype: DType = "float32") -> Measured:
    """Times the sampling of a decoder with experts and of a dense one."""
    ids = jax.random.randint(jax.random.key(1), (size.slots, size.prompt_length), 0, size.vocab_size)
    programs: dict[str, Any] = {}
    for name in ("dense", "experts"):
        model = size.decoder(name, dtype)
        params = init_params(model, jax.random.key(0), make_mesh())
        programs[name] = (functools.partial(_sample, model, size.new_tokens), (params, ids))
    # Of the decoder with experts: its matrices alone are stacked by layer and expert.
    matrices = [x for x in jax.tree.leaves(params) if x.ndim == 4]
    programs["read"] = (functools.partial(_read, size.new_tokens), (matrices,))
    return Measured(size, race_programs(programs, rounds)[0])


def _sample(model: Decoder, new_tokens: int, params: Any, ids: jax.Array) -> jax.Array:
    return sample(
        model,
        kljax.Policy(params),
        ids,
        jnp.ones(ids.shape, bool),
        key=jax.random.key(0),
        group=1,
        max_new_tokens=new_tokens,
        sampling=Sampling(temperature=1.0),
        eos_ids=(),
    ).tokens


def _read(times: int, arrays: list[jax.Array]) -> jax.Array:
    def read(_: int, largest: jax.Array) -> jax.Array:
        # As if the arrays changed: XLA would read them once.
        unknown, largest = lax.optimization_barrier((arrays, largest))
        return jnp.maximum(largest, jnp.stack([jnp.max(array) for array in unknown]).max())

    return lax.fori_loop(0, times, read, jnp.asarray(-jnp.inf, arrays[0].dtype))


def products(size: GroupSizes) -> dict[str, Callable[..., jax.Array]]:
    """Returns the products of rows, matrices and group sizes by contender."""
    return {
        "dense": lambda x, weights, groups: x @ weights[0],
        "equal": lambda x, weights, groups: jnp.einsum(
            "emk,ekf->emf", x.reshape(size.experts, size.rows, -1), weights
        ).reshape(len(x), -1),
        "grouped": grouped_dot,
    }


def measure_size(size: GroupSizes, rounds: int, dtype: str = "float32") -> Measured:
    """Times the contenders of a size."""
    keys = jax.random.split(jax.random.key(1), 3)
    rows = size.experts * size.rows
    shapes = (rows, size.inputs), (size.experts, size.inputs, size.outputs), (rows, size.outputs)
    x, weights, g = (jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))
    arrays = (x, weights, jnp.asarray(size.drawn, jnp.int32), g)
    # The dense product has the gradient of one matrix alone.
    arguments = dict.fromkeys(TITLES, arrays) | {"dense": (x, weights[:1], *arrays[2:])}
    programs = {
        f"{name}_{kind}": (functools.partial(_of_kind, kind, product), arguments[name])
        for name, product in products(size).items()
        for kind in KINDS
    }
    return Measured(size, race_programs(programs, rounds)[0])


def _of_kind(kind: str, product: Callable[..., Any], *arrays: Any) -> Any:
    """Returns the product, or product and gradients."""
    x, weights, groups, g = arrays
    if kind == "forward":
        return product(x, weights, groups)
    y, backward = jax.vjp(lambda x, weights: product(x, weights, groups), x, weights)
    return y, *backward(g)


def report(fields: Mapping[str, Any]) -> Report:
    """Makes a table of each size, and compares with the targets."""
    parts = list[str | Report]()
    checks = list[Check]()
    failures = list[str]()
    for entry in fields["sizes"]:
        measured = Measured.read(entry, GroupSizes)
        parts += [f"**{measured.size}**", table(COLUMNS, _rows(measured))]
        checks += _checks(measured)
        failures += measured.failures({})
    for entry in fields.get("decoders", ()):
        measured = Measured.read(entry, DecoderSizes)
        parts += [f"**{measured.size}**", table(DECODER_COLUMNS, _decoder_rows(measured))]
        title = f"{measured.size.active} of {measured.size.experts} experts: sampling, over dense"
        checks.append(Target("cpu", "experts", "dense", DECODE).check(title, measured.results))
        failures += measured.failures({})
    how = [f"float32, {fields['rounds']} interleaved rounds"]
    return Report(parts, checks, "wall time", fields, how, failures)


def _rows(measured: Measured) -> list[list[Any]]:
    results = measured.results
    rows = list[list[Any]]()
    for kind, title in KINDS.items():
        for name, label in TITLES.items():
            result = results.get(f"{name}_{kind}")
            if result is None or result.problem is not None:
                continue
            cpu = result.best("cpu")
            over = [ratio(cpu, results[f"{other}_{kind}"].best("cpu")) for other in ("equal", "dense")]
            rows.append([f"{label}, {title}", *result.milliseconds(), *over, result.temp_bytes])
    return rows


def _decoder_rows(measured: Measured) -> list[list[Any]]:
    results = measured.results
    rows = list[list[Any]]()
    for name, title in DECODERS.items():
        over = ratio(results[name].best("cpu"), results["dense"].best("cpu"))
        rows.append([title, *results[name].milliseconds(), over])
    return rows


def _checks(measured: Measured) -> list[Check]:
    checks = []
    for kind, title in KINDS.items():
        limits = {"equal": GRADIENT if kind == "gradient" else FORWARD}
        limits |= {"dense": DENSE} if measured.size.rows >= LARGE_GROUP else {}
        for other, limit in limits.items():
            # CPU seconds count: the machine may be shared.
            target = Target("cpu", f"grouped_{kind}", f"{other}_{kind}", limit)
            name = f"{measured.size.rows} rows an expert: {title}, over {TITLES[other]}"
            checks.append(target.check(name, measured.results))
    return checks


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    fields = machine.conditions("cpu") | {"rounds": options.rounds}
    sizes = [measure_size(size, options.rounds) for size in (QUICK if options.quick else SIZES)]
    decoders = [measure_decoders(size, options.rounds) for size in (QUICK_DECODED if options.quick else DECODED)]
    entries = {"sizes": sizes, "decoders": decoders}
    return fields | {name: [dataclasses.asdict(entry) for entry in group] for name, group in entries.items()}


main = cli.command(
    "grouped",
    __doc__,
    _measure,
    report,
    cli.option("--rounds", type=cli.positive, default=12, help="interleaved rounds; 12"),
    cli.option("--quick", action="store_true", help="a smoke test: a few rows"),
)

if __name__ == "__main__":
    sys.exit(main())
