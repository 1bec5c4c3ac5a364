"""Chooses the tests of `make test` and of CI from measurements, and writes the lists of those that they leave out.

    python -m tests.tiers FOLDER [--test SECONDS] [--ci SECONDS]

`make test` and CI have each a budget of CPU seconds. Within it they get, in this order:

1. of every test function the cheapest case, for three fifths of it: a function is a statement, and sweeps over all
   functions of the library, which reach the lines of a formula, do not check its value;
2. the cheapest tests, for a quarter of the remainder;
3. for lines that none of these reach, the tests that reach most of them for a second;
4. tests of other functions for lines that only one function reaches, then two, and so on: a line that a test
   reaches is not one that it checks.

`make test` is chosen first, and CI has it and more. The rest runs at night. A test that was not measured keeps its
place.
"""

import argparse
import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests import selection
from tests.tiers.measured import Lines, file_of, read_costs, read_lines

STATEMENTS = 0.6
"""The part of a budget for the cheapest case of every test function."""
CHEAPEST = 0.25
"""The part of the remainder for the cheapest tests."""

PROMISES = (
    "tests/integration/test_smoke_run.py::test_output_is_progress_and_the_table_alone",
    "tests/integration/test_smoke_run.py::test_same_seed_gives_the_same_run",
    "tests/integration/test_processes.py::test_error_of_one_process_ends_both_and_saves",
    "tests/integration/test_processes.py::test_unchanged_config_continues_on_fewer_processes",
    "tests/integration/test_lora_run.py::test_the_base_is_shared_and_never_written",
    "tests/integration/test_folder_run.py::test_trained_weights_are_exported_with_equal_log_probs",
    "tests/train/distributed/test_peer_watch.py::test_killed_process_is_named_within_fifteen_seconds",
    "tests/train/distributed/test_processes.py::test_two_processes_share_rows_values_and_errors",
    "tests/train/rl/test_no_logits.py::test_scoring_and_updates_hold_no_logits",
    "tests/train/rl/test_step.py::test_step_donates_compiles_once_and_stays_on_device",
    "tests/train/run/test_loop.py::test_three_steps_compile_once_and_carry_state",
)
"""What CI runs whatever it costs: promises that the documentation makes, and that no line shows."""


def function_of(test: str) -> str:
    """Returns a test without its parameters."""
    return test.partition("[")[0]


