// The data of the page, as train/report/page.py writes it, and the tokens of rollouts, unpacked when one is opened.

/**
 * The points of a metric.
 * @typedef {{group: string, steps: number[], values: (number|null)[]}} Series
 *
 * @typedef {object} Run
 * @property {string} name
 * @property {Record<string, Record<string, Series>>} metrics by phase and name
 * @property {Record<string, unknown>} config
 * @property {number[]} checkpoints
 * @property {number[]} skipped steps with a skipped update
 * @property {Record<string, number>} failed episodes of all steps that the world failed, by the name of the failure
 * @property {string[]} notes
 *
 * A number of each sampled token.
 * @typedef {object} Quantity
 * @property {string} key
 * @property {string} label
 * @property {string} unit
 * @property {"up"|"both"} scale whether colours go from 0 up, or from 0 both ways
 * @property {number} limit the number that has the full colour
 * @property {[string, string][]} difference columns that it is the difference of; the first pair that is there counts
 *
 * @typedef {object} Rollout
 * @property {number} run
 * @property {number} step
 * @property {number|null} group
 * @property {number} row
 * @property {number|null} version
 * @property {number|null} reward
 * @property {Record<string, number|null>} rewards
 * @property {boolean|null} finished
 * @property {number|null} episode the row that it forked from, -1 for none; null: it is an episode
 * @property {{of: "world"|"policy", name: string, text: string}|null} failure of its episode
 * @property {number} length
 * @property {string} prompt
 * @property {string} answer
 * @property {string} completion
 * @property {Record<string, [mean: number|null, largest: number|null]>} numbers by the key of a quantity
 *
 * Columns have a number for each sampled token.
 * @typedef {object} Tokens
 * @property {number[]} ids
 * @property {string[]} texts
 * @property {number} prompt its length
 * @property {number[]|null} sampled for each token after the prompt 1, or 0 of an observation; null: all were sampled
 * @property {Map<string, Float32Array>} columns
 * @property {Record<string, unknown[]>} others
 */

const page = JSON.parse(document.getElementById("data").textContent);

/** @type {Map<number, Promise<Tokens>>} */
const unpacked = new Map();

/** The tokens of the rollout at an index of `page.rollouts`. */
function tokensOf(index) {
  if (!unpacked.has(index)) unpacked.set(index, unpack(index));
  return unpacked.get(index);
}

/** Reads a header in JSON, and the columns as float32, whose bytes of equal weight lie together. */
async function unpack(index) {
  if (document.readyState === "loading") {
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  }
  const packed = Uint8Array.from(atob(document.getElementById(`rollout-${index}`).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const start = 4 + new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, start)));
  const count = (bytes.length - start) / 4;
  const plain = new Uint8Array(4 * count);
  for (let byte = 0; byte < 4; byte++) {
    for (let i = 0; i < count; i++) plain[4 * i + byte] = bytes[start + byte * count + i];
  }
  const numbers = new Float32Array(plain.buffer);
  const length = header.ids.length - header.prompt;
  const columns = header.columns.map((name, i) => [name, numbers.subarray(i * length, (i + 1) * length)]);
  return { ...header, columns: new Map(columns) };
}

/**
 * The numbers of a quantity, one for each sampled token; null if the rollout has none.
 *
 * @param {Quantity} quantity
 * @param {Rollout} rollout
 * @param {Tokens} tokens
 * @returns {Float32Array|null}
 */
function valuesOf(quantity, rollout, tokens) {
  for (const [first, second] of quantity.difference) {
    const [left, right] = [tokens.columns.get(first), tokens.columns.get(second)];
    if (left && right) return left.map((value, i) => value - right[i]);
  }
  const column = tokens.columns.get(quantity.key);
  if (column) return column;
  if (quantity.key === "policy_version" && rollout.version !== null) {
    return new Float32Array(tokens.ids.length - tokens.prompt).fill(rollout.version);
  }
  return null;
}
