// Curves of metrics: panels with zoom, hover, smoothing and a choice of axes.

import uPlot from "uplot";
import { page } from "./data";
import { css, h, select, svg } from "./dom";
import { short } from "./format";
import type { Run, Series } from "./types";

interface Panel {
  title: string;
  unit: string;
  log?: boolean;
  /** Phase, metric and label. */
  metrics: [phase: string, metric: string, label: string][];
}

const PANELS: Panel[] = [
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

type Axis = "auto" | "linear" | "robust" | "log";

interface Line {
  run: number;
  metric: string;
  label: string;
  series: Series;
  dash: number[];
}

const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
/** Points of a line up to which each is marked and none is smoothed. */
const FEW = 25;
/** Decades below the median that a logarithmic axis shows: KLs of rounding alone are beyond it. */
const DECADES_BELOW = 6;

interface Settings {
  smoothing: number;
  marks: boolean;
}

export function curves(): HTMLElement {
  const settings: Settings = { smoothing: 0.03, marks: true };
  const charts: Chart[] = [];
  const sync = (source: Chart, min: number, max: number): void => {
    for (const chart of charts) if (chart !== source) chart.zoom(min, max);
  };
  const resetAll = (): void => charts.forEach((chart) => chart.reset());
  const grid = h("div", { class: "panels" });
  const missing: string[] = [];
  const add = (panel: Panel, parent: HTMLElement): void => {
    const lines = linesOf(panel);
    if (lines.length === 0) {
      missing.push(panel.title.toLowerCase());
      return;
    }
    const chart = new Chart(panel, lines, settings, sync, resetAll);
    charts.push(chart);
    parent.append(chart.element);
  };
  for (const panel of PANELS) add(panel, grid);
  const redraw = (): void => charts.forEach((chart) => chart.draw());
  const toolbar = h(
    "div",
    { class: "toolbar" },
    select(
      "Smoothing",
      [
        ["0", "off"],
        ["0.03", "light"],
        ["0.1", "strong"],
      ],
      "0.03",
      (value) => {
        settings.smoothing = Number(value);
        redraw();
      },
    ),
    h(
      "label",
      { class: "field" },
      h("input", {
        type: "checkbox",
        checked: true,
        change: (event: Event) => {
          settings.marks = (event.target as HTMLInputElement).checked;
          redraw();
        },
      }),
      h("span", {}, "Checkpoints and skipped updates"),
    ),
    h("button", { type: "button", click: resetAll }, "Show all steps"),
    h(
      "p",
      { class: "hint" },
      "Drag to zoom. With the keyboard: arrows move through the steps, + and − zoom, 0 shows all.",
    ),
  );
  const section = h("section", { "aria-label": "Curves" }, toolbar, grid);
  const others = otherPanels();
  if (others.length > 0) {
    const more = h("div", { class: "panels" });
    const fill = (): void => {
      if (more.childElementCount === 0) for (const panel of others) add(panel, more);
    };
    section.append(h("details", { toggle: fill }, h("summary", {}, `${others.length} other metrics`), more));
  }
  if (missing.length > 0) section.append(h("p", { class: "hint" }, `Not recorded: ${missing.join(", ")}.`));
  new ResizeObserver(() => charts.forEach((chart) => chart.resize())).observe(section);
  document.addEventListener("theme", redraw);
  return section;
}

function linesOf(panel: Panel): Line[] {
  const lines: Line[] = [];
  page.runs.forEach((run, index) => {
    const present = panel.metrics.filter(([phase, metric]) => hasPoint(run.metrics[phase]?.[metric]));
    present.forEach(([phase, metric, label], number) => {
      const name = page.runs.length > 1 ? `${run.name}: ${label}` : label;
      const dash = DASHES[number % DASHES.length]!;
      lines.push({ run: index, metric, label: name, series: run.metrics[phase]![metric]!, dash });
    });
  });
  return lines;
}

function hasPoint(series: Series | undefined): boolean {
  return series?.values.some((value) => value !== null) ?? false;
}

/** The steps that an axis shows: one alone stands in the middle. */
function stepRange(plot: uPlot, min: number, max: number): [number, number] {
  const [step, another] = plot.data[0];
  return step !== undefined && another === undefined ? [step - 1, step + 1] : [min, max];
}

/** Round numbers of a logarithmic axis: decades alone, or 1, 2 and 5 if it has few decades, and all digits in one. */
function logTicks(low: number, high: number): number[] {
  const reach = high / low;
  const digits = reach > 200 ? [1] : reach > 5 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9];
  const every = Math.ceil(Math.log10(reach) / 8);
  const numbers: number[] = [];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade++) {
    if (decade % every === 0) numbers.push(...digits.map((digit) => Number(`${digit}e${decade}`)));
  }
  return numbers.filter((number) => number >= low && number <= high);
}

