// Numbers as text.

/** Four significant digits, for tables and axes. */
export function short(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return String(value);
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(4)));
  return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
}

/** The shortest text that is this float32 and no other. */
export function exact(value: number): string {
  if (!Number.isFinite(value)) return String(value);
  for (let digits = 1; digits <= 9; digits++) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return String(value);
}

/** A value of a config. */
export function plain(value: unknown): string {
  return value === null || value === undefined ? "null" : typeof value === "string" ? value : JSON.stringify(value);
}
