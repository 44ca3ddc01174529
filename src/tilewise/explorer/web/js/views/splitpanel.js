/** Split-KV decoding: one new token against a long cache, the keys split among workers, the parts merged exactly. */

import { finished, largestDifference, slow } from "tilewise/engine/check.js";
import { someNumbers } from "tilewise/engine/numbers.js";
import { workload } from "tilewise/engine/recorder.js";
import { fill, h } from "tilewise/ui/dom.js";
import { Form } from "tilewise/ui/form.js";
import { difference, shortNumber } from "tilewise/ui/format.js";
import { table } from "tilewise/ui/parts.js";

/** @typedef {typeof import("tilewise/engine/attention.js").fa2} Schedule */

const DIM = 4;

/** @param {Schedule} decode @param {Schedule} whole */
export function createSplitPanel(decode, whole) {
  const result = h("div");
  const form = new Form(
    [
      { key: "split-keys", label: "Cached tokens", type: "number", value: 48, min: 1, max: 512 },
      { key: "split-page", label: "Tokens a page", type: "number", value: 4, min: 1, max: 64 },
      { key: "split-workers", label: "Workers", type: "number", value: 4, min: 1, max: 12 },
    ],
    { "split-keys": 48, "split-page": 4, "split-workers": 4 },
    (values) => show(values),
  );
  const show = (/** @type {Record<string, number>} */ values) => fill(result, ...splitResult(decode, whole, values));
  show(form.values);
  return h(
    "section",
    { class: "panel below", "aria-label": "Split-KV decoding" },
    h("h3", {}, "One new token against the cache", h("small", {}, "split-KV decoding (flash decoding)")),
    h(
      "p",
      { class: "small muted" },
      "A single query has no other queries to share the keys with, so one worker would stream the whole cache alone. Instead the pages are split; each worker leaves its O and its lse, and the parts are merged: a part counts e^(lse − largest lse), and its share is that divided by the sum of them all.",
    ),
    form.element,
    result,
  );
}

/** @param {Schedule} decode @param {Schedule} whole @param {Record<string, number>} values */
function splitResult(decode, whole, { "split-keys": keys, "split-page": page, "split-workers": splits }) {
  const sizes = {
    seqlen_q: 1,
    seqlen_k: keys,
    head_dim: DIM,
    head_dim_v: DIM,
    block_m: 1,
    block_n: page,
    scale: 1 / Math.sqrt(DIM),
  };
  const inputs = { q: someNumbers(1, DIM, 11), k: someNumbers(keys, DIM, 12), v: someNumbers(keys, DIM, 13) };
  const [alone, split] = [
    finished(whole(workload(sizes)), inputs),
    finished(decode(workload({ ...sizes, num_splits: splits })), inputs),
  ];
  const lse = (split.slow.get("lse_partial") ?? alone.slow.get("lse"))?.data ?? new Float64Array();
  const parts = (split.slow.get("out_partial") ?? alone.slow.get("out"))?.data ?? new Float64Array();
  const top = Math.max(...lse);
  const weights = Array.from(lse, (value) => Math.exp(value - top));
  const sum = weights.reduce((total, weight) => total + weight, 0);
  const pages = Math.ceil(keys / page);
  const rows = weights.map((weight, part) => {
    const [first, stop] = [
      Math.floor((part * pages) / splits) * page,
      Math.min(keys, Math.floor(((part + 1) * pages) / splits) * page),
    ];
    return [
      `${part + 1}`,
      stop > first ? `${first}–${stop - 1}` : "none",
      shortNumber(lse[part]),
      shortNumber(weight),
      shortNumber(weight / sum),
      numbers(parts, part),
    ];
  });
  const merged = split.slow.get("out")?.data ?? new Float64Array();
  const error = largestDifference(slow(split, "out"), slow(alone, "out"));
  return [
    table(
      ["worker", "keys", "lse", "e^(lse − largest)", "share", "O of its part"],
      [
        ...rows,
        [
          "merged",
          `0–${keys - 1}`,
          shortNumber(split.slow.get("lse")?.data[0] ?? NaN),
          shortNumber(sum),
          "1",
          numbers(merged, 0),
        ],
      ],
      "Parts and their merge",
    ),
    h(
      "p",
      { class: "small muted", "data-split-error": "" },
      `Same result as one worker over all keys: largest difference ${difference(error)}.`,
    ),
  ];
}

/** @param {Float64Array} data @param {number} row */
function numbers(data, row) {
  return h(
    "code",
    {},
    Array.from({ length: DIM }, (_, col) => shortNumber(data[row * DIM + col]).padStart(7, "\u00a0")).join(""),
  );
}
