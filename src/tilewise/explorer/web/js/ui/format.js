/** Numbers for people; digits as in tilewise/units.py. */

const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const COUNTS = ["", "k", "M", "G", "T", "P", "E"];
const SECONDS = ["ns", "µs", "ms", "s"];
/** @type {[number, string][]} */
const LONG = [
  [31557600, "years"],
  [86400, "days"],
  [3600, "h"],
];

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** 17301504 -> "17,301,504". @param {number} value */
export function grouped(value) {
  return WHOLE.format(value);
}

/** 33.0 MiB, 512 B. @param {number} size */
export function formatBytes(size) {
  return scaled(size, 1024, BYTES);
}

/** 1.10 T, 640, 17.2 GFLOP, 0 FLOP. @param {number} count */
export function formatCount(count, of = "") {
  return scaled(
    count,
    1000,
    COUNTS.map((prefix) => prefix + of),
  );
}

/** 1.24 s, 310 ms, 4.20 µs. @param {number} seconds */
export function formatSeconds(seconds) {
  if (seconds < 1000) return scaled(seconds * 1e9, 1000, SECONDS);
  const [size, unit] = LONG.find(([least]) => seconds >= 2 * least) ?? [60, "min"];
  const count = seconds / size;
  return `${count < 9.95 ? count.toFixed(1) : grouped(count)} ${unit}`;
}

/** Three digits after the point at most, "-inf" for what has seen no key yet. @param {number} value */
export function shortNumber(value, digits = 3) {
  if (value === -Infinity) return "−∞";
  if (!Number.isFinite(value)) return "–";
  const text = value.toFixed(digits);
  return text.replace("-", "−");
}

/** For axes: 20 M instead of 20.0 M. @param {string} text */
export function short(text) {
  return text.replace(/\.0+(?= |$)/, "");
}

/** "1 tile", "3 tiles". @param {number} count @param {string} noun */
export function plural(count, noun) {
  return `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** "0" or "2e-16": the largest difference between two results. @param {number} value */
export function difference(value) {
  return value === 0 ? "0" : value.toExponential(0);
}

/** @param {number} value @param {number} base @param {string[]} units */
function scaled(value, base, units) {
  let power = 0;
  while (Math.abs(value) >= base * 0.9995 && power < units.length - 1) {
    value /= base;
    power += 1;
  }
  const size = Math.abs(value);
  const digits = Number.isInteger(value) && power === 0 ? 0 : size < 9.995 ? 2 : size < 99.95 ? 1 : 0;
  return `${value.toFixed(digits)} ${units[power]}`.trim();
}
