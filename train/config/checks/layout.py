"""Rows and parameters over the devices."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from train.config.checks.problem import Problem, problem
from train.config.download import HUB_NAME
from train.config.mesh import REMAINING, ROW_AXES, WIDTH_AXES, Parts, describe_mesh
from train.config.model import BYTE_VOCABULARY, PRESETS
from train.config.plan import Layout, Plan
from train.config.schema import Config

SPLIT_BY_TENSOR = ("heads", "kv_heads", "mlp_width", "vocab_size", "experts.width", "experts.shared_width")
"""Sizes of a decoder that the tensor axis of a mesh splits."""

ELEMENTWISE = ("adamw", "adam", "lion", "sgd", "rmsprop")
"""Optimizers that can update one layer of the stack at a time."""


def one_remaining_axis(config: Config) -> Iterator[Problem]:
    """Finds a second axis of a mesh that is -1."""
    sampling = config.rollout.mesh
    meshes = {"mesh": config.mesh.axes()}
    if sampling is not None:
        meshes["rollout.mesh"] = {"data": sampling.data, "tensor": sampling.tensor}
    for name, sizes in meshes.items():
        remaining = [f"{name}.{axis}" for axis, size in sizes.items() if size == REMAINING]
        if len(remaining) > 1:
            line = f"got -1, but {remaining[0]} is -1 too, and one axis alone takes all remaining devices; set a size"
            yield problem(line, remaining[1], remaining[0])


def with_smallest_mesh(config: Config) -> Config:
    """Returns the config of the fewest devices: sizes that it cannot divide, it divides for no number of them."""
    mesh = config.mesh
    sampling = config.rollout.mesh
    rollout = config.rollout
    if sampling is not None:
        rollout = rollout.model_copy(update={"mesh": sampling.smallest()})
    return config.model_copy(update={"mesh": mesh.smallest(), "rollout": rollout})


def _rows(config: Config) -> Iterator[Problem]:
    optim = config.optim
    shards = config.mesh.parts(ROW_AXES)
    rows = config.rows_per_batch()
    parts = optim.updates_per_batch * optim.micro_batches
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
    elif (rows // parts) % shards.count:
        yield problem(
            f"a micro-batch has {rows // parts} rows ({batch}, in {parts} parts), expected a multiple of {shards}",
            *rests_on,
            "mesh",
        )


def _slices(config: Config) -> Iterator[Problem]:
    mesh = config.mesh
    axis = f"mesh.{mesh.slice_axis}"
    if (size := getattr(mesh, mesh.slice_axis)) % mesh.slices:
        yield problem(f"got {mesh.slices}, expected a divisor of {axis} = {size}", "mesh.slices", axis)


def _context(config: Config) -> Iterator[Problem]:
    context = config.mesh.context
    group = Layout.of(config).group
    if context == 1:
        return
    for name in ("max_prompt_length", "max_completion_length", "max_tokens"):
        length = getattr(config.data, name) or 0
        if length % context:
            yield problem(
                f"got {length}, expected a multiple of mesh.context = {context}", f"data.{name}", "mesh.context"
            )
    if group > 1:
        line = (
            f"got true with mesh.context = {context}, but rows that share a prompt are not split by tokens; set false"
        )
        yield problem(line, "optim.share_prompts", "mesh.context")
    if config.optim.packing:
        line = f"got true with mesh.context = {context}, but packed rows are not split by tokens; set false"
        yield problem(line, "optim.packing", "mesh.context")


def named_sizes(shape: Mapping[str, Any]) -> dict[str, int]:
    """Returns the sizes of a decoder by their field, of a mixture of experts as `experts.count` and so on."""
    experts = {f"experts.{name}": size for name, size in dict(shape.get("experts") or {}).items()}
    return {name: size for name, size in (dict(shape) | experts).items() if isinstance(size, int)}


def divisions(shape: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Finds sizes of a decoder that do not divide: name, message and fields of each. `vocab_size` is optional."""
    mesh = config.mesh
    sampling = config.rollout.mesh
    sizes = named_sizes(shape)
    tensors = [mesh.parts(("tensor",))]
    tensors += [] if sampling is None else [Parts(sampling.tensor, ("rollout.mesh.tensor",))]
    pairs = [("heads", Parts(shape["kv_heads"], ("model.kv_heads",))), ("width", mesh.parts(WIDTH_AXES))]
    pairs += [(name, parts) for parts in tensors for name in SPLIT_BY_TENSOR]
    pairs.append(("experts.count", mesh.parts(("expert",))))
    for name, parts in pairs:
        if sizes.get(name, 0) % parts.count:
            yield name, f"got {sizes[name]}, expected a multiple of {parts}", parts.fields
    if mesh.expert > 1 and "experts.count" not in sizes:
        line = f"got null, but mesh.expert = {mesh.expert} splits experts; set mesh.fsdp or mesh.data instead"
        yield "experts", line, ("mesh.expert",)


