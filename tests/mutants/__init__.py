"""Faults planted one by one into a copy of the sources, to see that `make test` notices them."""
