// A chart of lines over the steps: drawn on a canvas, read by pointer and keyboard, zoomed by dragging.

/**
 * @typedef {object} Line
 * @property {number} run the index of its run, which has its colour
 * @property {string} metric
 * @property {string} label
 * @property {number[]} dash lengths of strokes and gaps
 * @property {number[]} steps increasing
 * @property {(number|null)[]} values
 *
 * What all charts of the page share.
 * @typedef {object} Shared
 * @property {Chart[]} charts
 * @property {number} smoothing share of the points that the running median takes
 * @property {boolean} marks whether checkpoints and skipped updates are drawn
 * @property {[number, number]|null} range of the steps that are shown; null shows all
 */

/** Pixels of a chart, and those around the area of its lines. */
const [CHART_HEIGHT, TOP, RIGHT, BOTTOM, LEFT] = [210, 17, 25, 30, 64];
/** Points of a line up to which each is marked and none is smoothed. */
const FEW = 25;
/** Decades below the median that a logarithmic axis shows: KLs of rounding alone are beyond it. */
const DECADES_BELOW = 6;
/** Pixels that a pointer has to be dragged to zoom. */
const LEAST_DRAG = 4;
const AXES = ["auto", "linear", "robust", "log"];

/** The first index of a sorted array whose number is not below a value. */
function lowerBound(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearestIndex(sorted, value) {
  const above = Math.min(lowerBound(sorted, value), sorted.length - 1);
  return above > 0 && value - sorted[above - 1] < sorted[above] - value ? above - 1 : above;
}

/** The numbers that are not null, sorted. */
function sortedNumbers(arrays) {
  return Float64Array.from(arrays.flatMap((values) => values.filter((value) => value !== null))).sort();
}

function quantile(sorted, share) {
  return sorted[Math.min(Math.floor(share * sorted.length), sorted.length - 1)];
}

/** A running median over the numbers around each; a gap stays one. */
function smooth(values, share) {
  const around = Math.round((values.length * share) / 2);
  if (values.length <= FEW || around === 0) return values;
  const near = [];
  const enter = (value) => value !== null && near.splice(lowerBound(near, value), 0, value);
  const leave = (value) => value !== null && near.splice(lowerBound(near, value), 1);
  values.slice(0, around).forEach(enter);
  return values.map((value, i) => {
    if (i + around < values.length) enter(values[i + around]);
    if (i > around) leave(values[i - around - 1]);
    const middle = near.length >> 1;
    return value === null ? null : near.length % 2 ? near[middle] : (near[middle - 1] + near[middle]) / 2;
  });
}

/** The axis that "auto" stands for: log where it helps, robust where spikes flatten the rest. */
function chooseAxis(lines, log) {
  const sorted = sortedNumbers(lines.map((line) => line.values));
  const last = sorted.at(-1);
  if (log && last > 5 * sorted[lowerBound(sorted, Number.MIN_VALUE)]) return "log";
  const spread = quantile(sorted, 0.95) - quantile(sorted, 0.05);
  return sorted.length > FEW && spread > 0 && last - sorted[0] > 4 * spread ? "robust" : "linear";
}

/** The range of a vertical axis: [low, high]. */
function verticalRange(axis, sorted) {
  if (sorted.length === 0) return [0, 1];
  let [low, high] = [sorted[0], sorted.at(-1)];
  if (axis === "log") {
    low = sorted[lowerBound(sorted, quantile(sorted, 0.5) / 10 ** DECADES_BELOW)];
    return low === high ? [low / 2, high * 2] : [low / 1.3, high * 1.3];
  }
  if (axis === "robust") [low, high] = [quantile(sorted, 0.02), quantile(sorted, 0.98)];
  if (low === 0 && high === 0) return [-0.06, 1];
  const room = (high - low || Math.abs(high)) * 0.06;
  return [low - room, high + room];
}

/** Round numbers of an axis, at most so many; whole ones if asked for. */
function linearTicks(low, high, most, whole = false) {
  const least = Math.max((high - low) / most, whole ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(least));
  const gaps = [1, 2, 2.5, 5, 10].map((digit) => digit * power);
  const gap = gaps.find((gap) => gap >= least && (!whole || Number.isInteger(gap)));
  const first = Math.ceil(low / gap);
  return Array.from({ length: Math.floor(high / gap) - first + 1 }, (_, i) => (first + i) * gap);
}

/** Round numbers of a logarithmic axis: decades alone, or 1, 2 and 5 if it has few decades, and all digits in one. */
function logTicks(low, high) {
  const reach = high / low;
  const digits = reach > 200 ? [1] : reach > 5 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9];
  const every = Math.ceil(Math.log10(reach) / 8);
  const numbers = [];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade++) {
    if (decade % every === 0) numbers.push(...digits.map((digit) => Number(`${digit}e${decade}`)));
  }
  return numbers.filter((number) => number >= low && number <= high);
}

