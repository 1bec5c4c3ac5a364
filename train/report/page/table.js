// The table of recorded rollouts: sorted, filtered and searched, a page of it at a time.

const PAGE_SIZE = 50;
/** Characters of a text in a cell; to measure more takes most of the time of a redraw. */
const EXCERPT = 48;
/** Quantities whose mean, or largest value, is shown at first. */
const SHOWN_MEANS = ["advantages", "entropy"];
const SHOWN_LARGEST = ["kl", "exact_kl", "log_ratio_sampler", "mismatch_kl"];
const NUMBER = String.raw`(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)`;
const COMPARISON = new RegExp(String.raw`^(<=|>=|<|>|=)?\s*${NUMBER}$`, "i");
const RANGE = new RegExp(String.raw`^${NUMBER}\s*\.\.\s*${NUMBER}$`, "i");

/** Whether a number passes a filter such as ">0.5", "<=2", "3..5" or "1"; null if the filter is not understood. */
function numberTest(filter) {
  const text = filter.trim();
  const range = RANGE.exec(text);
  if (range) return (value) => value >= Number(range[1]) && value <= Number(range[2]);
  const parts = COMPARISON.exec(text);
  if (!parts) return null;
  const limit = Number(parts[2]);
  const tests = {
    "<": (value) => value < limit,
    "<=": (value) => value <= limit,
    ">": (value) => value > limit,
    ">=": (value) => value >= limit,
    "=": (value) => value === limit,
  };
  return tests[parts[1] ?? "="];
}

/** The test of a filter on values of a column. No missing value passes; all pass a filter that is not understood. */
function testOf(filter, numeric) {
  if (numeric) {
    const test = numberTest(filter);
    return (value) => test === null || (value !== null && test(value));
  }
  const words = filter.toLowerCase();
  return (value) => value !== null && value.toLowerCase().includes(words);
}

/** Orders rollouts by a column; missing values stand last, whichever way the others go. */
function comparison({ value }, descending) {
  const sign = descending ? -1 : 1;
  return (a, b) => {
    const [left, right] = [value(a), value(b)];
    if (left === right) return 0;
    if (left === null) return 1;
    if (right === null) return -1;
    return left < right ? -sign : sign;
  };
}

/**
 * @typedef {object} Column
 * @property {string} id
 * @property {string} text its heading
 * @property {(rollout: Rollout) => number|string|null} value
 * @property {boolean} numeric
 * @property {boolean} shown at first
 * @property {string} [hint]
 *
 * @returns {Column[]}
 */
function columnsOf() {
  const column = (id, text, value, options) => ({ id, text, value, numeric: true, shown: true, ...options });
  const rewards = new Set(page.rollouts.flatMap(({ rewards }) => Object.keys(rewards)));
  rewards.delete("reward");
  const finished = ({ finished }) => (finished === null ? null : finished ? "yes" : "no");
  const failed = ({ failure }) => failure && `${failure.name}: ${failure.text.split("\n", 1)[0]}`;
  const far = "Of all tokens, the number that is farthest from 0";
  return [
    ...(page.runs.length > 1 ? [column("run", "Run", ({ run }) => page.runs[run].name, { numeric: false })] : []),
    column("step", "Step", ({ step }) => step),
    column("group", "Group", ({ group }) => group),
    column("row", "Row", ({ row }) => row, { shown: false }),
    column("reward", "Reward", ({ reward }) => reward),
    ...[...rewards].map((name) =>
      column(`reward-${name}`, `Reward: ${name}`, ({ rewards }) => rewards[name] ?? null, { shown: false }),
    ),
    column("length", "Tokens", ({ length }) => length),
    column("finished", "Finished", finished, { numeric: false }),
    ...(page.rollouts.some(({ failure }) => failure)
      ? [column("failure", "Failed", failed, { numeric: false })]
      : []),
    column("version", "Policy", ({ version }) => version, {
      shown: false,
      hint: "RL steps of the policy that sampled it",
    }),
    ...page.quantities.flatMap(({ key, label }) => [
      column(`mean-${key}`, `Mean ${label}`, ({ numbers }) => numbers[key]?.[0] ?? null, {
        shown: SHOWN_MEANS.includes(key),
      }),
      column(`largest-${key}`, `Largest ${label}`, ({ numbers }) => numbers[key]?.[1] ?? null, {
        shown: SHOWN_LARGEST.includes(key),
        hint: far,
      }),
    ]),
    column("prompt", "Prompt", ({ prompt }) => prompt, { numeric: false }),
    column("completion", "Completion", ({ completion }) => completion, { numeric: false }),
  ];
}

