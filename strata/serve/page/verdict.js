// What holds the engine back, in a sentence, from the series that /metrics tells it with.

import { mean } from "./prometheus.js";
import { UNITS } from "./units.js";

const SENTENCES = {
  "host gaps": "the device waits for the host between steps",
  "grammar masks": "steps wait for the masks of grammars",
  launches: "the host launches steps kernel by kernel",
  recomputation: "sequences whose pages were taken are computed again",
  compilation: "a kernel was compiled while requests waited",
  "KV pages": "requests wait for KV pages",
  slots: "requests wait for slots: as many run as may run at once",
  prompts: "requests wait behind prompts that fill the steps",
  "slow steps": "steps are far from their floor",
  "near the floor": "steps are near their floor",
  working: "nothing is found; how long steps could take is not known here",
};

/** {finding, text, floor, beside}: strings to show; of several engines the verdict of the first that has one. */
export function readVerdict(samples) {
  const found = samples.get("strata_verdict")?.[0]?.labels;
  if (!found) return { finding: null, text: "The engine rests", floor: "–", beside: "" };
  const floor = mean(samples, "strata_step_floor_share");
  const predicted = mean(samples, "strata_step_predicted_ratio");
  const gap = mean(samples, "strata_step_gap_share");
  const beside = [
    gap === null ? null : `${UNITS.share.show(gap)} of the time the device waits for the host`,
    predicted === null ? null : `steps were predicted to take ${UNITS.share.show(predicted)} of what they take`,
  ];
  return {
    finding: found.finding,
    text: `${capital(found.layer)}: ${SENTENCES[found.finding] ?? found.finding} (${found.cause})`,
    floor: floor === null ? "–" : UNITS.share.show(floor),
    beside: beside.filter((one) => one !== null).join("; "),
  };
}

function capital(word) {
  return word.charAt(0).toUpperCase() + word.slice(1);
}
