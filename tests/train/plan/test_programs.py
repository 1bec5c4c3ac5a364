"""The programs of a planned step: loops whose length depends on data, and the engine of episodes."""

import jax
import pytest

import kljax
from tests.tiny import config_of, host_params, mesh_of
from train.models.sharding import device_bytes, make_mesh
from train.plan.compiler.flops import count_flops
from train.plan.compiler.hlo import parse
from train.plan.programs import AbstractRun
from train.rollouts.engine.of_run import engine_of_run

CALCULATOR = "environment={name: 'train.data.environments.calculator:Calculator', max_turns: 3}"
AGENT = "rollout.source={type: endpoint, agent: 'train.data.agents.calculator:play'}"
ROWS = "rollout={prompts_per_step: 4, samples_per_prompt: 4}"
OTHERS = ["score", "prepare", "update"]


def operations(name: str, *changes: str) -> float:
    """Operations of a program, compiled for this machine."""
    run = AbstractRun.of(config_of("kl.loss.coef=0.1", "optim.updates_per_batch=1", *changes), mesh_of())
    program = next(program for program in run.lower() if program.name == name)
    compiled = program.lowered.compile({"xla_backend_optimization_level": 0})
    return count_flops(parse(compiled.as_text()), program.loops)


def test_operations_do_not_depend_on_the_tokens_of_a_chunk():
    """The head takes all tokens of a batch, however many at a time."""
    chunks = [operations("update", f"log_probs.token_chunk={tokens}") for tokens in (8, 16)]
    assert chunks[0] == chunks[1] > 0
    tiles = [operations("score", f"log_probs.tile={{tokens: {tokens}, vocab: 16}}") for tokens in (8, 16)]
    assert tiles[0] == tiles[1] > 0


@pytest.mark.parametrize("episodes", [CALCULATOR, AGENT])
def test_engine_of_episodes_is_planned(episodes):
    run = AbstractRun.of(config_of(ROWS, episodes, "data.max_completion_length=20", "kl.loss.coef=0.1"), mesh_of())
    engine = engine_of_run(run.context)
    weights = engine.programs.weights(kljax.Policy(host_params()))
    together = device_bytes((run.engine.weights, run.engine.pool))
    assert together == sum(x.nbytes for x in jax.tree.leaves((weights, engine.programs.make_pool())))
    programs = {program.name: program for program in run.lower()}
    length = run.context.config.data.max_prompt_length
    assert {name: x.runs for name, x in programs.items() if x.runs and name not in OTHERS} == {
        "engine weights": 1,
        **engine.executions(prompts=4, samples=4, prompt_length=length, length=20),
    }
    assert [name for name, x in programs.items() if not x.runs] == ["extend_256x12x25_after_25"], "the largest"
    assert [*programs][-3:] == OTHERS
    # The engine is in memory beside its own programs alone, of which it is an argument, and not beside the update.
    assert programs["score"].beside == device_bytes(run.resident()) - device_bytes((run.state.trainable, run.reference))
    decode = next(x for name, x in programs.items() if name.startswith("decode"))
    assert decode.beside == device_bytes(run.resident())
    put = next(x for name, x in programs.items() if name.startswith("put"))
    assert put.beside == device_bytes(run.resident()) + device_bytes(run.engine.weights)
    compiled = decode.lowered.compile({"xla_backend_optimization_level": 0})
    module = parse(compiled.as_text())
    chunk = engine.sizes.chunk
    assert count_flops(module, decode.loops) == pytest.approx(chunk * count_flops(module, {"decode": 1}), rel=1e-6)


def test_episodes_of_servers_have_no_programs():
    source = "rollout.source={type: openai, url: 'http://127.0.0.1:1', model: m}"
    run = AbstractRun.of(config_of(CALCULATOR, source, "kl.loss.coef=0.1"), mesh_of())
    assert [program.name for program in run.lower()] == OTHERS


def test_engine_on_a_mesh_is_planned_for_a_device():
    """Rows are split over data and fsdp, caches over tensor, and weights as the sampler has them."""
    shape = "model={layers: 2, width: 16, heads: 4, kv_heads: 2, head_dim: 8, mlp_width: 32}"
    config = config_of(ROWS, CALCULATOR, shape, "mesh={fsdp: 2, tensor: 2}", "rollout.mesh={data: 2, tensor: 2}")
    one = AbstractRun.of(config_of(ROWS, CALCULATOR, shape), mesh_of())
    run = AbstractRun.of(config, make_mesh(1, 2, 2))
    pools = device_bytes(one.engine.pool) / 16, device_bytes(run.engine.pool) / 8
    assert pools[0] == 2 * pools[1]
    assert run.engine.engine.sizes.rows == 8
    # Norms alone are whole on every device.
    norms = sum(x.size * x.dtype.itemsize for x in run.engine.weights if x.ndim == 1)
    assert device_bytes(run.engine.weights) == (device_bytes(one.engine.weights) + norms) / 2
    assert any(program.name == f"decode_8_after_{config.data.row_length()}" for program in run.lower())
