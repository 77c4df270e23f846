// One chart of the live page: series over the last ten minutes, drawn by uPlot in the page's colours.

import { element } from "./dom.js";

const SHORTEST = 10; // seconds that are shown at least, so that there is something to see soon
const HEIGHT = 190; // pixels, as in the style sheet
const HALF_A_CLOCK = 28; // pixels: a label at the right end stands half beyond it

/** What a style variable is as a colour: canvases know no variables. */
function colour(name) {
  const probe = element("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export class Chart {
  /**
   * series: [{name, label, colour, area}]; unit: of `UNITS`; most: the top of the scale if it is always the same; least:
   * the least that the top of the scale may be; none: said where there is nothing to draw yet.
   */
  constructor(title, series, { unit, most, least = 1, none = "Nothing yet" }) {
    this.series = series;
    this.unit = unit;
    this.none = none;
    this.range = (_, low, high) => [0, most ?? Math.max(least, (high ?? 0) * 1.12)];
    this.head = element("div", { class: "chart-head" }, element("h2", {}, title));
    this.box = element("div", { class: "plot", role: "img", "aria-label": `${title}, the last ten minutes` });
    this.nothing = element("p", { class: "nothing" });
    this.element = element("section", { class: "chart" }, this.head, element("div", { class: "plot-frame" }, this.box, this.nothing));
    new ResizeObserver(() => this.plot?.setSize({ width: this.box.clientWidth, height: HEIGHT })).observe(this.box);
  }

  /** Draw anew with the colours that hold now. */
  restyle(readings) {
    this.plot?.destroy();
    const axis = { stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: '11px Inter, system-ui, sans-serif' };
    const options = {
      width: this.box.clientWidth,
      height: HEIGHT,
      padding: [8, HALF_A_CLOCK, 0, 0],
      cursor: { sync: { key: "live" }, drag: { x: false, y: false }, points: { size: 7 }, y: false },
      legend: { mount: (_, legend) => this.head.append(legend), markers: { width: 0, fill: (plot, at) => plot.series[at].stroke() } },
      scales: { x: { range: (_, low, high) => [low ?? 0, Math.max(high ?? 0, (low ?? 0) + SHORTEST)] }, y: { range: this.range } },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 90, values: (_, times) => times.map(clock) },
        { ...axis, size: 62, space: 38, gap: 8, incrs: this.unit.steps, values: (_, splits, _axis, _space, step) => this.unit.labels(splits, step) },
      ],
      series: [{}, ...this.series.map((one) => this.line(one))],
      hooks: { ready: [() => this.tellNewest(readings)] },
    };
    this.plot = new uPlot(options, this.data(readings), this.box);
    this.update(readings);
  }

  line({ label, colour: name, area }) {
    const stroke = colour(name);
    const fill = area ? stroke.replaceAll(",", "").replace(")", " / 14%)") : undefined;
    return { label, stroke, width: 1.75, fill, points: { show: false }, value: (_, value) => (value === null || value === undefined ? "–" : this.unit.show(value)) };
  }

  update(readings) {
    this.plot.setData(this.data(readings));
    this.tellNewest(readings);
    const drawn = this.series.some(({ name }) => readings.series[name]?.some((value) => value !== null));
    this.nothing.textContent = readings.times.length < 2 ? "Reading…" : this.none;
    this.nothing.hidden = drawn && readings.times.length > 1;
  }

  /** Without a pointer over a chart the legend tells the newest values. */
  tellNewest(readings) {
    if (!(this.plot.cursor.left >= 0)) this.plot.setLegend({ idx: readings.newest() });
  }

  data(readings) {
    return [readings.times, ...this.series.map(({ name }) => readings.series[name] ?? [])];
  }
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { timeStyle: "medium", hourCycle: "h23" });
}
