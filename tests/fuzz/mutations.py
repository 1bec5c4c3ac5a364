"""Mutations of valid inputs: bytes that are flipped, cut or doubled, and values of JSON that are replaced."""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**400, 0.5, -0.0, 1e-50, 1e38, 1e39, -3e38),
    *(float("nan"), float("inf"), "", "a", "\x00", "\ud800", "\x1b[31m", "x" * 5000, "257", [], {}, [[]], [None]),
    *([0] * 3000, {"a": {"b": []}}, [[[[[[[[]]]]]]]]),
)
TEXTS = (
    *(b"", b"\x00", b"\xff\xfe", b"NaN", b"-Infinity", b"1e999", b"null", b"[" * 3000, b"{" * 300, b'"', b"\\", b","),
    *(b"9" * 5000, b"\n", b"\r\n", b": ", b"- ", b"&a *a", b"<<: ", b"!!python/object:os.system ", b"---\n", b"\t"),
    *(b"{{", b"}}", b"{%", b"%}", b"{# ", b"{% for i in range(10 ** 9) %}", b"{{ 1 / 0 }}", b"{{ x.__class__ }}"),
)
Mutation = tuple[str, int, int]
KINDS = ("flip", "cut", "delete", "double", "swap", "insert", "replace", "value", "remove", "key")
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 2**20), st.integers(0, 2**20)), min_size=1, max_size=4
)


def mutated(content: bytes, mutations: list[Mutation]) -> bytes:
    """Applies mutations; one of values is left out where the bytes are no JSON."""
    for kind, position, choice in mutations:
        content = (
            _OF_VALUES[kind](content, position, choice)
            if kind in _OF_VALUES
            else _of_bytes(kind, content, position, choice)
        )
    return content


def _of_bytes(kind: str, content: bytes, position: int, choice: int) -> bytes:
    start, other = position % (len(content) + 1), choice % (len(content) + 1)
    text, end = TEXTS[choice % len(TEXTS)], min(len(content), start + 1 + choice % 40)
    low, high = sorted((start, other))
    flipped = bytes(byte ^ 1 << choice % 8 for byte in content[start : start + 1])
    changes = {
        "flip": (content[:start], flipped, content[start + 1 :]),
        "cut": (content[:start],),
        "delete": (content[:start], content[end:]),
        "double": (content[:end], content[start:]),
        "swap": (content[:low], content[high : high + 8], content[low:high], content[high + 8 :]),
        "insert": (content[:start], text, content[start:]),
        "replace": (content[:start], text, content[start + len(text) :]),
    }
    return b"".join(changes[kind])


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every container of a tree with each of its keys."""
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from _places(tree[key])


def _in_tree(content: bytes, position: int, change: Any) -> bytes:
    """Changes one place of a JSON document, or of one of several lines of JSON."""
    lines = content.splitlines(keepends=True)
    number = position % max(len(lines), 1)
    try:
        tree = copy.deepcopy(json.loads(lines[number]))
    except (ValueError, RecursionError, IndexError):
        return content
    if not (places := list(_places(tree))):
        return content
    change(*places[position % len(places)])
    try:
        lines[number] = json.dumps(tree).encode() + b"\n"
    except (ValueError, RecursionError):
        return content
    return b"".join(lines)


def _replaced(content: bytes, position: int, choice: int) -> bytes:
    def change(container: Any, key: Any) -> None:
        container[key] = copy.deepcopy(VALUES[choice % len(VALUES)])

    return _in_tree(content, position, change)


def _removed(content: bytes, position: int, choice: int) -> bytes:
    def change(container: Any, key: Any) -> None:
        del container[key]

    return _in_tree(content, position, change)


def _renamed(content: bytes, position: int, choice: int) -> bytes:
    def change(container: Any, key: Any) -> None:
        if isinstance(container, dict):
            container[f"{key}{choice % 3 or ''}"] = container.pop(key)
        else:
            container.append(container[key])
            random.Random(choice).shuffle(container)

    return _in_tree(content, position, change)


_OF_VALUES = {"value": _replaced, "remove": _removed, "key": _renamed}
