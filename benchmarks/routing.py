"""Measures what router replay changes: log-prob errors and KL of a bfloat16 sampler and a float32 trainer.

    python -m benchmarks.routing
    python -m benchmarks.routing --seeds 4 --json PATH --markdown PATH

Both have the same weights, which bfloat16 holds exactly, so that only the arithmetic differs. A tiny mixture, the same
with a sharper router, and a dense model of the same active width sample completions. The trainer scores them with the
routes of its own router and with the recorded ones, and with planted faults: a layer without routes, routes of the
token before, weights one update away. Numbers are means over seeds, the largest error that of all. A missed target does
not fail the command.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from statistics import mean
from typing import Any

import jax
import jax.numpy as jnp

import kljax
from benchmarks.harness import cli, machine
from benchmarks.harness.report import Check, Report, ratio, table
from train.models import Decoder, DecoderConfig, ExpertsConfig, LayerKind
from train.models.head import stored_head
from train.models.parameters import init_params
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, hidden_states, slot_states, token_stats
from train.rollouts.sampler import Sampling, sample
from train.sequences.token_fields import ROUTES

Array = jax.Array
LIMIT = 1.1
"""Target: the largest error with replay, over that of the dense model."""
OUTLIER = 0.1
UPDATE = 2e-3
"""The size of an update, relative to the weights."""
SHARPNESS = 3
"""Factor of the logits of the sharp router."""
ROWS = {
    "dense": "dense, the same active width",
    "chosen": "the trainer's router chooses",
    "replayed": "routes replayed",
    "lost": "replayed but in the first layer",
    "shifted": "routes of the token before",
    "lag": "one update away, it chooses",
    "lag_replayed": "one update away, replayed",
    "sharp": "sharp router, it chooses",
    "sharp_replayed": "sharp router, replayed",
}
COLUMNS = (("", ""), ("largest error", ".3f"), ("mean error", ".4f"), ("k1", ".1e"), ("k3", ".1e"), ("exact KL", ".1e"),
           ("ratio off by 10 %", ".2%"), ("ESS", ".3f"), ("flips", ".2%"))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RoutingSizes:
    """Prompts and tokens of a seed, and the shape of the mixture."""

    prompts: int = 16
    prompt_length: int = 4
    tokens: int = 24
    layers: int = 4
    width: int = 128
    experts: int = 16
    active: int = 4
    expert_width: int = 64

    def config(self, *, dense: bool) -> DecoderConfig:
        """Returns the mixture, or the dense decoder of the same active width."""
        experts = None if dense else ExpertsConfig(self.experts, self.active, self.expert_width)
        return DecoderConfig(
            vocab_size=256,
            layers=self.layers,
            width=self.width,
            heads=4,
            kv_heads=4,
            head_dim=self.width // 4,
            mlp_width=self.active * self.expert_width,
            pattern=(LayerKind(mlp="dense" if dense else "experts"),),
            experts=experts,
        )


QUICK = RoutingSizes(prompts=2, tokens=4, layers=2, width=16, experts=4, active=2, expert_width=8)


def measure_seed(size: RoutingSizes, seed: int) -> dict[str, dict[str, Any]]:
    """Samples once for each model, and scores the completions in each way."""
    measured: dict[str, dict[str, Any]] = {}
    for kind in ("dense", "mixture", "sharp"):
        dense = kind == "dense"
        sampler, trainer = _models(size, dense)
        params = _weights(trainer, jax.random.key(seed), SHARPNESS if kind == "sharp" else 1)
        sequences, log_probs = _draw(sampler, params, size, seed)
        routes = sequences.fields.get(ROUTES)
        # The weights of the trainer, and the routes that it replays.
        ways: dict[str, tuple[Any, Array | None]] = {"chosen" if kind == "mixture" else kind: (params, None)}
        if kind == "sharp":
            ways["sharp_replayed"] = (params, routes)
        elif routes is not None:
            updated = _moved(params, jax.random.key(seed + 1))
            ways |= {"replayed": (params, routes), "lost": (params, routes.at[:, :, 0].set(-1))}
            ways |= {"shifted": (params, jnp.roll(routes, 1, axis=1))}
            ways |= {"lag": (updated, None), "lag_replayed": (updated, routes)}
        for way, (weights, replayed) in ways.items():
            results = _comparison(size, dense)(params, weights, sequences, log_probs, replayed)
            measured[way] = {key: value.tolist() for key, value in results.items()}
    return measured


def _weights(model: Decoder, key: Array, sharpness: float) -> Any:
    """Draws weights that bfloat16 holds exactly; the weights of routers are times `sharpness`."""

    def scaled(path: Any, x: Array) -> Array:
        scale = {"embed_tokens": 50.0, "lm_head": 2.0}.get(path[0].key, sharpness if path[-2].key == "gate" else 1)
        return (x * scale).astype(jnp.bfloat16).astype(jnp.float32)

    return jax.tree_util.tree_map_with_path(scaled, init_params(model, key, make_mesh()))


def _moved(params: Any, key: Array) -> Any:
    """Returns weights one update away, which bfloat16 holds exactly too."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    moved = [x + UPDATE * jnp.std(x) * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, moved)


