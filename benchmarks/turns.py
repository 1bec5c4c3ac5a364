"""Times episodes of several turns on a CPU: the engine of turns against one call of the batch sampler.

    python -m benchmarks.turns
    python -m benchmarks.turns --sessions 16 --rounds 5 --isa avx2,avx512 --json PATH --markdown PATH

An episode has 4 turns of 16 to 64 tokens, and observations of 24 between them. The batch sampler draws as many tokens
for each episode in one call, as one completion, and prefills the observations by themselves: no turn waits for another.

Both take turns in one process, on one thread, and its CPU time counts. The command fails if the log-probs of the engine
are not those of the trainer; a missed target does not fail it.
"""

import argparse
import collections
import dataclasses
import os
import sys
from collections.abc import Mapping
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kljax
from benchmarks.harness import cli, instructions, machine
from benchmarks.harness.measure import Clock, Seconds
from benchmarks.harness.process import RemoteError, start
from benchmarks.harness.race import race
from benchmarks.harness.report import Check, ContenderResult, Report, table
from train.models import Decoder, DecoderConfig
from train.models.parameters import bind, init_params
from train.models.sharding import make_mesh
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rollouts.engine import EngineSizes, Turn, TurnEngine
from train.rollouts.engine.schedule import session_keys
from train.rollouts.sampler import Sampling, WindowedSampler

SPEED = {16: 0.75, 64: 0.85}
"""Targets: tokens per CPU second of the engine over those of the batch sampler, by the number of sessions."""
PREFILLED, PROGRAMS, DIFFERENCE = 1.05, 16, 5e-6
"""Most tokens that are run over those of prompts and observations, most programs, largest difference of log-probs."""
CONTENDERS = {"engine": "turn by turn", "sampler": "one call for each batch"}
COLUMNS = (("contender", ""), ("CPU s", ".2f"), ("tokens/CPU s", ",.0f"), ("over the call", ".2f"))


@dataclasses.dataclass(frozen=True)
class EpisodeSizes:
    """Episodes, and the model that draws them; `isa` limits the instruction set, "" to all of the machine."""

    sessions: int = 64
    prompt: int = 64
    observation: int = 24
    turns: int = 4
    shortest: int = 16
    longest: int = 64
    layers: int = 4
    width: int = 256
    vocab: int = 32000
    isa: str = ""

    @property
    def columns(self) -> int:
        """Returns the most tokens of an episode."""
        return self.prompt + self.turns * self.longest + (self.turns - 1) * self.observation

    def model(self) -> Decoder:
        """Makes the decoder."""
        heads: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": self.width // 8}
        shape = DecoderConfig(self.vocab, layers=self.layers, width=self.width, mlp_width=4 * self.width, **heads)
        return Decoder(shape)


