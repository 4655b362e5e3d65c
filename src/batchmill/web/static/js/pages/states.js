// Pages for when there is nothing to show: no token, no server, no data, no such thing.

import { h } from "../dom.js";
import { sentence } from "../format.js";

export function askToken(wrong, on) {
  const input = h("input", { type: "password", autocomplete: "current-password", required: true, spellcheck: "false" });
  return h(
    "section",
    { class: "state" },
    h("h2", {}, "This server asks for a token"),
    h("p", {}, "It is the one that batchmill was started with (--token). It is kept in this tab until you close it."),
    wrong ? h("p", { class: "wrong", role: "alert" }, "That token was refused.") : null,
    h(
      "form",
      {
        onsubmit(event) {
          event.preventDefault();
          if (input.value.trim()) on(input.value.trim());
        },
      },
      // For password managers, which keep secrets by name.
      h("input", { type: "text", autocomplete: "username", value: "batchmill", hidden: true, readonly: true }),
      h("label", {}, "Token", input),
      h("button", { class: "primary", type: "submit" }, "Show me"),
    ),
  );
}

export function failure(error, where, retry) {
  const titles = { 0: "The server does not answer", 404: "There is no such thing here", 503: "Nothing to read from yet" };
  const title = titles[error.status] ?? (error.status === 400 ? "This cannot be shown" : "Something went wrong");
  const hints = {
    0: "It may be starting, or it was stopped: this page tries again by itself.",
    503: "This page tries again by itself.",
  };
  return h(
    "section",
    { class: "state", role: "alert" },
    h("h2", {}, title),
    h("p", {}, error.gone ? hints[0] : sentence(error.message)),
    !error.gone && hints[error.status] ? h("p", {}, hints[error.status]) : null,
    h(
      "form",
      {
        onsubmit(event) {
          event.preventDefault();
          retry();
        },
      },
      h("button", { type: "submit" }, "Try again"),
      where.page === "services" ? null : h("a", { href: "#/services" }, "To the services"),
    ),
  );
}

export function noData(run) {
  const http = run.pipeline?.ingest?.http;
  const lines = http
    ? `OTEL_EXPORTER_OTLP_ENDPOINT=http://${http} OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf your-program`
    : "batchmill run --demo";
  return h(
    "section",
    { class: "state" },
    h("h2", {}, "No data yet"),
    h("p", {}, "The store has no metrics of services. They appear here, by themselves, with the first commit after spans came in."),
    h("p", {}, http ? "Spans are taken at:" : "To see the pages with simulated traffic:"),
    h("pre", { tabindex: "0" }, lines),
  );
}

export function unknownPage(name) {
  return {
    title: "No such page",
    element: h("section", { class: "state" }, h("h2", {}, `There is no page “${name}”`), h("p", {}, h("a", { href: "#/services" }, "To the services"))),
  };
}
