/** What several chapters share: small attention problems, and the last line of each. */

import { fa1, fa2, naive } from "tilewise/engine/attention.js";
import { differenceFromNaive, headInputs } from "tilewise/engine/check.js";
import { workload } from "tilewise/engine/recorder.js";
import { difference } from "tilewise/ui/format.js";

/** @param {number} n @param {number} d @param {number} block @param {object} [more] */
export function attention(n, d, block, more = {}) {
  return workload({
    seqlen_q: n,
    seqlen_k: n,
    head_dim: d,
    head_dim_v: d,
    block_m: block,
    block_n: block,
    scale: 1 / Math.sqrt(d),
    ...more,
  });
}

/** The three ways on one problem; the first is shown. @param {any} work @param {any} shown */
export function raceStory(work, shown, { capacity = 0, racers = ["naive", "fa1", "fa2"] } = {}) {
  const all = /** @type {Record<string, [string, any]>} */ ({
    naive: ["naive", naive],
    fa1: ["FA-1", fa1],
    fa2: ["FA-2", fa2],
  });
  return {
    trace: shown(work),
    inputs: headInputs(work),
    racers: racers.map((kind) => /** @type {[string, string, any]} */ ([all[kind][0], kind, all[kind][1](work)])),
    capacity,
  };
}

/** @param {any} schedule @param {any} work */
export function sameAsNaive(schedule, work) {
  return `Same result as naive attention: largest difference ${difference(differenceFromNaive(schedule, work))}.`;
}

/** Blocks of the small problems, as a choice. */
export function blockChoice() {
  return /** @type {import("tilewise/ui/form.js").Spec[]} */ ([
    {
      key: "block",
      label: "Tokens in a tile",
      type: "select",
      value: "2",
      options: ["1", "2", "3", "6"].map((size) => [size, `${size} × ${size}`]),
    },
  ]);
}

/** Bytes of the toy's fast memory: tiles of 3 × 3 fit, the whole matrix does not. */
export const TOY_SRAM = 192;
