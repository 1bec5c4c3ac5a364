// Filters of the table: words, and comparisons such as ">0.5", "<=2", "3..5" or "=1".

const COMPARISON = /^(<=|>=|<|>|=)?\s*(-?[\d.]+(?:e[+-]?\d+)?)$/i;
const RANGE = /^(-?[\d.]+(?:e[+-]?\d+)?)\s*\.\.\s*(-?[\d.]+(?:e[+-]?\d+)?)$/i;

/** Whether a number passes a filter; null if the filter is not understood. */
export function numberTest(filter: string): ((value: number | null) => boolean) | null {
  const text = filter.trim();
  const range = RANGE.exec(text);
  if (range) {
    const [low, high] = [Number(range[1]), Number(range[2])];
    return (value) => value !== null && value >= low && value <= high;
  }
  const comparison = COMPARISON.exec(text);
  if (!comparison) return null;
  const limit = Number(comparison[2]);
  const tests: Record<string, (value: number) => boolean> = {
    "<": (value) => value < limit,
    "<=": (value) => value <= limit,
    ">": (value) => value > limit,
    ">=": (value) => value >= limit,
    "=": (value) => value === limit,
  };
  const test = tests[comparison[1] ?? "="]!;
  return (value) => value !== null && test(value);
}
