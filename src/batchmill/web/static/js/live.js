// Server-sent events, read with fetch: EventSource cannot send a token.

import { request } from "./api.js";

const SILENCE_MS = 35_000; // the server sends at least a heartbeat every 15 s
const FIRST_MS = 500;
const LONGEST_MS = 15_000;
const DOWN_AFTER_MS = 5000;

// Calls on({kind, data}) for each event, and state({name, since, why}) for each change of state:
//   connecting, live, reconnecting, down, paused, denied (a token is required).
export class LiveStream {
  #on;
  #state;
  #stopped = true;
  #abort = null;
  #wait = null;
  #tries = 0;
  #lostAt = null;

  constructor({ on, state }) {
    this.#on = on;
    this.#state = state;
  }

  start() {
    if (!this.#stopped) return;
    this.#stopped = false;
    this.#tries = 0;
    this.#lostAt = null;
    this.#setState("connecting");
    this.#connect();
  }

  stop() {
    this.#stopped = true;
    clearTimeout(this.#wait);
    this.#abort?.abort();
  }

  pause() {
    if (this.#stopped) return;
    this.stop();
    this.#setState("paused");
  }

  retryNow() {
    if (this.#wait === null) return;
    clearTimeout(this.#wait);
    this.#wait = null;
    this.#connect();
  }

  async #connect() {
    const abort = (this.#abort = new AbortController());
    let silence = setTimeout(() => abort.abort(), SILENCE_MS);
    let why = "the connection was lost";
    try {
      const response = await request("live", {}, { signal: abort.signal, headers: { accept: "text/event-stream" } });
      this.#tries = 0;
      this.#lostAt = null;
      this.#setState("live");
      const parse = parser((event) => this.#on(event));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        clearTimeout(silence);
        silence = setTimeout(() => abort.abort(), SILENCE_MS);
        parse(value);
      }
    } catch (error) {
      if (error.status === 401) {
        this.#stopped = true;
        this.#setState("denied");
      }
      if (error.status) why = error.message;
      else if (error.status === 0) why = "the server does not respond";
    } finally {
      clearTimeout(silence);
    }
    if (!this.#stopped) this.#retryLater(why);
  }

  #retryLater(why) {
    const now = Date.now();
    this.#lostAt ??= now;
    const longest = Math.min(LONGEST_MS, FIRST_MS * 2 ** this.#tries);
    this.#tries += 1;
    // Jitter, so that not all pages reconnect at the same moment.
    const delay = longest * (0.7 + 0.3 * Math.random());
    const name = now - this.#lostAt >= DOWN_AFTER_MS ? "down" : "reconnecting";
    this.#setState(name, { since: this.#lostAt / 1000, why });
    this.#wait = setTimeout(() => {
      this.#wait = null;
      this.#connect();
    }, delay);
  }

  #setState(name, more = {}) {
    this.#state({ name, ...more });
  }
}

// Parses chunks of text into events, by the standard: a field per line, an empty line ends an event.
export function parser(on) {
  let rest = "";
  let kind = "message";
  let data = [];
  return (chunk) => {
    const lines = (rest + chunk).split(/\r\n|\n|\r(?!$)/);
    rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (data.length) on({ kind, data: JSON.parse(data.join("\n")) });
        kind = "message";
        data = [];
      } else if (line.startsWith("event:")) kind = line.slice(6).trim();
      else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
    }
  };
}
