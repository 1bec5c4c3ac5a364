// The tokens of a rollout as the model saw them, coloured by a quantity.

import { page, type Tokens, valuesOf } from "./data";
import { h, select } from "./dom";
import { exact, short } from "./format";
import type { Quantity, Rollout } from "./types";

/** The quantity that colours every rollout of the page. */
let chosen: Quantity | null = null;
const listeners = new Set<() => void>();

export function chosenQuantity(): Quantity | null {
  chosen ??= page.quantities[0] ?? null;
  return chosen;
}

/** Calls a function whenever another quantity is chosen, as long as an element is on the page. */
export function whenChosen(element: Element, listener: () => void): void {
  const call = (): void => {
    if (element.isConnected) listener();
    else listeners.delete(call);
  };
  listeners.add(call);
}

/** The choice of the quantity, with the scale of its colours. */
export function quantityChoice(): HTMLElement {
  const scale = h("span", { class: "scale" });
  const draw = (): void => {
    const quantity = chosenQuantity();
    if (!quantity) return;
    const low = quantity.scale === "both" ? short(-quantity.limit) : "0";
    const bar = h("i", { class: quantity.scale });
    scale.replaceChildren(low, bar, `${short(quantity.limit)} ${quantity.unit}`);
  };
  const options = page.quantities.map(({ key, label }) => [key, label] as const);
  const choice = select("Colour by", options, chosenQuantity()?.key ?? "", (key) => {
    chosen = page.quantities.find((quantity) => quantity.key === key) ?? null;
    draw();
    for (const listener of [...listeners]) listener();
  });
  draw();
  return h("div", { class: "toolbar" }, choice, scale);
}

/** The background of a value: stronger the farther it is from 0. */
export function color(quantity: Quantity, value: number): string {
  if (Number.isNaN(value)) return "transparent";
  const share = Math.min(Math.abs(value) / quantity.limit, 1);
  const hue = quantity.scale === "up" ? "--up" : value < 0 ? "--below" : "--above";
  return `color-mix(in oklab, var(${hue}) ${(share * 100).toFixed(1)}%, transparent)`;
}

