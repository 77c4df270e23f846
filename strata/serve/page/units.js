// Figures as text: one alone, and those beside an axis, which share their unit and their decimals.

const COUNTS = [1, 2, 5, 25].flatMap((digit) => Array.from({ length: 12 }, (_, power) => digit * 10 ** power)).sort((one, other) => one - other);

function decimals(step) {
  return Math.min(6, Number(step.toPrecision(3)).toString().split(".")[1]?.length ?? 0);
}

/** `labels(splits, step)`: the texts of an axis; `steps`: what may lie between two of them, anything where it is missing. */
export const UNITS = {
  tokens: {
    show(value) {
      if (value >= 10_000) return `${(value / 1000).toFixed(value >= 100_000 ? 0 : 1)}k`;
      return Math.round(value).toLocaleString("en");
    },
    steps: COUNTS,
    labels(splits, step) {
      const thousands = splits.at(-1) >= 10_000;
      if (!thousands) return splits.map((value) => value.toLocaleString("en"));
      return splits.map((value) => (value ? `${(value / 1000).toFixed(decimals(step / 1000))}k` : "0"));
    },
  },
  whole: {
    show: (value) => (Number.isInteger(value) ? value.toLocaleString("en") : ""),
    steps: COUNTS,
    labels: (splits) => splits.map((value) => value.toLocaleString("en")),
  },
  seconds: {
    show(value) {
      if (value >= 10) return `${value.toFixed(0)} s`;
      if (value >= 1) return `${value.toFixed(1)} s`;
      const milliseconds = value * 1000;
      return `${milliseconds.toFixed(milliseconds >= 10 || milliseconds === 0 ? 0 : 1)} ms`;
    },
    labels(splits, step) {
      const [scale, unit] = splits.at(-1) >= 1 ? [1, "s"] : [1000, "ms"];
      return splits.map((value) => (value ? `${(value * scale).toFixed(decimals(step * scale))} ${unit}` : "0"));
    },
  },
  share: {
    show: (value) => `${(value * 100).toFixed(0)} %`,
    labels: (splits, step) => splits.map((value) => `${(value * 100).toFixed(decimals(step * 100))} %`),
  },
};