/** A panel for each metric that has none yet. */
function otherPanels(): Panel[] {
  const shown = new Set(PANELS.flatMap((panel) => panel.metrics.map(([phase, metric]) => `${phase}/${metric}`)));
  const names = new Map<string, [group: string, phase: string, metric: string]>();
  for (const run of page.runs) {
    for (const [phase, metrics] of Object.entries(run.metrics)) {
      for (const [metric, series] of Object.entries(metrics)) {
        const key = `${phase}/${metric}`;
        if (!shown.has(key) && hasPoint(series)) names.set(key, [series.group, phase, metric]);
      }
    }
  }
  return [...names.values()]
    .sort()
    .map(([, phase, metric]) => ({ title: `${phase.replace("_", " ")}: ${metric}`, unit: "", metrics: [[phase, metric, metric]] }));
}

/** A running median over the finite values around each; a gap stays one. */
function smooth(values: (number | null)[], share: number): (number | null)[] {
  const around = Math.round((values.length * share) / 2);
  if (values.length <= FEW || around === 0) return values;
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(i - around, 0), i + around + 1).filter((x): x is number => x !== null);
    near.sort((a, b) => a - b);
    const middle = near.length >> 1;
    return near.length % 2 ? near[middle]! : (near[middle - 1]! + near[middle]!) / 2;
  });
}

function quantile(sorted: number[], share: number): number {
  return sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)]!;
}

/** What the metrics of a panel mean, folded; null if the glossary has none of them. */
function meanings(panel: Panel, lines: Line[]): HTMLElement | null {
  const drawn = new Set(lines.map((line) => line.metric));
  const known = panel.metrics.flatMap(([, metric]) => {
    const meaning = drawn.has(metric) && page.glossary[metric];
    return meaning ? [[metric, meaning] as const] : [];
  });
  if (known.length === 0) return null;
  const entries = known.flatMap(([metric, { meaning, healthy, sick }]) => [
    h("dt", {}, h("code", {}, metric)),
    h("dd", {}, ...withCode(meaning), h("br"), "Healthy: ", ...withCode(healthy), h("br"), "Sick: ", ...withCode(sick)),
  ]);
  return h("details", { class: "meanings" }, h("summary", {}, "Meaning"), h("dl", {}, entries));
}

/** A text whose parts between backticks are code. */
function withCode(text: string): (string | HTMLElement)[] {
  return text.split("`").map((part, i) => (i % 2 ? h("code", {}, part) : part));
}

class Chart {
  readonly element: HTMLElement;
  private axis: Axis = "auto";
  private plot: uPlot | null = null;
  private readonly canvas: HTMLElement;
  private readonly legend: HTMLElement;
  private readonly beyond: HTMLElement;

