/** What a step does, in a sentence or two with its numbers. */

import { shortNumber } from "tilewise/ui/format.js";

/** @typedef {import("tilewise/engine/replay.js").Replay} Replay */
/** @typedef {import("tilewise/engine/recorder.js").TraceEvent} TraceEvent */

/**
 * "query 3", "queries 0–1".
 * @param {string} one @param {string} many @param {number} block @param {number} size @param {number} length
 */
export function tokens(one, many, block, size, length) {
  const [first, last] = [block * size, Math.min((block + 1) * size, length) - 1];
  return first === last ? `${one} ${first}` : `${many} ${first}–${last}`;
}

/** @param {Replay} replay */
export function names(replay) {
  const work = replay.trace.workload;
  const stop = /** @type {import("tilewise/engine/timeline.js").Stop} */ (replay.stop);
  return {
    queries: tokens("query", "queries", stop.mBlock ?? 0, work.block_m, work.seqlen_q),
    keys: tokens("key", "keys", stop.nBlock ?? 0, work.block_n, work.seqlen_k),
  };
}

/** @param {Replay} replay */
export function skipped(replay) {
  const count = replay.skips.length;
  return count === 0
    ? ""
    : ` Before it, ${count === 1 ? "a wholly masked tile was" : `${count} wholly masked tiles were`} skipped at no cost.`;
}

/** Whether a step masked its scores. @param {Replay} replay */
export function masking(replay) {
  return replay.events.some((event) => event.op === "mask")
    ? " Some pairs of this tile are masked: they become −∞."
    : "";
}

/** @param {Replay} replay */
export function fa2Caption(replay) {
  if (replay.stop === null)
    return "Nothing is in fast memory yet. A tile of queries will come once and stay while the keys stream past it.";
  const { queries, keys } = names(replay);
  if (replay.stop.phase === "scores") {
    const fresh = replay.buffers.get("q")?.how === "loaded" ? `Q for ${queries} comes in and stays; ` : "";
    return `${fresh}K and V for ${keys} are loaded, and S = QKᵀ is computed for ${queries}.${masking(replay)}${skipped(replay)}`;
  }
  if (replay.stop.phase === "softmax") return correction(replay);
  const ended = replay.events.some((event) => event.kind === "store");
  return ended
    ? `P·V is added; ${queries} have met all their keys, so O is divided by l once and written once, with lse = m + ln l.`
    : `P·V is added to O, which stays in fast memory; the scores, K and V are thrown away.`;
}

/** @param {Replay} replay */
export function fa1Caption(replay) {
  if (replay.stop === null)
    return "Nothing is in fast memory yet. A tile of keys and values will come once and stay while the queries stream past it.";
  const { queries, keys } = names(replay);
  if (replay.stop.phase === "scores") {
    const fresh = replay.buffers.get("k")?.how === "loaded" ? `K and V for ${keys} come in and stay; ` : "";
    return `${fresh}Q, O, m and l for ${queries} are loaded, and S = QKᵀ is computed.${masking(replay)}${skipped(replay)}`;
  }
  if (replay.stop.phase === "softmax") return correction(replay);
  return `P·V is added, O is divided by l, and O, m and l for ${queries} go back to slow memory: once per tile.`;
}

/** The softmax of a tile: whose maximum rose, and by what everything before is multiplied. @param {Replay} replay */
function correction(replay) {
  const alpha = replay.machine.alpha ?? new Float64Array();
  const top = (replay.stop?.mBlock ?? 0) * replay.trace.workload.block_m;
  const rowMax = replay.buffers.get("row_max")?.matrix.data ?? new Float64Array();
  const risen = Array.from(alpha).findIndex((factor) => factor < 1 && factor > 0);
  if (risen >= 0) {
    const before = rowMax[risen] + Math.log(alpha[risen]);
    return `The maximum of row ${top + risen} rises from ${shortNumber(before, 2)} to ${shortNumber(rowMax[risen], 2)}, so its l and O so far are multiplied by e^(${shortNumber(before, 2)} − ${shortNumber(rowMax[risen], 2)}) = ${shortNumber(alpha[risen])}.`;
  }
  if (Array.from(alpha).every((factor) => factor === 0)) {
    return "The first keys these rows see: m becomes the maximum, P = e^(S − m), and l is their sum; there is nothing to correct yet.";
  }
  return "No row found a larger score, so every correction is 1; P = e^(S − m) is added to l.";
}
