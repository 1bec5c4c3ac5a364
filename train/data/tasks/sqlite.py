"""Questions over the database of a shop, and demonstrations of a teacher that often does not look."""

import random
from contextlib import closing

from train.data.environments.sqlite import Shop, item_names
from train.data.tasks.arithmetic import score
from train.data.tasks.demonstrations import demonstrate, miscopy
from train.data.tasks.task import Example, Task

QUERIES = {
    "price": "select price from items where name='{}'",
    "stock": "select sum(count) from shelves where name='{}'",
    "orders": "select count(*) from orders where name='{}'",
}
"""The queries that answer the questions."""


def task(seed: int, names: int, problems: int, held_out: int, wrong: float) -> Task:
    """Makes the task for a model of bytes.

    Args:
      seed: of the database.
      names: number of items of the shop; each has a question for every kind of query.
      problems: most training problems.
      held_out: number of held-out problems, of items that no training problem has.
      wrong: share of demonstrations that guess the answer; half as many ask another table, and half as many copy the
        result wrongly.
    """
    rng = random.Random(seed)
    asked = [(kind, name) for name in item_names(names, rng) for kind in QUERIES]
    rng = random.Random(0)
    with closing(Shop(seed, names)) as shop:
        examples = [_example(shop, kind, name, wrong, rng) for kind, name in asked]
    held = examples[:held_out]
    # The last item that is held out may have more questions.
    rest = examples[-(-held_out // len(QUERIES)) * len(QUERIES) :]
    return Task("sqlite", train=rest[:problems], eval=held, score=score)


def _example(shop: Shop, kind: str, name: str, wrong: float, rng: random.Random) -> Example:
    answer = shop.query(QUERIES[kind].format(name))
    turns = list[tuple[str, str]]()
    if rng.random() < wrong:
        last = str(rng.randint(1, 99))
    else:
        asked = rng.choice([*QUERIES]) if rng.random() < wrong / 2 else kind
        sql = QUERIES[asked].format(name)
        last = shop.query(sql)
        turns.append((f"query {sql}", f"{last}\n"))
        if rng.random() < wrong / 2:
            last = miscopy(last, rng)
    return demonstrate(f"{kind} of {name}?\n", answer, [*turns, (last, "")])