  constructor(
    private readonly panel: Panel,
    private readonly lines: Line[],
    private readonly settings: Settings,
    private readonly sync: (source: Chart, min: number, max: number) => void,
    private readonly resetAll: () => void,
  ) {
    this.legend = h("p", { class: "legend", "aria-live": "polite" });
    this.beyond = h("span", { class: "beyond" });
    this.canvas = h("div", {
      class: "canvas",
      tabindex: 0,
      role: "group",
      "aria-roledescription": "chart",
      "aria-label": this.summary(),
      keydown: (event: KeyboardEvent) => this.key(event),
    });
    const axes = (["auto", "linear", "robust", "log"] as const).map((axis) => [axis, axis] as const);
    const choose = select("Axis", axes, "auto", (value) => {
      this.axis = value as Axis;
      this.draw();
    });
    const title = h("h3", {}, panel.title, panel.unit && h("small", {}, ` ${panel.unit}`), this.beyond);
    const header = h("header", {}, title, choose);
    this.element = h("article", { class: "panel" }, header, this.canvas, this.legend, meanings(panel, lines));
    new IntersectionObserver((entries, observer) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        observer.disconnect();
        this.draw();
      }
    }).observe(this.element);
  }

  private summary(): string {
    const parts = this.lines.map(({ label, series }) => {
      const values = series.values.filter((value): value is number => value !== null);
      const [first, last] = [values[0], values[values.length - 1]];
      const range = `from ${short(Math.min(...values))} to ${short(Math.max(...values))}`;
      return `${label}: ${values.length} points, first ${short(first)}, last ${short(last)}, ${range}`;
    });
    return `${this.panel.title}${this.panel.unit ? `, ${this.panel.unit}` : ""}. ${parts.join(". ")}`;
  }

  /** The axis that "auto" stands for: log where it helps, robust where spikes flatten the rest. */
  private chosenAxis(): Exclude<Axis, "auto"> {
    if (this.axis !== "auto") return this.axis;
    const values = this.lines.flatMap((line) => line.series.values.filter((x): x is number => x !== null));
    const positive = values.filter((value) => value > 0);
    if (this.panel.log && Math.max(...positive) > 5 * Math.min(...positive)) return "log";
    const sorted = [...values].sort((a, b) => a - b);
    const spread = quantile(sorted, 0.95) - quantile(sorted, 0.05);
    const reach = sorted[sorted.length - 1]! - sorted[0]!;
    return values.length > FEW && reach > 4 * spread && spread > 0 ? "robust" : "linear";
  }

  draw(): void {
    const range = this.plot ? { min: this.plot.scales["x"]!.min, max: this.plot.scales["x"]!.max } : null;
    this.plot?.destroy();
    const axis = this.chosenAxis();
    const tables: uPlot.AlignedData[] = this.lines.map(({ series }) => {
      const values = axis === "log" ? series.values.map((x) => (x !== null && x > 0 ? x : null)) : series.values;
      return [series.steps, values, smooth(values, this.settings.smoothing)];
    });
    const data = uPlot.join(tables);
    this.plot = new uPlot(this.options(axis, data), data, this.canvas);
    this.plot.over.addEventListener("dblclick", () => this.resetAll());
    if (range && range.min !== undefined && range.max !== undefined) this.zoom(range.min!, range.max!);
    this.read(null);
  }

  private options(axis: Exclude<Axis, "auto">, data: uPlot.AlignedData): uPlot.Options {
    const text = css("--muted");
    const lines = css("--line");
    const bounds = this.bounds(axis, data);
    // uPlot's own ticks of a logarithmic axis never end if its lowest value is no round number.
    const ticks = axis === "log" ? { splits: () => logTicks(...bounds), filter: (_: uPlot, splits: number[]) => splits } : {};
    const axes = { stroke: text, ticks: { stroke: lines, width: 1 }, font: "12px system-ui" };
    const grid = { stroke: lines, width: 1 };
    return {
      ...this.size(),
      legend: { show: false },
      cursor: { sync: { key: "steps" }, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: stepRange }, y: axis === "log" ? { distr: 3, range: () => bounds } : { range: () => bounds } },
      axes: [
        { ...axes, grid, size: 30, space: 60 },
        { ...axes, ...ticks, grid, size: 64, values: (_, splits) => splits.map(short) },
      ],
      series: [{}, ...this.lines.flatMap((line) => this.styles(line))],
      hooks: {
        setCursor: [(plot) => this.read(plot.cursor.idx ?? null)],
        setSelect: [
          (plot) => {
            const { left, width } = plot.select;
            if (width > 0) this.sync(this, plot.posToVal(left, "x"), plot.posToVal(left + width, "x"));
          },
        ],
        draw: [(plot) => this.drawMarks(plot, bounds)],
      },
    };
  }

  /** The raw line, faint where a smooth one is drawn over it, and the smooth one. */
  private styles(line: Line): uPlot.Series[] {
    const stroke = css(`--run-${line.run}`);
    const few = line.series.values.length <= FEW;
    const both = !few && this.settings.smoothing > 0;
    const base = { stroke, dash: line.dash, spanGaps: true };
    return [
      { ...base, width: both ? 1 : 1.75, alpha: both ? 0.28 : 1, points: { show: few, size: 5, fill: stroke } },
      { ...base, width: 1.75, points: { show: false }, show: both },
    ];
  }

  /** The range of the vertical axis. */
  private bounds(axis: Exclude<Axis, "auto">, data: uPlot.AlignedData): [number, number] {
    const values = data.slice(1).flatMap((column) => Array.from(column).filter((x): x is number => x !== null && x !== undefined));
    values.sort((a, b) => a - b);
    if (values.length === 0) return [0, 1];
    let [low, high] = [values[0]!, values[values.length - 1]!];
    if (axis === "robust") [low, high] = [quantile(values, 0.02), quantile(values, 0.98)];
    const least = quantile(values, 0.5) / 10 ** DECADES_BELOW;
    if (axis === "log") low = values.find((value) => value >= least)!;
    this.beyond.textContent = "";
    const outside = values.filter((value) => value < low || value > high).length;
    if (outside > 0) this.beyond.textContent = ` ${high < values[values.length - 1]! ? "▲" : "▼"} beyond the axis`;
    if (axis === "log") return low === high ? [low / 2, high * 2] : [low / 1.3, high * 1.3];
    if (low === 0 && high === 0) return [-0.06, 1];
    const room = (high - low || Math.abs(high)) * 0.06;
    return [low - room, high + room];
  }

  /** Draws checkpoints and skipped updates, and triangles for points beyond the axis. */
  private drawMarks(plot: uPlot, [low, high]: [number, number]): void {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    if (this.settings.marks) {
      page.runs.forEach((run, index) => this.drawRunMarks(plot, run, css(`--run-${index}`)));
    }
    this.lines.forEach((line, number) => {
      ctx.fillStyle = css(`--run-${line.run}`);
      plot.data[2 * number + 1]!.forEach((value, i) => {
        if (value === null || value === undefined || (value >= low && value <= high)) return;
        const x = plot.valToPos(plot.data[0][i]!, "x", true);
        const up = value > high;
        const [edge, away] = up ? [bbox.top, 7 * ratio] : [bbox.top + bbox.height, -7 * ratio];
        ctx.beginPath();
        ctx.moveTo(x, edge);
        ctx.lineTo(x - 4 * ratio, edge + away);
        ctx.lineTo(x + 4 * ratio, edge + away);
        ctx.fill();
      });
    });
    ctx.restore();
  }

  private drawRunMarks(plot: uPlot, run: Run, color: string): void {
    const { ctx, bbox } = plot;
    const bottom = bbox.top + bbox.height;
    const ratio = devicePixelRatio;
    ctx.fillStyle = color;
    for (const step of run.checkpoints) {
      const x = plot.valToPos(step, "x", true);
      ctx.fillRect(x - ratio, bottom - 8 * ratio, 2 * ratio, 8 * ratio);
    }
    ctx.strokeStyle = css("--bad");
    ctx.lineWidth = ratio;
    for (const step of run.skipped) {
      const x = plot.valToPos(step, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bottom);
      ctx.stroke();
    }
  }

  /** Shows the values at a step, or the names of the lines. */
  private read(index: number | null): void {
    const plot = this.plot;
    this.legend.replaceChildren();
    if (!plot) return;
    const step = index === null ? null : plot.data[0][index];
    if (step !== null && step !== undefined) {
      const marks = page.runs.flatMap((run) => [
        ...(run.checkpoints.includes(step) ? ["checkpoint"] : []),
        ...(run.skipped.includes(step) ? ["skipped update"] : []),
      ]);
      this.legend.append(h("span", {}, `step ${step}${marks.length ? ` (${[...new Set(marks)].join(", ")})` : ""}`));
    }
    this.lines.forEach((line, number) => {
      const value = index === null ? undefined : plot.data[2 * number + 1]![index];
      const stroke = svg("line", { x1: 0, x2: 24, y1: 3, y2: 3, "stroke-dasharray": line.dash.join(" ") });
      const key = svg("svg", { class: `dash run-${line.run}`, viewBox: "0 0 24 6", "aria-hidden": "true" });
      key.append(stroke);
      this.legend.append(h("span", {}, key, line.label, value === undefined ? "" : h("b", {}, ` ${short(value)}`)));
    });
  }

  private size(): { width: number; height: number } {
    return { width: Math.max(this.element.clientWidth - 26, 200), height: 210 };
  }

  resize(): void {
    const size = this.size();
    if (this.plot && this.plot.width !== size.width) this.plot.setSize(size);
  }

  zoom(min: number, max: number): void {
    this.plot?.setScale("x", { min, max });
  }

  reset(): void {
    const steps = this.plot?.data[0];
    if (steps && steps.length > 0) this.zoom(steps[0]!, steps[steps.length - 1]!);
  }

  private key(event: KeyboardEvent): void {
    const plot = this.plot;
    if (!plot) return;
    const steps = plot.data[0];
    const { min, max } = plot.scales["x"]!;
    const index = plot.cursor.idx ?? -1;
    const middle = index >= 0 ? steps[index]! : (min! + max!) / 2;
    const zoomed = (factor: number): void => {
      this.zoom(middle - (middle - min!) * factor, middle + (max! - middle) * factor);
      this.sync(this, plot.scales["x"]!.min!, plot.scales["x"]!.max!);
    };
    const moves: Record<string, number> = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: steps.length - 1 };
    if (event.key in moves) {
      const to = Math.min(Math.max(moves[event.key]!, 0), steps.length - 1);
      plot.setCursor({ left: plot.valToPos(steps[to]!, "x"), top: 40 });
      this.read(to);
    } else if (event.key === "+" || event.key === "=") zoomed(0.6);
    else if (event.key === "-") zoomed(1 / 0.6);
    else if (event.key === "0") this.resetAll();
    else return;
    event.preventDefault();
  }
}
