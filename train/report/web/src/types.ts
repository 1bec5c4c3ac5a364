// The data of the page, as train/report/page.py writes it.

export interface Series {
  group: string;
  steps: number[];
  values: (number | null)[];
}

export interface Run {
  name: string;
  metrics: Record<string, Record<string, Series>>;
  config: Record<string, unknown>;
  checkpoints: number[];
  skipped: number[];
  notes: string[];
}

/** What a metric means; code stands between backticks. */
export interface Meaning {
  meaning: string;
  healthy: string;
  sick: string;
}

export interface Quantity {
  key: string;
  label: string;
  unit: string;
  /** Whether colours go from 0 up, or from 0 both ways. */
  scale: "up" | "both";
  /** The number that has the full colour. */
  limit: number;
  /** Columns that it is the difference of; the first pair that a rollout has counts. */
  difference: [string, string][];
}

export interface Rollout {
  run: number;
  step: number;
  group: number | null;
  row: number;
  version: number | null;
  reward: number | null;
  rewards: Record<string, number>;
  finished: boolean | null;
  length: number;
  prompt: string;
  answer: string;
  completion: string;
  /** Mean and largest value, by the key of a quantity. */
  numbers: Record<string, [number | null, number | null]>;
}

export interface Histogram {
  key: string;
  label: string;
  limit: number;
  runs: {
    counts: number[];
    below: number;
    above: number;
    mean: number | null;
    std: number | null;
    largest: number | null;
  }[];
}

export interface ParityField {
  field: string;
  agrees: boolean;
  numbers: number;
  at: number[];
  absolute: number | string;
  relative: number | string;
  bound: number | string;
}

export interface Dump {
  name: string;
  text: string;
  agrees: boolean;
  dtype: string;
  fields: ParityField[];
  findings: {
    field: string;
    causes: { stage: string; name: string; text: string }[][];
    unknown: boolean;
    follows: string | null;
    advice: string | null;
  }[];
  not_compared: Record<string, string>;
  notes: string[];
}

export interface PageData {
  title: string;
  made: string;
  runs: Run[];
  glossary: Record<string, Meaning>;
  quantities: Quantity[];
  rollouts: Rollout[];
  histograms: Histogram[];
  differences: [string, unknown, unknown][];
  dumps: Dump[];
}
