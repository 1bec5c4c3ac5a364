"""An SQLite file as an environment: what a query may read, and hostile ones, which change and reach nothing."""

import re
import sqlite3
from contextlib import closing

import pytest

from train.data.environments.sqlite import Database, Shop, build
from train.data.tasks import sqlite as task_of_shop

ENDLESS = "with recursive n(i) as (select 1 union all select i + 1 from n) "


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("database") / "a shop?#1.db"
    build(str(path), seed=3, names=8)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("create table odd(a, b)")
        connection.execute("insert into odd values(null, x'ff'), (1.5, cast(x'ff41' as text))")
    return path


@pytest.fixture
def database(path):
    before = path.read_bytes()
    with closing(Database(str(path), rows=5, text=60, seconds=0.05)) as database:
        database.reset()
        yield database
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_query_reads_tables_and_their_names(database):
    assert database.query("select count(*), 'x' from items") == "8|x"
    assert database.query("with a as (select 2 as b) select b from a union select 3") == "2\n3"
    assert database.query("select name from sqlite_master where type = 'table' order by 1 limit 2") == "items\nodd"
    assert database.query("select a, b from odd where a is null") == "|b'\\xff'"
    assert database.query("select b from odd where a = 1.5") == "\ufffdA"
    assert database.query("select 1 where 0") == database.query("") == database.query("-- nothing") == ""


def test_results_are_cut(database):
    assert database.query("select 1 from orders limit 5") == "1\n" * 4 + "1"
    assert database.query("select 1 from orders limit 6") == "1\n" * 5 + "error: more than 5 rows"
    assert database.query("select hex(zeroblob(30))") == "0" * 60
    assert database.query("select hex(zeroblob(31))") == "error: more than 60 characters"
    assert database.query("values('a'), (hex(zeroblob(30)))") == "a\nerror: more than 60 characters"
    assert database.query(ENDLESS + "select i from n") == "1\n2\n3\n4\n5\nerror: more than 5 rows"
    assert len(database.query(f"select {'x' * 900}")) <= 60


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("select price from item", "no such table: item"),
        ("price of bado?", 'near "price": syntax error'),
        ("select ?", "Incorrect number of bindings"),
        ("select 1; drop table items", "one statement at a time"),
        ("select '\0'", "null character"),
        ("select '\ud800'", "can't encode"),
        (f"select '{'x' * 20_000}'", "too big|too large"),
        ("insert into items values('a', 1)", "not authorized"),
        ("update items set price = 0", "not authorized"),
        ("delete from items", "not authorized"),
        ("drop table items", "not authorized"),
        ("create table a(b)", "not authorized"),
        ("create temp table a as select 1", "not authorized"),
        ("create view a as select 1", "not authorized"),
        ("attach '{folder}/other.db' as other", "not authorized|too many attached"),
        ("attach ':memory:' as other", "not authorized|too many attached"),
        ("vacuum into '{folder}/copy.db'", "not authorized|too many attached|authorization denied"),
        ("vacuum", "not authorized|too many attached|authorization denied|readonly"),
        ("pragma query_only = 0", "not authorized"),
        ("pragma writable_schema = 1", "not authorized"),
        ("select * from pragma_database_list", "not authorized|no such table"),
        ("begin exclusive", "not authorized"),
        ("savepoint a", "not authorized"),
        ("reindex", "not authorized"),
        ("analyze", "not authorized"),
        ("select load_extension('/tmp/x.so')", "not authorized"),
        ("select LOAD_EXTENSION('/tmp/x.so', 'f')", "not authorized"),
        ("select readfile('/etc/passwd')", "no such function"),
        ("select writefile('{folder}/x', 'y')", "no such function"),
        ("select printf('%.*c', 1000000000, 'x')", "not authorized to use function: printf"),
        ("select format('%d', 3)", "not authorized to use function: format"),
        ("select length(zeroblob(1000000000))", "too big"),
        ("select group_concat(a.name) from orders a, orders b, orders c, orders d", "too big|took more than"),
        (ENDLESS + "select sum(i) from n", "took more than 0.05 s"),
        (ENDLESS + "select max(length(hex(zeroblob(9999)))) from n", "took more than 0.05 s"),
        ("select count(*) from orders a, orders b, orders c, orders d, orders e, orders f", "took more than 0.05 s"),
        ("select " + ",".join(["zeroblob(9)"] * 101), "too many columns"),
    ],
)
def test_error_is_an_observation(database, path, sql, error):
    answer = database.query(sql.replace("{folder}", str(path.parent)))
    assert re.match(f"error: .*({error})", answer, re.DOTALL), answer
    assert len(answer) <= 60
    assert database.query("select 1") == "1"


def test_query_may_take_its_seconds_and_no_more(path):
    now = iter(range(1_000_000))
    with closing(Database(str(path), seconds=3.0, clock=lambda: next(now))) as database:
        assert database.query("select count(*) from items") == "8"
        assert database.query(ENDLESS + "select sum(i) from n") == "error: the query took more than 3 s"
        # Each query has its own time.
        assert database.query(ENDLESS + "select sum(i) from (select i from n limit 10)") == "55"


def test_missing_file_is_refused_and_not_made(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"^path: got .*no\.db', which is no file$"):
        Database(str(tmp_path / "no.db"))
    assert not list(tmp_path.iterdir())


def test_answers_are_those_of_the_tables():
    task = task_of_shop.task(seed=0, names=12, problems=30, held_out=5, wrong=0.5)
    assert (len(task.train), len(task.eval)) == (30, 5)
    names = [{example.prompt.split()[-1] for example in part} for part in (task.train, task.eval)]
    assert not names[0] & names[1]
    for example in task.train:
        kind, _, name = example.prompt.removesuffix("?\n").split()
        assert example.answer == _answer(kind, name)


def _answer(kind, name):
    """Computes an answer in Python, from all rows of a table."""
    table, column = {"price": ("items", 1), "stock": ("shelves", 2), "orders": ("orders", None)}[kind]
    with closing(Shop(0, 12)) as shop:
        rows = shop._connection.execute(f"select * from {table}").fetchall()
    values = [1 if column is None else row[column] for row in rows if row[0] == name]
    return str(sum(values))
