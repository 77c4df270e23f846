// Prometheus' text format, read; percentiles of what a histogram counted between two readings.

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Samples by name: a list of {labels, value} each. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (!match) continue;
    const [, name, labels, value] = match;
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels: parseLabels(labels ?? ""), value: parseNumber(value) });
  }
  return samples;
}

function parseLabels(text) {
  return Object.fromEntries([...text.matchAll(LABEL)].map(([, name, value]) => [name, value.replace(/\\(.)/g, "$1")]));
}

function parseNumber(text) {
  if (text === "+Inf") return Infinity;
  return text === "-Inf" ? -Infinity : Number(text);
}

/** The sum of all samples of a name; null if there is none. */
export function total(samples, name) {
  const found = samples.get(name);
  return found ? found.reduce((sum, { value }) => sum + value, 0) : null;
}

/** The mean of all samples of a name, such as the shares of several engines; null if there is none. */
export function mean(samples, name) {
  const found = samples.get(name);
  return found ? total(samples, name) / found.length : null;
}

/** {bounds, counts}: observations up to each bound, the last of which is infinite. */
export function histogram(samples, name) {
  const buckets = (samples.get(`${name}_bucket`) ?? []).map(({ labels, value }) => [parseNumber(labels.le), value]);
  buckets.sort(([one], [other]) => one - other);
  return { bounds: buckets.map(([bound]) => bound), counts: buckets.map(([, count]) => count) };
}

/**
 * The share `q` of the observations made between two readings is at most this; within a bucket they are taken to lie
 * evenly. Null if there were none, or if the server was started anew in between.
 */
export function percentile(q, before, after) {
  const counts = after.counts.map((count, at) => count - (before.counts[at] ?? 0));
  const all = counts.at(-1);
  if (!(all > 0) || counts.some((count) => count < 0)) return null;
  const at = counts.findIndex((count) => count >= q * all);
  const low = at ? after.bounds[at - 1] : 0;
  const below = at ? counts[at - 1] : 0;
  if (after.bounds[at] === Infinity) return low;
  return low + ((after.bounds[at] - low) * (q * all - below)) / (counts[at] - below);
}
