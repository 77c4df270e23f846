// The live page: reads /metrics once a second while it is seen, and draws what has come.

import { request, servedModel } from "./api.js";
import { Chart } from "./chart.js";
import { dress, element, icon } from "./dom.js";
import { parseMetrics } from "./prometheus.js";
import { Readings } from "./readings.js";
import { UNITS } from "./units.js";
import { readVerdict } from "./verdict.js";

const EVERY = 1000; // milliseconds

const { tokens, seconds, share, whole } = UNITS;

const CHARTS = [
  new Chart("Tokens per second", [
    { name: "generated", label: "generated", colour: "accent", area: true },
    { name: "prompted", label: "prompt", colour: "slate" },
  ], { unit: tokens, least: 10 }),
  new Chart("Sequences", [
    { name: "running", label: "running", colour: "moss", area: true },
    { name: "waiting", label: "waiting", colour: "ochre", area: true },
  ], { unit: whole, least: 4 }),
  new Chart("Time to first token", percentiles("ttft"), { unit: seconds, least: 0.01, none: "No reply so far" }),
  new Chart("Between tokens", percentiles("itl"), { unit: seconds, least: 0.001, none: "No reply so far" }),
  new Chart("KV cache in use", [{ name: "kv", label: "of the pages", colour: "slate", area: true }], { unit: share, most: 1 }),
  new Chart("Prompt tokens found in the prefix cache", [
    { name: "hitShare", label: "since the start", colour: "moss", area: true },
  ], { unit: share, most: 1, none: "No prompt so far" }),
];

function percentiles(name) {
  return [
    { name: `${name}_p99`, label: "p99", colour: "accent" },
    { name: `${name}_p90`, label: "p90", colour: "ochre" },
    { name: `${name}_p50`, label: "p50", colour: "slate" },
  ];
}

/** [label, what to show, what to show below it]; each is given the newest point and all readings. */
const TILES = [
  ["Generated", ({ generated }) => [tokens.show(generated), "tokens/s"], (_, readings) => `most ${tokens.show(readings.peak("generated"))}`],
  ["Running", ({ running }) => [whole.show(running)], (_, readings) => `most ${whole.show(readings.peak("running"))}`],
  ["Waiting", ({ waiting }) => [whole.show(waiting)], ({ preemptions }) => `${whole.show(preemptions)} preemptions`],
  ["KV cache", ({ kv }) => share.show(kv).split(" "), (_, readings) => `most ${share.show(readings.peak("kv"))}`],
  ["First token", ({ ttft_p50 }) => seconds.show(ttft_p50).split(" "), ({ ttft_p99 }) => `p99 ${seconds.show(ttft_p99)}`],
  ["Between tokens", ({ itl_p50 }) => seconds.show(itl_p50).split(" "), ({ itl_p99 }) => `p99 ${seconds.show(itl_p99)}`],
];
const SERIES = CHARTS.flatMap(({ series }) => series.map(({ name }) => name));
const NEEDED = ["generated", "running", "waiting", "kv", "ttft_p50", "itl_p50"]; // no tile without its value

class Live {
  constructor() {
    this.readings = Readings.restored(SERIES, Date.now() / 1000);
    addEventListener("pagehide", () => this.readings.keep());
    this.state = document.getElementById("state");
    this.fault = document.getElementById("fault");
    this.button = document.getElementById("pause");
    this.tiles = document.getElementById("tiles");
    this.verdict = document.getElementById("verdict");
    this.paused = false;
    document.getElementById("charts").append(...CHARTS.map((chart) => chart.element));
    this.restyle();
    document.addEventListener("themechange", () => this.restyle());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.restyle());
    document.addEventListener("visibilitychange", () => this.schedule());
    this.button.addEventListener("click", () => {
      this.paused = !this.paused;
      this.schedule();
    });
    this.showTiles(null);
    this.showVerdict(new Map());
    this.schedule();
    servedModel().then(({ id }) => (document.getElementById("model").textContent = id), () => {});
  }

  restyle() {
    for (const chart of CHARTS) chart.restyle(this.readings);
  }

  /** Whether the page is seen and not paused. */
  get reads() {
    return !this.paused && !document.hidden;
  }

  /** Read on, or leave a gap. */
  schedule() {
    clearInterval(this.timer);
    if (this.reads) {
      this.timer = setInterval(() => this.read(), EVERY);
      this.read();
    } else {
      this.readings.interrupt(Date.now() / 1000);
    }
    this.say(this.reads ? "Live" : "Paused", this.reads);
    this.button.replaceChildren(icon(this.paused ? "play" : "pause"), this.paused ? "Go on" : "Pause");
    this.button.setAttribute("aria-pressed", this.paused);
  }

  async read() {
    if (this.reading) return; // the last answer is not there yet
    this.reading = true;
    try {
      const text = await (await request("/metrics")).text();
      if (!this.reads) return; // paused meanwhile
      const point = this.readings.add(text, Date.now() / 1000);
      this.fault.hidden = true;
      this.say("Live", true);
      this.showTiles(point);
      this.showVerdict(parseMetrics(text));
    } catch (error) {
      if (!this.reads) return;
      this.readings.interrupt(Date.now() / 1000);
      this.fault.replaceChildren(error.status === 401 ? "The server asks for a key: enter it in the chat's settings, in this tab." : error.message);
      this.fault.hidden = false;
      this.say("Trying again every second", false);
    } finally {
      this.reading = false;
    }
    for (const chart of CHARTS) chart.update(this.readings);
  }

  say(text, isReading) {
    this.state.textContent = text;
    this.state.classList.toggle("reading", isReading);
  }

  showVerdict(samples) {
    const { finding, text, floor, beside } = readVerdict(samples);
    this.verdict.dataset.finding = finding ?? "";
    this.verdict.replaceChildren(
      element("p", { class: "said" }, text),
      element("p", { class: "floor" }, element("b", {}, floor), " of the floor"),
      ...(beside ? [element("p", { class: "beside" }, beside)] : []),
    );
  }

  showTiles(point) {
    const tiles = TILES.map(([label, show, beside], at) => {
      const known = point !== null && typeof point[NEEDED[at]] === "number";
      const [value, unit] = known ? show(point, this.readings) : ["–"];
      return element(
        "div",
        { class: "tile" },
        element("dt", {}, label),
        element("dd", { class: "value" }, value, ...(unit ? [" ", element("span", { class: "unit" }, unit)] : [])),
        element("dd", { class: "beside" }, known ? beside(point, this.readings) : "nothing yet"),
      );
    });
    this.tiles.replaceChildren(...tiles);
  }
}

dress();
new Live();