/**
 * Adds the points from one index to another to a path. Of the points that share a column of pixels it takes the first,
 * the least, the largest and the last: no spike is lost, and the time does not grow with the steps.
 */
function trace(context, { steps, values }, [from, to], x, y) {
  let [column, left, low, high, last] = [NaN, 0, 0, 0, 0];
  const endColumn = () => {
    if (low !== high) for (const level of [low, high, last]) context.lineTo(left, level);
  };
  context.beginPath();
  for (let i = from; i < to; i++) {
    const [across, level] = [x(steps[i]), y(values[i])];
    if (Math.floor(across * devicePixelRatio) === column) {
      [low, high, last] = [Math.min(low, level), Math.max(high, level), level];
    } else {
      endColumn();
      context.lineTo(across, level);
      [column, left, low, high, last] = [Math.floor(across * devicePixelRatio), across, level, level, level];
    }
  }
  endColumn();
}

class Chart {
  /**
   * @param {{title: string, unit: string, log?: boolean}} panel
   * @param {Line[]} lines
   * @param {Shared} shared
   */
  constructor(panel, lines, shared) {
    Object.assign(this, { panel, lines, shared });
    this.axis = "auto";
    this.steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
    /** Index of the step that is read, or null. */
    this.read = null;
    /** Where a drag began, or null. */
    this.began = null;
    this.seen = false;
    this.drawnWidth = 0;
    this.canvas = h("canvas");
    this.vertical = h("i", { class: "cursor-x", hidden: true });
    this.horizontal = h("i", { class: "cursor-y", hidden: true });
    this.selected = h("i", { class: "selected", hidden: true });
    this.dots = lines.map(({ run }) => [0, 1].map(() => h("i", { class: `dot run-${run}`, hidden: true })));
    this.area = h(
      "div",
      {
        class: "area",
        style: `inset: ${TOP}px ${RIGHT}px ${BOTTOM}px ${LEFT}px`,
        pointerdown: (event) => this.startDrag(event),
        pointermove: (event) => this.followPointer(event),
        pointerup: (event) => this.endDrag(event),
        pointercancel: () => this.stopDrag(),
        // A finger that is lifted leaves the step to read.
        pointerleave: ({ pointerType }) => {
          if (pointerType !== "touch") shared.charts.forEach((chart) => chart.readIndex(null));
        },
        dblclick: () => this.zoomAll(null),
      },
      [this.vertical, this.horizontal, this.selected, ...this.dots.flat()],
    );
    this.frame = h(
      "div",
      {
        class: "canvas",
        tabindex: 0,
        role: "group",
        "aria-roledescription": "chart",
        "aria-label": this.summary(),
        keydown: (event) => this.pressKey(event),
      },
      this.canvas,
      this.area,
    );
    this.step = h("span", { hidden: true });
    this.numbers = lines.map(() => h("b"));
    const keys = lines.map(({ run, label, dash }, i) => {
      const stroke = svg("line", { x1: 0, x2: 24, y1: 3, y2: 3, "stroke-dasharray": dash.join(" ") });
      const key = svg("svg", { class: `dash run-${run}`, viewBox: "0 0 24 6", "aria-hidden": "true" }, stroke);
      return h("span", {}, key, label, this.numbers[i]);
    });
    this.beyond = h("span", { class: "beyond" });
    const axes = choice("Axis", AXES.map((axis) => [axis, axis]), "auto", (axis) => {
      this.axis = axis;
      this.prepare();
    });
    const title = h("h3", {}, panel.title, panel.unit && h("small", {}, ` ${panel.unit}`), this.beyond);
    const legend = h("p", { class: "legend", "aria-live": "polite" }, this.step, keys);
    this.element = h("article", { class: "panel" }, h("header", {}, title, axes), this.frame, legend);
    new IntersectionObserver((entries, observer) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        observer.disconnect();
        this.seen = true;
        this.prepare();
      }
    }).observe(this.element);
  }

  summary() {
    const parts = this.lines.map(({ label, values }) => {
      const numbers = values.filter((value) => value !== null);
      const sorted = sortedNumbers([values]);
      const ends = `first ${short(numbers[0])}, last ${short(numbers.at(-1))}`;
      const range = `from ${short(sorted[0])} to ${short(sorted.at(-1))}`;
      return `${label}: ${numbers.length} points, ${ends}, ${range}`;
    });
    return `${this.panel.title}${this.panel.unit ? `, ${this.panel.unit}` : ""}. ${parts.join(". ")}`;
  }

  /** Computes the numbers that are drawn, after a change of the axis or of the smoothing. */
  prepare() {
    if (!this.seen) return;
    this.scale = this.axis === "auto" ? chooseAxis(this.lines, this.panel.log) : this.axis;
    this.curves = this.lines.map(({ steps, values }) => {
      const raw = this.scale === "log" ? values.map((value) => (value > 0 ? value : null)) : values;
      const present = (numbers) => ({
        steps: steps.filter((_, i) => numbers[i] !== null),
        values: numbers.filter((value) => value !== null),
      });
      return [present(raw), present(smooth(raw, this.shared.smoothing))];
    });
    const sorted = sortedNumbers(this.curves.flat().map(({ values }) => values));
    this.bounds = verticalRange(this.scale, sorted);
    const beyond = this.bounds[1] < sorted.at(-1) ? "▲" : this.bounds[0] > sorted[0] ? "▼" : "";
    this.beyond.textContent = beyond && ` ${beyond} beyond the axis`;
    this.draw();
  }

  /** The steps that are shown: one alone stands in the middle. */
  range() {
    const [first, last] = [this.steps[0], this.steps.at(-1)];
    return this.shared.range ?? (first === last ? [first - 1, first + 1] : [first, last]);
  }

  /** The functions from steps and values to pixels of the area. */
  pixels() {
    const [width, height] = [this.drawnWidth - LEFT - RIGHT, CHART_HEIGHT - TOP - BOTTOM];
    const [first, last] = this.range();
    const form = this.scale === "log" ? Math.log : (value) => value;
    const [low, high] = this.bounds.map(form);
    // Points far beyond the axis would make dashed lines very long.
    const limit = 20 * height;
    return {
      width,
      height,
      x: (step) => ((step - first) / (last - first)) * width,
      y: (value) => Math.min(Math.max(((high - form(value)) / (high - low)) * height, -limit), limit),
    };
  }

  draw() {
    if (!this.seen) return;
    const ratio = devicePixelRatio;
    this.drawnWidth = this.frame.clientWidth;
    [this.canvas.width, this.canvas.height] = [this.drawnWidth * ratio, CHART_HEIGHT * ratio];
    if (this.drawnWidth === 0) return;
    const context = this.canvas.getContext("2d");
    const { width, height, x, y } = this.pixels();
    context.scale(ratio, ratio);
    context.translate(LEFT, TOP);
    this.drawAxes(context);
    context.save();
    context.beginPath();
    context.rect(0, 0, width, height);
    context.clip();
    if (this.shared.marks) page.runs.forEach((run, i) => this.drawMarks(context, run, i));
    context.lineJoin = "round";
    this.lines.forEach(({ run, dash, values }, i) => {
      const [raw, smoothed] = this.curves[i];
      const both = values.length > FEW && this.shared.smoothing > 0;
      context.strokeStyle = context.fillStyle = themeColor(`--run-${run}`);
      context.setLineDash(dash);
      for (const curve of both ? [raw, smoothed] : [raw]) {
        const faint = both && curve === raw;
        Object.assign(context, { lineWidth: faint ? 1 : 1.75, globalAlpha: faint ? 0.28 : 1 });
        trace(context, curve, this.shownPart(curve), x, y);
        context.stroke();
      }
      context.globalAlpha = 1;
      this.drawBeyond(context, raw);
    });
    context.restore();
    this.lines.forEach(({ run, values }, i) => {
      context.fillStyle = themeColor(`--run-${run}`);
      if (values.length <= FEW) this.drawPoints(context, this.curves[i][0]);
    });
    this.showCursor();
  }

  /** The indices of the points in the range, and of one more on each side. */
  shownPart({ steps }) {
    const [first, last] = this.range();
    return [Math.max(lowerBound(steps, first) - 1, 0), Math.min(lowerBound(steps, last) + 2, steps.length)];
  }

  drawAxes(context) {
    const { width, height, x, y } = this.pixels();
    Object.assign(context, {
      strokeStyle: themeColor("--line"),
      fillStyle: themeColor("--muted"),
      font: "12px system-ui",
      lineWidth: 1,
    });
    context.beginPath();
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const step of linearTicks(...this.range(), width / 60, true)) {
      const across = Math.round(x(step)) + 0.5;
      context.moveTo(across, 0);
      context.lineTo(across, height + 8);
      context.fillText(step.toLocaleString("en"), across, height + 15);
    }
    context.textAlign = "right";
    context.textBaseline = "middle";
    const ticks = this.scale === "log" ? logTicks(...this.bounds) : linearTicks(...this.bounds, height / 30);
    // Numbers that differ little need more digits.
    const few = ticks.map(short);
    const labels = new Set(few).size === few.length ? few : ticks.map((value) => String(Number(value.toPrecision(8))));
    ticks.forEach((value, i) => {
      const level = Math.round(y(value)) + 0.5;
      context.moveTo(-8, level);
      context.lineTo(width, level);
      context.fillText(labels[i], -14, level, LEFT - 14);
    });
    context.stroke();
  }

  drawMarks(context, run, index) {
    const { height, x } = this.pixels();
    context.fillStyle = themeColor(`--run-${index}`);
    for (const step of run.checkpoints) context.fillRect(x(step) - 1, height - 8, 2, 8);
    context.fillStyle = themeColor("--bad");
    for (const step of run.skipped) context.fillRect(x(step) - 0.5, 0, 1, height);
  }

  /** Whether a point lies within the range and the bounds. */
  contains(step, value) {
    const [[first, last], [low, high]] = [this.range(), this.bounds];
    return step >= first && step <= last && value >= low && value <= high;
  }

  drawPoints(context, { steps, values }) {
    const { x, y } = this.pixels();
    steps.forEach((step, i) => {
      if (!this.contains(step, values[i])) return;
      context.beginPath();
      context.arc(x(step), y(values[i]), 2.5, 0, 2 * Math.PI);
      context.fill();
    });
  }

  /** Draws triangles for points beyond the axis, at most one for a pixel and side. */
  drawBeyond(context, curve) {
    const { height, x } = this.pixels();
    const [low, high] = this.bounds;
    const [from, to] = this.shownPart(curve);
    const drawn = new Set();
    context.beginPath();
    for (let i = from; i < to; i++) {
      if (curve.values[i] >= low && curve.values[i] <= high) continue;
      const above = curve.values[i] > high;
      const across = x(curve.steps[i]);
      const key = `${Math.round(across)} ${above}`;
      if (drawn.has(key)) continue;
      drawn.add(key);
      const [edge, inside] = above ? [0, 7] : [height, height - 7];
      context.moveTo(across, edge);
      context.lineTo(across - 4, inside);
      context.lineTo(across + 4, inside);
    }
    context.fill();
  }

  /** Draws again if the width changed. */
  fit() {
    if (Math.floor(this.frame.clientWidth * devicePixelRatio) !== this.canvas.width) this.draw();
  }

  /** Shows the values at an index of the steps, or the names of the lines. */
  readIndex(index) {
    this.horizontal.hidden = true;
    if (this.read === index) return;
    this.read = index;
    const step = this.steps[index];
    const marks = [
      ["checkpoint", page.runs.some((run) => run.checkpoints.includes(step))],
      ["skipped update", page.runs.some((run) => run.skipped.includes(step))],
    ];
    const names = marks.filter(([, here]) => here).map(([name]) => name);
    this.step.hidden = index === null;
    this.step.textContent = index === null ? "" : `step ${step}${names.length ? ` (${names.join(", ")})` : ""}`;
    this.lines.forEach(({ steps, values }, i) => {
      const at = lowerBound(steps, step);
      this.numbers[i].textContent = index !== null && steps[at] === step ? ` ${short(values[at])}` : "";
    });
    this.showCursor();
  }

  /** Moves the cursor and the dots of the lines to the step that is read. */
  showCursor() {
    if (!this.seen) return;
    const { x, y } = this.pixels();
    const [first, last] = this.range();
    const step = this.read === null ? NaN : this.steps[this.read];
    this.vertical.hidden = !(step >= first && step <= last);
    this.vertical.style.left = `${x(step)}px`;
    this.curves.forEach((curves, i) =>
      curves.forEach(({ steps, values }, j) => {
        const at = lowerBound(steps, step);
        const dot = this.dots[i][j];
        dot.hidden = steps[at] !== step || !this.contains(step, values[at]);
        if (!dot.hidden) dot.style.translate = `${x(step)}px ${y(values[at])}px`;
      }),
    );
  }

  /** Shows a range of steps in all charts, at least one wide; null, or one that has all steps, shows all. */
  zoomAll(range) {
    if (range) {
      const [low, high] = range;
      const half = Math.max(high - low, 1) / 2;
      range = [(low + high) / 2 - half, (low + high) / 2 + half];
      if (this.shared.charts.every(({ steps }) => range[0] <= steps[0] && range[1] >= steps.at(-1))) range = null;
    }
    this.shared.range = range;
    this.shared.charts.forEach((chart) => chart.draw());
  }

  startDrag(event) {
    if (event.button !== 0) return;
    this.began = event.offsetX;
    this.area.setPointerCapture(event.pointerId);
    this.followPointer(event);
  }

  /** Reads the step under the pointer in all charts, and marks what a drag selects. */
  followPointer(event) {
    if (!this.seen) return;
    const { width } = this.pixels();
    const [first, last] = this.range();
    const across = Math.min(Math.max(event.offsetX, 0), width);
    const step = first + (across / width) * (last - first);
    for (const chart of this.shared.charts) chart.readIndex(nearestIndex(chart.steps, step));
    this.horizontal.hidden = false;
    this.horizontal.style.top = `${event.offsetY}px`;
    if (this.began === null) return;
    this.selected.hidden = Math.abs(across - this.began) < LEAST_DRAG;
    this.selected.style.left = `${Math.min(across, this.began)}px`;
    this.selected.style.width = `${Math.abs(across - this.began)}px`;
  }

  endDrag(event) {
    if (this.began === null) return;
    this.followPointer(event);
    const { width } = this.pixels();
    const [first, last] = this.range();
    const ends = [this.began, Math.min(Math.max(event.offsetX, 0), width)].sort((a, b) => a - b);
    if (!this.selected.hidden) this.zoomAll(ends.map((across) => first + (across / width) * (last - first)));
    this.stopDrag();
  }

  stopDrag() {
    this.began = null;
    this.selected.hidden = true;
  }

  pressKey(event) {
    // With these keys the browser zooms the page and goes back.
    if (!this.seen || event.ctrlKey || event.metaKey || event.altKey) return;
    const index = this.read ?? -1;
    const [first, last] = this.range();
    const middle = this.steps[index] ?? (first + last) / 2;
    const zoom = (factor) => this.zoomAll([middle - (middle - first) * factor, middle + (last - middle) * factor]);
    const moves = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: this.steps.length - 1 };
    if (event.key in moves) this.readIndex(Math.min(Math.max(moves[event.key], 0), this.steps.length - 1));
    else if (event.key === "+" || event.key === "=") zoom(0.6);
    else if (event.key === "-") zoom(1 / 0.6);
    else if (event.key === "0") this.zoomAll(null);
    else return;
    event.preventDefault();
  }
}
