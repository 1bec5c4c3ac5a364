// The table of recorded rollouts: sorted and filtered by TanStack Table, a page of it at a time.

import {
  type ColumnDef,
  type FilterFn,
  type SortingState,
  type TableState,
  createTable,
  getCoreRowModel,
  getFilteredRowModel,
  getPaginationRowModel,
  getSortedRowModel,
} from "@tanstack/table-core";
import { page } from "./data";
import { h } from "./dom";
import { numberTest } from "./filter";
import { short } from "./format";
import type { Rollout } from "./types";

export interface Row extends Rollout {
  index: number;
}

const PAGE_SIZE = 50;
/** Characters of a text in a cell; to measure more takes most of the time of a redraw. */
const EXCERPT = 48;
const rows: Row[] = page.rollouts.map((rollout, index) => ({ ...rollout, index }));

const matches: FilterFn<Row> = (row, column, filter: string) => {
  const value = row.getValue(column);
  if (typeof value === "string") return value.toLowerCase().includes(filter.toLowerCase());
  const test = numberTest(filter);
  return test === null || test(value as number | null);
};

type Column = ColumnDef<Row> & { id: string; text: string; hint?: string; numeric: boolean; shown: boolean };

function column(
  id: string,
  text: string,
  value: (row: Row) => number | string | null,
  options: { numeric?: boolean; shown?: boolean; hint?: string } = {},
): Column {
  const { numeric = true, shown = true } = options;
  return {
    id,
    text,
    numeric,
    shown,
    ...(options.hint === undefined ? {} : { hint: options.hint }),
    accessorFn: value,
    filterFn: matches,
    // Missing numbers stand last, whichever way the others go.
    sortUndefined: "last",
    sortingFn: (a, b, key) => compare(a.getValue(key), b.getValue(key)),
  };
}

function compare(a: number | string | null, b: number | string | null): number {
  if (a === b) return 0;
  if (a === null) return -1;
  if (b === null) return 1;
  return a < b ? -1 : 1;
}

/** Quantities whose mean, or largest value, is shown at first. */
const SHOWN = ["kl", "exact_kl", "log_ratio_sampler", "mismatch_kl", "advantages", "entropy"];
const LARGEST = ["kl", "exact_kl", "log_ratio_sampler", "mismatch_kl"];

function columnsOf(): Column[] {
  const rewards = [...new Set(rows.flatMap((row) => Object.keys(row.rewards)))].filter((name) => name !== "reward");
  return [
    ...(page.runs.length > 1 ? [column("run", "Run", (row) => page.runs[row.run]!.name, { numeric: false })] : []),
    column("step", "Step", (row) => row.step),
    column("group", "Group", (row) => row.group),
    column("row", "Row", (row) => row.row, { shown: false }),
    column("reward", "Reward", (row) => row.reward),
    ...rewards.map((name) => column(`reward-${name}`, `Reward: ${name}`, (row) => row.rewards[name] ?? null, { shown: false })),
    column("length", "Tokens", (row) => row.length),
    column("finished", "Finished", (row) => (row.finished === null ? null : row.finished ? "yes" : "no"), { numeric: false }),
    column("version", "Policy", (row) => row.version, { shown: false, hint: "RL steps of the policy that sampled it" }),
    ...page.quantities.flatMap(({ key, label }) => {
      const mean = column(`mean-${key}`, `Mean ${label}`, (row) => row.numbers[key]?.[0] ?? null, {
        shown: SHOWN.includes(key) && !LARGEST.includes(key),
      });
      const largest = column(`largest-${key}`, `Largest ${label}`, (row) => row.numbers[key]?.[1] ?? null, {
        shown: LARGEST.includes(key),
        hint: "Of all tokens, the number that is farthest from 0",
      });
      return [mean, largest];
    }),
    column("prompt", "Prompt", (row) => row.prompt, { numeric: false }),
    column("completion", "Completion", (row) => row.completion, { numeric: false }),
  ];
}

export interface RolloutTable {
  element: HTMLElement;
  /** The index of the rollout before or after one, in the order that is shown. */
  neighbour(index: number, by: number): number | null;
}

