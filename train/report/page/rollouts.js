// One rollout opened, and several side by side.

/** The address of the rollouts that share a prompt with one. */
function groupAddress({ run, step, group }) {
  return `#group=${run}.${step}.${group}`;
}

/** The indices of the rollouts of a group, from "run.step.group". */
function membersOf(key) {
  const [run, step, group] = key.split(".").map(Number);
  const belongs = (rollout) => rollout.run === run && rollout.step === step && rollout.group === group;
  return [...page.rollouts.keys()].filter((index) => belongs(page.rollouts[index]));
}

function titleOf({ run, step, row }) {
  return `${page.runs.length > 1 ? `${page.runs[run].name}, ` : ""}step ${step}, row ${row}`;
}

function facts({ reward, rewards, length, finished, version, answer, episode, failure }) {
  const without = failure ? "left out" : "left out, or a row that no fork took";
  const others = Object.entries(rewards).filter(([name]) => name !== "reward");
  return definitions("facts", [
    ["reward", short(reward)],
    ...others.map(([name, value]) => [name, short(value)]),
    ["tokens", length],
    ["finished", finished === null ? "–" : finished ? "yes" : "no, cut at the limit"],
    ["policy version", short(version)],
    ...(episode === null ? [] : [["episode", episode < 0 ? without : `a fork of row ${episode}`]]),
    ...(answer ? [["answer", answer]] : []),
  ]);
}

/** Why the episode of a rollout failed; nothing if it did not. */
function failureOf({ failure }) {
  if (!failure) return null;
  const whose = {
    world: "Of the world: the episode is left out of loss, baseline and group.",
    policy: "Of the policy: the episode is trained.",
  };
  return h(
    "section",
    { class: "failure" },
    h("h4", {}, `Failed: ${failure.name}`),
    h("p", { class: "hint" }, whose[failure.of]),
    h("div", { class: "text" }, failure.text),
  );
}

/** A view of rollouts: links, title and content. */
function openedView(label, title, links, ...content) {
  return h(
    "section",
    { class: "opened", "aria-label": label },
    h("nav", { class: "toolbar", "aria-label": "Rollouts" }, h("a", { href: "#rollouts" }, "← All rollouts"), links),
    h("h2", { tabindex: -1 }, title),
    content,
  );
}

/** A rollout with its numbers, and links to its neighbours in the table. */
async function rolloutView(index, table) {
  const rollout = page.rollouts[index];
  if (!rollout) return h("p", {}, "There is no such rollout.");
  const tokens = await tokensOf(index);
  const view = tokenView(rollout, tokens, true);
  const largest = largestTokens(view.element, rollout, tokens);
  const [before, after] = [table.neighbour(index, -1), table.neighbour(index, 1)];
  const { run, step, row } = rollout;
  const twin = page.rollouts.findIndex((other) => other.run !== run && other.step === step && other.row === row);
  const links = [
    before !== null && h("a", { href: `#rollout=${before}`, rel: "prev" }, "Previous"),
    after !== null && h("a", { href: `#rollout=${after}`, rel: "next" }, "Next"),
    rollout.group !== null && h("a", { href: groupAddress(rollout) }, "Its group, side by side"),
    twin >= 0 && h("a", { href: `#side=${index},${twin}` }, `The same row in ${page.runs[1 - run].name}`),
  ];
  const change = () => {
    view.paint();
    largest.draw();
  };
  const columns = h("div", { class: "columns" }, view.element, largest.element);
  return openedView("Rollout", `Rollout: ${titleOf(rollout)}`, links, facts(rollout), failureOf(rollout), quantityChoice(change), columns);
}

/** Rollouts side by side, with their prompt once if they share it. */
async function sideBySide(title, indices) {
  if (indices.length === 0 || indices.some((index) => !page.rollouts[index])) {
    return h("p", {}, "There are no such rollouts.");
  }
  const tokens = await Promise.all(indices.map(tokensOf));
  const promptOf = ({ ids, prompt }) => ids.slice(0, prompt).join();
  const shared = tokens.every((other) => promptOf(other) === promptOf(tokens[0]));
  const views = indices.map((index, i) => tokenView(page.rollouts[index], tokens[i], !shared));
  const cards = indices.map((index, i) => {
    const rollout = page.rollouts[index];
    const heading = h("h3", {}, h("a", { href: `#rollout=${index}` }, titleOf(rollout)));
    return h("article", { class: "card" }, heading, facts(rollout), failureOf(rollout), views[i].element);
  });
  const prompt = tokens[0].texts.slice(0, tokens[0].prompt).map(visible).join("");
  return openedView(
    title,
    title,
    null,
    shared && prompt && h("h4", {}, "Prompt, as the model saw it"),
    shared && prompt && h("div", { class: "text shared" }, prompt),
    quantityChoice(() => views.forEach((view) => view.paint())),
    h("div", { class: "cards" }, cards),
  );
}
