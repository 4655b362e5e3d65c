// The frame: which page is shown, when its data is requested, and notices about faults.

import { get, token } from "./api.js";
import { redrawCharts } from "./charts.js";
import { setAttribute, setText } from "./dom.js";
import { moment, sentence, zone } from "./format.js";
import { LiveStream } from "./live.js";
import { Notices } from "./notices.js";
import { alerts } from "./pages/alerts.js";
import { entity } from "./pages/entity.js";
import { explore } from "./pages/explore.js";
import { overview } from "./pages/overview.js";
import { pipeline } from "./pages/pipeline.js";
import { tokenForm, failure, unknownPage } from "./pages/states.js";
import { topology } from "./pages/topology.js";
import { trace } from "./pages/trace.js";
import { traces } from "./pages/traces.js";
import { Rates } from "./pipeline/rates.js";
import { KINDS, format, kept, parse } from "./route.js";
import { startTheme } from "./theme.js";

const PAGES = { services: overview, topology, explore, traces, trace, alerts, pipeline, ...Object.fromEntries(Object.keys(KINDS).map((name) => [name, entity])) };
const GAP_MS = 2000; // between two requests, however fast commits come
const HIDDEN_MS = 30_000;
const IDLE_MS = 30_000; // without events, because the range moves with the time

const main = document.getElementById("main");
const notices = new Notices(document.getElementById("notices"));
const run = { status: null, pipeline: null, commit: null, rates: new Rates() };

// The current page: {element, title, load(signal), show(data), pipeline?(run), destroy?(), waits?()}.
// waits(): whether its data may still come or change; else it is requested by the user only.
let page = null;
let route = parse(location.hash);
let shownAt = null; // when the page's data arrived
let shownFailure = ""; // the failure that is shown instead of the page
let lastFailure = null;
let pending = null; // the AbortController of the request in progress
let again = false; // whether to request once more after it
let requestedAt = 0;
let timer = null;
let returnTo = null; // where Back, Forward or a reload has to scroll to, until the data is shown

// ---- the page and its data

function go(next) {
  keepScroll();
  const hash = format(next);
  if (hash === location.hash) follow();
  else location.hash = hash;
}

// The same page with other parameters: changes the address without building the page again.
// Each choice is an entry of the history, what is typed letter by letter replaces the last one.
function amend(change, { replace = false } = {}) {
  keepScroll();
  change(route.query);
  const hash = format(route);
  if (hash !== location.hash) history[replace ? "replaceState" : "pushState"](history.state, "", hash);
  page.reads?.(route.query);
  links();
  refresh(true);
}

function follow() {
  if (!location.hash.startsWith("#/") && location.hash !== "") return; // the skip link
  const before = route;
  route = parse(location.hash);
  links();
  if (page && before.page === route.page && before.argument === route.argument && page.reads) {
    page.reads(route.query);
    scrollBack();
    refresh(true);
    return;
  }
  open(before.page !== route.page || before.argument !== route.argument);
}

function open(moved) {
  pending?.abort();
  pending = null;
  clearTimeout(timer);
  timer = null;
  page?.destroy?.();
  notices.clear("data");
  shownAt = null;
  shownFailure = "";
  lastFailure = null;
  const make = PAGES[route.page];
  page = make ? make({ page: route.page, query: route.query, argument: route.argument, amend, run, go }) : unknownPage(route.page);
  main.replaceChildren(page.element);
  document.title = `${page.title} · batchmill`;
  if (run.pipeline) page.pipeline?.(run);
  if (moved) {
    window.scrollTo(0, 0);
    scrollBack();
    main.focus({ preventScroll: true });
  }
  refresh(true);
}

// Where one has scrolled to is kept with the entry of the history.
function keepScroll() {
  clearTimeout(scrolled);
  if (returnTo !== null) return; // not there yet
  if (history.state?.scroll !== window.scrollY) history.replaceState({ scroll: window.scrollY }, "");
}

function scrollBack() {
  if (returnTo !== null) window.scrollTo(0, returnTo);
}

function links() {
  for (const anchor of document.querySelectorAll(".nav a")) {
    const name = anchor.dataset.page;
    setAttribute(anchor, "href", format({ page: name, query: kept(route.query) }));
    const current = name === route.page || (name === "services" && route.page in KINDS) || (name === "traces" && route.page === "trace");
    setAttribute(anchor, "aria-current", current ? "page" : null);
  }
}

// Requests the page's data: at once, or when GAP_MS have passed since the last request.
function refresh(now = false) {
  if (!page?.load) return;
  if (document.hidden && !now) return;
  if (!now && page.waits?.() === false) {
    if (lastFailure !== null) failed(lastFailure); // it says that nothing is requested any more
    return;
  }
  if (now) {
    pending?.abort();
    pending = null; // so that its end is ignored
  } else if (pending) {
    again = true;
    return;
  }
  clearTimeout(timer);
  const wait = now ? 0 : Math.max(0, requestedAt + GAP_MS - Date.now());
  timer = setTimeout(load, wait);
}

