// The frame: which page is shown, when its data is asked for again, and what is wrong meanwhile.

import { get, token } from "./api.js";
import { redrawCharts } from "./charts.js";
import { setAttribute, setText } from "./dom.js";
import { moment, sentence, zone } from "./format.js";
import { LiveStream } from "./live.js";
import { Notices } from "./notices.js";
import { overview } from "./pages/overview.js";
import { pipeline } from "./pages/pipeline.js";
import { service } from "./pages/service.js";
import { askToken, failure, unknownPage } from "./pages/states.js";
import { topology } from "./pages/topology.js";
import { Rates } from "./pipeline/rates.js";
import { format, kept, parse } from "./route.js";
import { startTheme } from "./theme.js";

const PAGES = { services: overview, service, topology, pipeline };
const GAP_MS = 2000; // between two times of asking, however quickly commits come
const HIDDEN_MS = 30_000;
const IDLE_MS = 30_000; // without any news, time goes on and so does the range

const main = document.getElementById("main");
const notices = new Notices(document.getElementById("notices"));
const run = { status: null, pipeline: null, commit: null, rates: new Rates() };

let page = null; // what is shown: {element, title, load(signal), show(data), pipeline?(run), destroy?()}
let where = parse(location.hash);
let shownAt = null; // when the page's data came
let said = ""; // which failure stands in the page's place
let asking = null;
let again = false;
let askedAt = 0;
let timer = null;

// ---- the page and its data

function go(next) {
  const hash = format(next);
  if (hash === location.hash) follow();
  else location.hash = hash;
}

// The same page with other parameters: the address follows, nothing is built anew.
function amend(change) {
  change(where.query);
  history.replaceState(null, "", format(where));
  links();
  refresh(true);
}

function follow() {
  if (!location.hash.startsWith("#/") && location.hash !== "") return; // the skip link's
  const before = where;
  where = parse(location.hash);
  links();
  if (page && before.page === where.page && before.argument === where.argument && page.reads) {
    page.reads(where.query);
    refresh(true);
    return;
  }
  open(before.page !== where.page || before.argument !== where.argument);
}

