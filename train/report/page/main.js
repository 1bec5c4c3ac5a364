// The page of a run: its header, its views, and the address behind "#" that chooses one.

/** Makes a function that calls another at most once, when its value is first asked for. */
function once(make) {
  let value = null;
  return () => (value ??= make());
}

const table = once(() => new RolloutTable());
/** Name in the address, title, and element, of the views that the page has data for. */
const views = [
  ["parity", "Parity", once(parityView), page.dumps.length > 0],
  ["curves", "Curves", once(curvesView), page.runs.length > 0],
  ["rollouts", "Rollouts", () => table().element, page.rollouts.length > 0],
  ["distributions", "Distributions", once(histogramsView), page.histograms.length > 0],
  ["config", "Config", once(configView), page.runs.some(({ config }) => Object.keys(config).length > 0)],
].filter(([, , , present]) => present);
const nav = h("nav", { class: "views", "aria-label": "Views" });

/** The numbers that a reader wants first. @param {Run} run */
function overview(run, index) {
  const numbers = (phase, metric) => run.metrics[phase]?.[metric]?.values.filter((value) => value !== null) ?? [];
  const change = (values, unit) => `${short(values[0])} → ${short(values.at(-1))}${unit}`;
  const steps = Object.values(run.metrics.train ?? {})[0]?.steps ?? [];
  const [accuracy, reward] = [numbers("eval", "accuracy"), numbers("train", "reward")];
  const kl = ["kl_reference_exact", "kl_reference"].map((name) => numbers("train", name)).find(({ length }) => length);
  const skipped = run.skipped.length;
  const failed = Object.entries(run.failed);
  const entries = [
    steps.length > 0 && ["steps", steps.at(-1)],
    accuracy.length > 0 && ["held-out accuracy", change(accuracy, " %")],
    reward.length > 0 && ["reward", change(reward, "")],
    kl && ["KL to the reference", `${short(kl.at(-1))} nats/token`],
    failed.length > 0 && ["episodes that the world failed", failed.map(([name, count]) => `${count} ${name}`).join(", ")],
    skipped > 0 && ["skipped updates", skipped === 1 ? "in 1 step" : `in ${skipped} steps`],
  ];
  return h(
    "div",
    { class: "overview" },
    page.runs.length > 1 && h("h2", {}, h("i", { class: `key run-${index}` }), run.name),
    definitions("", entries.filter(Boolean)),
    run.notes.map((note) => h("p", { class: "note" }, note)),
  );
}

function drawHeader() {
  const changed = () => document.dispatchEvent(new Event("theme"));
  const themes = [
    ["light dark", "as the system"],
    ["light", "light"],
    ["dark", "dark"],
  ];
  const theme = choice("Theme", themes, "light dark", (scheme) => {
    document.documentElement.style.colorScheme = scheme;
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  const title = h("div", { class: "title" }, h("h1", {}, page.title), h("p", {}, page.made), theme);
  document.getElementById("header").append(title, h("div", { class: "overviews" }, page.runs.map(overview)), nav);
}

/** Shows what the address names: a view, a rollout, a group, or rollouts side by side. */
async function show(first) {
  hideNumbers();
  const [key, value = ""] = decodeURIComponent(location.hash.slice(1)).split("=");
  const opened = ["rollout", "group", "side"].includes(key);
  const [current, , make] = views.find(([name]) => name === (opened ? "rollouts" : key)) ?? views[0] ?? [];
  let content;
  if (key === "rollout") content = await rolloutView(Number(value), table());
  else if (key === "group") {
    const [, step, group] = value.split(".");
    content = await sideBySide(`Group ${group} of step ${step}`, membersOf(value));
  } else if (key === "side") content = await sideBySide("Side by side", value.split(",").map(Number));
  else content = make?.() ?? h("p", {}, "Nothing was recorded.");
  const links = views.map(([name, title]) =>
    h("a", { href: `#${name}`, "aria-current": name === current ? "page" : null }, title),
  );
  nav.replaceChildren(...links);
  const main = document.getElementById("main");
  main.replaceChildren(content);
  if (!first) (content.querySelector("h2[tabindex]") ?? main).focus({ preventScroll: current !== "rollouts" });
}

drawHeader();
addEventListener("hashchange", () => show(false));
show(true);
