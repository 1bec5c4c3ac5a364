"""Functions of the user, checked from their source: that they exist, what they read, and their arguments."""

from collections.abc import Collection, Iterator, Mapping

from train.config.algorithms import SET_BY_TRAINER
from train.config.checks.problem import Problem, problem
from train.config.messages import did_you_mean
from train.config.plan import array_name
from train.config.signatures import read_signature


def function_problems(
    target: str,
    arguments: Mapping[str, object],
    field: str,
    arguments_field: str,
    arrays: Collection[str] | None = None,
    *,
    supplied: Collection[str] = SET_BY_TRAINER,
    coroutines: bool = False,
) -> Iterator[Problem]:
    """Yields what is wrong with a function that a config names.

    Args:
      target: `module:function`, or `path/to/file.py:function`.
      arguments: the keyword arguments of the config.
      field: of the config, with the name of the function.
      arguments_field: of the config, with its arguments.
      arrays: names of arrays that the trainer passes, for a function that computes; None for others.
      supplied: names of other arguments that the trainer passes.
      coroutines: whether it may be defined by `async def`.
    """
    available = arrays or ()
    try:
        signature = read_signature(target, coroutines=coroutines)
    except LookupError as error:
        yield problem(f"got {target!r}, but {error.args[0]}", field)
        return
    if arrays is not None and not any(array_name(parameter) in available for parameter in signature.parameters):
        yield problem(f"{target} reads no array of the batch; available: {', '.join(available)}", field)
        return
    options = {p.name for p in signature.parameters if array_name(p) not in available} - {*supplied}
    for name in arguments:
        if name not in options:
            expected = f"expected some of {', '.join(sorted(options))}" if options else "it takes no arguments"
            hint = did_you_mean(name, options)
            yield problem(f"{target} has no argument {name!r}, {expected}{hint}", arguments_field)
    for parameter in signature.parameters:
        known = parameter.name in arguments or parameter.name in supplied or array_name(parameter) in available
        if known or not parameter.required:
            continue
        if arrays is None or parameter.keyword or parameter.type is not None:
            text = f"{target} needs the argument {parameter.name!r}; set {arguments_field}={{{parameter.name}: ...}}"
            yield problem(text, arguments_field)
        else:
            hint = did_you_mean(parameter.name, available)
            listed = ", ".join(available)
            text = f"{target} reads the array {parameter.name!r}, which does not exist; available: {listed}{hint}"
            yield problem(text, field)