/** A text with marks for the characters that are not seen. */
export function textOf(text: string): string {
  return text === "" ? "∎" : text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

/** Shows the tokens of a rollout; arrow keys move from token to token. */
export function tokenView(rollout: Rollout, tokens: Tokens, options: { prompt: boolean }): HTMLElement {
  const view = h("div", { class: "tokens" });
  const spans: HTMLElement[] = [];
  const make = (index: number): HTMLElement => {
    const sampled = index >= tokens.prompt;
    const text = tokens.texts[index] ?? String(tokens.ids[index]);
    const span = h("span", { class: sampled ? "token" : "token prompt", "data-token": index }, textOf(text));
    if (sampled) {
      span.tabIndex = index === tokens.prompt ? 0 : -1;
      spans.push(span);
    }
    return span;
  };
  const indices = [...tokens.ids.keys()];
  const part = (title: string, members: number[]): HTMLElement =>
    h("section", {}, h("h4", {}, title), h("div", { class: "text" }, members.map(make)));
  if (options.prompt && tokens.prompt > 0) {
    view.append(part("Prompt, as the model saw it", indices.slice(0, tokens.prompt)));
  }
  view.append(part("Completion", indices.slice(tokens.prompt)));

  const paint = (): void => {
    const quantity = chosenQuantity();
    const values = quantity && valuesOf(quantity, tokens, rollout);
    spans.forEach((span, i) => {
      span.style.backgroundColor = quantity && values ? color(quantity, values[i]!) : "";
    });
  };
  paint();
  whenChosen(view, paint);

  const indexOf = (target: EventTarget | null): number | null => {
    const span = (target as Element | null)?.closest?.("[data-token]");
    return span ? Number((span as HTMLElement).dataset["token"]) : null;
  };
  const show = (event: Event): void => {
    const index = indexOf(event.target);
    if (index !== null) showNumbers(event.target as HTMLElement, index, tokens, rollout);
  };
  view.addEventListener("pointerover", show);
  view.addEventListener("focusin", (event) => {
    const index = indexOf(event.target);
    if (index !== null) {
      for (const span of spans) span.tabIndex = -1;
      const span = event.target as HTMLElement;
      span.tabIndex = 0;
      span.setAttribute("role", "img");
      span.setAttribute("aria-label", describe(index, tokens, rollout));
    }
    show(event);
  });
  view.addEventListener("pointerleave", hideNumbers);
  view.addEventListener("focusout", hideNumbers);
  view.addEventListener("keydown", (event) => {
    const index = indexOf(event.target);
    if (index === null) return;
    const position = index - tokens.prompt;
    const moves: Record<string, number> = { ArrowLeft: position - 1, ArrowRight: position + 1, Home: 0, End: spans.length - 1 };
    if (event.key === "Escape") hideNumbers();
    if (!(event.key in moves)) return;
    event.preventDefault();
    spans[Math.min(Math.max(moves[event.key]!, 0), spans.length - 1)]?.focus();
  });
  return view;
}

function describe(index: number, tokens: Tokens, rollout: Rollout): string {
  const quantity = chosenQuantity();
  const value = quantity && valuesOf(quantity, tokens, rollout)?.[index - tokens.prompt];
  const number = value === null || value === undefined ? "" : `, ${quantity!.label} ${exact(value)}`;
  return `token ${index - tokens.prompt + 1}, ${JSON.stringify(tokens.texts[index])}${number}`;
}

const numbers = h("div", { class: "numbers", role: "tooltip", hidden: true });
document.body.append(numbers);

/** Shows every number of a token beside it. */
function showNumbers(span: HTMLElement, index: number, tokens: Tokens, rollout: Rollout): void {
  const position = index - tokens.prompt;
  const line = (name: string, value: string): HTMLElement => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value));
  const lines = [line("token id", String(tokens.ids[index])), line("text", JSON.stringify(tokens.texts[index]))];
  if (position >= 0) {
    lines.push(line("position", `${position + 1} of ${tokens.ids.length - tokens.prompt}`));
    for (const quantity of page.quantities) {
      const value = valuesOf(quantity, tokens, rollout)?.[position];
      if (value !== undefined) lines.push(line(quantity.label, exact(value)));
    }
    for (const [name, values] of Object.entries(tokens.others)) lines.push(line(name, JSON.stringify(values[position]).slice(0, 120)));
  }
  numbers.replaceChildren(h("table", {}, h("tbody", {}, lines)));
  numbers.hidden = false;
  const box = span.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = numbers;
  const below = box.bottom + 6 + height < innerHeight ? box.bottom + 6 : Math.max(box.top - height - 6, 4);
  numbers.style.left = `${Math.max(Math.min(box.left, innerWidth - width - 8), 4)}px`;
  numbers.style.top = `${below}px`;
}

export function hideNumbers(): void {
  numbers.hidden = true;
}

/** The tokens with the largest values of the chosen quantity; a button goes to each. */
export function largestTokens(view: HTMLElement, rollout: Rollout, tokens: Tokens): HTMLElement {
  const section = h("section", { class: "largest" });
  const draw = (): void => {
    const quantity = chosenQuantity();
    const values = quantity && valuesOf(quantity, tokens, rollout);
    if (!quantity || !values) {
      section.replaceChildren(h("p", { class: "hint" }, "This rollout has no such quantity."));
      return;
    }
    const order = [...values.keys()].filter((i) => !Number.isNaN(values[i]!));
    order.sort((a, b) => Math.abs(values[b]!) - Math.abs(values[a]!));
    const focus = (i: number): void =>
      view.querySelector<HTMLElement>(`[data-token="${tokens.prompt + i}"]`)?.focus();
    const items = order.slice(0, 12).map((i) =>
      h(
        "tr",
        {},
        h("td", { class: "number" }, i + 1),
        h("td", {}, h("button", { type: "button", class: "plain", click: () => focus(i) }, textOf(tokens.texts[tokens.prompt + i] ?? ""))),
        h("td", { class: "number" }, exact(values[i]!)),
      ),
    );
    section.replaceChildren(
      h("h4", {}, `Farthest from 0: ${quantity.label}`),
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ["Position", "Token", quantity.unit || "Value"].map((text) => h("th", { scope: "col" }, text)))),
        h("tbody", {}, items),
      ),
    );
  };
  draw();
  whenChosen(section, draw);
  return section;
}