def _draw(model: Decoder, params: Any, size: RoutingSizes, seed: int) -> tuple[Sequences, Array]:
    """Samples completions, and returns them with the log-probs of the sampler."""
    prompts = jax.random.randint(jax.random.key(seed + 2), (size.prompts, size.prompt_length), 0, 256)
    arguments = (prompts, jnp.ones(prompts.shape, bool))
    options: dict[str, Any] = {
        "key": jax.random.key(seed + 3),
        "max_new_tokens": size.tokens,
        "sampling": Sampling(record_routes=model.config.experts is not None),
        "eos_ids": (),
    }
    drawn = jax.jit(lambda params: sample(model, kljax.Policy(params), *arguments, **options))(params)
    fields = {name: x for name, x in drawn.fields.items() if name == ROUTES}
    sequences = Sequences.rows(drawn.tokens, drawn.token_mask, drawn.completion_mask, fields)
    return sequences, drawn.fields["rollout_log_probs"]


@functools.cache
def _models(size: RoutingSizes, dense: bool) -> tuple[Decoder, Decoder]:
    """Returns the model of the sampler and that of the trainer."""
    config = size.config(dense=dense)
    return Decoder(dataclasses.replace(config, dtype="bfloat16")), Decoder(config)


@functools.cache
def _comparison(size: RoutingSizes, dense: bool) -> Callable[..., dict[str, Array]]:
    """Makes the program of a comparison, which all weights, seeds and routes share."""
    sampler, trainer = _models(size, dense)

    @jax.jit
    def run(
        sampled: Any, params: Any, sequences: Sequences, log_probs: Array, routes: Array | None
    ) -> dict[str, Array]:
        mask = sequences.completion_mask
        assert mask is not None
        rows = dataclasses.replace(sequences, fields={} if routes is None else {ROUTES: routes})
        policy, drawing = (ScoredPolicy(model, kljax.Policy(p)) for model, p in ((trainer, params), (sampler, sampled)))
        hidden, routed = slot_states(policy, rows)
        stats, _ = token_stats(policy, rows, temperature=1.0, hidden=hidden)
        of_sampler, hidden = hidden_states(drawing, sequences), rows.forest.gather(hidden)
        exact = kljax.token_kl(
            of_sampler,
            stored_head(sampler, sampled).astype(of_sampler.dtype),
            hidden,
            stored_head(trainer, params),
            mask,
        )
        error = jnp.where(mask, log_probs - stats.log_prob, 0)
        count = mask.sum()
        weights = jnp.exp(-error.sum(1))
        results = {
            "largest": jnp.abs(error).max(),
            "mean": jnp.abs(error).sum() / count,
            "k1": jnp.where(mask, error, 0).sum() / count,
            "k3": jnp.where(mask, jnp.expm1(-error) + error, 0).sum() / count,
            "exact": exact.sum() / count,
            "outliers": (mask & (jnp.abs(jnp.expm1(-error)) > OUTLIER)).sum() / count,
            "ess": weights.sum() ** 2 / (weights**2).sum() / len(weights),
        }
        if routed is not None:
            recorded = jnp.sort(sequences.fields[ROUTES], axis=-1)
            known = recorded[..., 0] >= 0
            flips = jnp.any(recorded != routed.chosen, axis=-1) & known
            results["flips"] = flips.sum() / known.sum()
            results["layer_flips"] = flips.sum((0, 1)) / known.sum((0, 1))
        return results

    return run


def report(fields: Mapping[str, Any]) -> Report:
    """Makes the table, means over seeds but for the largest error."""
    size = RoutingSizes(**fields["work"])
    seeds = fields["seeds"]
    rows, layers = [], []
    for name, title in ROWS.items():
        of_seeds = [seed[name] for seed in seeds]
        values = [mean(seed[key] for seed in of_seeds) for key in ("mean", "k1", "k3", "exact", "outliers", "ess")]
        values = [max(seed["largest"] for seed in of_seeds), *values]
        flips = [mean(part) for part in zip(*(seed.get("layer_flips", ()) for seed in of_seeds), strict=True)]
        rows.append([title, *values, mean(seed["flips"] for seed in of_seeds) if flips else None])
        layers += [[title, *flips]] if flips else []
    replayed, dense = (max(seed[name]["largest"] for seed in seeds) for name in ("replayed", "dense"))
    checks = [Check("largest error replayed, over dense", LIMIT, ratio(replayed, dense))]
    how = [
        f"{len(seeds)} seeds of {size.prompts} completions of {size.tokens} tokens",
        f"{size.layers} layers of {size.experts} experts, {size.active} active",
        "errors in nats",
    ]
    of_layers = (("flips by layer", ""), *((str(layer), ".2%") for layer in range(size.layers)))
    return Report([table(COLUMNS, rows), table(of_layers, layers)], checks, fields=fields, how=how)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    size = QUICK if options.quick else RoutingSizes()
    seeds = [measure_seed(size, seed) for seed in range(options.seeds)]
    return machine.conditions("cpu") | {"work": dataclasses.asdict(size), "seeds": seeds}


main = cli.command(
    "routing",
    __doc__,
    _measure,
    report,
    cli.option("--seeds", type=cli.positive, default=4, help="weights and completions; 4"),
    cli.option("--quick", action="store_true", help="a smoke test: a tiny model"),
)

if __name__ == "__main__":
    sys.exit(main())
