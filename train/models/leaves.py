"""Names of the leaves of a tree."""

from typing import Any

import jax

Tree = Any


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The leaves of a tree by dotted name, such as `layers.mlp.up_proj.kernel`; None is no leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
