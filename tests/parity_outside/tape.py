"""Derivatives of numpy expressions, in reverse, with the conventions of PyTorch at ties and bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Node:
    """A value and how its derivative reaches the values that it was computed from."""

    __array_ufunc__ = None

    def __init__(self, value: Array, parents: Sequence[tuple[Node, Callable[[Array], Array]]] = ()) -> None:
        self.value = np.asarray(value)
        self.parents = tuple(parents)

    def __add__(self, other: Node | Array | float) -> Node:
        right = wrap(other, self.value.dtype)
        return Node(self.value + right.value, [(self, lambda g: g), (right, lambda g: g)])

    def __neg__(self) -> Node:
        return Node(-self.value, [(self, lambda g: -g)])

    def __sub__(self, other: Node | Array | float) -> Node:
        return self + (-wrap(other, self.value.dtype))

    def __rsub__(self, other: Array | float) -> Node:
        return wrap(other, self.value.dtype) - self

    def __mul__(self, other: Node | Array | float) -> Node:
        right = wrap(other, self.value.dtype)
        return Node(
            self.value * right.value,
            [(self, lambda g: g * right.value), (right, lambda g: g * self.value)],
        )

    __radd__ = __add__
    __rmul__ = __mul__

    def exp(self) -> Node:
        """Exponential."""
        result = np.exp(self.value)
        return Node(result, [(self, lambda g: g * result)])

    def abs(self) -> Node:
        """Absolute value; its derivative at 0 is 0."""
        return Node(np.abs(self.value), [(self, lambda g: g * np.sign(self.value))])

    def sigmoid(self) -> Node:
        """Logistic function."""
        result = 1 / (1 + np.exp(-self.value))
        return Node(result, [(self, lambda g: g * result * (1 - result))])

    def clip(self, low: float | None, high: float | None) -> Node:
        """Clamp whose derivative is 1 on the bounds as well."""
        inside = np.ones(self.value.shape, bool)
        if low is not None:
            inside &= self.value >= low
        if high is not None:
            inside &= self.value <= high
        if low is None and high is None:
            return self
        return Node(np.clip(self.value, low, high), [(self, lambda g: np.where(inside, g, 0))])

    def sum(self, axis: int | None = None) -> Node:
        """Sum over all entries, or over one axis, which stays with length 1."""
        total = self.value.sum(axis=axis, keepdims=axis is not None)
        return Node(total, [(self, lambda g: np.broadcast_to(g, self.value.shape))])

    def detach(self) -> Node:
        """The same value, treated as a constant."""
        return Node(self.value)


def wrap(value: Node | Array | float, dtype: Any) -> Node:
    """A node as it is, anything else as a constant of this dtype."""
    return value if isinstance(value, Node) else Node(np.asarray(value, dtype))


def select(condition: Array, yes: Node, no: Node) -> Node:
    """`yes` where the condition is true, else `no`."""
    return Node(
        np.where(condition, yes.value, no.value),
        [(yes, lambda g: np.where(condition, g, 0)), (no, lambda g: np.where(condition, 0, g))],
    )


def larger(left: Node, right: Node) -> Node:
    """Elementwise maximum; a tie shares its derivative equally."""
    weight = np.where(left.value == right.value, 0.5, left.value > right.value)
    weight = weight.astype(left.value.dtype)
    return Node(
        np.maximum(left.value, right.value),
        [(left, lambda g: g * weight), (right, lambda g: g * (1 - weight))],
    )


def smaller(left: Node, right: Node) -> Node:
    """Elementwise minimum; a tie shares its derivative equally."""
    return -larger(-left, -right)


def gradient(result: Node, leaf: Node) -> Array:
    """Derivative of a scalar node by a leaf of its expression."""
    order: list[Node] = []
    seen: set[int] = set()

    def visit(node: Node) -> None:
        if id(node) not in seen:
            seen.add(id(node))
            for parent, _ in node.parents:
                visit(parent)
            order.append(node)

    visit(result)
    flows = {id(result): np.ones_like(result.value)}
    for node in reversed(order):
        flow = flows.get(id(node))
        if flow is None:
            continue
        for parent, back in node.parents:
            part = _shrink(np.asarray(back(flow)), parent.value.shape)
            flows[id(parent)] = flows[id(parent)] + part if id(parent) in flows else part
    return flows.get(id(leaf), np.zeros_like(leaf.value))


def _shrink(flow: Array, shape: tuple[int, ...]) -> Array:
    """Sums over the axes along which a value of this shape was broadcast."""
    while flow.ndim > len(shape):
        flow = flow.sum(axis=0)
    for axis, length in enumerate(shape):
        if length == 1 and flow.shape[axis] != 1:
            flow = flow.sum(axis=axis, keepdims=True)
    return flow
