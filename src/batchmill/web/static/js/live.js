// Server-sent events, read with fetch: EventSource cannot send a token.

import { ask } from "./api.js";

const SILENCE_MS = 35_000; // the server says something each 15 s, if only that it is there
const FIRST_MS = 500;
const LONGEST_MS = 15_000;
const DOWN_AFTER_MS = 5000;

// Calls on({kind, data}) for each event, and state({name, since, why}) for each change of
//   connecting, live, reconnecting, down, paused, denied (a token is needed).
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
    this.#tell("connecting");
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
    this.#tell("paused");
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
      const response = await ask("live", {}, { signal: abort.signal, headers: { accept: "text/event-stream" } });
      this.#tries = 0;
      this.#lostAt = null;
      this.#tell("live");
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
        this.#tell("denied");
      }
      if (error.status) why = error.message;
      else if (error.status === 0) why = "the server does not answer";
    } finally {
      clearTimeout(silence);
    }
    if (!this.#stopped) this.#later(why);
  }

  #later(why) {
    const now = Date.now();
    this.#lostAt ??= now;
    const longest = Math.min(LONGEST_MS, FIRST_MS * 2 ** this.#tries);
    this.#tries += 1;
    // Not all pages at the same moment, when a server is back.
    const delay = longest * (0.7 + 0.3 * Math.random());
    const name = now - this.#lostAt >= DOWN_AFTER_MS ? "down" : "reconnecting";
    this.#tell(name, { since: this.#lostAt / 1000, why });
    this.#wait = setTimeout(() => {
      this.#wait = null;
      this.#connect();
    }, delay);
  }

  #tell(name, more = {}) {
    this.#state({ name, ...more });
  }
}

// Text in pieces to events, as the standard has it: fields in lines, an empty line ends an event.
export function parser(on) {
  let rest = "";
  let kind = "message";
  let data = [];
  return (piece) => {
    const lines = (rest + piece).split(/\r\n|\n|\r(?!$)/);
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
