"""YAML by the 1.2 core schema: 1e-3 is a number, `no` is text, a repeated key is an error."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

# Digits in groups: 1_000, and no 1__0 or 10_.
DIGITS = r"[0-9]+(?:_[0-9]+)*"
# The core schema of YAML 1.2. PyYAML's own rules read 1e-3 as text, `no` as false, 010 as 8 and 1:30 as 90.
SCALARS = (
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ("~", "n", "N", "")),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", tuple("tTfF")),
    ("tag:yaml.org,2002:int", rf"[-+]?(?:0|(?!0){DIGITS})", tuple("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        rf"[-+]?(?:{DIGITS}\.(?:{DIGITS})?(?:[eE][-+]?[0-9]+)?|\.[0-9]+(?:[eE][-+]?[0-9]+)?|{DIGITS}[eE][-+]?[0-9]+"
        r"|\.(?:inf|Inf|INF))|\.(?:nan|NaN|NAN)",
        tuple("-+.0123456789"),
    ),
)


SHOWN = 40
"""Characters of a scalar that a message shows."""


class _Loader(yaml.SafeLoader):
    """Reads with the rules above."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Makes the value of a node; names the place of a scalar that its tag does not fit."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            kind = node.tag.rpartition(":")[2]
            text = node.value
            shown = repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}... ({len(text)} characters)"
            problem = f"{shown} cannot be read as {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


class _Dumper(yaml.SafeDumper):
    """Writes with the same rules, so that text which looks like a number is quoted."""


for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in SCALARS:
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), list(_first))


def parse_yaml(text: str) -> tuple[Any, list[str]]:
    """Parses a YAML text; also returns one line for every repeated key. Raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        return loader.construct_document(node), list(_repeated_keys(node, "", set()))
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:
        raise yaml.YAMLError(str(error)) from None
    finally:
        loader.dispose()


def format_yaml(value: Any) -> str:
    """Formats a value as YAML that `parse_yaml` reads back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _repeated_keys(node: yaml.Node, path: str, seen: set[int]) -> Iterator[str]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _repeated_keys(item, f"{path}[{index}]", seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = f"{path}.{key.value}" if path else str(key.value)
            line = key.start_mark.line + 1
            if name in lines:
                yield f"{name}: given twice, on lines {lines[name]} and {line}"
            lines[name] = line
            yield from _repeated_keys(value, name, seen)
