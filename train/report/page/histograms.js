// Distributions of the log-ratios over all recorded rollouts.

const [BARS_WIDTH, BARS_HEIGHT] = [560, 190];

function histogramsView() {
  const panels = page.histograms.map((histogram) => {
    const totals = histogram.runs.map((run, i) => {
      const count = run.counts.reduce((sum, n) => sum + n, run.below + run.above);
      const name = page.runs.length > 1 ? `${page.runs[i].name}: ` : "";
      const sizes = `mean ${short(run.mean)}, std ${short(run.std)}, largest ${short(run.largest)}`;
      const text = count === 0 ? "not recorded" : `${count} tokens, ${sizes}, beyond the axis ${run.below + run.above}`;
      return h("span", {}, h("i", { class: `key run-${i}` }), `${name}${text}`);
    });
    const legend = h("p", { class: "legend" }, totals);
    const bars = drawBars(histogram);
    bars.setAttribute("aria-label", `${histogram.label}. ${legend.textContent}`);
    const title = h("h3", {}, histogram.label, h("small", {}, " nats, tokens on a log scale"));
    return h("article", { class: "panel" }, h("header", {}, title), bars, legend);
  });
  return h("section", { "aria-label": "Distributions" }, h("div", { class: "panels" }, panels));
}

/** Bars with a logarithmic height, so that rare large ratios are seen beside the many near 0. */
function drawBars({ limit, runs }) {
  const bins = runs[0].counts.length;
  const most = Math.max(...runs.flatMap(({ counts, below, above }) => [...counts, below, above]), 1);
  const base = BARS_HEIGHT - 22;
  const height = (count) => (count && (1 + Math.log10(count)) / (1 + Math.log10(most))) * (BARS_HEIGHT - 40);
  const width = BARS_WIDTH / (bins + 4);
  const chart = svg("svg", { viewBox: `0 0 ${BARS_WIDTH} ${BARS_HEIGHT}`, role: "img" });
  const line = (y) => svg("line", { x1: 0, x2: BARS_WIDTH, y1: y, y2: y, class: "axis" });
  const text = (x, y, anchor, content) => svg("text", { x, y, "text-anchor": anchor }, content);
  for (let count = 1; count <= most; count *= 10) {
    const y = base - height(count);
    chart.append(line(y), text(BARS_WIDTH, y - 2, "end", count.toLocaleString("en")));
  }
  runs.forEach(({ counts, below, above }, run) => {
    const edge = (bin) => short(-limit + (bin * 2 * limit) / bins);
    const bar = (count, bin, place) => {
      if (count === 0) return;
      const attributes = {
        x: bin * width + (run * width) / runs.length + 0.4,
        y: base - height(count),
        width: Math.max(width / runs.length - 0.8, 0.8),
        height: height(count),
        class: `run-${run}`,
      };
      chart.append(svg("rect", attributes, svg("title", {}, `${place}: ${count} tokens`)));
    };
    bar(below, 0, `below ${short(-limit)}`);
    counts.forEach((count, i) => bar(count, i + 2, `${edge(i)} to ${edge(i + 1)}`));
    bar(above, bins + 3, `above ${short(limit)}`);
  });
  chart.append(line(base));
  for (const share of [-1, -0.5, 0, 0.5, 1]) {
    const anchor = share === -1 ? "start" : share === 1 ? "end" : "middle";
    chart.append(text(width * (2 + ((share + 1) / 2) * bins), BARS_HEIGHT - 5, anchor, short(share * limit)));
  }
  return chart;
}