class Budget:
    """Tests within a budget."""

    def __init__(self, costs: Mapping[str, float], shared: Mapping[str, float], lines: Mapping[str, Lines]) -> None:
        self.costs = costs
        self.shared = shared
        self.lines = lines
        self.chosen: set[str] = set()
        self.files: set[str] = set()
        self.spent = 0.0
        # The functions that reach a line.
        self.by_line: dict[tuple[str, int], set[str]] = {}

    def take(self, test: str) -> None:
        """Chooses a test."""
        self.spent += self.price(test)
        self.chosen.add(test)
        self.files.add(file_of(test))
        for line in self.lines.get(test, ()):
            self.by_line.setdefault(line, set()).add(function_of(test))

    def price(self, test: str) -> float:
        """Returns what a test adds: the first of a file sets up what its tests share."""
        file = file_of(test)
        return self.costs[test] + (0.0 if file in self.files else self.shared.get(file, 0.0))

    def gain(self, test: str, times: int) -> float:
        """Returns the lines for a second that a test reaches, and fewer than `times` other functions do."""
        function = function_of(test)
        nobody: set[str] = set()
        reached = (self.by_line.get(line, nobody) for line in self.lines.get(test, ()))
        new = sum(1 for functions in reached if len(functions) < times and function not in functions)
        return new / self.price(test)

    def cheapest(self, tests: Iterable[str]) -> list[str]:
        """Sorts tests by their costs, each with its part of what the tests of its file share."""
        listed = list(tests)
        sizes = Counter(map(file_of, listed))

        def cost(test: str) -> tuple[float, str]:
            return self.costs[test] + (self.price(test) - self.costs[test]) / sizes[file_of(test)], test

        return sorted(listed, key=cost)

    def take_cheapest(self, budget: float) -> None:
        """Chooses the cheapest tests."""
        self.take_all(self.cheapest(self.costs.keys() - self.chosen), budget)

    def take_statements(self, budget: float) -> None:
        """Chooses the cheapest case of each function, the cheapest functions first."""
        first: dict[str, str] = {}
        for test in sorted(self.costs, key=lambda test: (self.costs[test], test)):
            first.setdefault(function_of(test), test)
        for test in self.chosen:
            first.pop(function_of(test), None)
        self.take_all(self.cheapest(first.values()), budget)

    def take_all(self, tests: Iterable[str], budget: float) -> None:
        """Chooses tests in their order until the budget is spent."""
        for test in tests:
            if self.spent + self.price(test) <= budget:
                self.take(test)

    def take_lines(self, budget: float, times: int) -> None:
        """Chooses tests until `times` functions reach each line, as far as there are so many and the budget lasts."""
        # Gains fall, but for those of a file with its first test: what is first after it was weighed again is the best.
        heap = [(-self.gain(test, times), test) for test in self.costs if test not in self.chosen]
        heapq.heapify(heap)
        while heap:
            _, test = heapq.heappop(heap)
            gain = self.gain(test, times)
            if gain == 0 or self.spent + self.price(test) > budget:
                continue
            if heap and gain < -heap[0][0]:
                heapq.heappush(heap, (-gain, test))
                continue
            self.take(test)

    def fill(self, budget: float) -> None:
        """Spends a budget."""
        self.take_statements(self.spent + STATEMENTS * (budget - self.spent))
        self.take_cheapest(self.spent + CHEAPEST * (budget - self.spent))
        for times in range(1, 10):
            self.take_lines(budget, times)
        self.take_statements(budget)


def write_list(mark: str, tests: Iterable[str], measured: Iterable[str]) -> None:
    """Writes a list; tests that were not measured stay in it, and files and functions that are left out stand whole."""
    path = Path(selection.__file__).with_name(selection.MARKS[mark])
    head = path.read_text("utf-8").partition("\n")[0]
    known = set(measured)
    left_out = set(tests)
    parts = set(map(file_of, known)) | set(map(function_of, known)) | known
    kept = {name for name in selection.read_names(mark) if name not in parts}
    for part in (file_of, function_of):
        whole = {part(test) for test in left_out} - {part(test) for test in known - left_out}
        kept |= whole
        left_out = {test for test in left_out if part(test) not in whole}
    path.write_text("\n".join([head, *sorted(kept | left_out)]) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.tiers", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what tests.tiers.measure wrote")
    parser.add_argument("--test", type=float, default=500, help="CPU seconds of make test; default %(default)s")
    parser.add_argument("--ci", type=float, default=1200, help="those of CI, with make test; default %(default)s")
    options = parser.parse_args(arguments)
    costs, shared = read_costs(options.folder)
    lines = read_lines(options.folder)
    quick = Budget(costs, shared, lines)
    quick.fill(options.test)
    in_ci = Budget(costs, shared, lines)
    for test in sorted(quick.chosen | {test for test in costs if function_of(test) in PROMISES}):
        in_ci.take(test)
    in_ci.fill(options.ci)
    write_list("more", in_ci.chosen - quick.chosen, costs)
    write_list("thorough", costs.keys() - in_ci.chosen, costs)
    every = len(set().union(*lines.values()))
    functions = set(map(function_of, costs))
    for name, choice in (("make test", quick), ("CI", in_ci)):
        of_functions = set(map(function_of, choice.chosen))
        print(
            f"{name}: {choice.spent:.0f} of {sum(costs.values()) + sum(shared.values()):.0f} CPU seconds, "
            f"{len(choice.chosen)} of {len(costs)} tests, {len(of_functions)} of {len(functions)} functions, "
            f"{len(choice.by_line)} of {every} lines"
        )


if __name__ == "__main__":
    main()
