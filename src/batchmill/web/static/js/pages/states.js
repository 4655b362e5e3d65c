// Pages without data: token required, server unreachable, errors, empty store, unknown page.

import { h } from "../dom.js";
import { sentence } from "../format.js";

export function tokenForm(wrong, on) {
  const input = h("input", { type: "password", autocomplete: "current-password", required: true, spellcheck: "false" });
  return h(
    "section",
    { class: "state" },
    h("h2", {}, "This server requires a token"),
    h("p", {}, "Enter the token that batchmill was started with (--token). It is kept in this tab until you close it."),
    wrong ? h("p", { class: "wrong", role: "alert" }, "The token was refused.") : null,
    h(
      "form",
      {
        onsubmit(event) {
          event.preventDefault();
          if (input.value.trim()) on(input.value.trim());
        },
      },
      // For password managers, which need a user name.
      h("input", { type: "text", autocomplete: "username", value: "batchmill", hidden: true, readonly: true }),
      h("label", {}, "Token", input),
      h("button", { class: "primary", type: "submit" }, "Continue"),
    ),
  );
}

// waits: whether the page goes on looking for what was not found; undefined: that is not coming.
export function failure(error, route, retry, waits) {
  const titles = { 0: "The server does not respond", 400: "Invalid request", 404: "Not found", 503: "Temporarily unavailable" };
  const title = titles[error.status] ?? "Error";
  const hints = {
    0: "It may be starting, or it was stopped. This page retries automatically.",
    404: { true: "This page looks for it again automatically.", false: "This page no longer looks for it." }[waits],
    503: "This page retries automatically.",
  };
  return h(
    "section",
    { class: "state", role: "alert" },
    h("h2", {}, title),
    h("p", {}, error.unreachable ? hints[0] : sentence(error.message)),
    !error.unreachable && hints[error.status] ? h("p", {}, hints[error.status]) : null,
    h(
      "form",
      {
        onsubmit(event) {
          event.preventDefault();
          retry();
        },
      },
      h("button", { type: "submit" }, "Retry"),
      route.page === "services" ? null : h("a", { href: "#/services" }, "All services"),
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
    h("p", {}, "The store has no service metrics. They appear here automatically after the first commit."),
    h("p", {}, http ? "To send spans:" : "To see the web UI with simulated traffic:"),
    h("pre", { tabindex: "0" }, lines),
  );
}

export function unknownPage(name) {
  return {
    title: "Page not found",
    element: h("section", { class: "state" }, h("h2", {}, `There is no page “${name}”`), h("p", {}, h("a", { href: "#/services" }, "All services"))),
  };
}