class Episodes:
    """The same episodes for both contenders, in one process."""

    def __init__(self, sizes: EpisodeSizes) -> None:
        """Draws prompts, observations and lengths, and compiles the programs of the engine."""
        rng = np.random.default_rng(0)
        self.sizes = sizes
        self.model = sizes.model()
        self.prompts = rng.integers(0, sizes.vocab, (sizes.sessions, sizes.prompt))
        self.observations = rng.integers(0, sizes.vocab, (sizes.turns, sizes.sessions, sizes.observation))
        self.lengths = rng.integers(sizes.shortest, sizes.longest + 1, (sizes.turns, sizes.sessions))
        self.keys = session_keys(jax.random.key(0), sizes.sessions)
        self.policy = kljax.Policy(init_params(self.model, jax.random.key(0), make_mesh()))
        clock = Clock()
        with clock.part("compile"):
            self.engine = TurnEngine(
                self.model, EngineSizes.of(sizes.sessions, sizes.columns), sampling=Sampling(), eos_ids=()
            )
            self.engine.update(self.policy, 0)
        self.compile_seconds = clock.parts["compile"][1]
        self.sampler = WindowedSampler(
            self.model,
            make_mesh(),
            name="batch",
            max_new_tokens=sizes.turns * sizes.longest,
            sampling=Sampling(),
            eos_ids=(sizes.vocab,),
        )
        self.prefill = jax.jit(self._prefill)
        self.last_turns: list[Turn] = []

    def run(self, name: str) -> dict[str, Seconds]:
        """Times one contender."""
        clock = Clock()
        with clock.part("run"):
            if name == "engine":
                self.last_turns = self.by_engine()
            else:
                self.by_sampler()
        return clock.parts

    def by_engine(self) -> list[Turn]:
        """Runs all episodes turn by turn; returns the last turn of each."""
        engine = self.engine
        engine.forget()
        engine.count = collections.Counter()
        sessions = range(self.sizes.sessions)
        number = [0 for _ in sessions]
        last = dict[Any, Turn]()
        for session in sessions:
            length = int(self.lengths[0, session])
            engine.submit(Turn(self.prompts[session].tolist(), length, self.keys[session], session=session))
        while not engine.is_idle():
            for turn in engine.step():
                session = int(turn.session)  # type: ignore[call-overload]
                last[session] = turn
                number[session] += 1
                if number[session] < self.sizes.turns:
                    ids = turn.all_ids() + self.observations[number[session], session].tolist()
                    length = int(self.lengths[number[session], session])
                    engine.submit(Turn(ids, length, self.keys[session], turn.first + len(turn.tokens), session))
        return [last[session] for session in sessions]

    def by_sampler(self) -> None:
        """Draws as many tokens of each episode in one call, and prefills the observations."""
        limits = jnp.asarray(self.lengths.sum(0), jnp.int32)
        mask = jnp.ones(self.prompts.shape, bool)
        prompts = jnp.asarray(self.prompts, jnp.int32)
        drawn = self.sampler(self.policy, prompts, mask, jax.random.key(1), {"limits": limits})
        jax.block_until_ready(drawn.tokens)
        for number in range(1, self.sizes.turns):
            jax.block_until_ready(self.prefill(self.policy, jnp.asarray(self.observations[number], jnp.int32)))

    def _prefill(self, policy: kljax.Policy, tokens: jax.Array) -> jax.Array:
        return bind(self.model, policy).prefill(tokens, jnp.ones(tokens.shape, bool))[0][:, -1]

    def counts(self) -> dict[str, float]:
        """Returns what the last round of the engine did, and how far its log-probs are from the trainer's."""
        sizes = self.sizes
        count = self.engine.count
        return {
            "tokens": int(self.lengths.sum()),
            "prefilled": count["prefilled"] / (sizes.sessions * (sizes.prompt + (sizes.turns - 1) * sizes.observation)),
            "prefill_slots": count["prefilled"] / count["prefill_slots"],
            "decode_slots": (count["sampled"] - self.lengths.size) / count["slot_steps"],
            "programs": len(self.engine.programs.compiled),
            "compile_seconds": self.compile_seconds,
            "difference": self.difference(self.last_turns),
        }

    def difference(self, turns: list[Turn], most: int = 8) -> float:
        """Returns the largest difference of the log-probs of the first turns from those of the trainer."""
        turns = turns[:most]
        shape = (len(turns), self.sizes.columns)
        tokens = np.zeros(shape, np.int32)
        log_probs = np.zeros(shape)
        real, drawn = np.zeros((2, *shape), bool)
        for row, turn in enumerate(turns):
            end = len(turn.all_ids())
            tokens[row, :end] = turn.all_ids()
            real[row, :end] = True
            drawn[row, len(turn.ids) : end] = True
            log_probs[row, len(turn.ids) : end] = turn.rollout_log_probs
        stats, _ = token_stats(
            ScoredPolicy(self.model, self.policy),
            Sequences.rows(jnp.asarray(tokens), jnp.asarray(real), jnp.asarray(drawn)),
            temperature=1.0,
        )
        return float(np.abs(np.asarray(stats.log_prob) - log_probs)[drawn].max())


def load(**sizes: Any) -> Episodes:
    """Makes the episodes of a worker process."""
    return Episodes(EpisodeSizes(**sizes))


def measure_size(sizes: EpisodeSizes, rounds: int) -> dict[str, Any]:
    """Times both contenders in a process of one thread; returns an entry of `sizes`."""
    limits = instructions.settings(sizes.isa)
    flags = limits.get("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    settings = {**limits, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} --xla_cpu_multi_thread_eigen=false".strip()}
    results = {name: ContenderResult(name) for name in CONTENDERS}
    with start("benchmarks.turns", settings=settings) as remote:
        try:
            remote.ask(do="load", **dataclasses.asdict(sizes))
            race(results, rounds, lambda name: remote.ask(do="run", name=name))
            counts = remote.ask(do="counts")
        except RemoteError as error:
            raise cli.EndError(f"{sizes.sessions} sessions{instructions.title(sizes.isa)}: {error}") from error
    entries = {name: dataclasses.asdict(result) for name, result in results.items()}
    return {"size": dataclasses.asdict(sizes), "results": entries, "counts": counts}


