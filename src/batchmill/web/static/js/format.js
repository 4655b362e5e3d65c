// Formats numbers as [text, unit], or null for no value; and times with their zone.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const two = new Intl.NumberFormat("en", { maximumFractionDigits: 2, minimumFractionDigits: 2 });

const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (n) => (known(n) ? whole.format(n) : "–");

// "1 span", "2 spans"
export const countOf = (n, noun, plural = `${noun}s`) => `${count(n)} ${n === 1 ? noun : plural}`;

// For narrow places.
export const short = (n) => (known(n) && n >= 999_500 ? `${two.format(n / 1e6)} M` : count(n));

export function rate(n) {
  if (!known(n)) return null;
  if (n !== 0 && Math.abs(n) < 9.95) return [n < 0.995 ? two.format(n) : one.format(n), ""];
  if (n >= 1e6) return [two.format(n / 1e6), " M"];
  return [whole.format(n), ""];
}

export function ms(n) {
  if (!known(n)) return null;
  if (n > 0 && n < 0.01) return ["< 0.01", " ms"];
  if (n < 9.95 && n % 1) return [n < 0.995 ? two.format(n) : one.format(n), " ms"];
  if (n < 1000) return [whole.format(n), " ms"];
  if (n < 99_995) return [two.format(n / 1000), " s"];
  return [one.format(n / 60_000), " min"];
}

// Values of events or metrics in whole milliseconds: 0 is less than they can tell.
export const averageMs = (n) => (n === 0 ? ["< 1", " ms"] : ms(n));
export const rankMs = (n) => (n === 0 ? ["< 10", " ms"] : ms(n));

// Rounded down: 99.999 % must not become 100 %.
export function percent(share) {
  if (!known(share)) return null;
  return [two.format(Math.floor(share * 10_000 + 1e-6) / 100), " %"];
}

export const apdex = (n) => (known(n) ? [two.format(Math.floor(n * 100 + 1e-6) / 100), ""] : null);

export function bytes(n) {
  if (!known(n)) return null;
  let unit = 0;
  while (n >= 1024 && unit < 4) {
    n /= 1024;
    unit += 1;
  }
  return [unit && n < 100 ? one.format(n) : whole.format(n), [" B", " KiB", " MiB", " GiB", " TiB"][unit]];
}

export function seconds(s) {
  if (!known(s)) return null;
  if (s < 1) return [whole.format(Math.max(0, s) * 1000), " ms"];
  if (s < 100) return [one.format(s), " s"];
  if (s < 595) return [one.format(s / 60), " min"];
  if (s < 7200) return [whole.format(s / 60), " min"];
  if (s < 172_800) return [whole.format(s / 3600), " h"];
  return [whole.format(s / 86_400), " d"];
}

// A duration up to now, to the second.
export function ago(s) {
  if (!known(s)) return "–";
  if (s < 1.5) return "just now";
  return s < 100 ? `${whole.format(s)} s ago` : `${seconds(s).join("")} ago`;
}

export const plain = (formatted) => (formatted === null ? "–" : formatted.join(""));

// A message of the server as a sentence.
export const sentence = (text) => text.replace(/^./, (first) => first.toUpperCase()).replace(/([^.!?…])$/, "$1.");

const pad = (n) => String(n).padStart(2, "0");
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

export function clock(epoch, withSeconds = false) {
  const at = new Date(epoch * 1000);
  return `${pad(at.getHours())}:${pad(at.getMinutes())}${withSeconds ? `:${pad(at.getSeconds())}` : ""}`;
}

export function day(epoch) {
  const at = new Date(epoch * 1000);
  return `${at.getDate()} ${MONTHS[at.getMonth()]}`;
}

const sameDay = (epoch) => new Date(epoch * 1000).toDateString() === new Date().toDateString();

// Local time, without the date if it is today.
export function moment(epoch, withSeconds = false) {
  return sameDay(epoch) ? clock(epoch, withSeconds) : `${day(epoch)} ${clock(epoch, withSeconds)}`;
}

// Whether the bucket that begins then may still grow; incomplete: the start of the first such, or null.
export const isFilling = (epoch, incomplete) => incomplete !== null && epoch >= incomplete;

export const bucketName = (epoch, incomplete) => `${moment(epoch)}${isFilling(epoch, incomplete) ? " (incomplete)" : ""}`;

export const utc = (epoch) => new Date(epoch * 1000).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC");

export function zone() {
  const minutes = -new Date().getTimezoneOffset();
  const size = Math.abs(minutes);
  return `UTC${minutes < 0 ? "−" : "+"}${pad(Math.floor(size / 60))}:${pad(size % 60)}`;
}

// The grade of a success rate or an apdex.
export function grade(share, fine = 0.99, poor = 0.95) {
  if (!known(share)) return "";
  return share >= fine ? "good" : share >= poor ? "warn" : "bad";
}

export function number(n) {
  if (!known(n)) return null;
  if (Math.abs(n) >= 1e9) return [n.toExponential(2), ""];
  return [n % 1 === 0 || Math.abs(n) >= 1000 ? whole.format(n) : Math.abs(n) < 10 ? two.format(n) : one.format(n), ""];
}

const UNITS = { per_minute: rate, count: number, share: percent, score: apdex, ms, bytes, "": number };
export const UNIT_NAMES = { per_minute: "per minute", share: "share of all", score: "score from 0 to 1", ms: "", bytes: "", count: "number", "": "" };

// How values of a unit of the API are shown; of milliseconds, 0 is less than `least`.
export function formatOf(unit, least = 1) {
  const form = UNITS[unit] ?? number;
  return unit === "ms" ? (n) => (n === 0 ? [`< ${least}`, " ms"] : form(n)) : form;
}
