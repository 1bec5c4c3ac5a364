// Distributions of the log-ratios over all recorded rollouts.

import { page } from "./data";
import { h, svg } from "./dom";
import { short } from "./format";
import type { Histogram } from "./types";

const [WIDTH, HEIGHT] = [560, 190];

/** Bars with a logarithmic height, so that rare large ratios are seen beside the many near 0. */
function draw(histogram: Histogram): SVGElement {
  const { limit, runs } = histogram;
  const bins = runs[0]!.counts.length;
  const most = Math.max(...runs.flatMap(({ counts, below, above }) => [...counts, below, above]), 1);
  const height = (count: number): number => (count === 0 ? 0 : ((1 + Math.log10(count)) / (1 + Math.log10(most))) * (HEIGHT - 40));
  const width = WIDTH / (bins + 4);
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const base = HEIGHT - 22;
  for (let count = 1; count <= most; count *= 10) {
    const y = base - height(count);
    chart.append(svg("line", { x1: 0, x2: WIDTH, y1: y, y2: y, class: "axis" }));
    chart.append(svg("text", { x: WIDTH, y: y - 2, "text-anchor": "end" }, count.toLocaleString("en")));
  }
  runs.forEach(({ counts, below, above }, run) => {
    const all = [below, 0, ...counts, 0, above];
    const share = width / runs.length;
    all.forEach((count, bin) => {
      if (count === 0) return;
      const edge = -limit + ((bin - 2) * 2 * limit) / bins;
      const place = bin === 0 ? `below ${short(-limit)}` : bin === all.length - 1 ? `above ${short(limit)}` : `${short(edge)} to ${short(edge + (2 * limit) / bins)}`;
      const bar = svg("rect", {
        x: bin * width + run * share + 0.4,
        y: base - height(count),
        width: Math.max(share - 0.8, 0.8),
        height: height(count),
        class: `run-${run}`,
      });
      bar.append(svg("title", {}, `${place}: ${count} tokens`));
      chart.append(bar);
    });
  });
  chart.append(svg("line", { x1: 0, x2: WIDTH, y1: base, y2: base, class: "axis" }));
  for (const share of [-1, -0.5, 0, 0.5, 1]) {
    const x = 2 * width + ((share + 1) / 2) * bins * width;
    const anchor = share === -1 ? "start" : share === 1 ? "end" : "middle";
    chart.append(svg("text", { x, y: HEIGHT - 5, "text-anchor": anchor }, short(share * limit)));
  }
  return chart;
}

export function histograms(): HTMLElement {
  const panels = page.histograms.map((histogram) => {
    const chart = draw(histogram);
    const totals = histogram.runs.map((run, i) => {
      const count = run.counts.reduce((sum, n) => sum + n, run.below + run.above);
      const name = page.runs.length > 1 ? `${page.runs[i]!.name}: ` : "";
      const sizes = `mean ${short(run.mean)}, std ${short(run.std)}, largest ${short(run.largest)}`;
      const text = count === 0 ? "not recorded" : `${count} tokens, ${sizes}, beyond the axis ${run.below + run.above}`;
      return h("span", {}, h("i", { class: `key run-${i}` }), `${name}${text}`);
    });
    const legend = h("p", { class: "legend" }, totals);
    chart.setAttribute("aria-label", `${histogram.label}. ${legend.textContent}`);
    return h("article", { class: "panel" }, h("header", {}, h("h3", {}, histogram.label, h("small", {}, " nats, tokens on a log scale"))), chart, legend);
  });
  return h("section", { "aria-label": "Distributions" }, h("div", { class: "panels" }, panels));
}
