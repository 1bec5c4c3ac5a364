// Curves of metrics: panels that zoom together, with smoothing, and the meaning of each metric.

/** Panels of metrics, each with its phase, name and label. */
const PANELS = [
  { title: "Reward", unit: "mean per completion", metrics: [["train", "reward", "reward"]] },
  {
    title: "Held-out accuracy",
    unit: "%",
    metrics: [
      ["eval", "accuracy", "sampled"],
      ["eval", "accuracy_greedy", "greedy"],
    ],
  },
  {
    title: "KL to the reference",
    unit: "nats per token",
    log: true,
    metrics: [
      ["train", "kl_reference_exact", "exact"],
      ["train", "kl_reference", "k3 estimate"],
      ["train", "kl_reference_forward", "forward"],
      ["train", "kl_reward", "in the reward"],
      ["train", "kl_advantage", "in the advantage"],
      ["train", "kl", "k3 estimate"],
    ],
  },
  {
    title: "Largest KL of a token",
    unit: "nats",
    log: true,
    metrics: [
      ["train", "kl_reference_exact_max", "exact"],
      ["train", "kl_reference_max", "k3 estimate"],
    ],
  },
  {
    title: "KL to the sampler",
    unit: "nats per token",
    log: true,
    metrics: [
      ["train", "rollout_kl", "rollout KL"],
      ["train", "mismatch_k1", "mismatch, k1"],
      ["train", "mismatch_k3", "mismatch, k3"],
      ["train", "mismatch_kl", "mismatch"],
    ],
  },
  { title: "Entropy of the policy", unit: "nats per token", metrics: [["train", "entropy", "entropy"]] },
  {
    title: "Clip fraction",
    unit: "of tokens",
    metrics: [
      ["train", "clip_fraction", "clipped"],
      ["train", "correction_clipped", "correction clipped"],
      ["train", "correction_rejected", "correction rejected"],
    ],
  },
  { title: "Length", unit: "tokens", metrics: [["train", "completion_length", "completion"]] },
  { title: "Finished", unit: "of completions", metrics: [["train", "finished", "finished"]] },
  {
    title: "Effective sample size",
    unit: "of tokens",
    metrics: [["train", "correction_sample_size", "of the correction"]],
  },
  { title: "Gradient norm", unit: "", log: true, metrics: [["train", "grad_norm", "norm"]] },
  {
    title: "Loss",
    unit: "",
    metrics: [
      ["train", "loss", "total"],
      ["train", "policy_loss", "policy"],
      ["train", "kl_loss", "KL"],
      ["train", "rollout_kl_loss", "rollout KL"],
    ],
  },
];
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];

function curvesView() {
  /** @type {Shared} */
  const shared = { charts: [], smoothing: 0.03, marks: true, range: null };
  const missing = [];
  const add = (panel, parent) => {
    const lines = linesOf(panel);
    if (lines.length === 0) {
      missing.push(panel.title.toLowerCase());
      return;
    }
    const chart = new Chart(panel, lines, shared);
    shared.charts.push(chart);
    chart.element.append(...meanings(panel, lines));
    parent.append(chart.element);
  };
  const grid = h("div", { class: "panels" });
  for (const panel of PANELS) add(panel, grid);
  const draw = () => shared.charts.forEach((chart) => chart.draw());
  const fit = () => shared.charts.forEach((chart) => chart.fit());
  const smoothings = [
    ["0", "off"],
    ["0.03", "light"],
    ["0.1", "strong"],
  ];
  const smoothing = choice("Smoothing", smoothings, String(shared.smoothing), (share) => {
    shared.smoothing = Number(share);
    shared.charts.forEach((chart) => chart.prepare());
  });
  const marks = h("input", {
    type: "checkbox",
    checked: true,
    change: () => {
      shared.marks = marks.checked;
      draw();
    },
  });
  const showAll = () => {
    shared.range = null;
    draw();
  };
  const keys = "Drag to zoom. With the keyboard: arrows move through the steps, + and − zoom, 0 shows all.";
  const toolbar = h(
    "div",
    { class: "toolbar" },
    smoothing,
    h("label", { class: "field" }, marks, h("span", {}, "Checkpoints and skipped updates")),
    h("button", { type: "button", click: showAll }, "Show all steps"),
    h("p", { class: "hint" }, keys),
  );
  const section = h("section", { "aria-label": "Curves" }, toolbar, grid);
  const others = otherPanels();
  if (others.length > 0) {
    const more = h("div", { class: "panels" });
    const fill = () => more.childElementCount === 0 && others.forEach((panel) => add(panel, more));
    section.append(h("details", { toggle: fill }, h("summary", {}, `${others.length} other metrics`), more));
  }
  if (missing.length > 0) section.append(h("p", { class: "hint" }, `Not recorded: ${missing.join(", ")}.`));
  new ResizeObserver(fit).observe(section);
  // A window on another screen has another number of pixels.
  addEventListener("resize", fit);
  document.addEventListener("theme", draw);
  return section;
}

/** The lines of a panel: its metrics that a run has. @returns {Line[]} */
function linesOf(panel) {
  return page.runs.flatMap((run, index) => {
    const present = panel.metrics.filter(([phase, metric]) => hasPoint(run.metrics[phase]?.[metric]));
    return present.map(([phase, metric, label], number) => {
      // A step that was repeated counts as it was at last.
      const { steps, values } = run.metrics[phase][metric];
      const points = [...new Map(steps.map((step, i) => [step, values[i]]))].sort(([a], [b]) => a - b);
      return {
        run: index,
        metric,
        label: page.runs.length > 1 ? `${run.name}: ${label}` : label,
        dash: DASHES[number % DASHES.length],
        steps: points.map(([step]) => step),
        values: points.map(([, value]) => value),
      };
    });
  });
}

/** Whether a metric was recorded. @param {Series|undefined} series */
function hasPoint(series) {
  return series?.values.some((value) => value !== null) ?? false;
}

/** A panel for each metric that has none yet. */
function otherPanels() {
  const keyOf = (phase, metric) => `${phase}/${metric}`;
  const shown = new Set(PANELS.flatMap(({ metrics }) => metrics.map(([phase, metric]) => keyOf(phase, metric))));
  const others = new Map();
  for (const run of page.runs) {
    for (const [phase, metrics] of Object.entries(run.metrics)) {
      for (const [metric, series] of Object.entries(metrics)) {
        const key = keyOf(phase, metric);
        if (!shown.has(key) && hasPoint(series)) others.set(key, [series.group, phase, metric]);
      }
    }
  }
  return [...others.values()].sort().map(([, phase, metric]) => ({
    title: `${phase.replace("_", " ")}: ${metric}`,
    unit: "",
    metrics: [[phase, metric, metric]],
  }));
}

/** The meaning of the metrics of a panel, folded; nothing if the glossary has none of them. */
function meanings(panel, lines) {
  const drawn = new Set(lines.map((line) => line.metric));
  const known = panel.metrics.filter(([, metric]) => drawn.has(metric) && page.glossary[metric]);
  if (known.length === 0) return [];
  const entries = known.flatMap(([, metric]) => {
    const { meaning, healthy, sick } = page.glossary[metric];
    const parts = [withCode(meaning), h("br"), "Healthy: ", withCode(healthy), h("br"), "Sick: ", withCode(sick)];
    return [h("dt", {}, h("code", {}, metric)), h("dd", {}, ...parts)];
  });
  return [h("details", { class: "meanings" }, h("summary", {}, "Meaning"), h("dl", {}, entries))];
}

/** A text whose parts between backticks are code. */
function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
}
