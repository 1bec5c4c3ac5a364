"""Rows and parameters over the devices."""

from collections.abc import Iterator, Mapping

from train.config.checks.problem import Problem, problem
from train.config.model import BYTE_VOCABULARY, PRESETS
from train.config.schema import Config, Mesh


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


def _slices(config: Config) -> Iterator[Problem]:
    mesh = config.mesh
    if mesh.data % mesh.slices:
        yield problem(f"got {mesh.slices}, expected a divisor of mesh.data = {mesh.data}", "mesh.slices", "mesh.data")


def divisions(shape: Mapping[str, int], mesh: Mesh) -> Iterator[tuple[str, str]]:
    """Finds sizes of a decoder that do not divide: name and message of each. `vocab_size` is optional."""
    pairs = (
        ("heads", "heads", shape["kv_heads"], "model.kv_heads"),
        ("heads", "heads", mesh.tensor, "mesh.tensor"),
        ("kv_heads", "kv_heads", mesh.tensor, "mesh.tensor"),
        ("mlp_width", "mlp_width", mesh.tensor, "mesh.tensor"),
        ("width", "width", mesh.fsdp, "mesh.fsdp"),
        ("vocab_size", "vocab_size", mesh.tensor, "mesh.tensor"),
    )
    for name, key, divisor, by in pairs:
        if shape.get(key, 0) % divisor:
            yield name, f"got {shape[key]}, expected a multiple of {by} = {divisor}"


def _divisions(config: Config) -> Iterator[Problem]:
    model, mesh = config.model, config.mesh
    rows = mesh.data * mesh.fsdp
    for name, size in (("warm_start", config.warm_start.batch_size), ("eval", config.eval.batch_size)):
        if size % rows:
            line = f"got {size}, expected a multiple of mesh.data x mesh.fsdp = {rows}"
            yield problem(line, f"{name}.batch_size", "mesh.data", "mesh.fsdp")
    if model.path is not None:
        return  # whether config.json fits is checked where it is read
    for name, line in divisions(model.shape(), mesh):
        yield problem(line, f"model.{name}", line.rpartition(" of ")[2].partition(" = ")[0])
    if BYTE_VOCABULARY % mesh.tensor:
        yield problem(f"got {mesh.tensor}, expected a divisor of the vocabulary of {BYTE_VOCABULARY}", "mesh.tensor")


def _folder(config: Config) -> Iterator[Problem]:
    model = config.model
    given = [name for name in model.shape() if name in model.model_fields_set]
    if model.path is None or not given:
        return
    fields = [f"model.{name}" for name in given]
    set_to = {name: getattr(model, name) for name in given}
    preset = next((name for name, shape in PRESETS.items() if shape.items() <= set_to.items()), None)
    if preset is not None:
        line = f"got {model.path!r} and model={preset}, which is a shape in place of a folder; set only one of them"
        yield problem(line, "model.path", *fields)
    elif len(given) == 1:
        line = f"got {set_to[given[0]]}, but config.json of model.path decides it; set only one of them"
        yield problem(line, *fields, "model.path")
    else:
        shown = ", ".join(f"{name}={value}" for name, value in set_to.items())
        line = f"got {model.path!r}, whose config.json decides the shape, and {shown}; set only one of them"
        yield problem(line, "model.path", *fields)


def _trained_dtype(config: Config) -> Iterator[Problem]:
    if config.model.param_dtype != "bfloat16":
        return
    if config.lora is None:
        yield problem(
            "got bfloat16, but the weights are trained: updates below 1/256 of a weight would be rounded away; "
            "use float32 with model.dtype=bfloat16, or lora",
            "model.param_dtype",
            "lora",
        )
    elif config.warm_start.trains():
        yield problem(
            f"got bfloat16, but warm_start.steps = {config.warm_start.steps} trains the weights; use float32, or 0",
            "model.param_dtype",
            "warm_start.steps",
            "warm_start.checkpoint",
        )


def _quantization(config: Config) -> Iterator[Problem]:
    if config.model.quantization is not None and config.lora is None:
        yield problem(
            f"got {config.model.quantization}, but there is no lora section, so the weights are trained, and "
            "int8 weights cannot be; set it to null, or add a lora section",
            "model.quantization",
            "lora",
        )


CHECKS = (_rows, _slices, _divisions, _folder, _trained_dtype, _quantization)