/** The recorded episodes that failed, counted by name; nothing if there are none. */
function failureCounts() {
  const counts = new Map();
  for (const { failure } of page.rollouts) {
    if (failure) counts.set(failure.name, (counts.get(failure.name) ?? 0) + 1);
  }
  const counted = [...counts].sort(([, a], [, b]) => b - a).map(([name, count]) => `${count} ${name}`);
  return counted.length > 0 && h("p", { class: "hint failures" }, `Episodes here that failed: ${counted.join(", ")}.`);
}

class RolloutTable {
  constructor() {
    this.columns = columnsOf();
    this.shown = new Set(this.columns.filter(({ shown }) => shown).map(({ id }) => id));
    /** The text of the filter of each column that has one. */
    this.filters = new Map();
    this.search = "";
    /** The column that sorts, and whether it does so downwards; or null. */
    this.sorting = null;
    this.pageIndex = 0;
    this.caption = h("caption", { "aria-live": "polite" });
    this.head = h("thead");
    this.body = h("tbody");
    this.pages = h("nav", { class: "pages", "aria-label": "Pages of the table" });
    const search = h("input", {
      type: "search",
      placeholder: "text of prompt or completion",
      "aria-label": "Search prompts and completions",
      input: () => {
        this.search = search.value;
        this.arrange();
      },
    });
    const choices = this.columns.map(({ id, text }) => {
      const change = () => this.show(id, box.checked);
      const box = h("input", { type: "checkbox", checked: this.shown.has(id), change });
      return h("label", {}, box, text);
    });
    const filters = "A heading sorts. Numbers are filtered by >0.5, <=2, 2..5 or =1.";
    const hint = `${filters} A group link shows its completions side by side.`;
    this.element = h(
      "section",
      { "aria-label": "Recorded rollouts" },
      h(
        "div",
        { class: "toolbar" },
        h("label", { class: "field" }, h("span", {}, "Search"), search),
        h("details", { class: "choices" }, h("summary", {}, "Columns"), h("div", {}, choices)),
        h("p", { class: "hint" }, hint),
        failureCounts(),
      ),
      h(
        "div",
        { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of rollouts" },
        h("table", { class: "rollouts" }, this.caption, this.head, this.body),
      ),
      this.pages,
    );
    this.drawHead();
    this.arrange();
  }

  /** The index of the rollout before or after one, in the order that is shown; null if there is none. */
  neighbour(index, by) {
    return this.order[this.order.indexOf(index) + by] ?? null;
  }

  /** Filters and sorts the rollouts, and shows the first page. */
  arrange() {
    const tests = this.columns
      .filter(({ id }) => this.filters.has(id))
      .map(({ id, value, numeric }) => [value, testOf(this.filters.get(id), numeric)]);
    const found = testOf(this.search, false);
    const passes = (rollout) =>
      (found(rollout.prompt) || found(rollout.completion)) && tests.every(([value, test]) => test(value(rollout)));
    this.order = [...page.rollouts.keys()].filter((index) => passes(page.rollouts[index]));
    if (this.sorting) {
      const compare = comparison(this.sorting.column, this.sorting.descending);
      this.order.sort((a, b) => compare(page.rollouts[a], page.rollouts[b]));
    }
    this.turnTo(0);
  }

  /** Sorts by a column: numbers downwards and texts upwards first, then the other way, then not at all. */
  sort(column) {
    const now = this.sorting?.column === column ? this.sorting.descending : null;
    if (now === null) this.sorting = { column, descending: column.numeric };
    else this.sorting = now === column.numeric ? { column, descending: !now } : null;
    this.markSorting();
    this.arrange();
  }

  show(id, shown) {
    if (shown) this.shown.add(id);
    else this.shown.delete(id);
    this.drawHead();
    this.turnTo(this.pageIndex);
  }

  shownColumns() {
    return this.columns.filter(({ id }) => this.shown.has(id));
  }

  drawHead() {
    const titles = this.shownColumns().map((column) => {
      const arrow = h("span", { class: "arrow", "aria-hidden": "true" });
      const sort = { type: "button", title: column.hint, click: () => this.sort(column) };
      const name = column.numeric ? "number" : "";
      return h("th", { scope: "col", "data-column": column.id, class: name }, h("button", sort, column.text, arrow));
    });
    const fields = this.shownColumns().map(({ id, text, numeric }) => {
      const field = h("input", {
        type: "search",
        value: this.filters.get(id) ?? "",
        placeholder: numeric ? ">0.5" : "text",
        "aria-label": `Filter ${text}${numeric ? ", such as >0.5 or 2..5" : ""}`,
        input: () => {
          const empty = field.value.trim() === "";
          field.setAttribute("aria-invalid", String(numeric && !empty && numberTest(field.value) === null));
          if (empty) this.filters.delete(id);
          else this.filters.set(id, field.value);
          this.arrange();
        },
      });
      return h("td", {}, field);
    });
    this.head.replaceChildren(
      h("tr", {}, h("th", { scope: "col" }, h("span", { class: "hidden" }, "Open")), titles),
      h("tr", { class: "filters" }, h("td"), fields),
    );
    this.markSorting();
  }

  markSorting() {
    for (const cell of this.head.querySelectorAll("th[data-column]")) {
      const sorts = this.sorting?.column.id === cell.dataset.column;
      cell.setAttribute("aria-sort", !sorts ? "none" : this.sorting.descending ? "descending" : "ascending");
    }
  }

  /** Shows a page of the table. */
  turnTo(pageIndex) {
    this.pageIndex = pageIndex;
    const [found, all] = [this.order.length, page.rollouts.length];
    this.caption.textContent = `${found === all ? "" : `${found} of `}${all} recorded rollouts`;
    const columns = this.shownColumns();
    const rows = this.order.slice(pageIndex * PAGE_SIZE, (pageIndex + 1) * PAGE_SIZE);
    this.body.replaceChildren(...rows.map((index) => rowOf(index, columns)));
    const last = Math.max(Math.ceil(found / PAGE_SIZE) - 1, 0);
    const turn = (to, text) => {
      const disabled = to < 0 || to > last || to === pageIndex;
      return h("button", { type: "button", disabled, click: () => this.turnTo(to) }, text);
    };
    this.pages.replaceChildren(
      turn(0, "First"),
      turn(pageIndex - 1, "Previous"),
      h("span", {}, `page ${pageIndex + 1} of ${last + 1}`),
      turn(pageIndex + 1, "Next"),
      turn(last, "Last"),
    );
    this.pages.hidden = last === 0;
  }
}

/** The row of a rollout, with links to it and to its group. */
function rowOf(index, columns) {
  const rollout = page.rollouts[index];
  const cells = columns.map(({ id, numeric, value }) => {
    const content = value(rollout);
    const text = typeof content === "string" ? content.slice(0, EXCERPT) : short(content);
    const links = id === "group" && content !== null;
    return h("td", { class: numeric ? "number" : id }, links ? h("a", { href: groupAddress(rollout) }, text) : text);
  });
  const label = `Open row ${rollout.row} of step ${rollout.step}`;
  return h("tr", {}, h("td", {}, h("a", { href: `#rollout=${index}`, "aria-label": label }, "open")), cells);
}
