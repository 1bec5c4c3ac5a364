// One rollout opened, and several side by side.

import { page, tokensOf } from "./data";
import { h } from "./dom";
import { short } from "./format";
import type { RolloutTable } from "./table";
import { largestTokens, quantityChoice, textOf, tokenView } from "./tokens";
import type { Rollout } from "./types";

function facts(rollout: Rollout): HTMLElement {
  const entries: [string, string][] = [
    ["reward", short(rollout.reward)],
    ...Object.entries(rollout.rewards)
      .filter(([name]) => name !== "reward")
      .map(([name, value]): [string, string] => [name, short(value)]),
    ["tokens", String(rollout.length)],
    ["finished", rollout.finished === null ? "–" : rollout.finished ? "yes" : "no, cut at the limit"],
    ["policy version", short(rollout.version)],
  ];
  if (rollout.answer) entries.push(["answer", rollout.answer]);
  return h("dl", { class: "facts" }, entries.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function titleOf(rollout: Rollout): string {
  const run = page.runs.length > 1 ? `${page.runs[rollout.run]!.name}, ` : "";
  return `${run}step ${rollout.step}, row ${rollout.row}`;
}

/** Rollouts of the same group, or of the same row in the other run. */
function groupLink(rollout: Rollout): string {
  return `#group=${rollout.run}.${rollout.step}.${rollout.group}`;
}

function twinOf(rollout: Rollout): number | null {
  const index = page.rollouts.findIndex(
    (other) => other.run !== rollout.run && other.step === rollout.step && other.row === rollout.row,
  );
  return index < 0 ? null : index;
}

/** The page of a rollout. */
export async function rolloutView(index: number, table: RolloutTable): Promise<HTMLElement> {
  const rollout = page.rollouts[index];
  if (!rollout) return h("p", {}, "There is no such rollout.");
  const tokens = await tokensOf(index);
  const view = tokenView(rollout, tokens, { prompt: true });
  const [before, after, twin] = [table.neighbour(index, -1), table.neighbour(index, 1), twinOf(rollout)];
  return h(
    "section",
    { class: "opened", "aria-label": "Rollout" },
    h(
      "nav",
      { class: "toolbar", "aria-label": "Rollouts" },
      h("a", { href: "#rollouts" }, "← All rollouts"),
      before !== null && h("a", { href: `#rollout=${before}`, rel: "prev" }, "Previous"),
      after !== null && h("a", { href: `#rollout=${after}`, rel: "next" }, "Next"),
      rollout.group !== null && h("a", { href: groupLink(rollout) }, "Its group, side by side"),
      twin !== null && h("a", { href: `#side=${index},${twin}` }, `The same row in ${page.runs[1 - rollout.run]!.name}`),
    ),
    h("h2", { tabindex: -1 }, `Rollout: ${titleOf(rollout)}`),
    facts(rollout),
    quantityChoice(),
    h("div", { class: "columns" }, view, largestTokens(view, rollout, tokens)),
  );
}

/** Rollouts side by side, with their prompt once if they share it. */
export async function sideBySide(title: string, indices: number[]): Promise<HTMLElement> {
  if (indices.length === 0 || indices.some((index) => !page.rollouts[index])) return h("p", {}, "There are no such rollouts.");
  const tokens = await Promise.all(indices.map(tokensOf));
  const first = tokens[0];
  const shared = first !== undefined && tokens.every((other) => samePrompt(other, first));
  const cards = indices.map((index, i) => {
    const rollout = page.rollouts[index]!;
    return h(
      "article",
      { class: "card" },
      h("h3", {}, h("a", { href: `#rollout=${index}` }, titleOf(rollout))),
      facts(rollout),
      tokenView(rollout, tokens[i]!, { prompt: !shared }),
    );
  });
  const prompt = shared && first.prompt > 0 && h("div", { class: "text shared" }, first.texts.slice(0, first.prompt).map(textOf).join(""));
  return h(
    "section",
    { class: "opened", "aria-label": title },
    h("nav", { class: "toolbar", "aria-label": "Rollouts" }, h("a", { href: "#rollouts" }, "← All rollouts")),
    h("h2", { tabindex: -1 }, title),
    prompt && h("h4", {}, "Prompt, as the model saw it"),
    prompt,
    quantityChoice(),
    h("div", { class: "cards" }, cards),
  );
}

function samePrompt(a: { ids: number[]; prompt: number }, b: { ids: number[]; prompt: number }): boolean {
  return a.prompt === b.prompt && a.ids.slice(0, a.prompt).every((id, i) => id === b.ids[i]);
}

/** The rollouts of a group, as "run.step.group". */
export function membersOf(key: string): number[] {
  const [run, step, group] = key.split(".").map(Number);
  return page.rollouts.flatMap((rollout, index) =>
    rollout.run === run && rollout.step === step && rollout.group === group ? [index] : [],
  );
}
