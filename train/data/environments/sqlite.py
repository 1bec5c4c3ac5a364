"""An SQLite file that a policy may ask, and nothing else: read-only, with limits of rows, text and time."""

import atexit
import random
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path

ALLOWED = (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE)
REFUSED_FUNCTIONS = ("load_extension", "fts3_tokenizer", "sqlite_log", "printf", "format")
"""Functions that do more than compute a value; the last two take seconds for a text that they then refuse to make."""

STEPS = 100
"""Instructions of SQLite between two looks at the clock."""

LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 10_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 100,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}
"""Bytes of a value and of a query, and other limits of a connection."""


class Database:
    """An episode with the tool `query`; the task scores its last turn."""

    def __init__(
        self,
        path: str,
        rows: int = 20,
        text: int = 1000,
        seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens a file, read-only.

        Args:
          path: of the file.
          rows: the most rows of a result.
          text: the most characters of a result.
          seconds: the longest time of a query.
          clock: the time in seconds.

        Raises:
          FileNotFoundError: there is no file.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"path: got {path!r}, which is no file")
        self._rows = rows
        self._text = text
        self._seconds = seconds
        self._clock = clock
        self._connection = sqlite3.connect(f"{Path(path).resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)
        self._connection.text_factory = lambda data: data.decode(errors="replace")
        for limit, most in LIMITS.items():
            self._connection.setlimit(limit, most)
        self._connection.set_authorizer(_authorize)

    def reset(self) -> None:
        """Begins an episode."""

    def query(self, sql: str) -> str:
        """Answers a SELECT of SQLite: a line for each row, with | between its values."""
        end = self._clock() + self._seconds
        self._connection.set_progress_handler(lambda: self._clock() > end, STEPS)
        try:
            with closing(self._connection.execute(sql)) as cursor:
                return self._written(cursor)
        except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                return f"error: the query took more than {self._seconds:g} s"
            return f"error: {error}"[: self._text]

    def _written(self, cursor: sqlite3.Cursor) -> str:
        lines = list[str]()
        length = 0
        for row in cursor:
            if len(lines) == self._rows:
                return "\n".join([*lines, f"error: more than {self._rows} rows"])
            line = "|".join("" if value is None else str(value) for value in row)
            length += len(line) + 1
            if length > self._text + 1:
                return "\n".join([*lines, f"error: more than {self._text} characters"])
            lines.append(line)
        return "\n".join(lines)

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()


def _authorize(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    """Allows reading, and functions that only compute."""
    if action not in ALLOWED or (action == sqlite3.SQLITE_FUNCTION and (name or "").lower() in REFUSED_FUNCTIONS):
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK


class Shop(Database):
    """A small shop, which is built from a seed."""

    def __init__(self, seed: int, names: int) -> None:
        """Opens the file of this process, which is built once."""
        super().__init__(shop_file(seed, names))


@cache
def shop_file(seed: int, names: int) -> str:
    """Builds a file of `shop_rows`, which is removed at the end of the process; returns its path."""
    folder = tempfile.TemporaryDirectory(prefix="kljax-shop-")
    atexit.register(folder.cleanup)
    path = f"{folder.name}/shop.db"
    build(path, seed, names)
    return path


def build(path: str, seed: int, names: int) -> None:
    """Builds the database of a shop: what its items cost, on which shelves they are, and their orders.

    Args:
      path: of a file that is not there yet.
      seed: of the numbers.
      names: number of items.
    """
    rng = random.Random(seed)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table items(name text primary key, price integer)")
        connection.execute("create table shelves(name text, shelf integer, count integer)")
        connection.execute("create table orders(name text, count integer)")
        for name in item_names(names, rng):
            shelves = [(name, shelf, rng.randint(1, 49)) for shelf in rng.sample(range(1, 10), rng.randint(1, 3))]
            orders = [(name, rng.randint(1, 9)) for _ in range(rng.randint(1, 20))]
            connection.execute("insert into items values(?, ?)", (name, rng.randint(10, 99)))
            connection.executemany("insert into shelves values(?, ?, ?)", shelves)
            connection.executemany("insert into orders values(?, ?)", orders)


def item_names(count: int, rng: random.Random) -> list[str]:
    """Returns different names, such as `bado`."""
    every = [a + b + c + d for a in "bdfgklmnprst" for b in "aeiou" for c in "bdfgklmnprst" for d in "aeiou"]
    return rng.sample(every, count)