def _divisions(config: Config) -> Iterator[Problem]:
    model = config.model
    mesh = config.mesh
    rows = mesh.parts(ROW_AXES)
    for name, size in (("warm_start", config.warm_start.batch_size), ("eval", config.eval.rows())):
        if size % rows.count:
            yield problem(f"got {size}, expected a multiple of {rows}", f"{name}.batch_size", *rows.fields)
    if model.path is not None:
        return  # whether config.json fits is checked where it is read
    for name, line, fields in divisions(model.shape(), config):
        yield problem(line, f"model.{name}", *fields)
    tensors = {"mesh.tensor": mesh.tensor}
    if config.rollout.mesh is not None:
        tensors["rollout.mesh.tensor"] = config.rollout.mesh.tensor
    for name, tensor in tensors.items():
        if BYTE_VOCABULARY % tensor:
            yield problem(f"got {tensor}, expected a divisor of the vocabulary of {BYTE_VOCABULARY}", name)


def _sampling_mesh(config: Config) -> Iterator[Problem]:
    mesh = config.mesh
    sampling = config.rollout.mesh
    for name in ("mesh", "dtype"):
        if config.rollout.in_place and getattr(config.rollout, name) is not None:
            line = f"got true, but rollout.{name} needs a copy of the weights; set only one of them"
            yield problem(line, "rollout.in_place", f"rollout.{name}")
    if sampling is None:
        return
    devices = mesh.parts()
    sampling_devices = sampling.parts(mesh).count * sampling.tensor
    if sampling_devices != devices.count:
        sizes = {"data": sampling.data, "expert": mesh.expert, "tensor": sampling.tensor}
        line = (
            f"got {describe_mesh(sizes)} = {sampling_devices} devices, "
            f"expected the {devices.count} of {' x '.join(devices.fields)}"
        )
        yield Problem(("rollout.mesh.data", "rollout.mesh.tensor", *devices.fields), f"rollout.mesh: {line}")
        return
    parts = mesh.fsdp * mesh.tensor
    # Otherwise weights could not move in parts, and each would be whole on every device for a moment.
    if parts % sampling.tensor:
        line = f"got {sampling.tensor}, expected a divisor of mesh.fsdp x mesh.tensor = {parts}"
        yield problem(line, "rollout.mesh.tensor", "mesh.fsdp", "mesh.tensor")
    elif sampling.tensor % mesh.tensor and mesh.tensor % sampling.tensor:
        line = f"got {sampling.tensor}, expected a divisor or a multiple of mesh.tensor = {mesh.tensor}"
        yield problem(line, "rollout.mesh.tensor", "mesh.tensor")
    rows = {"rollout.prompts_per_step x rollout.samples_per_prompt": config.rows_per_batch()}
    row_parts = sampling.parts(mesh)
    for name, size in (rows | {"eval.batch_size": config.eval.rows()}).items():
        if size % row_parts.count:
            line = f"got {row_parts.count}, expected a divisor of {name} = {size}"
            yield Problem((*row_parts.fields, *name.split(" x ")), f"{' x '.join(row_parts.fields)}: {line}")


def _host_memory(config: Config) -> Iterator[Problem]:
    chosen = config.optim.optimizer.type
    if config.optim.host_memory and chosen not in ELEMENTWISE:
        line = f"got true, but optimizer {chosen} reads whole matrices; expected one of {', '.join(ELEMENTWISE)}"
        yield problem(line, "optim.host_memory", "optim.optimizer.type")


