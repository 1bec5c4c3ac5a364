"""Commands around the library: `python -m kljax systems`, `audit` and `parity`; nothing of the library imports them."""
