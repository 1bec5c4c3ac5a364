// The page of a run: its header, its views, and the address behind "#" that chooses one.

import "uplot/dist/uPlot.min.css";
import "./page.css";
import { configs, dumps } from "./compare";
import { curves } from "./curves";
import { page } from "./data";
import { append, h, select } from "./dom";
import { short } from "./format";
import { histograms } from "./histograms";
import { membersOf, rolloutView, sideBySide } from "./rollout";
import { type RolloutTable, rolloutTable } from "./table";
import { hideNumbers } from "./tokens";
import type { Run } from "./types";

interface View {
  key: string;
  title: string;
  make: () => HTMLElement;
}

let table: RolloutTable | null = null;
const theTable = (): RolloutTable => (table ??= rolloutTable());

const VIEWS: View[] = [
  ...(page.dumps.length > 0 ? [{ key: "parity", title: "Parity", make: dumps }] : []),
  ...(page.runs.length > 0 ? [{ key: "curves", title: "Curves", make: curves }] : []),
  ...(page.rollouts.length > 0 ? [{ key: "rollouts", title: "Rollouts", make: () => theTable().element }] : []),
  ...(page.histograms.length > 0 ? [{ key: "distributions", title: "Distributions", make: histograms }] : []),
  ...(page.runs.some((run) => Object.keys(run.config).length > 0) ? [{ key: "config", title: "Config", make: configs }] : []),
];
const made = new Map<string, HTMLElement>();
const main = document.getElementById("main")!;
const nav = h("nav", { class: "views", "aria-label": "Views" });

function ends(run: Run, phase: string, metric: string): [number, number] | null {
  const values = run.metrics[phase]?.[metric]?.values.filter((value): value is number => value !== null);
  return values?.length ? [values[0]!, values[values.length - 1]!] : null;
}

/** The numbers that a reader wants first. */
function overview(run: Run, index: number): HTMLElement {
  const accuracy = ends(run, "eval", "accuracy");
  const reward = ends(run, "train", "reward");
  const kl = ends(run, "train", "kl_reference_exact") ?? ends(run, "train", "kl_reference");
  const steps = run.metrics["train"] && Object.values(run.metrics["train"])[0]?.steps;
  const skipped = run.skipped.length;
  const numbers: [string, string][] = [];
  if (steps?.length) numbers.push(["steps", String(steps[steps.length - 1])]);
  if (accuracy) numbers.push(["held-out accuracy", `${short(accuracy[0])} → ${short(accuracy[1])} %`]);
  if (reward) numbers.push(["reward", `${short(reward[0])} → ${short(reward[1])}`]);
  if (kl) numbers.push(["KL to the reference", `${short(kl[1])} nats/token`]);
  if (skipped) numbers.push(["skipped updates", skipped === 1 ? "in 1 step" : `in ${skipped} steps`]);
  return h(
    "div",
    { class: "overview" },
    page.runs.length > 1 && h("h2", {}, h("i", { class: `key run-${index}` }), run.name),
    h("dl", {}, numbers.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    run.notes.map((note) => h("p", { class: "note" }, note)),
  );
}

function setTheme(theme: string): void {
  document.documentElement.style.colorScheme = theme === "auto" ? "light dark" : theme;
  document.dispatchEvent(new Event("theme"));
}

function header(): void {
  const theme = select(
    "Theme",
    [
      ["auto", "as the system"],
      ["light", "light"],
      ["dark", "dark"],
    ],
    "auto",
    setTheme,
  );
  append(document.getElementById("header")!, [
    h("div", { class: "title" }, h("h1", {}, page.title), h("p", {}, page.made), theme),
    h("div", { class: "overviews" }, page.runs.map(overview)),
    nav,
  ]);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("theme")));
}

/** Shows what the address names: a view, a rollout, a group, or rollouts side by side. */
async function show(first: boolean): Promise<void> {
  hideNumbers();
  const [key = "", value = ""] = decodeURIComponent(location.hash.slice(1)).split("=");
  const view = VIEWS.find((other) => other.key === key) ?? VIEWS[0];
  let content: HTMLElement;
  if (key === "rollout") content = await rolloutView(Number(value), theTable());
  else if (key === "group") content = await sideBySide(`Group ${value.split(".")[2]} of step ${value.split(".")[1]}`, membersOf(value));
  else if (key === "side") content = await sideBySide("Side by side", value.split(",").map(Number));
  else if (view) {
    if (!made.has(view.key)) made.set(view.key, view.make());
    content = made.get(view.key)!;
  } else content = h("p", {}, "Nothing was recorded.");
  const current = ["rollout", "group", "side"].includes(key) ? "rollouts" : (view?.key ?? "");
  nav.replaceChildren(
    ...VIEWS.map((other) =>
      h("a", { href: `#${other.key}`, "aria-current": other.key === current ? "page" : null }, other.title),
    ),
  );
  main.replaceChildren(content);
  if (!first) (content.querySelector<HTMLElement>("h2[tabindex]") ?? main).focus({ preventScroll: current !== "rollouts" });
}

header();
addEventListener("hashchange", () => void show(false));
void show(true);