def _folder(config: Config) -> Iterator[Problem]:
    model = config.model
    names = [name for name in model.shape() if name in model.model_fields_set]
    if model.path is None or not names:
        return
    fields = [f"model.{name}" for name in names]
    set_to = {name: getattr(model, name) for name in names}
    preset = next((name for name, shape in PRESETS.items() if shape.items() <= set_to.items()), None)
    if preset is not None:
        line = f"got {model.path!r} and model={preset}, which is a shape in place of a folder; set only one of them"
        yield problem(line, "model.path", *fields)
    elif len(names) == 1:
        line = f"got {set_to[names[0]]}, but config.json of model.path decides it; set only one of them"
        yield problem(line, *fields, "model.path")
    else:
        shown = ", ".join(f"{name}={value}" for name, value in set_to.items())
        line = f"got {model.path!r}, whose config.json decides the shape, and {shown}; set only one of them"
        yield problem(line, "model.path", *fields)


def _revision(config: Config) -> Iterator[Problem]:
    model = config.model
    if model.revision is None:
        return
    if model.path is None:
        yield problem("got a commit without model.path; set that to org/name", "model.revision", "model.path")
        return
    path = Path(model.path)
    # The cache of the Hub, which a run is continued from, has a folder named by the commit.
    if path.name != model.revision and (path.is_dir() or not HUB_NAME.fullmatch(model.path)):
        line = f"got a commit for {model.path!r}, which is no name on the Hub, as org/name; leave it out for a folder"
        yield problem(line, "model.revision", "model.path")


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


def _router_bias(config: Config) -> Iterator[Problem]:
    rate = config.routing.bias_update_rate
    if rate == 0:
        return
    if config.routing.freeze:
        yield problem(
            f"got {rate:g}, but routing.freeze leaves the routers as they are; set only one of them",
            "routing.bias_update_rate",
            "routing.freeze",
        )
    if config.lora is not None:
        yield problem(
            f"got {rate:g}, but lora trains adapters alone, which have no bias of the routers; set it to 0",
            "routing.bias_update_rate",
            "lora",
        )


def _routes(config: Config) -> Iterator[Problem]:
    for name, value, is_set in (
        ("routing.replay", "none", config.routing.replay == "none"),
        ("routing.verify", "true", config.routing.verify),
    ):
        if is_set and config.routing.threshold > 0:
            yield problem(
                f"got {config.routing.threshold:g}, but {name} is {value}, and the threshold replaces recorded "
                "experts; set it to 0",
                "routing.threshold",
                name,
            )
    if config.routing.verify and config.routing.replay == "none":
        yield problem(
            "got true, but with routing.replay none the trainer's router chooses; set it to false, or replay routes",
            "routing.verify",
            "routing.replay",
        )
    if config.routing.replay != "old_policy":
        return
    if not Plan.of(config).scores_policy:
        yield problem(
            "got old_policy, but no pass scores the policy before its updates: there is one update, or "
            "loss.old_log_probs is sampler; expected rollout or none",
            "routing.replay",
            "optim.updates_per_batch",
            "loss.old_log_probs",
        )


def _packed_tokens(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.packed_tokens is not None:
        shortest = config.data.row_length()
        padded = Layout.of(config).slots(config.rows_per_micro_batch())
        if not optim.packing:
            line = f"got {optim.packed_tokens}, but optim.packing is false; set that to true"
            yield problem(line, "optim.packed_tokens", "optim.packing")
        elif not shortest <= optim.packed_tokens < padded:
            line = (
                f"got {optim.packed_tokens}, expected {shortest} to {padded - 1}: at least the tokens of a sequence, "
                "fewer than a micro-batch has in padded rows"
            )
            yield problem(line, "optim.packed_tokens", "data.max_tokens", "optim.micro_batches")


def _prefixes(config: Config) -> Iterator[Problem]:
    optim = config.optim
    if optim.share_prefixes and not (optim.packing and optim.share_prompts):
        field = "optim.share_prompts" if optim.packing else "optim.packing"
        yield problem(
            f"got true, but {field} is false, without which no tokens are shared; set that to true",
            "optim.share_prefixes",
            field,
        )


CHECKS = (
    _rows,
    _prefixes,
    _routes,
    _router_bias,
    _slices,
    _context,
    _divisions,
    _host_memory,
    _folder,
    _revision,
    _trained_dtype,
    _quantization,
)
OF_ALL_SIZES = (_sampling_mesh, _packed_tokens)
"""Checks that need the sizes of all axes."""
