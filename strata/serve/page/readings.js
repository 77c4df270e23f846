// Successive readings of /metrics as series over time: one point a second, the last ten minutes.

import { histogram, mean, parseMetrics, percentile, total } from "./prometheus.js";

const KEY = "strata.readings";
const KEPT = 600; // points, and as many seconds
const PERCENTILE_WINDOW = 10; // seconds
const SHARES = { p50: 0.5, p90: 0.9, p99: 0.99 };

export class Readings {
  constructor() {
    this.times = []; // seconds since 1970, as the charts take them
    this.series = {};
    this.past = []; // readings of the last seconds, for differences
  }

  /** Those of `names` that this tab has kept since it last showed the page, as far as they are not too old, and a gap. */
  static restored(names, at) {
    const readings = new Readings();
    try {
      const { times, series } = JSON.parse(sessionStorage.getItem(KEY));
      if (names.every((name) => series[name].length === times.length)) {
        readings.times = times;
        readings.series = Object.fromEntries(names.map((name) => [name, series[name]]));
        readings.push(at, {});
      }
    } catch {
      // nothing was kept, or not by this version of the page
    }
    return readings;
  }

  /** Keep them while the reader is on another page. */
  keep() {
    try {
      sessionStorage.setItem(KEY, JSON.stringify({ times: this.times, series: this.series }));
    } catch {
      // no room, or nothing is kept at all: the page begins empty
    }
  }

  /** Take in what /metrics answered at `at` (seconds since 1970). Returns the newest point by name. */
  add(text, at) {
    const samples = parseMetrics(text);
    const reading = {
      at,
      generated: total(samples, "strata_generation_tokens_total"),
      prompted: total(samples, "strata_prompt_tokens_total"),
      queries: total(samples, "strata_prefix_cache_queries_total"),
      hits: total(samples, "strata_prefix_cache_hits_total"),
      preemptions: total(samples, "strata_num_preemptions_total"),
      ttft: histogram(samples, "strata_time_to_first_token_seconds"),
      itl: histogram(samples, "strata_inter_token_latency_seconds"),
    };
    const last = this.past.at(-1);
    if (last && reading.generated < last.generated) this.past = []; // started anew, so from zero
    const point = {
      running: total(samples, "strata_num_requests_running"),
      waiting: total(samples, "strata_num_requests_waiting"),
      kv: mean(samples, "strata_kv_cache_usage_perc"),
      hitShare: reading.queries ? reading.hits / reading.queries : null,
      preemptions: reading.preemptions,
      generated: this.rate(reading, "generated"),
      prompted: this.rate(reading, "prompted"),
    };
    this.past = this.past.filter((one) => one.at >= at - PERCENTILE_WINDOW);
    for (const name of ["ttft", "itl"]) {
      for (const [share, q] of Object.entries(SHARES)) {
        point[`${name}_${share}`] = this.past.length ? percentile(q, this.past[0][name], reading[name]) : null;
      }
    }
    this.past.push(reading);
    this.push(at, point);
    return point;
  }

  /** Nothing was read for a while: no line is drawn across, and no difference taken. */
  interrupt(at) {
    if (!this.past.length) return;
    this.past = [];
    this.push(at, {});
  }

  rate(reading, name) {
    const last = this.past.at(-1);
    return last ? (reading[name] - last[name]) / (reading.at - last.at) : null;
  }

  push(at, point) {
    for (const name of new Set([...Object.keys(this.series), ...Object.keys(point)])) {
      this.series[name] ??= this.times.map(() => null);
      this.series[name].push(point[name] ?? null);
    }
    this.times.push(at);
    while (this.times.length > KEPT || this.times[0] < at - KEPT) {
      this.times.shift();
      for (const values of Object.values(this.series)) values.shift();
    }
  }

  /** Where the newest point stands that was read, and is no gap; -1 if there is none. */
  newest() {
    return this.times.findLastIndex((_, at) => Object.values(this.series).some((values) => values[at] !== null));
  }

  /** The highest value there is of a series; null if there is none. */
  peak(name) {
    const values = (this.series[name] ?? []).filter((value) => value !== null);
    return values.length ? Math.max(...values) : null;
  }
}
