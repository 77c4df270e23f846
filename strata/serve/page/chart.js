// One chart of the live page: series over the last ten minutes, drawn by uPlot in the page's colours.

import { element } from "./dom.js";

const SHORTEST = 60; // seconds that are shown at least
const HEIGHT = 190; // pixels, as in the style sheet

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
   * series: [{name, label, colour, area}]; show: a value as text; most: the top of the scale if it is always the same;
   * least: the least that the top of the scale may be.
   */
  constructor(title, series, { show, most, least = 1 }) {
    this.series = series;
    this.show = show;
    this.range = (_, low, high) => [0, most ?? Math.max(least, (high ?? 0) * 1.12)];
    this.head = element("div", { class: "chart-head" }, element("h2", {}, title));
    this.box = element("div", { class: "plot", role: "img", "aria-label": `${title}, the last ten minutes` });
    this.element = element("section", { class: "chart" }, this.head, this.box);
    new ResizeObserver(() => this.plot?.setSize({ width: this.box.clientWidth, height: HEIGHT })).observe(this.box);
  }

  /** Draw anew with the colours that hold now. */
  restyle(readings) {
    this.plot?.destroy();
    const axis = { stroke: colour("faint"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: '11px Inter, system-ui, sans-serif' };
    const options = {
      width: this.box.clientWidth,
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      cursor: { sync: { key: "live" }, drag: { x: false, y: false }, points: { size: 7 }, y: false },
      legend: { mount: (_, legend) => this.head.append(legend), markers: { width: 0, fill: (plot, at) => plot.series[at].stroke() } },
      scales: { x: { range: (_, low, high) => [Math.min(low ?? 0, (high ?? 0) - SHORTEST), high ?? 0] }, y: { range: this.range } },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 90, values: (_, times) => times.map(clock) },
        { ...axis, size: 58, space: 38, gap: 8, values: (_, values) => values.map(this.show) },
      ],
      series: [{}, ...this.series.map((one) => this.line(one))],
    };
    this.plot = new uPlot(options, this.data(readings), this.box);
    this.update(readings);
  }

  line({ label, colour: name, area }) {
    const stroke = colour(name);
    const fill = area ? stroke.replaceAll(",", "").replace(")", " / 14%)") : undefined;
    return { label, stroke, width: 1.75, fill, points: { show: false }, value: (_, value) => (value === null ? "–" : this.show(value)) };
  }

  update(readings) {
    this.plot.setData(this.data(readings));
    // Without a pointer over a chart the legend tells the newest values.
    if (this.plot.cursor.idx === null || this.plot.cursor.left < 0) this.plot.setLegend({ idx: readings.times.length - 1 });
  }

  data(readings) {
    return [readings.times, ...this.series.map(({ name }) => readings.series[name] ?? [])];
  }
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { timeStyle: "medium", hourCycle: "h23" });
}
