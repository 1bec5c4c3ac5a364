// Elements of HTML and SVG, and numbers as text.

/**
 * Makes an element of HTML. An attribute that is a function is a listener, `true` is an empty attribute, null and false
 * are none; so are children that are null or false.
 */
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Makes an element of SVG. */
function svg(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/**
 * A labelled choice among values.
 *
 * @param {string} label
 * @param {[value: string, text: string][]} options
 * @param {string} value the one that is chosen at first
 * @param {(value: string) => void} change
 */
function choice(label, options, value, change) {
  const choices = options.map(([key, text]) => h("option", { value: key, selected: key === value }, text));
  const field = h("select", { change: () => change(field.value) }, ...choices);
  return h("label", { class: "field" }, h("span", {}, label), field);
}

/** A row of headings of a table. */
function headings(texts) {
  return h("thead", {}, h("tr", {}, texts.map((text) => h("th", { scope: "col" }, text))));
}

/** A list of names with values. */
function definitions(name, entries) {
  return h("dl", { class: name }, entries.map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))));
}

/** The colour of a custom property in the theme that is on, for a canvas. */
function themeColor(name) {
  const probe = h("i", { hidden: true, style: `color: var(${name})` });
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/** Four significant digits, for tables and axes. */
function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(4)));
  return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
}

/** The shortest text that is this float32 and no other. */
function exact(value) {
  if (!Number.isFinite(value)) return String(value);
  for (let digits = 1; digits <= 9; digits++) {
    const number = Number(value.toPrecision(digits));
    if (Math.fround(number) === value) return String(number);
  }
  return String(value);
}
