// How quickly counters grow, from one look to the next.

const KEEP_S = 180;

export class Rates {
  #looks = [];

  // What a run tells of itself.
  look({ at, ingest = {}, pipeline = {} }) {
    this.add(at, {
      received: ingest.received_spans ?? 0,
      requests: Object.values(ingest.requests ?? {}).reduce((a, b) => a + b, 0),
      counted: pipeline.spans ?? 0,
    });
  }

  // A counter that went back was started again: what was seen before says nothing any more.
  add(at, counters) {
    const last = this.#looks.at(-1);
    if (last && at <= last.at) return;
    if (last && Object.entries(counters).some(([name, n]) => n < last.counters[name])) this.#looks = [];
    this.#looks.push({ at, counters });
    while (at - this.#looks[0].at > KEEP_S) this.#looks.shift();
  }

  // Per second, over about the last `window` seconds; null: too early to tell.
  of(name, window) {
    const last = this.#looks.at(-1);
    const first = this.#looks.find((each) => last.at - each.at <= window);
    if (!first || last.at - first.at < 0.5) return null;
    return (last.counters[name] - first.counters[name]) / (last.at - first.at);
  }

  // [times, rates of each name], each over a few looks: what comes in bursts is not to look like a saw.
  lines(windows) {
    const times = this.#looks.map((each) => each.at);
    const series = Object.entries(windows).map(([name, window]) => {
      let begin = 0;
      return this.#looks.map((each, index) => {
        while (each.at - this.#looks[begin].at > window) begin += 1;
        const first = this.#looks[begin];
        return index === begin ? null : Math.max(0, (each.counters[name] - first.counters[name]) / (each.at - first.at));
      });
    });
    return [times, series];
  }
}
