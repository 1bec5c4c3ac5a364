"""Leaves of trees in words: their dotted names, their types and shapes, and messages about several of them."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

Tree = Any
SHOWN = 5


def named_leaves(tree: Tree) -> dict[str, Any]:
    """Lists the leaves of a tree by dotted name, such as `layers.mlp.up_proj.kernel`; None is no leaf.

    Args:
      tree: pytree of any leaves.

    Returns:
      Name to leaf, in the order of the tree.

    Raises:
      Nothing.

    Example:
      >>> import kljax
      >>> kljax.checkpoint.named_leaves({"layers": {"bias": 0.5, "scale": None}})
      {'layers.bias': 0.5}
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def shape_and_dtype(leaf: Any) -> str:
    """Formats the dtype and shape of an array or its metadata, as `float32[8, 4]`.

    Args:
      leaf: an object with `shape` and `dtype`.

    Returns:
      The text.

    Raises:
      Nothing.

    Example:
      >>> import numpy as np, kljax
      >>> kljax.checkpoint.shape_and_dtype(np.zeros((8, 4), np.float32))
      'float32[8, 4]'
    """
    return f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"


def first_five(problems: Sequence[str], *, separator: str = "; ") -> str:
    """Joins the first five problems, and counts the others.

    Args:
      problems: one text each.
      separator: text between two of them.

    Returns:
      One line; an empty text without a problem.

    Raises:
      Nothing.

    Example:
      >>> import kljax
      >>> kljax.checkpoint.first_five("abcdefg", separator=", ")
      'a, b, c, d, e, and 2 more'
    """
    others = f"{separator}and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return separator.join(problems[:SHOWN]) + others
