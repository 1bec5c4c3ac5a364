"""Times of the page of a run in headless Chromium: open, sort, filter, open a rollout.

    python -m benchmarks.report_page                      2,000 rollouts of 512 tokens
    python -m benchmarks.report_page --keep DIR           keeps the run and its page

It needs Debian's chromium and the package playwright. The run is made of random numbers and words: a page of a real one
compresses better.
"""

import argparse
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.harness import cli
from benchmarks.harness.report import Report, table
from tests.train.report.random_run import make_run
from train.report.page import render
from train.report.runs import read_run

MEASURE = """
async () => {
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const timed = async (act) => {
    const start = performance.now(); act(); await frame();
    return performance.now() - start;
  };
  const opened = performance.getEntriesByType("navigation")[0];
  location.hash = "#rollouts";
  await frame(); await frame();
  const heading = document.querySelector("th[data-column='mean-entropy'] button");
  const sort = [];
  for (let i = 0; i < 5; i++) sort.push(await timed(() => heading.click()));
  const search = document.querySelector(".filters input[aria-label^='Filter Step']");
  const filter = await timed(() => { search.value = ">60"; search.dispatchEvent(new Event("input")); });
  const start = performance.now();
  location.hash = "#rollout=1000";
  while (!document.querySelector(".tokens .token")) await frame();
  return { interactive: opened.domInteractive, loaded: opened.loadEventEnd, sort: sort.sort((a, b) => a - b)[2], filter,
           rollout: performance.now() - start };
}
"""


def times_of(page: pathlib.Path, *, runs: int = 3) -> dict[str, float]:
    """Opens the page several times, and returns the median milliseconds of each act."""
    from playwright.sync_api import sync_playwright

    results = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for _ in range(runs):
            tab = browser.new_page(viewport={"width": 1400, "height": 900})
            began = time.perf_counter()
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector(".panel")
            results.append({"open": 1e3 * (time.perf_counter() - began), **tab.evaluate(MEASURE)})
            tab.close()
        browser.close()
    return {name: float(np.median([result[name] for result in results])) for name in results[0]}


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or pathlib.Path(temporary)
        run = make_run(root / "random", rollouts=options.rollouts, tokens=options.tokens)
        began = time.perf_counter()
        shown = read_run(run, rollouts=options.rollouts)
        page = root / "report.html"
        page.write_text(render("random", [shown]), encoding="utf-8")
        made = {"seconds": time.perf_counter() - began, "bytes": page.stat().st_size}
        sizes = {"rollouts": len(shown.recording.rollouts), "tokens": options.tokens}
        return sizes | made | {"milliseconds": times_of(page)}


def report(fields: dict[str, Any]) -> Report:
    """Makes the table of the times."""
    how = [
        f"{fields['rollouts']} rollouts of {fields['tokens']} tokens",
        f"page of {fields['bytes'] / 2**20:.1f} MiB made in {fields['seconds']:.1f} s",
    ]
    return Report([table((("", ""), ("ms", ".0f")), list(fields["milliseconds"].items()))], how=how)


main = cli.command(
    "report_page",
    __doc__,
    _measure,
    report,
    cli.option("--rollouts", type=cli.positive, default=2000),
    cli.option("--tokens", type=cli.positive, default=512),
    cli.option("--keep", type=pathlib.Path, help="directory of the run and its page"),
)

if __name__ == "__main__":
    sys.exit(main())
