// The data of the page, and the tokens of a rollout, which are unpacked when it is opened.

import type { PageData, Quantity, Rollout } from "./types";

export const page = JSON.parse(document.getElementById("data")!.textContent!) as PageData;

/** The tokens of a rollout; columns have a number for each sampled token. */
export interface Tokens {
  ids: number[];
  texts: string[];
  prompt: number;
  columns: Map<string, Float32Array>;
  others: Record<string, unknown[]>;
}

interface Header {
  ids: number[];
  texts: string[];
  prompt: number;
  columns: string[];
  others: Record<string, unknown[]>;
}

const unpacked = new Map<number, Promise<Tokens>>();

/** Unpacks the tokens of the rollout at an index of `page.rollouts`. */
export function tokensOf(index: number): Promise<Tokens> {
  let tokens = unpacked.get(index);
  if (tokens === undefined) {
    tokens = unpack(index);
    unpacked.set(index, tokens);
  }
  return tokens;
}

async function unpack(index: number): Promise<Tokens> {
  if (document.readyState === "loading") {
    await new Promise((done) => document.addEventListener("DOMContentLoaded", done, { once: true }));
  }
  const packed = Uint8Array.from(atob(document.getElementById(`rollout-${index}`)!.textContent!), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const start = 4 + new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, start))) as Header;
  const count = (bytes.length - start) / 4;
  const plain = new Uint8Array(4 * count);
  for (let byte = 0; byte < 4; byte++) {
    for (let i = 0; i < count; i++) plain[4 * i + byte] = bytes[start + byte * count + i]!;
  }
  const numbers = new Float32Array(plain.buffer);
  const length = header.ids.length - header.prompt;
  const columns = new Map(
    header.columns.map((name, i) => [name, numbers.subarray(i * length, (i + 1) * length)] as const),
  );
  return { ...header, columns };
}

/** The numbers of a quantity, one for each sampled token; null if the rollout has none. */
export function valuesOf(quantity: Quantity, tokens: Tokens, rollout: Rollout): Float32Array | null {
  for (const [first, second] of quantity.difference) {
    const left = tokens.columns.get(first);
    const right = tokens.columns.get(second);
    if (left && right) return left.map((value, i) => value - right[i]!);
  }
  const column = tokens.columns.get(quantity.key);
  if (column) return column;
  if (quantity.key === "policy_version" && rollout.version !== null) {
    return new Float32Array(tokens.ids.length - tokens.prompt).fill(rollout.version);
  }
  return null;
}
