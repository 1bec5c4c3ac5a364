"""The loops of a planned step whose length depends on its data."""

from tests.tiny import config_of, mesh_of
from train.plan.compiler.flops import count_flops
from train.plan.compiler.hlo import parse
from train.plan.programs import AbstractRun


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
