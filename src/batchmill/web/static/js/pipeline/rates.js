// Rates of counters, from samples of the status.

const KEEP_S = 180;

export class Rates {
  #samples = [];

  // Adds a sample from the status of a run.
  record({ at, ingest = {}, pipeline = {} }) {
    this.add(at, {
      received: ingest.received_spans ?? 0,
      requests: Object.values(ingest.requests ?? {}).reduce((a, b) => a + b, 0),
      counted: pipeline.spans ?? 0,
    });
  }

  // A counter that decreased was restarted: older samples are useless.
  add(at, counters) {
    const last = this.#samples.at(-1);
    if (last && at <= last.at) return;
    if (last && Object.entries(counters).some(([name, n]) => n < last.counters[name])) this.#samples = [];
    this.#samples.push({ at, counters });
    while (at - this.#samples[0].at > KEEP_S) this.#samples.shift();
  }

  // Per second, over about the last `window` seconds; null if there are too few samples.
  of(name, window) {
    const last = this.#samples.at(-1);
    const first = this.#samples.find((sample) => last.at - sample.at <= window);
    if (!first || last.at - first.at < 0.5) return null;
    return (last.counters[name] - first.counters[name]) / (last.at - first.at);
  }

  // [times, rates of each name], smoothed over `window` seconds, because batches come in bursts.
  lines(windows) {
    const times = this.#samples.map((sample) => sample.at);
    const series = Object.entries(windows).map(([name, window]) => {
      let begin = 0;
      return this.#samples.map((sample, index) => {
        while (sample.at - this.#samples[begin].at > window) begin += 1;
        const first = this.#samples[begin];
        return index === begin ? null : Math.max(0, (sample.counters[name] - first.counters[name]) / (sample.at - first.at));
      });
    });
    return [times, series];
  }
}
