"""Rows and parameters over the devices."""

from collections.abc import Iterator

from train.config.checks.problem import Problem, problem
from train.config.schema import Config
from train.tokenizer import ByteTokenizer


def _rows(config: Config) -> Iterator[Problem]:
    optim, shards = config.optim, config.mesh.data * config.mesh.fsdp
    rows, parts = config.rows_per_batch(), optim.updates_per_batch * optim.micro_batches
    batch = f"rollout.prompts_per_step x rollout.samples_per_prompt = {rows}"
    rests_on = (
        "optim.micro_batches",
        "optim.updates_per_batch",
        "rollout.prompts_per_step",
        "rollout.samples_per_prompt",
    )
    if rows % parts:
        yield problem(
            f"{batch} rows do not divide into optim.updates_per_batch x optim.micro_batches = {parts} equal parts",
            *rests_on,
        )
    elif (rows // parts) % shards:
        yield problem(
            f"a micro-batch has {rows // parts} rows ({batch}, in {parts} parts), expected a multiple of "
            f"mesh.data x mesh.fsdp = {shards}",
            *rests_on,
            "mesh",
        )


def _divisions(config: Config) -> Iterator[Problem]:
    model, mesh = config.model, config.mesh
    divisions = (
        ("model.heads", model.heads, "model.kv_heads", model.kv_heads),
        ("model.heads", model.heads, "mesh.tensor", mesh.tensor),
        ("model.kv_heads", model.kv_heads, "mesh.tensor", mesh.tensor),
        ("model.mlp_width", model.mlp_width, "mesh.tensor", mesh.tensor),
        ("model.width", model.width, "mesh.fsdp", mesh.fsdp),
        ("warm_start.batch_size", config.warm_start.batch_size, "mesh.data x mesh.fsdp", mesh.data * mesh.fsdp),
        ("eval.batch_size", config.eval.batch_size, "mesh.data x mesh.fsdp", mesh.data * mesh.fsdp),
    )
    for name, value, by, divisor in divisions:
        if value % divisor:
            yield problem(f"got {value}, expected a multiple of {by} = {divisor}", name, *by.split(" x "))
    vocabulary = ByteTokenizer().vocab_size
    if vocabulary % mesh.tensor:
        yield problem(f"got {mesh.tensor}, expected a divisor of the vocabulary of {vocabulary}", "mesh.tensor")


CHECKS = (_rows, _divisions)
