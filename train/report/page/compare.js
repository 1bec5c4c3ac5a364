// Config differences of two runs, the config of a run, and replayed dumps.

/** A table whose rows begin with a name. */
function namedTable(head, rows) {
  const cell = (value) => (value instanceof Node ? value : h("td", {}, value));
  const body = rows.map(([name, ...values]) =>
    h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), values.map(cell)),
  );
  return h("table", { class: "config" }, head && headings(head), h("tbody", {}, body));
}

/** The fields that differ between two runs, and all fields of each. */
function configView() {
  const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? null));
  const section = h("section", { "aria-label": "Config" });
  if (page.runs.length === 2) {
    const rows = page.differences.map(([name, left, right]) => [name, plain(left), plain(right)]);
    const table = namedTable(["Field", ...page.runs.map(({ name }) => name)], rows);
    const equal = h("p", {}, "None: the configs are equal.");
    section.append(
      h("h2", {}, "Fields that differ"),
      rows.length === 0 ? equal : h("div", { class: "scroll" }, table),
    );
  }
  for (const { name, config } of page.runs) {
    const rows = Object.entries(config).map(([field, value]) => [field, plain(value)]);
    if (rows.length === 0) continue;
    const summary = h("summary", {}, `All fields of ${name}`);
    section.append(h("details", { open: page.runs.length === 1 }, summary, namedTable(null, rows)));
  }
  return section;
}

/** The verdicts on the fields of replayed dumps, with the causes that were found. */
function parityView() {
  const names = [...new Set(page.dumps.flatMap(({ fields }) => fields.map(({ field }) => field)))];
  const rows = names.map((name) => [
    name,
    ...page.dumps.map(({ fields }) => verdict(fields.find(({ field }) => field === name))),
  ]);
  return h(
    "section",
    { "aria-label": "Parity" },
    h("div", { class: "scroll" }, namedTable(["Field", ...page.dumps.map(({ name }) => name)], rows)),
    h("div", { class: "cards" }, page.dumps.map(findings)),
  );
}

function verdict(field) {
  if (!field) return h("td", {}, "not recorded");
  if (field.numbers === 0) return h("td", {}, "nothing to compare");
  if (field.agrees) return h("td", { class: "good" }, "agrees");
  const size = typeof field.absolute === "number" ? short(field.absolute) : field.absolute;
  const place = field.at.length ? ` at (${field.at.join(", ")})` : "";
  return h("td", { class: "bad" }, `differs by ${size}${place}`);
}

function findings(dump) {
  const agrees = h("p", { class: "good" }, `All compared fields agree within the rounding of ${dump.dtype}.`);
  const items = dump.findings.map(({ field, causes, follows, advice }) => {
    const unknown = follows ? `not judged: computed with ${follows}, whose cause is unknown` : "Cause unknown.";
    const several = causes.length > 1 ? "These causes fit equally well:" : "Cause:";
    const texts = causes.map((all) => h("li", {}, all.map(({ text }) => text).join(", and ")));
    return h(
      "div",
      { class: "finding" },
      h("h4", {}, h("code", {}, field)),
      h("p", {}, causes.length > 0 ? several : unknown),
      causes.length > 0 && h("ul", {}, texts),
      advice && h("p", {}, `To decide: ${advice}`),
    );
  });
  return h(
    "article",
    { class: "card" },
    h("h3", {}, dump.name),
    dump.agrees ? agrees : items,
    h("details", {}, h("summary", {}, "The report as text"), h("pre", {}, dump.text)),
  );
}
