"""Where an array stands in a pytree, as text such as "layers/attention/query"."""

import jax


def path_name(path) -> str:
    """Writes down a path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(tree) -> dict:
    """Maps the path of each leaf to the leaf."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