function open(moved) {
  asking?.abort();
  asking = null;
  clearTimeout(timer);
  timer = null;
  page?.destroy?.();
  notices.clear("data");
  shownAt = null;
  said = "";
  const make = PAGES[where.page];
  page = make ? make({ query: where.query, argument: where.argument, amend, run, go }) : unknownPage(where.page);
  main.replaceChildren(page.element);
  document.title = `${page.title} · batchmill`;
  if (run.pipeline) page.pipeline?.(run);
  if (moved) {
    window.scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  refresh(true);
}

function links() {
  for (const anchor of document.querySelectorAll(".nav a")) {
    const name = anchor.dataset.page;
    setAttribute(anchor, "href", format({ page: name, query: kept(where.query) }));
    const current = name === where.page || (name === "services" && where.page === "service");
    setAttribute(anchor, "aria-current", current ? "page" : null);
  }
}

// Ask for the page's data: at once, or as soon as the last time is long enough ago.
function refresh(now = false) {
  if (!page?.load) return;
  if (document.hidden && !now) return;
  if (now) {
    asking?.abort();
    asking = null; // so that its end does not concern us any more
  } else if (asking) {
    again = true;
    return;
  }
  clearTimeout(timer);
  const wait = now ? 0 : Math.max(0, askedAt + GAP_MS - Date.now());
  timer = setTimeout(load, wait);
}

async function load() {
  const mine = page;
  const abort = (asking = new AbortController());
  askedAt = Date.now();
  again = false;
  setAttribute(main, "aria-busy", shownAt === null ? "true" : null);
  try {
    const data = await mine.load(abort.signal);
    if (abort.signal.aborted || mine !== page) return;
    said = "";
    shownAt = Date.now();
    if (mine.element !== main.firstChild) main.replaceChildren(mine.element);
    mine.show(data);
    if (mine.title) document.title = `${mine.title} · batchmill`;
    notices.clear("data");
  } catch (error) {
    if (error.name === "AbortError" || mine !== page) return;
    if (error.status === 401) return denied();
    if (error.status === undefined) throw error; // a fault of ours: the console tells
    failed(error);
  } finally {
    if (asking === abort) {
      asking = null;
      setAttribute(main, "aria-busy", null);
      clearTimeout(timer);
      timer = null;
      if (again) refresh();
      else timer = setTimeout(() => refresh(), shownAt === null ? 5000 : IDLE_MS);
    }
  }
}

function failed(error) {
  if (shownAt !== null && error.status !== 404) {
    if (error.gone) return; // the notice about the server says so
    notices.set("data", `${sentence(error.message)} ${asOf()}`, { bad: true, action: ["Try again", () => refresh(true)] });
    return;
  }
  shownAt = null;
  const text = `${where.page} ${error.status} ${error.message}`;
  if (text === said) return; // nobody wants to hear it again each time
  said = text;
  main.replaceChildren(failure(error, where, () => refresh(true)));
}

const asOf = () => (shownAt === null ? "" : `What you see is of ${moment(shownAt / 1000, true)}.`);

function denied() {
  const wrong = token.get() !== null;
  token.set(null);
  stream.stop();
  asking?.abort();
  page?.destroy?.();
  page = null;
  document.getElementById("forget").hidden = true;
  showLive({ name: "denied" });
  document.title = "Token · batchmill";
  main.replaceChildren(
    askToken(wrong, (given) => {
      token.set(given);
      begin();
    }),
  );
  main.querySelector("input:not([hidden])").focus();
}

// ---- live

const stream = new LiveStream({
  on({ kind, data }) {
    if (kind === "pipeline") {
      run.pipeline = data;
      run.rates.look(data);
      page?.pipeline?.(run);
      health(data);
    } else if (kind === "commit") {
      const known = JSON.stringify(run.commit);
      run.commit = data;
      if (known !== JSON.stringify(data)) refresh();
    } else if (kind === "store") {
      // A page that has nothing to show says why itself.
      if (data.ok || shownAt === null) notices.clear("store");
      else notices.set("store", sentence(data.fault), { bad: true });
    }
  },
  state: showLive,
});

function showLive(state) {
  const element = document.getElementById("live");
  const text = document.getElementById("live-text");
  const before = element.dataset.state;
  setAttribute(element, "data-state", state.name);
  setAttribute(element, "title", state.why ?? null);
  if (state.name === "live") {
    setText(text, "Live");
    notices.clear("server");
    if (["reconnecting", "down", "paused"].includes(before)) {
      run.commit = null; // something may have been missed
      refresh();
      tellVersion();
    }
  } else if (state.name === "reconnecting") {
    setText(text, "Reconnecting");
  } else if (state.name === "down") {
    setText(text, `Down since ${moment(state.since, true)}`);
    notices.set("server", `Not live since ${moment(state.since, true)}: ${state.why}. ${asOf()} It is tried again by itself.`, {
      bad: true,
      action: ["Try now", () => stream.retryNow()],
    });
    refresh();
  } else setText(text, { denied: "Token needed", paused: "Paused" }[state.name] ?? "Connecting");
}

function health(state) {
  if (state.health && state.health !== "healthy" && where.page !== "pipeline") {
    notices.set("health", `The run is ${state.health}: ${(state.reasons ?? []).join("; ")}.`, {
      bad: state.health === "down",
      action: ["Look", () => go({ page: "pipeline", query: kept(where.query) })],
    });
  } else notices.clear("health");
}

async function tellVersion() {
  try {
    run.status = await get("status");
    setText(document.getElementById("foot-version"), `batchmill ${run.status.version}`);
  } catch {
    // The page's own question says what is wrong.
  }
}

// ---- begin

function begin() {
  document.getElementById("forget").hidden = token.get() === null;
  stream.stop();
  stream.start();
  links();
  open(false);
  tellVersion();
}

startTheme(document.getElementById("theme"), redrawCharts);
setText(document.getElementById("foot-zone"), `Times are local, ${zone()}; UTC is shown when you point at one.`);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.getElementById("forget").addEventListener("click", () => {
  token.set(null);
  begin();
});
window.addEventListener("hashchange", () => {
  if (page) follow();
});
// A browser has few connections to a server: a page that nobody looks at gives its own back.
let hiding = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (!page) return;
  if (document.hidden) hiding = setTimeout(() => stream.pause(), HIDDEN_MS);
  else {
    stream.start();
    refresh();
  }
});
begin();