def report(fields: Mapping[str, Any]) -> Report:
    """Makes a table of each number of sessions, and compares with the targets."""
    parts = list[str | Report]()
    checks = list[Check]()
    failures = list[str]()
    for entry in fields["sizes"]:
        sizes = EpisodeSizes(**entry["size"])
        counts = entry["counts"]
        results = {name: ContenderResult(**result) for name, result in entry["results"].items()}
        title = f"{sizes.sessions} sessions{instructions.title(sizes.isa)}"
        failures += [f"{title}: {result.name}: {result.problem}" for result in results.values() if result.failed]
        if any(result.problem for result in results.values()):
            continue
        seconds = {name: [cpu for _, cpu in result.seconds["run"]] for name, result in results.items()}
        ratios = [call / turns for turns, call in zip(seconds["engine"], seconds["sampler"], strict=True)]
        best = {name: min(values) for name, values in seconds.items()}
        speeds = {"engine": median(ratios), "sampler": None}
        rows = [
            (CONTENDERS[name], median(values), counts["tokens"] / median(values), speeds[name])
            for name, values in seconds.items()
        ]
        parts += [f"**{title}**", table(COLUMNS, rows), _describe(counts)]
        if sizes.sessions in SPEED:
            checks.append(
                Check(
                    f"{title}: tokens per CPU second, over the call",
                    SPEED[sizes.sessions],
                    median(ratios),
                    best["sampler"] / best["engine"],
                    at_least=True,
                )
            )
        checks += [
            Check(f"{title}: tokens run, over those of prompts and observations", PREFILLED, counts["prefilled"]),
            Check(f"{title}: programs", PROGRAMS, counts["programs"], digits=0),
        ]
        if not counts["difference"] <= DIFFERENCE:
            failures.append(
                f"{title}: got a difference of {counts['difference']:.1e} from the log-probs of the trainer, "
                f"expected at most {DIFFERENCE:.0e}"
            )
    size = EpisodeSizes(**fields["sizes"][0]["size"])
    how = [
        f"{size.layers} layers of width {size.width}, V={size.vocab:,}, float32",
        f"one thread, medians of {fields['rounds']} interleaved rounds",
    ]
    return Report(parts, checks, "fastest rounds", fields, how, failures)


def _describe(counts: Mapping[str, float]) -> str:
    """Says what the engine did in a round."""
    return (
        f"{counts['programs']:.0f} programs, compiled in {counts['compile_seconds']:.0f} CPU s. "
        f"{counts['decode_slots']:.0%} of the slots of decode steps drew a token, {counts['prefill_slots']:.0%} of "
        f"those for new tokens had one. Log-probs differ from the trainer's by {counts['difference']:.1e}."
    )


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    lacking = instructions.lacking(options.isa)
    if lacking:
        raise cli.OptionError(f"argument --isa: got {','.join(lacking)}, which this processor lacks")
    tiny = {
        "prompt": 4,
        "observation": 2,
        "turns": 2,
        "shortest": 1,
        "longest": 3,
        "layers": 1,
        "width": 16,
        "vocab": 32,
    }
    sizes = [
        EpisodeSizes(sessions, isa=isa, **(tiny if options.quick else {}))
        for isa in options.isa or [""]
        for sessions in options.sessions
    ]
    fields = machine.conditions("cpu") | {"rounds": options.rounds}
    return fields | {"sizes": [measure_size(size, options.rounds) for size in sizes]}


main = cli.command(
    "turns",
    __doc__,
    _measure,
    report,
    cli.option("--sessions", type=cli.positive, nargs="+", default=list(SPEED), help="episodes at once; 16 and 64"),
    cli.option("--rounds", type=cli.positive, default=5, help="interleaved rounds; 5"),
    cli.option(
        "--isa",
        type=cli.some_of(instructions.TITLES),
        default=(),
        metavar="NAMES",
        help=f"measure under each of these instruction sets: {','.join(instructions.TITLES)}",
    ),
    cli.option("--quick", action="store_true", help="a smoke test: a tiny model"),
)

if __name__ == "__main__":
    sys.exit(main())
