"""How to call every public function, worked out from its signature, its docstring and its own error messages.

An array is drawn by the name of its parameter, in the shape that the docstring gives. Of each function there is one
call with its defaults, one for every value of every option that takes names (the function lists them when it is given
one that it does not know), one for every option that is None unless given, one for every switch, and those of
`VARIANTS`. A function that cannot be called this way fails the tests that use `calls_of`, until the tables here say
what its new parameter stands for or `NOT_CALLED` says why it is not called.
"""

import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kljax
from kljax._checks import check_mask
from kljax.typing import ArrayLike, Mask
from tests import oracles
from tests.numpy_programs import in_numpy
from train.distributed.compile_cache import compiled_anew

# Distinct, so that an axis is known by its size. Rows and positions can be split over 8 devices.
SIZES = {"B": 8, "T": 16, "V": 11, "D": 5, "K": 2, "G": 3}
ROWS, LENGTH, GROUPS = SIZES["B"], SIZES["T"], SIZES["G"]
Options = dict[str, Any]

NOT_CALLED = {
    "adapter_reference": "reads a directory",
    "checkpoint_reference": "reads a directory",
    "check_tree": "reads a directory",
    "restore_tree": "reads a directory",
    "base_reference": "computes nothing: it takes a pair apart",
}


def ppo_of_token(stats: kljax.TokenStats, inputs: dict[str, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A `token_loss`, which computes in the dtype of the statistics, whatever that of its inputs."""
    inputs = {name: x.astype(stats.log_prob.dtype) for name, x in inputs.items()}
    mask = jnp.ones(stats.log_prob.shape, bool)
    loss = kljax.ppo_clip_loss(stats.log_prob, inputs["old"], inputs["advantages"], mask)
    if stats.entropy is not None:
        loss -= inputs["coef"] * stats.entropy
    if stats.kl is not None:
        loss += stats.kl
    return loss, {"ratio": jnp.exp(stats.log_prob - inputs["old"])}


# What to give a parameter that has no default, or that does nothing by default. Numbers that bite: the draws of
# `_draw` lie on both sides of them.
SAMPLES: Options = {
    "axis": -1,
    "clip": 0.2,
    "coef": 0.3,
    "ddof": 0,
    "decay": 0.9,
    "balance": 0.4,
    "delta": 0.01,
    "version": 5,
    "denominator": 50.0,
    "dual_clip": 1.5,
    "entropy": True,
    "every": 2,
    "fill": 0.5,
    "fraction": 0.2,
    "gamma": 0.9,
    "horizon": 100.0,
    "ki": 0.02,
    "kp": 0.1,
    "lam": 0.8,
    "length": LENGTH,
    "log_ratio_clip": 0.4,
    "lower": 0.7,
    "mask_high": 0.3,
    "mask_low": 0.3,
    "max_coef": 0.31,
    "max_lag": 4,
    "max_divergence": 0.1,
    "max_fraction": 0.3,
    "max_kl": 0.01,
    "max_length": 20.0,
    "max_log_ratio": 0.02,
    "max_probability": 0.4,
    "max_ratio": 1.4,
    "max_weight": None,
    "mean_kl": 0.1,
    "min_coef": 0.2,
    "min_log_prob": -1.5,
    "min_ratio": 0.4,
    "mode": "token_mean",
    "mu": 0.1,
    "num_buckets": 4,
    "num_groups": GROUPS,
    "schedule": lambda count: 0.5 / (1 + jnp.asarray(count, float)),
    "steps": (
        functools.partial(kljax.rejection_mask, lower=0.7, upper=1.3),
        functools.partial(kljax.truncated_importance_weights, level="geometric", max_weight=1.02),
    ),
    "target": 0.1,
    "threshold": 1.0,
    "token_chunk": 24,
    "token_loss": ppo_of_token,
    "tau": 0.5,
    "temperature": 0.7,
    "upper": 1.3,
    "value_clip": 0.2,
}


class StandIn(NamedTuple):
    """Stands for the sample, or the drawn array, of a parameter; in this shape if not in the documented one.

    With `fields`, the array is the first field of the type that `TYPES` has for the parameter, and these are others.
    """

    shape: str = ""
    fields: tuple[tuple[str, Any], ...] = ()


GIVEN = StandIn()
MASKS = ("mask", "hidden_mask")
TYPES = {
    **{"head": kljax.Head, "ref_head": kljax.Head, "reference": kljax.ReferenceStates},
    **{**dict.fromkeys(MASKS, kljax.Segments), "rejected_mask": kljax.Segments, "group_ids": kljax.Groups},
}
CAPPED = (("softcap", 2.0), ("logit_scale", 0.8), ("vocab_size", SIZES["V"] - 2), ("tile", kljax.Tile(24, 4)))
HEAD = StandIn("DV", (("bias", StandIn("V")), *CAPPED))
TURNED = StandIn("VD", (("bias", StandIn("V")), ("softcap", 1.5), ("vocab_size", SIZES["V"] - 2), ("layout", "vd")))
NAIVE = StandIn("DV", (("implementation", "reference"),))
PACKED = StandIn("", (("ids", StandIn("BT")),))
GROUPED = StandIn("", (("count", GROUPS), ("valid", StandIn("B"))))

# An option, or one value of it, that has a meaning only beside others, where the function has those. Keys may name the
# function: `function.option='value'`.
COMPANIONS: dict[str, Options] = {
    "max_ratio": {"sampling_log_probs": GIVEN},
    "max_length": {"mode": "seq_mean_token_sum_norm"},
    "mode='seq_mean_token_sum_norm'": {"max_length": GIVEN},
    "mode='prompt_mean'": {"group_ids": GIVEN, "num_groups": GIVEN},
    "num_groups": {"mode": "prompt_mean", "group_ids": GIVEN},
    "group_ids": {"mode": "prompt_mean", "num_groups": GIVEN},
    "importance_weights.mode": {"lower": GIVEN, "upper": GIVEN},
    "importance_weights.lower": {"mode": "clip", "upper": GIVEN},
    "importance_weights.normalize": {"upper": GIVEN},
    # Segments matter to a number of each sequence, which a packed array has once for every token.
    "mask": {"level": "geometric", "mode": "seq_mean_token_mean"},
    "importance_weights.mask": {"level": "geometric", "normalize": "rows", "upper": GIVEN},
    "kl_rejection_mask.mask": {"reduction": "mean", "upper": GIVEN},
    "divergence_mask.mask": {"level": "sequence"},
    "max_lag_mask.mask": {"level": "sequence"},
    "rejection_mask.mask": {"level": "geometric", "upper": GIVEN},
    "dpo_loss.mask": {"rejected_mask": PACKED},
    "preference_loss.loss='exo_pair'": {"label_smoothing": 0.1},
    "broadcast_to_tokens.mask": {"advantages": StandIn("BG")},
    "place_rewards.mask": {"scores": StandIn("BT")},
    "subtract_kl.mask": {"rewards": StandIn("BT")},
    "kl_shaped_rewards.mask": {"scores": StandIn("BT")},
    "remax_advantages.mask": {"baselines": StandIn("BT")},
    "opo_advantages.mask": {"rewards": StandIn("BT"), "group_ids": StandIn("BT")},
    "otb_advantages.mask": {"group_ids": StandIn("BT")},
    "topd_advantages.mask": {"group_ids": StandIn("BT")},
    "gvpo_loss.mask": {"group_ids": StandIn("BT")},
    "flowrl_loss.mask": {"group_ids": StandIn("BT")},
}
# Combinations of options that single ones do not cover.
VARIANTS: dict[str, list[Options]] = {
    "estimate_kl": [
        {"estimator": "k3", "gradient": "k2", "value_clip": GIVEN, "log_ratio_clip": GIVEN},
        {"estimator": "k1", "sampling_log_probs": GIVEN},
        {"estimator": "k2", "sampling_log_probs": GIVEN, "max_ratio": GIVEN, "gradient": "k2"},
    ],
    "masked_var": [{"axis": GIVEN, "ddof": 0}],
    "masked_whiten": [{"axis": GIVEN, "shift_mean": False}],
    "aggregate": [
        {"mode": "seq_mean_token_mean", "mask": PACKED, "empty_rows": "count"},
        {"mode": "seq_mean_token_mean", "empty_rows": "count"},
        {"mode": "prompt_mean", "group_ids": GIVEN, "num_groups": GIVEN, "empty_rows": "count"},
    ],
    "clip_cov_loss": [{"lower": 0.0, "fraction": GIVEN}],
    "clip_v_mask": [{"mu": GIVEN, "max_fraction": GIVEN}],
    "clip_fraction": [{"level": "geometric", "clip_low": 0.02, "clip_high": 0.02}],
    "rejection_mask": [{"level": "geometric", "lower": 0.9, "upper": 1.1}],
    "log_probs_from_hidden": [
        {"entropy": True, "head": StandIn("DV", CAPPED), "reference": GIVEN},
        {"entropy": "constant", "reference": StandIn("", (("direction", "forward"),))},
        {"head": TURNED},
        {"head": NAIVE, "entropy": True},
    ],
    "renormalized_log_probs": [
        {"entropy": True, "head": StandIn("DV", CAPPED), "reference": GIVEN},
        {"head": NAIVE},
    ],
    **{
        name: [{"head": HEAD, "ref_head": TURNED}, {"head": NAIVE, "ref_head": GIVEN}]
        for name in ("kl_from_hidden", "token_kl")
    },
    **{
        name: [{"head": HEAD, "ref_head": TURNED, "beta": 0.3}, {"head": NAIVE, "ref_head": GIVEN}]
        for name in ("jsd_from_hidden", "token_jsd")
    },
    "token_loss_from_hidden": [
        {"entropy": "constant", "reference": StandIn("", (("direction", "forward"),))},
        {"head": TURNED},
        {"head": NAIVE},
    ],
}
# Options that are given in one call instead of one each, as their programs are not tiny; `log_probs/test_grid.py` has
# them in pairs.
TOGETHER: dict[str, Options] = {
    **{
        name: {"temperature": GIVEN, "head": HEAD}
        for name in (
            *("log_probs_from_hidden", "renormalized_log_probs"),
            *("kl_from_hidden", "token_kl", "jsd_from_hidden", "token_jsd"),
        )
    },
    "token_log_probs": {"temperature": GIVEN, "head": HEAD, "entropy": GIVEN, "sum_squared_probs": True},
    "token_loss_from_hidden": {
        **{"temperature": GIVEN, "head": HEAD, "entropy": GIVEN, "sum_squared_probs": True},
        **{"token_chunk": GIVEN, "reference": GIVEN},
    },
}

# The programs run once and are tiny: what their compilation costs is what counts. Some XLA do not know every option.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_llvm_disable_expensive_passes": True,
}


class FunctionCall(NamedTuple):
    """One call: a name to read in a failure, the public function it is of, what is called, and the arguments by kind.

    `arrays` are floats that a gradient can be taken to; `data` are masks, ids, keys; `scalars` are numbers that may
    be traced; `static` is the rest.
    """

    name: str
    of: str
    function: Callable[..., Any]
    arrays: Options
    data: Options
    scalars: Options
    static: Options

    def __call__(self, arrays: Options | None = None, data: Options | None = None, **more: Any) -> Any:
        arrays, data = self.arrays if arrays is None else arrays, self.data if data is None else data
        return self.function(**arrays, **data, **{**self.scalars, **self.static, **more})

    def value_and_grads(self, arrays: Options, data: Options, scalars: Options | None = None, **more: Any) -> Any:
        """The result, and the gradient to every array of one number that all of the result enters."""
        scalars = self.scalars if scalars is None else scalars
        return value_and_grads(lambda arrays: self(arrays, data, **{**scalars, **more}), arrays)


def total(out: Any) -> jax.Array:
    """The floats of a result added up, each with a weight of its own, so that opposite gradients do not cancel."""
    floats = [leaf for leaf in jax.tree.leaves(out) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    weighted = [(x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)).sum() for x in floats]
    return sum(weighted[1:], weighted[0]) if weighted else jnp.zeros(())


def value_and_grads(function: Callable[[Options], Any], arrays: Options) -> tuple[Any, Options]:
    def with_result(arrays: Options) -> tuple[jax.Array, Any]:
        out = function(arrays)
        return total(out), out

    (_, out), grads = jax.value_and_grad(with_result, has_aux=True)(arrays)
    return out, grads


def public_functions() -> list[str]:
    """Every public function. Types are not called, nor the namespaces: tables of names and whole programs."""
    return [name for name in kljax.__all__ if inspect.isfunction(getattr(kljax, name))]


def callable_functions() -> list[str]:
    return [name for name in public_functions() if name not in NOT_CALLED]


def parameters(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(kljax, name)).parameters


@functools.cache
def calls_of(name: str, seed: int = 0) -> tuple[FunctionCall, ...]:
    """Every call of a public function; another seed draws other arrays for the same calls.

    The arrays are in float64 whichever test asks first: one that lowers in float32 may be the first of its worker.
    """
    with jax.enable_x64(True):
        calls = {call.name: call for call in (_call(name, options, seed) for options in _option_sets(name))}
    return tuple(calls.values())


def inputs(name: str, seed: int = 0) -> list[tuple[Any, Any]]:
    return [(call.arrays, call.data) for call in calls_of(name, seed)]


def each_call(name: str, run: Callable[[FunctionCall, Any, Any], Any]) -> Callable[[list[tuple[Any, Any]]], list[Any]]:
    """A function of the inputs of every call of `name`, which runs them one after the other."""

    calls = calls_of(name)

    def every(given: list[tuple[Any, Any]]) -> list[Any]:
        results = []
        for call, (arrays, data) in zip(calls, given, strict=True):
            try:
                results.append(run(call, arrays, data))
            except Exception as error:
                error.add_note(f"in {call.name}")
                raise
        return results

    return every


@functools.cache
def known_options() -> dict[str, Any]:
    def is_known(option: str) -> bool:
        try:
            jax.jit(lambda: 0.0).lower().compile(compiler_options={option: QUICK[option]})
        except jax.errors.JaxRuntimeError:
            return False
        return True

    return {option: value for option, value in QUICK.items() if is_known(option)}


def program(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    return jax.jit(function).lower(*arguments).compile(compiler_options=known_options())


def quick(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Returns a program of the function, which runs a few times: its compilation is what costs."""
    return jax.jit(function, compiler_options=known_options(), **options)


def traced_program(function: Callable[..., Any], *, static_argnames: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Returns the function as NumPy runs it, or compiled where the environment asks for that.

    Static arguments are given by keyword.
    """
    by_xla = os.environ.get("KLJAX_TEST_XLA")
    return quick(function, static_argnames=static_argnames) if by_xla else in_numpy(function)


def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    # No other test reads this program from disk.
    with compiled_anew():
        run = program(function, *arguments)
    return jax.device_get(run(*arguments))


@functools.cache
def allowed_names(name: str, parameter: str) -> tuple[str, ...]:
    """The names that an option takes, read from the error for one that it does not."""
    with pytest.raises(ValueError, match=rf"{parameter}: got '\?', expected one of ") as refusal:
        _call(name, {**_plain_options(name), **_companions(name, parameter, "?"), parameter: "?"}, 0)()
    names = re.match(r".*expected one of ([\w, -]+)", str(refusal.value))
    assert names
    return tuple(names[1].split(", "))


def names_of(about: inspect.Parameter) -> tuple[str, ...]:
    """The names that the signature lists: those of a `Literal`, alone or beside None, but not beside a bool."""
    kinds = [about.annotation, *typing.get_args(about.annotation)]
    if bool in kinds:
        return ()
    return next((typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is typing.Literal), ())


def takes_segments(name: str) -> bool:
    """Whether a function has a statistic of each sequence, by its docstring; all others take the mask alone."""
    return "`Segments`" in (inspect.getdoc(getattr(kljax, name)) or "")


def _number_of_groups(name: str) -> list[str]:
    """The parameter that says how many groups there are, where ids are required and do not say it themselves."""
    ids = parameters(name).get("group_ids")
    needed = ids is not None and ids.default is ids.empty and "num_groups" in parameters(name)
    return ["num_groups"] if needed else []


def _plain_options(name: str) -> Options:
    known = parameters(name)
    required = {parameter: GIVEN for parameter, about in known.items() if about.default is about.empty}
    # A pair of bounds of which one is needed; and a mask, which hardly anything does without.
    extra = ["upper"] if {"lower", "upper"} <= set(known) and known["upper"].default is None else []
    return {
        **required,
        **{parameter: GIVEN for parameter in (*extra, *MASKS, *_number_of_groups(name)) if parameter in known},
    }


def _option_sets(name: str) -> Iterator[Options]:
    """The options of each call: the plain one first, then one deviation at a time, then the listed combinations."""
    plain = _plain_options(name)
    yield plain
    together = TOGETHER.get(name, {})
    if together:
        yield {**plain, **together}
    if takes_segments(name):
        yield {**plain, **_companions(name, "mask", PACKED), "mask": PACKED}
    if "group_ids" in plain:
        yield {**plain, **dict.fromkeys(_number_of_groups(name)), "group_ids": GROUPED}
    for parameter, about in parameters(name).items():
        if parameter in together:
            continue
        for value in _deviations(name, parameter, about, plain):
            yield {**plain, **_companions(name, parameter, value), parameter: value}
    for options in VARIANTS.get(name, []):
        yield {**plain, **options}


def _deviations(name: str, parameter: str, about: inspect.Parameter, plain: Options) -> list[Any]:
    """The values of one parameter beside the one in the plain call."""
    usual = SAMPLES.get(parameter) if plain.get(parameter) is GIVEN else plain.get(parameter, about.default)
    choices = names_of(about)
    if choices or (str in (about.annotation, *typing.get_args(about.annotation)) and parameter != "axis_name"):
        allowed = allowed_names(name, parameter)
        assert set(choices or allowed) == set(allowed), f"{name}({parameter}): the signature lists other names"
        return [value for value in allowed if value != usual]
    if about.annotation is bool:
        return [not usual]
    if parameter in plain or parameter == "axis_name":
        return []
    if _is_array(about) or (parameter in SAMPLES and SAMPLES[parameter] != usual):
        return [GIVEN]
    assert about.default is not None or parameter in SAMPLES, f"{name}({parameter}): calls.SAMPLES has no value for it"
    return []


def _companions(name: str, parameter: str, value: Any) -> Options:
    """Returns the options that a value of an option needs beside it; the most specific entry counts."""
    keys = [f"{name}.{parameter}={value!r}", f"{name}.{parameter}", f"{parameter}={value!r}", parameter]
    actual: Options = next((COMPANIONS[key] for key in keys if key in COMPANIONS), {})
    return {other: sample for other, sample in actual.items() if other in parameters(name)}


def _call(name: str, options: Options, seed: int) -> FunctionCall:
    function = getattr(kljax, name)
    known = parameters(name)
    kinds: dict[str, Options] = {"arrays": {}, "data": {}, "scalars": {}, "static": {}}
    unknown = [parameter for parameter in options if parameter not in known]
    assert not unknown, f"{name} has no parameter {unknown}"
    for position, (parameter, about) in enumerate(known.items()):
        if parameter not in options:
            if _is_scalar(about) and about.default is not None:
                kinds["scalars"][parameter] = about.default
            continue
        value = options[parameter]
        if _is_array(about) and isinstance(value, StandIn):
            shape = tuple(SIZES[letter] for letter in value.shape) or _shape(name, parameter)
            value = _built(parameter, value, _draw(name, parameter, shape, seed, position), seed)
            is_float = jax.tree.all(jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.floating), value))
            kinds["arrays" if is_float else "data"][parameter] = value
            continue
        if value is GIVEN:
            assert parameter in SAMPLES, f"{name}({parameter}=...): calls.SAMPLES has no value for it"
            value = SAMPLES[parameter]
        kinds["scalars" if _is_scalar(about) and isinstance(value, (int, float)) else "static"][parameter] = value
    unusual = {k: v for kind in ("scalars", "static") for k, v in kinds[kind].items() if v != known[k].default}
    inputs = [k for kind in ("arrays", "data") for k in kinds[kind] if known[k].default is None and k not in MASKS]
    fields = [
        f"{parameter}.{field}" + ("" if isinstance(setting, tuple) else f"={setting}")
        for parameter, value in options.items()
        if isinstance(value, StandIn)
        for field, setting in value.fields
    ]
    listed = ", ".join(
        [
            *inputs,
            *fields,
            *(k if callable(v) or isinstance(v, tuple) else f"{k}={v}" for k, v in sorted(unusual.items())),
        ]
    )
    return _of_controller(FunctionCall(f"{name}({listed})", name, function, **kinds), seed)


def _built(parameter: str, given: StandIn, drawn: Any, seed: int) -> Any:
    """The drawn array, or the type of the parameter with it and the fields that are given."""
    if not given.fields:
        return drawn
    first = drawn if isinstance(drawn, tuple) else (drawn,)
    shapes = {name: value.shape for name, value in given.fields if isinstance(value, StandIn)}
    arrays = {
        name: _draw("", name, tuple(SIZES[letter] for letter in shape), seed, 99) for name, shape in shapes.items()
    }
    return TYPES[parameter](*first, **{**dict(given.fields), **arrays})


def _of_controller(call: FunctionCall, seed: int) -> FunctionCall:
    """A controller is a pair of functions: what is called is one update of its first state."""
    if inspect.signature(call.function).return_annotation is not kljax.Controller:
        return call

    def updated(kl: jax.Array, num_samples: jax.Array, **options: Any) -> kljax.ControllerState:
        controller = call.function(**options)
        return controller.update(controller.init(), kl, num_samples)

    arrays = {"kl": jnp.asarray(0.05 + 0.06 * seed)}
    return call._replace(function=updated, arrays=arrays, data={"num_samples": jnp.asarray(32 + seed)})


def _is_array(about: inspect.Parameter) -> bool:
    if typing.get_origin(about.annotation) is Callable:
        return False  # a function of arrays
    kinds = (about.annotation, *typing.get_args(about.annotation))
    # With their shapes checked, see `typed_calls`, annotations are jaxtyping's, which know the type of their array.
    return about.name in (*TREES, "per_token") or any(
        kind in (ArrayLike, Mask, np.ndarray) or hasattr(kind, "array_type") for kind in kinds
    )


def _is_scalar(about: inspect.Parameter) -> bool:
    """Annotated as a number that may be traced."""
    inner = typing.get_args(about.annotation)
    return jax.Array in inner and float in inner and np.ndarray not in inner


def _shape(name: str, parameter: str) -> tuple[int, ...]:
    """The shape that the docstring gives for a parameter; without one it is that of the parameter before it."""
    if parameter in SHAPES:
        return tuple(SIZES[letter] for letter in SHAPES[parameter])
    text = inspect.getdoc(getattr(kljax, name)) or ""
    text = text[text.index("\nArgs:\n") : text.index("\nReturns:\n")]
    shape, shapes = (ROWS, LENGTH), {}
    entries = dict(re.findall(r"^  (\w+): (.*)$", text, re.MULTILINE))
    for other in inspect.signature(getattr(kljax, name)).parameters:
        entry = entries.get(other, "")
        arguments, same = re.match(r"`\[([^]]*)\]`", entry), re.match(r"same shape as the (\w+)", entry)
        if arguments:
            letters = arguments[1].replace(" ", "").split(",")
            # Leading axes are the rows, unless the rows are named themselves.
            letters = [letter for letter in letters if letter != "..." or "B" not in letters]
            shape = tuple(SIZES["B" if letter == "..." else letter] for letter in letters)
        shapes[other] = shape = shapes[same[1]] if same else shape
        if other == parameter:
            return shape
    raise AssertionError(f"{name} has no parameter {parameter}")


# By name where the docstring speaks of any leading axes.
SHAPES = {"hidden": "BTD", "ref_hidden": "BTD", "head": "DV", "ref_head": "DV", "targets": "BT", "kept_ids": "BTK"}
TREES = ("tree", "params", "reference", "policy", "average", "initial")


def masked_functions() -> list[str]:
    """The functions that take a mask of tokens or of hidden states."""
    return [name for name in callable_functions() if mask_name(name) is not None]


def mask_name(name: str) -> str | None:
    """The parameter of the mask of a function; None if it has none."""
    return next((parameter for parameter in MASKS if parameter in parameters(name)), None)


def mask_of(call: FunctionCall) -> np.ndarray:
    """The mask of a call, of packed rows without the padding."""
    return np.asarray(check_mask(call.data[mask_name(call.of)]))


def mask(seed: int) -> jax.Array:
    """Every kind of row: empty, full, a single token, holes, padding on either side, and two of chance."""
    rng = np.random.default_rng(seed)
    kinds = np.zeros((len(oracles.MASK_KINDS), LENGTH), bool)
    kinds[:, 3 : 3 + oracles.MASK_KINDS.shape[1]] = oracles.MASK_KINDS
    kinds[1] = True
    chance = rng.random((ROWS - len(kinds), LENGTH)) < 0.7
    return jnp.asarray(np.roll(np.concatenate([kinds, chance]), seed, axis=0))


Draw = Callable[[np.random.Generator, tuple[int, ...], int], Any]
# By how the name of the parameter ends, after that of the function; the rest are normal numbers. The number is that of
# the seed.
DRAWS: dict[str, Draw] = {
    **{
        f"{name}.reference": lambda rng, shape, seed: (
            rng.normal(size=(ROWS, LENGTH, SIZES["D"])),
            rng.normal(size=(SIZES["D"], SIZES["V"])),
        )
        for name in ("log_probs_from_hidden", "token_log_probs", "renormalized_log_probs", "token_loss_from_hidden")
    },
    "per_token": lambda rng, shape, seed: {
        "old": rng.normal(-2.0, 0.4, (ROWS, LENGTH)),
        "advantages": rng.normal(size=(ROWS, LENGTH)),
        "coef": rng.uniform(0.1, 0.2),
    },
    "mask": lambda rng, shape, seed: mask(seed),
    "kept": lambda rng, shape, seed: mask(seed + 1),
    "desirable": lambda rng, shape, seed: np.arange(*shape) % 3 != seed % 3,
    **{
        f"preference_loss.{side}": lambda rng, shape, seed: -0.1 - abs(rng.normal(size=shape))
        for side in ("preferred", "rejected")
    },
    "valid": lambda rng, shape, seed: np.arange(*shape) % 4 != 2,
    "key": lambda rng, shape, seed: jax.random.key(seed),
    "group_ids": lambda rng, shape, seed: np.broadcast_to(
        np.roll([0, 1, 0, 2, 1, 0, 0, 1], seed).reshape(ROWS, *(1,) * (len(shape) - 1)), shape
    ),
    # The sequences of a row; of the first seed with padding before them.
    ".ids": lambda rng, shape, seed: np.broadcast_to(np.arange(shape[-1]) // 6 - (seed == 0), shape),
    "lengths": lambda rng, shape, seed: rng.integers(0, LENGTH // 2, shape),
    "step": lambda rng, shape, seed: np.asarray(1 + seed),
    "scored": lambda rng, shape, seed: np.arange(np.prod(shape)).reshape(shape) % 3 != seed % 3,
    "turn_ids": lambda rng, shape, seed: np.broadcast_to(np.arange(shape[-1]) * SIZES["K"] // shape[-1], shape),
    "versions": lambda rng, shape, seed: rng.integers(0, 7, shape),
    "lags": lambda rng, shape, seed: rng.integers(-1, 7, shape),
    "targets": lambda rng, shape, seed: rng.integers(0, SIZES["V"], shape),
    "token_log_probs.tokens": lambda rng, shape, seed: rng.integers(0, SIZES["V"] - 2, shape),
    "kept_ids": lambda rng, shape, seed: rng.integers(-1, SIZES["V"], shape),
    "indices": lambda rng, shape, seed: np.argsort(rng.random((*shape[:-1], SIZES["V"])), -1)[..., : shape[-1]],
    "vocab_log_probs": lambda rng, shape, seed: jax.nn.log_softmax(jnp.asarray(rng.normal(size=shape))),
    "squared_probs": lambda rng, shape, seed: rng.uniform(0.1, 0.9, shape),
    "log_probs": lambda rng, shape, seed: rng.normal(-1.0, 0.4, shape),
    "weights": lambda rng, shape, seed: rng.uniform(0.0, 2.0, shape),
    **{
        name: lambda rng, shape, seed: {"w": rng.normal(size=(ROWS, LENGTH)), "b": rng.normal(size=3)} for name in TREES
    },
}


def _draw(function: str, parameter: str, shape: tuple[int, ...], seed: int, position: int) -> Any:
    named = next((draw for name, draw in DRAWS.items() if f"{function}.{parameter}".endswith(name)), None)
    rng = np.random.default_rng([seed, position])
    drawn = rng.normal(size=shape) if named is None else named(rng, shape, seed)
    return jax.tree.map(jnp.asarray, drawn)
