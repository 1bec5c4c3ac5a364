// The tokens of a rollout as the model saw them, coloured by a quantity, with all numbers of one under the pointer.

/** The quantity that colours every rollout. @type {Quantity|undefined} */
let colouring = page.quantities[0];

const tooltip = h("div", { class: "numbers", role: "tooltip", hidden: true });
document.body.append(tooltip);

/** The choice of the quantity, with the scale of its colours; calls a function after a change. */
function quantityChoice(changed) {
  const scale = h("span", { class: "scale" });
  const draw = () => {
    if (!colouring) return;
    const low = colouring.scale === "both" ? short(-colouring.limit) : "0";
    const high = `${short(colouring.limit)} ${colouring.unit}`;
    scale.replaceChildren(low, h("i", { class: colouring.scale }), high);
  };
  const options = page.quantities.map(({ key, label }) => [key, label]);
  const quantities = choice("Colour by", options, colouring?.key ?? "", (chosen) => {
    colouring = page.quantities.find(({ key }) => key === chosen);
    draw();
    changed();
  });
  draw();
  return h("div", { class: "toolbar" }, quantities, scale);
}

/** The background of a value: stronger the farther it is from 0. */
function colorOf(quantity, value) {
  if (Number.isNaN(value)) return "transparent";
  const share = Math.min(Math.abs(value) / quantity.limit, 1);
  const hue = quantity.scale === "up" ? "--up" : value < 0 ? "--below" : "--above";
  return `color-mix(in oklab, var(${hue}) ${(share * 100).toFixed(1)}%, transparent)`;
}

/** A text with marks for the characters that are not seen. */
function visible(text) {
  return text === "" ? "∎" : text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

/**
 * The tokens of a rollout, and a function that paints them anew; arrow keys move from token to token.
 *
 * @param {Rollout} rollout
 * @param {Tokens} tokens
 * @param {boolean} prompt whether the prompt is shown
 */
function tokenView(rollout, tokens, prompt) {
  const isSampled = (index) => !tokens.sampled || tokens.sampled[index - tokens.prompt] === 1;
  const spans = tokens.ids.map((id, index) => {
    const text = visible(tokens.texts[index] ?? String(id));
    if (index < tokens.prompt) return h("span", { class: "token prompt", "data-token": index }, text);
    const kind = isSampled(index) ? "token" : "token observed";
    return h("span", { class: kind, "data-token": index, tabindex: index === tokens.prompt ? 0 : -1 }, text);
  });
  const sampled = spans.slice(tokens.prompt);
  const part = (title, members) => h("section", {}, h("h4", {}, title), h("div", { class: "text" }, members));
  const element = h(
    "div",
    { class: "tokens" },
    prompt && tokens.prompt > 0 && part("Prompt, as the model saw it", spans.slice(0, tokens.prompt)),
    tokens.sampled ? turnsOf(tokens).map(([title, from, to]) => part(title, spans.slice(from, to))) : part("Completion", sampled),
  );
  const paint = () => {
    const values = colouring && valuesOf(colouring, rollout, tokens);
    sampled.forEach((span, i) => {
      if (isSampled(tokens.prompt + i)) span.style.backgroundColor = values ? colorOf(colouring, values[i]) : "";
    });
  };
  paint();

  const show = ({ target }) => {
    if (target.dataset.token !== undefined) showNumbers(target, rollout, tokens);
  };
  element.addEventListener("pointerover", show);
  element.addEventListener("focusin", (event) => {
    const span = event.target;
    for (const other of sampled) other.tabIndex = -1;
    span.tabIndex = 0;
    span.setAttribute("role", "img");
    span.setAttribute("aria-label", describe(Number(span.dataset.token), rollout, tokens));
    show(event);
  });
  element.addEventListener("pointerleave", hideNumbers);
  element.addEventListener("focusout", hideNumbers);
  element.addEventListener("keydown", (event) => {
    const at = sampled.indexOf(event.target);
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: sampled.length - 1 };
    if (event.key === "Escape") hideNumbers();
    if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    sampled[Math.min(Math.max(moves[event.key], 0), sampled.length - 1)].focus();
  });
  return { element, paint };
}

/** The turns of an episode: who spoke, the first token, and the one after the last. */
function turnsOf({ ids, prompt, sampled }) {
  const turns = [];
  let count = 0;
  for (let from = 0; from < sampled.length; ) {
    let to = from + 1;
    while (to < sampled.length && sampled[to] === sampled[from]) to++;
    if (sampled[from]) count++;
    const title = sampled[from] ? `Policy, turn ${count}` : count ? "Environment" : "History, not trained here";
    turns.push([title, prompt + from, prompt + to]);
    from = to;
  }
  return ids.length > prompt ? turns : [["No turn that counts", prompt, prompt]];
}

/** The text of a token for a screen reader. */
function describe(index, rollout, tokens) {
  const position = index - tokens.prompt;
  const values = colouring && valuesOf(colouring, rollout, tokens);
  const number = values ? `, ${colouring.label} ${exact(values[position])}` : "";
  return `token ${position + 1}, ${JSON.stringify(tokens.texts[index])}${number}`;
}

/** Shows every number of a token beside it. */
function showNumbers(span, rollout, tokens) {
  const index = Number(span.dataset.token);
  const position = index - tokens.prompt;
  const lines = [
    ["token id", tokens.ids[index]],
    ["text", JSON.stringify(tokens.texts[index])],
  ];
  if (position >= 0) {
    lines.push(["position", `${position + 1} of ${tokens.ids.length - tokens.prompt}`]);
    for (const quantity of page.quantities) {
      const values = valuesOf(quantity, rollout, tokens);
      if (values) lines.push([quantity.label, exact(values[position])]);
    }
    for (const [name, values] of Object.entries(tokens.others)) {
      lines.push([name, JSON.stringify(values[position]).slice(0, 120)]);
    }
  }
  const rows = lines.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value)));
  tooltip.replaceChildren(h("table", {}, h("tbody", {}, rows)));
  tooltip.hidden = false;
  const { left, top, bottom } = span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tooltip;
  const below = bottom + 6 + height < innerHeight;
  tooltip.style.left = `${Math.max(Math.min(left, innerWidth - width - 8), 4)}px`;
  tooltip.style.top = `${below ? bottom + 6 : Math.max(top - height - 6, 4)}px`;
}

function hideNumbers() {
  tooltip.hidden = true;
}

/** The tokens with the largest values, with a button that goes to each, and a function that draws them anew. */
function largestTokens(view, rollout, tokens) {
  const element = h("section", { class: "largest" });
  const draw = () => {
    const values = colouring && valuesOf(colouring, rollout, tokens);
    if (!values) {
      element.replaceChildren(h("p", { class: "hint" }, "This rollout has no such quantity."));
      return;
    }
    const order = [...values.keys()].filter((i) => !Number.isNaN(values[i]));
    order.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
    const rows = order.slice(0, 12).map((i) => {
      const index = tokens.prompt + i;
      const focus = () => view.querySelector(`[data-token="${index}"]`).focus();
      const text = visible(tokens.texts[index] ?? "");
      const button = h("button", { type: "button", class: "plain", click: focus }, text);
      const number = h("td", { class: "number" }, exact(values[i]));
      return h("tr", {}, h("td", { class: "number" }, i + 1), h("td", {}, button), number);
    });
    const head = headings(["Position", "Token", colouring.unit || "Value"]);
    const title = h("h4", {}, `Farthest from 0: ${colouring.label}`);
    element.replaceChildren(title, h("table", {}, head, h("tbody", {}, rows)));
  };
  draw();
  return { element, draw };
}