async function load() {
  const mine = page;
  const abort = (pending = new AbortController());
  requestedAt = Date.now();
  again = false;
  setAttribute(main, "aria-busy", shownAt === null ? "true" : null);
  try {
    const data = await mine.load(abort.signal);
    if (abort.signal.aborted || mine !== page) return;
    shownFailure = "";
    lastFailure = null;
    shownAt = Date.now();
    if (mine.element !== main.firstChild) main.replaceChildren(mine.element);
    mine.show(data);
    scrollBack();
    returnTo = null;
    if (mine.title) document.title = `${mine.title} · batchmill`;
    notices.clear("data");
  } catch (error) {
    if (error.name === "AbortError" || mine !== page) return;
    if (error.status === 401) return denied();
    if (error.status === undefined) throw error; // a bug: the console shows it
    failed(error);
  } finally {
    if (pending === abort) {
      pending = null;
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
    if (error.unreachable) return; // the notice about the server is enough
    notices.set("data", `${sentence(error.message)} ${asOf()}`, { bad: true, action: ["Retry", () => refresh(true)] });
    return;
  }
  shownAt = null;
  lastFailure = error;
  const waits = page.waits?.();
  const text = `${route.page} ${error.status} ${error.message} ${waits}`;
  if (text === shownFailure) return; // screen readers would read it again
  shownFailure = text;
  main.replaceChildren(failure(error, route, () => refresh(true), waits));
}

const asOf = () => (shownAt === null ? "" : `Data as of ${moment(shownAt / 1000, true)}.`);

function denied() {
  const wrong = token.get() !== null;
  token.set(null);
  stream.stop();
  pending?.abort();
  page?.destroy?.();
  page = null;
  document.getElementById("forget").hidden = true;
  showLive({ name: "denied" });
  document.title = "Token · batchmill";
  main.replaceChildren(
    tokenForm(wrong, (value) => {
      token.set(value);
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
      run.rates.record(data);
      page?.pipeline?.(run);
      heard();
      health(data);
    } else if (kind === "commit") {
      const known = JSON.stringify(run.commit);
      run.commit = data;
      if (known !== JSON.stringify(data)) refresh();
    } else if (kind === "store") {
      // A page without data shows the reason itself.
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
    notices.clear("server");
    if (["reconnecting", "down", "paused"].includes(before)) {
      run.commit = null; // commits may have been missed
      refresh();
      showVersion();
    }
  } else if (state.name === "reconnecting") {
    setText(text, "Reconnecting");
  } else if (state.name === "down") {
    setText(text, `No connection since ${moment(state.since, true)}`);
    notices.set("server", `No live updates since ${moment(state.since, true)}: ${state.why}. ${asOf()} Reconnecting automatically.`, {
      bad: true,
      action: ["Retry now", () => stream.retryNow()],
    });
    refresh();
  } else setText(text, { denied: "Token required", paused: "Paused" }[state.name] ?? "Connecting");
  if (state.name !== "live") {
    clearTimeout(listening);
    runHealth = null; // not known without a connection
  }
  pill();
}

// What the pill says of a run while the connection is up: its health. Without a run: "Live".
const HEALTHS = { healthy: "Healthy", degraded: "Degraded", down: "Down", silent: "Not responding" };
const SILENT_MS = 5000; // the server reports the run's status every second
let runHealth = null;
let listening = null;

function heard() {
  clearTimeout(listening);
  runHealth = run.pipeline.health in HEALTHS ? run.pipeline.health : "silent";
  listening = setTimeout(() => {
    runHealth = "silent";
    pill();
  }, SILENT_MS);
  pill();
}

function pill() {
  const element = document.getElementById("live");
  setAttribute(element, "data-health", runHealth);
  if (element.dataset.state !== "live") return;
  setText(document.getElementById("live-text"), runHealth === null ? "Live" : HEALTHS[runHealth]);
  const reasons = runHealth === "silent" ? ["no status of the run for some seconds"] : (run.pipeline?.reasons ?? []);
  setAttribute(element, "title", reasons.length ? reasons.join("; ") : null);
}

function health(state) {
  if (state.health && state.health !== "healthy" && route.page !== "pipeline") {
    notices.set("health", `The run is ${state.health}: ${(state.reasons ?? []).join("; ")}.`, {
      bad: state.health === "down",
      action: ["Show pipeline", () => go({ page: "pipeline", query: kept(route.query) })],
    });
  } else notices.clear("health");
}

async function showVersion() {
  try {
    run.status = await get("status");
    setText(document.getElementById("foot-version"), `batchmill ${run.status.version}`);
  } catch {
    // The page's own request shows the error.
  }
}

// ---- begin

function begin() {
  document.getElementById("forget").hidden = token.get() === null;
  stream.stop();
  stream.start();
  links();
  returnTo = history.state?.scroll ?? null;
  open(false);
  showVersion();
}

startTheme(document.getElementById("theme"), redrawCharts);
setText(document.getElementById("foot-zone"), `Times are local (${zone()}); hover over a time for UTC.`);
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.getElementById("forget").addEventListener("click", () => {
  token.set(null);
  begin();
});
// The browser itself would scroll before the page has its data, and its height.
history.scrollRestoration = "manual";
let scrolled = null;
window.addEventListener("scroll", () => {
  clearTimeout(scrolled);
  scrolled = setTimeout(keepScroll, 100);
});
document.addEventListener("click", keepScroll, true); // before a link is followed
for (const name of ["wheel", "touchmove", "keydown"]) {
  window.addEventListener(name, () => (returnTo = null), { passive: true }); // who scrolls decides
}
window.addEventListener("popstate", (event) => {
  clearTimeout(scrolled); // it would be kept with another entry
  returnTo = event.state?.scroll ?? null; // a link that is followed has none yet
});
window.addEventListener("hashchange", () => {
  if (page) follow();
});
// A browser has few connections per server: a hidden page closes its own.
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
