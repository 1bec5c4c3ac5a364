"""Times of the page of a run in headless Chromium: open, sort, filter, open a rollout.

    python -m tests.train.report.times                      2,000 rollouts of 512 tokens
    python -m tests.train.report.times --keep DIR           keeps the run and its page

It needs Debian's chromium and the package playwright. The run is made of random numbers and words: a page of a real one
compresses better.
"""

import argparse
import pathlib
import tempfile
import time
from collections.abc import Sequence

import numpy as np

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


def measure(root: pathlib.Path, rollouts: int, tokens: int) -> str:
    """Makes a run of random numbers and its page; returns a table of the times."""
    run = make_run(root / "random", rollouts=rollouts, tokens=tokens)
    began = time.perf_counter()
    page = root / "report.html"
    page.write_text(render("random", [read_run(run, rollouts=rollouts)]), encoding="utf-8")
    seconds = time.perf_counter() - began
    times = [f"| {name} | {milliseconds:.0f} |" for name, milliseconds in times_of(page).items()]
    made = f"page of {page.stat().st_size / 2**20:.1f} MiB made in {seconds:.1f} s"
    return "\n".join([f"{rollouts} rollouts of {tokens} tokens, {made}.", "", "|  | ms |", "| --- | --- |", *times])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    command = argparse.ArgumentParser(
        prog="python -m tests.train.report.times", description=str(__doc__).partition("\n")[0]
    )
    command.add_argument("--rollouts", type=int, default=2000)
    command.add_argument("--tokens", type=int, default=512)
    command.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="keep the run and its page there")
    options = command.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        print(measure(options.keep or pathlib.Path(temporary), options.rollouts, options.tokens))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