export function rolloutTable(): RolloutTable {
  const columns = columnsOf();
  const caption = h("caption", { "aria-live": "polite" });
  const head = h("thead");
  const body = h("tbody");
  const pages = h("nav", { class: "pages", "aria-label": "Pages of the table" });
  const visible = Object.fromEntries(columns.map(({ id, shown }) => [id, shown]));

  let state: Partial<TableState> = {
    sorting: [],
    columnFilters: [],
    globalFilter: "",
    columnVisibility: visible,
    pagination: { pageIndex: 0, pageSize: PAGE_SIZE },
  };
  const table = createTable<Row>({
    data: rows,
    columns,
    state,
    onStateChange: () => {},
    renderFallbackValue: null,
    enableSortingRemoval: true,
    getColumnCanGlobalFilter: (item) => ["prompt", "completion"].includes(item.id),
    globalFilterFn: matches,
    getCoreRowModel: getCoreRowModel(),
    getFilteredRowModel: getFilteredRowModel(),
    getSortedRowModel: getSortedRowModel(),
    getPaginationRowModel: getPaginationRowModel(),
    autoResetPageIndex: false,
  });
  state = { ...table.initialState, ...state };

  function set(change: Partial<TableState>): void {
    state = { ...state, ...change };
    table.setOptions((options) => ({ ...options, state }));
    drawBody();
  }

  /** Replaces the filter of a column; an empty one is removed. */
  function filter(id: string, value: string): void {
    const others = state.columnFilters!.filter((other) => other.id !== id);
    set({
      columnFilters: value.trim() ? [...others, { id, value }] : others,
      pagination: { pageIndex: 0, pageSize: PAGE_SIZE },
    });
  }

  function sort(id: string): void {
    const now = state.sorting![0];
    const next: SortingState =
      now?.id !== id ? [{ id, desc: isNumeric(id) }] : now.desc === isNumeric(id) ? [{ id, desc: !now.desc }] : [];
    set({ sorting: next, pagination: { pageIndex: 0, pageSize: PAGE_SIZE } });
    drawSorting();
  }

  const isNumeric = (id: string): boolean => columns.find((item) => item.id === id)!.numeric;
  const shownColumns = (): Column[] => columns.filter(({ id }) => state.columnVisibility![id]);

  function drawHead(): void {
    const titles = shownColumns().map(({ id, text, hint, numeric }) =>
      h(
        "th",
        { scope: "col", "data-column": id, class: numeric ? "number" : "" },
        h("button", { type: "button", title: hint, click: () => sort(id) }, text, h("span", { class: "arrow", "aria-hidden": "true" })),
      ),
    );
    const filters = shownColumns().map(({ id, text, numeric }) => {
      const active = state.columnFilters!.find((other) => other.id === id)?.value as string | undefined;
      const field = h("input", {
        type: "search",
        value: active ?? "",
        placeholder: numeric ? ">0.5" : "text",
        "aria-label": `Filter ${text}${numeric ? ", such as >0.5 or 2..5" : ""}`,
        input: (event: Event) => {
          const { value } = event.target as HTMLInputElement;
          field.setAttribute("aria-invalid", String(numeric && value.trim() !== "" && numberTest(value) === null));
          filter(id, value);
        },
      });
      return h("td", {}, field);
    });
    head.replaceChildren(
      h("tr", {}, h("th", { scope: "col" }, h("span", { class: "hidden" }, "Open")), titles),
      h("tr", { class: "filters" }, h("td"), filters),
    );
    drawSorting();
  }

  function drawSorting(): void {
    const sorted = state.sorting![0];
    for (const cell of head.querySelectorAll<HTMLElement>("th[data-column]")) {
      const direction = sorted?.id === cell.dataset["column"] ? (sorted!.desc ? "descending" : "ascending") : "none";
      cell.setAttribute("aria-sort", direction);
    }
  }

  function drawBody(): void {
    const shown = shownColumns();
    const filtered = table.getFilteredRowModel().rows.length;
    caption.textContent =
      filtered === rows.length ? `${rows.length} recorded rollouts` : `${filtered} of ${rows.length} recorded rollouts`;
    body.replaceChildren(
      ...table.getPaginationRowModel().rows.map((row) => {
        const { index, step, run, group } = row.original;
        const cells = shown.map(({ id, numeric }) => {
          const value = row.getValue<number | string | null>(id);
          const text = typeof value === "string" ? value : short(value);
          const link = id === "group" && group !== null && h("a", { href: `#group=${run}.${step}.${group}` }, text);
          return h("td", { class: numeric ? "number" : id }, link || text.slice(0, EXCERPT));
        });
        const open = h("a", { href: `#rollout=${index}`, "aria-label": `Open row ${row.original.row} of step ${step}` }, "open");
        return h("tr", {}, h("td", {}, open), cells);
      }),
    );
    const { pageIndex } = state.pagination!;
    const last = Math.max(Math.ceil(filtered / PAGE_SIZE) - 1, 0);
    const turn = (to: number, text: string): HTMLElement =>
      h(
        "button",
        {
          type: "button",
          disabled: to < 0 || to > last || to === pageIndex,
          click: () => set({ pagination: { pageIndex: to, pageSize: PAGE_SIZE } }),
        },
        text,
      );
    pages.replaceChildren(
      turn(0, "First"),
      turn(pageIndex - 1, "Previous"),
      h("span", {}, `page ${pageIndex + 1} of ${last + 1}`),
      turn(pageIndex + 1, "Next"),
      turn(last, "Last"),
    );
    pages.hidden = last === 0;
  }

  const search = h("input", {
    type: "search",
    placeholder: "text of prompt or completion",
    "aria-label": "Search prompts and completions",
    input: (event: Event) =>
      set({
        globalFilter: (event.target as HTMLInputElement).value,
        pagination: { pageIndex: 0, pageSize: PAGE_SIZE },
      }),
  });
  const choices = columns.map(({ id, text }) =>
    h(
      "label",
      {},
      h("input", {
        type: "checkbox",
        checked: state.columnVisibility![id],
        change: (event: Event) => {
          set({ columnVisibility: { ...state.columnVisibility!, [id]: (event.target as HTMLInputElement).checked } });
          drawHead();
        },
      }),
      text,
    ),
  );
  set({});
  drawHead();
  const element = h(
    "section",
    { "aria-label": "Recorded rollouts" },
    h(
      "div",
      { class: "toolbar" },
      h("label", { class: "field" }, h("span", {}, "Search"), search),
      h("details", { class: "choices" }, h("summary", {}, "Columns"), h("div", {}, choices)),
      h("p", { class: "hint" }, "A heading sorts. Numbers are filtered by >0.5, <=2, 2..5 or =1. A group link shows its completions side by side."),
    ),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of rollouts" }, h("table", { class: "rollouts" }, caption, head, body)),
    pages,
  );
  return {
    element,
    neighbour(index, by) {
      const order = table.getSortedRowModel().rows.map((row) => row.original.index);
      return order[order.indexOf(index) + by] ?? null;
    },
  };
}
