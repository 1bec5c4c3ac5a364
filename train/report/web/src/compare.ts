// Config differences of two runs, the config of a run, and replayed dumps.

import { page } from "./data";
import { h } from "./dom";
import { plain, short } from "./format";
import type { Dump, ParityField } from "./types";

/** The fields that differ between two runs, and all fields of each. */
export function configs(): HTMLElement {
  const section = h("section", { "aria-label": "Config" });
  const [first, second] = page.runs;
  if (first && second) {
    const rows = page.differences.map(([name, left, right]) =>
      h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", {}, plain(left)), h("td", {}, plain(right))),
    );
    section.append(
      h("h2", {}, "Fields that differ"),
      rows.length === 0
        ? h("p", {}, "None: the configs are equal.")
        : h(
            "div",
            { class: "scroll" },
            h(
              "table",
              { class: "config" },
              h("thead", {}, h("tr", {}, ["Field", first.name, second.name].map((text) => h("th", { scope: "col" }, text)))),
              h("tbody", {}, rows),
            ),
          ),
    );
  }
  for (const run of page.runs) {
    const rows = Object.entries(run.config).map(([name, value]) =>
      h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", {}, plain(value))),
    );
    if (rows.length > 0) {
      const table = h("table", { class: "config" }, h("tbody", {}, rows));
      section.append(h("details", { open: page.runs.length === 1 }, h("summary", {}, `All fields of ${run.name}`), table));
    }
  }
  return section;
}

function verdict(field: ParityField | undefined): HTMLElement {
  if (!field) return h("td", {}, "not recorded");
  if (field.numbers === 0) return h("td", {}, "nothing to compare");
  const size = typeof field.absolute === "number" ? short(field.absolute) : field.absolute;
  const text = field.agrees ? "agrees" : `differs by ${size}${field.at.length ? ` at (${field.at.join(", ")})` : ""}`;
  return h("td", { class: field.agrees ? "good" : "bad" }, text);
}

function findings(dump: Dump): HTMLElement {
  const items = dump.findings.map((finding) => {
    const causes = finding.causes.map((all) => h("li", {}, all.map(({ text }) => text).join(", and ")));
    const follows = finding.follows && `not judged: computed with ${finding.follows}, whose cause is unknown`;
    return h(
      "div",
      { class: "finding" },
      h("h4", {}, h("code", {}, finding.field)),
      causes.length > 0
        ? [h("p", {}, causes.length > 1 ? "These causes fit equally well:" : "Cause:"), h("ul", {}, causes)]
        : h("p", {}, follows || "Cause unknown."),
      finding.advice && h("p", {}, `To decide: ${finding.advice}`),
    );
  });
  const agrees = h("p", { class: "good" }, `All compared fields agree within the rounding of ${dump.dtype}.`);
  return h(
    "article",
    { class: "card" },
    h("h3", {}, dump.name),
    dump.agrees ? agrees : items,
    h("details", {}, h("summary", {}, "The report as text"), h("pre", {}, dump.text)),
  );
}

/** Replayed dumps: a row for each field, and the causes that were found. */
export function dumps(): HTMLElement {
  const names = [...new Set(page.dumps.flatMap((dump) => dump.fields.map(({ field }) => field)))];
  const rows = names.map((name) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, h("code", {}, name)),
      page.dumps.map((dump) => verdict(dump.fields.find(({ field }) => field === name))),
    ),
  );
  return h(
    "section",
    { "aria-label": "Parity" },
    h(
      "div",
      { class: "scroll" },
      h(
        "table",
        { class: "config" },
        h("thead", {}, h("tr", {}, ["Field", ...page.dumps.map(({ name }) => name)].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, rows),
      ),
    ),
    h("div", { class: "cards" }, page.dumps.map(findings)),
  );
}
