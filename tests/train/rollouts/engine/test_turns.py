"""Turns: what is drawn in chunks over cached rows is what the trainer computes over whole sequences."""

import collections
import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from tests import tiny
from train.models import Decoder, DecoderConfig, LoraConfig
from train.models.config import ExpertsConfig, LayerKind
from train.models.sharding import axis_size, make_mesh
from train.rl.policy import ScoredPolicy, Sequences, token_stats
from train.rollouts.engine import EngineSizes, ExtendSize, Turn, TurnEngine
from train.rollouts.engine.of_run import make_engine
from train.rollouts.engine.pool import gather_rows, slice_rows
from train.rollouts.engine.programs import DrawnTokens, EnginePrograms
from train.rollouts.engine.schedule import session_keys
from train.rollouts.sampler import Sampling, sample, stop_table

MODEL = Decoder(
    DecoderConfig(vocab_size=24, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, mlp_width=24, final_softcap=9.0)
)
SIZES = EngineSizes(4, 64, 4, (2, 4), (64,), (ExtendSize(24, 4, 12),))
score = jax.jit(token_stats, static_argnames="temperature")
complete = jax.jit(sample, static_argnums=0, static_argnames=("max_new_tokens", "sampling", "group"))
ROWS = 24  # as many for every call, so that they share a program
KEY, EOS, STOP, WIDTH, SESSIONS = jax.random.key(3), 5, "bc", 64, 7
TEMPERATURE = 0.8


def policy_of(seed: int = 0) -> kljax.Policy:
    params = tiny.drawn(MODEL, jax.random.key(seed))
    params["embed_tokens"]["embedding"] *= 12
    return kljax.Policy(params)


@pytest.fixture(scope="module")
def compiled():
    engine = TurnEngine(
        MODEL,
        SIZES,
        sampling=Sampling(TEMPERATURE),
        eos_ids=(EOS,),
        stop=stop_table([STOP], [bytes([97 + token]) for token in range(24)]),
    )
    engine.update(policy_of(), 0)
    return engine


@pytest.fixture
def engine(compiled):
    compiled.update(policy_of(), 0)
    compiled.forget()
    compiled.count.clear()
    compiled.greedy = False
    return compiled


def prompts_of(lengths) -> list[list[int]]:
    return [np.random.default_rng(row).integers(6, 24, length).tolist() for row, length in enumerate(lengths)]


def run(engine, turns, *, between=lambda number: None) -> list[Turn]:
    for turn in turns:
        engine.submit(turn)
    ended, number = [], 0
    while not engine.is_idle():
        ended += engine.step()
        between(number)
        number += 1
    assert {id(turn) for turn in ended} == {id(turn) for turn in turns}
    return turns


def episodes(engine) -> list[Turn]:
    """Three turns of more sessions than there are rows, with observations of other lengths between them."""
    keys = session_keys(KEY, SESSIONS)
    prompts = prompts_of([9, 1, 14, 3, 6, 2, 11])
    turns = run(engine, [Turn(prompts[s], 7, keys[s], session=s) for s in range(SESSIONS)])
    history = list(turns)
    for number in (1, 2):
        seen = prompts_of([number + s for s in range(SESSIONS)])
        turns = [Turn(t.all_ids() + seen[t.session], 7, t.key, 7 * number, t.session) for t in turns]
        history += run(engine, turns)
    return history


def errors(turns, policy) -> np.ndarray:
    """How far the log-probs of turns are from those of the trainer."""
    tokens, log_probs = np.zeros((ROWS, WIDTH), np.int32), np.zeros((ROWS, WIDTH))
    real, drawn = np.zeros((2, ROWS, WIDTH), bool)
    for row, turn in enumerate(turns):
        start, end = len(turn.ids), len(turn.all_ids())
        tokens[row, :end], real[row, :end], drawn[row, start:end] = turn.all_ids(), True, True
        log_probs[row, start:end] = turn.rollout_log_probs
    stats, _ = score(ScoredPolicy(MODEL, policy), Sequences.rows(tokens, real, drawn), temperature=TEMPERATURE)
    return np.abs(np.asarray(stats.log_prob) - log_probs)[drawn]


