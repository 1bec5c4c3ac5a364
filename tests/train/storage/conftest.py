"""A store for the tests of this folder."""

from tests.stores import store

__all__ = ["store"]