def test_log_probs_with_evicted_rows_equal_the_trainer(engine):
    history = episodes(engine)
    assert engine.count["evicted"] > 0
    assert {turn.finish for turn in history} == {"stop", "length"}
    assert errors(history, policy_of()).max() < 5e-6


def test_first_turns_draw_the_tokens_of_the_sampler(engine):
    prompts = prompts_of([9, 2, 14])
    keys = session_keys(KEY, 6)
    turns = run(engine, [Turn(prompts[row // 2], 9, keys[row], session=row) for row in range(6)])
    tokens, mask = np.zeros((3, 14), np.int32), np.zeros((3, 14), bool)
    for row, prompt in enumerate(prompts):
        tokens[row, 14 - len(prompt) :], mask[row, 14 - len(prompt) :] = prompt, True
    stop = engine.programs.stop
    sampling = {
        "sampling": Sampling(TEMPERATURE),
        "eos_ids": jnp.array([EOS]),
        "stop": stop,
        "group": 2,
        "max_new_tokens": 9,
    }
    drawn = complete(MODEL, policy_of(), jnp.asarray(tokens), jnp.asarray(mask), key=KEY, **sampling)
    expected = [row[mask].tolist() for row, mask in zip(drawn.tokens, drawn.completion_mask, strict=True)]
    assert [turn.tokens for turn in turns] == expected
    assert [turn.finish == "stop" for turn in turns] == drawn.finished.tolist()


def test_prompt_of_a_group_is_run_once(engine):
    (prompt,) = prompts_of([11])
    keys = session_keys(KEY, 4)
    run(engine, [Turn(list(prompt), 3, keys[row], session=row) for row in range(4)])
    assert engine.count["prefilled"] == len(prompt)


def test_shared_beginning_is_copied(engine):
    (prompt,) = prompts_of([40])
    keys = session_keys(KEY, 3)
    turns = run(engine, [Turn([*prompt, 6 + row], 3, keys[row], session=row) for row in range(3)])
    assert engine.count["copied"] == 80
    assert engine.count["prefilled"] == 43
    assert errors(turns, policy_of()).max() < 5e-6


def test_schedule_is_a_function_of_the_turns(engine):
    """Also of those after others: a continued run begins with an engine that has drawn nothing."""
    first = [(turn.tokens, turn.rollout_log_probs, turn.row) for turn in episodes(engine)]
    run(engine, [Turn([6, 7], 3, key, session=number) for number, key in enumerate(session_keys(KEY, 3))])
    engine.forget()
    assert [(turn.tokens, turn.rollout_log_probs, turn.row) for turn in episodes(engine)] == first


def test_new_weights_in_the_middle_of_a_turn_draw_its_next_tokens(engine):
    prompts, keys = prompts_of([9, 8, 7]), session_keys(KEY, 3)

    def between(number: int) -> None:
        if number == 0:
            engine.update(policy_of(1), 1)

    turns = [Turn(prompt, 12, keys[row], session=row) for row, prompt in enumerate(prompts)]
    run(engine, turns, between=between)
    mixed = [turn for turn in turns if {*turn.versions} == {0, 1}]
    assert mixed
    for turn in mixed:
        count = turn.versions.count(0)
        old = Turn(turn.ids, 12, turn.key, tokens=turn.tokens[:count], rollout_log_probs=turn.rollout_log_probs[:count])
        new = Turn(turn.all_ids()[: len(turn.ids) + count], 12, turn.key)
        new.tokens, new.rollout_log_probs = turn.tokens[count:], turn.rollout_log_probs[count:]
        assert errors([old], policy_of()).max() < 5e-6
        assert errors([new], policy_of(1)).max() < 5e-6


def test_greedy_turns_take_the_most_probable_tokens(engine):
    engine.greedy = True
    (turn,) = run(engine, [Turn(prompts_of([9])[0], 6, session_keys(KEY, 1)[0])])
    tokens = jnp.asarray([turn.ids]), jnp.ones((1, 9), bool)
    sampling = Sampling(TEMPERATURE, greedy=True)
    drawn = complete(
        MODEL, policy_of(), *tokens, key=KEY, max_new_tokens=6, sampling=sampling, eos_ids=jnp.array([EOS])
    )
    assert drawn.tokens[0, 9 : 9 + len(turn.tokens)].tolist() == turn.tokens


def test_stop_string_may_begin_with_the_first_token(engine):
    """Layers that add nothing, and a head that continues 6 with "bcc"."""
    params = policy_of().params
    for output in (params["layers"]["self_attn"]["o_proj"], params["layers"]["mlp"]["down_proj"]):
        output["kernel"] *= 0
    embedding = np.zeros((24, 16), np.float32)
    embedding[6, 0] = 1
    embedding[1, :2] = 2, 3
    embedding[2, 1] = 9
    params["embed_tokens"]["embedding"] = jnp.asarray(embedding)
    params["lm_head"]["kernel"] = jnp.asarray(embedding.T)
    engine.greedy = True
    engine.update(kljax.Policy(params), 0)
    (turn,) = run(engine, [Turn([6], 7, session_keys(KEY, 1)[0])])
    assert (turn.tokens, turn.finish) == ([1, 2], "stop")


def test_cancelled_turn_leaves_its_row(engine):
    keys = session_keys(KEY, 5)
    turns = [Turn(prompt, 20, keys[row], session=row) for row, prompt in enumerate(prompts_of([9] * 5))]
    for turn in turns:
        engine.submit(turn)
    ended = engine.step()
    left = [turn for turn in turns if not turn.finish]
    cancelled = [left[0], left[-1]]  # one of them is under way, and one waits
    for turn in cancelled:
        engine.cancel(turn)
    while not engine.is_idle():
        ended += engine.step()
    assert {*ended} == {*turns} - {*cancelled}
    assert errors(ended, policy_of()).max() < 5e-6


@pytest.mark.parametrize(("ids", "limit"), [([], 3), ([6], 0), ([6] * 60, 5)])
def test_turn_that_does_not_fit_is_refused(engine, ids, limit):
    with pytest.raises(
        ValueError, match=r"^turn: got \d+ tokens and max_tokens \d+, expected at least 1 .* 64 together$"
    ):
        engine.submit(Turn(ids, limit, np.zeros(2, np.uint32)))


def test_engine_of_a_run_records_no_kept_tokens():
    """A run that is served may have recorded them."""
    context = tiny.context_of(tiny.config_of("rollout.top_k=5", "rollout.record_kept_tokens=true"))
    assert make_engine(context, 2, 16).programs.sampling == Sampling(context.config.temperature, top_k=5)


def test_no_program_copies_the_pool(engine):
    shapes = {f"f32[{','.join(map(str, x.shape))}]" for x in jax.tree.leaves(engine.programs.make_pool())}
    assert any(shape in program.as_text() for shape in shapes for program in engine.programs.compiled.values())
    assert not [line for line in copies_of(engine.programs) if any(shape in line for shape in shapes)]


def test_chunk_of_all_rows_reads_them_in_place(engine):
    """A slice of their columns would be another array of that shape."""
    sizes = engine.sizes
    shape = f"f32[{sizes.rows},{MODEL.config.kv_heads},{MODEL.config.head_dim},{{}}]"
    text = engine.programs.compiled[f"decode_{sizes.rows}_after_{sizes.columns}"].as_text()
    assert shape.format(sizes.columns + sizes.slack) in text
    assert shape.format(sizes.columns) not in text


def test_rows_are_sliced_as_they_are_gathered(engine):
    """A TPU takes the first, everything else the second."""
    pool = engine.programs.make_pool()[0]
    pool = jax.tree.map(lambda x: jax.random.normal(KEY, x.shape), pool)
    rows = jnp.asarray([3, 0, 3])
    results = [take(pool, rows, 5) for take in (slice_rows, gather_rows)]
    assert results[0].key.shape[::3] == (3, 5)
    jax.tree.map(np.testing.assert_array_equal, *results)


def copies_of(programs: EnginePrograms) -> list[str]:
    """The lines of compiled programs that copy an array, with the name of the program."""
    lines = [
        f"{name}: {line}" for name, program in programs.compiled.items() for line in program.as_text().splitlines()
    ]
    return [line for line in lines if re.search(r" copy(-start)?\(", line)]


MESHES = {"data": (2, 1, 1), "tensor": (1, 1, 2), "fsdp and tensor": (1, 2, 2)}


@functools.cache
def engine_on(shape: tuple[int, int, int], model: Decoder = MODEL, **axes: int) -> TurnEngine:
    """An engine that has as many rows as `SIZES` on all devices together."""
    mesh = make_mesh(*shape, **axes)
    rows = SIZES.rows // axis_size("rows", mesh)
    sizes = dataclasses.replace(SIZES, rows=rows, batches=(1, rows), extends=(ExtendSize(24, rows, 12),))
    stop = stop_table([STOP], [bytes([97 + token]) for token in range(24)])
    return TurnEngine(model, sizes, sampling=Sampling(TEMPERATURE), eos_ids=(EOS,), stop=stop, mesh=mesh)


@pytest.fixture(params=MESHES.values(), ids=MESHES)
def engine_on_mesh(request):
    engine = engine_on(request.param)
    engine.update(tiny.placed(policy_of(), MODEL, make_mesh(*request.param)), 0)
    engine.forget()
    engine.count.clear()
    return engine


def test_turns_on_a_mesh_equal_one_device(engine, engine_on_mesh):
    """With evicted rows; every episode stays where it began as long as it has a row."""
    expected, history = episodes(engine), episodes(engine_on_mesh)
    assert [(turn.tokens, turn.finish) for turn in history] == [(turn.tokens, turn.finish) for turn in expected]
    assert errors(history, policy_of()).max() < 5e-6
    assert engine_on_mesh.count["evicted"] > 0
    busy = [turn.row // engine_on_mesh.sizes.rows for turn in history[: SIZES.rows]]
    assert {*busy} == {*range(engine_on_mesh.shards)}


EXPERTS = {"pattern": (LayerKind(mlp="experts"),), "experts": ExpertsConfig(count=4, active=2, width=8)}
SINKS = {"sinks": True, "sliding_window": 6, "pattern": (LayerKind(attention="sliding"), LayerKind())}
ADAPTER = {"lora": LoraConfig(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "down_proj"))}


@pytest.mark.parametrize(
    ("shape", "axes", "changes"),
    [((2, 1, 1), {"expert": 2}, EXPERTS), ((2, 1, 2), {}, SINKS), ((1, 2, 2), {}, ADAPTER)],
    ids=["experts", "sinks", "adapter"],
)
def test_layers_of_other_kinds_on_a_mesh_equal_one_device(shape, axes, changes):
    model = Decoder(dataclasses.replace(MODEL.config, **changes))
    params = tiny.drawn(model, jax.random.key(0))
    params["embed_tokens"]["embedding"] *= 12
    adapter = None
    if model.config.lora is not None:
        adapter = jax.tree.map(lambda x: x + 0.1, tiny.drawn(model, jax.random.key(3), adapter=True))
    histories = []
    for mesh, more in (((1, 1, 1), {}), (shape, axes)):
        engine = engine_on(mesh, model, **more)
        engine.update(tiny.placed(kljax.Policy(params, adapter), model, make_mesh(*mesh, **more)), 0)
        histories.append([(turn.tokens, turn.finish) for turn in episodes(engine)])
    assert histories[0] == histories[1]


def test_no_program_moves_a_cache_between_devices(engine_on_mesh):
    """Caches alone have four axes; nor does a program copy the part of the pool of a device."""
    programs = engine_on_mesh.programs
    moves = r"\[\d+,\d+,\d+,\d+\]\S* (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)"
    lines = [f"{name}: {line}" for name, x in programs.compiled.items() for line in x.as_text().splitlines()]
    assert not [line for line in lines if re.search(moves, line)]
    pool = jax.tree.leaves(programs.make_pool())
    shapes = {f"f32[{','.join(map(str, x.sharding.shard_shape(x.shape)))}]" for x in pool}
    assert any(shape in line for shape in shapes for line in lines)
    assert not [line for line in copies_of(programs) if any(shape in line for shape in shapes)]


@pytest.mark.parametrize(("rows", "columns"), [(1, 20), (16, 300), (64, 392), (512, 4096)])
def test_default_sizes_take_at_most_sixteen_programs(rows, columns):
    sizes = EngineSizes.of(rows, columns)
    puts = {(size.segments, size.width) for size in sizes.extends} | {(batch, sizes.chunk) for batch in sizes.batches}
    assert (len(sizes.extends) + len(sizes.batches)) * len(sizes.lengths) + len(puts) + 1 <= 16
    assert sizes.batches[-1] == rows
    assert sizes.lengths[-1] == columns


class CountedPrograms(EnginePrograms):
    """Programs that draw token 6 and compute nothing; counts their executions by name."""

    runs: collections.Counter

    def weights(self, policy):
        return []

    def make_pool(self):
        return ()

    def compile(self, weights, pool):
        programs = self.lowered_names()
        self.runs = collections.Counter()
        self.compiled = {name: self.executed(name) for name in programs}

    def lowered_names(self):
        sizes = self.sizes
        names = [f"extend_{'x'.join(map(str, size))}_after_{c}" for size in sizes.extends for c in sizes.lengths]
        names += [f"decode_{batch}_after_{c}" for batch in sizes.batches for c in sizes.lengths]
        names += [f"put_{size.segments}x{size.width}" for size in sizes.extends]
        return names + [f"put_{batch}x{sizes.chunk}" for batch in sizes.batches]

    def executed(self, name):
        def program(*arguments):
            self.runs[name] += 1
            if name.startswith("put"):
                return ()
            limits = arguments[3] if name.startswith("decode") else np.ones(len(arguments[3].rows), np.int32)
            counts = np.minimum(limits, self.sizes.chunk)
            tokens = np.full((len(counts), self.sizes.chunk), 6)
            is_decode = name.startswith("decode")
            chosen = tokens if is_decode else tokens[:, 0]
            return (), DrawnTokens(chosen, np.zeros(chosen.shape), counts, np.zeros(len(counts), np.int32))

        return program


@pytest.mark.parametrize(
    ("shards", "rows", "prompts", "samples", "prompt_length", "length"),
    [
        (1, 4, 1, 4, 8, 32),
        (1, 16, 4, 4, 32, 17),
        (1, 16, 2, 8, 5, 1),
        (1, 8, 8, 2, 32, 9),
        (1, 64, 8, 8, 96, 300),
        (1, 8, 4, 4, 30, 9),
        (2, 16, 4, 8, 40, 17),
        (4, 3, 3, 4, 30, 9),
        (2, 4, 4, 4, 30, 9),
    ],
)
def test_executions_are_those_of_the_engine(*, shards, rows, prompts, samples, prompt_length, length):
    """Of turns that draw all their tokens; the last mesh has them in two parts."""
    sizes = EngineSizes.of(rows, prompt_length + length)
    options = {"sampling": Sampling(TEMPERATURE), "eos_ids": (EOS,), "mesh": make_mesh(shards)}
    engine = TurnEngine(MODEL, sizes, **options)
    engine.programs = CountedPrograms(MODEL, sizes, **options)
    engine.update(None, 0)
    of_prompts = [np.random.default_rng(number).integers(6, 24, prompt_length).tolist() for number in range(prompts)]
    keys = session_keys(KEY, prompts * samples)
    turns = [Turn(of_prompts[n // samples], length, keys[n], session=n) for n in range(len(keys))]
    run(engine, turns)
    numbers = {"prompts": prompts, "samples": samples, "prompt_length": prompt_length, "length": length}
    assert engine.executions(**numbers) == engine.programs.runs


@pytest.mark.parametrize("rows", [16, 64])
def test_chunk_has_at_most_twice_its_rows(rows):
    """Beside those of a few rows: other slots draw for nobody."""
    sizes = EngineSizes.of(rows, 64)
    options = {"sampling": Sampling(TEMPERATURE), "eos_ids": (EOS,)}
    engine = TurnEngine(MODEL, sizes, **options)
    engine.programs = CountedPrograms(MODEL, sizes, **options)
    engine.update(None, 0)
    for count in range(rows // 8, rows + 1):
        engine.forget()
        engine.count.clear()
        run(engine, [Turn([6], 1 + sizes.chunk, key, session=n) for n, key in enumerate(session_keys(KEY, count))])
        assert engine.count["slot_steps"] <= 2 * sizes.chunk * count
