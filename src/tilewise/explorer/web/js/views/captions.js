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
export function naiveCaption(replay) {
  if (replay.stop === null) return "Three passes: scores, softmax, values. Each goes through slow memory.";
  const { queries } = names(replay);
  if (replay.stop.phase === "scores")
    return `First pass: S = QKᵀ/√d for ${queries} is computed and written to slow memory.${masking(replay)}`;
  if (replay.stop.phase === "softmax")
    return `Second pass: S for ${queries} is read back, its softmax P is written to slow memory.`;
  return `Third pass: P for ${queries} is read back, and O = P·V is written.`;
}

/** @param {Replay} replay */
export function fa2Caption(replay) {
  if (replay.stop === null)
    return "Nothing is in fast memory yet. A tile of queries will come once and stay while the keys stream past it.";
  const { queries, keys } = names(replay);
  if (replay.stop.phase === "scores") {
    const fresh = replay.buffers.get("q")?.how === "loaded" ? `Q for ${queries} comes in and stays; ` : "";
    return `${fresh}K and V for ${keys} are loaded, and S = QKᵀ/√d is computed for ${queries}.${masking(replay)}${skipped(replay)}`;
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
    return `${fresh}Q, O, m and l for ${queries} are loaded, and S = QKᵀ/√d is computed.${masking(replay)}${skipped(replay)}`;
  }
  if (replay.stop.phase === "softmax") return correction(replay);
  return `P·V is added, O is divided by l, and O, m and l for ${queries} go back to slow memory: once per tile.`;
}

/** The softmax of a tile: whose maximum rose, and by what everything before is multiplied. @param {Replay} replay */
function correction(replay) {
  const found = replay.machine.correction;
  if (found === null) return "";
  const { before, alpha, out } = found;
  const top = (replay.stop?.mBlock ?? 0) * replay.trace.workload.block_m;
  const rowMax = replay.buffers.get("row_max")?.matrix.data ?? new Float64Array();
  const seen = Array.from(alpha, (_, row) => before[row] !== -Infinity);
  const risen = Array.from(alpha).findIndex((factor, row) => seen[row] && factor < 1);
  if (risen >= 0) {
    const [old, now] = [shortNumber(before[risen]), shortNumber(rowMax[risen])];
    const factor = `e^(${old} − ${now}) = ${shortNumber(alpha[risen])}`;
    const rises = `The maximum of row ${top + risen} rises from ${old} to ${now}, so`;
    // FA-1 order keeps O divided by l, and has to undo that first.
    return replay.trace.algorithm === "fa1"
      ? `${rises} its l is multiplied by ${factor}. Its O was divided by the old l: it is multiplied by that, ${shortNumber(out[risen] / alpha[risen])}, and by the same factor, together ${shortNumber(out[risen])}.`
      : `${rises} its l and O so far are multiplied by ${factor}.`;
  }
  if (!seen.some(Boolean)) {
    return "The first keys these rows see: m becomes the maximum, P = e^(S − m), and l is their sum; there is nothing to correct yet.";
  }
  const undone = seen.findIndex(Boolean);
  return replay.trace.algorithm === "fa1"
    ? `No row found a larger score, so l keeps its value; O is multiplied by the old l (${shortNumber(out[undone])} in row ${top + undone}), which undoes the division. P = e^(S − m) is added to l.`
    : "No row found a larger score, so every correction is 1; P = e^(S − m) is added to l.";
}

/** @param {Replay} replay */
export function backwardCaption(replay) {
  if (replay.stop === null) return "From the forward there are Q, K, V, O and one lse a row. P is not there.";
  const { queries, keys } = names(replay);
  const { phase } = replay.stop;
  if (phase === "delta")
    return `First, D = rowsum(dO ∘ O) for ${queries}: one number a row that every tile of the row will need.`;
  if (phase === "recompute") {
    const fresh = replay.buffers.get("k")?.how === "loaded" ? `K and V for ${keys} come in and stay; ` : "";
    return `${fresh}Q, dO, lse and D for ${queries} are loaded, and P = e^(QKᵀ − lse) is recomputed.${masking(replay)}${skipped(replay)}`;
  }
  if (phase === "values") return `dV for ${keys} grows by PᵀdO, and dP = dO Vᵀ is computed.`;
  if (phase === "gradients") {
    const ended = replay.events.some((event) => event.array === "dk");
    return `dS = P ∘ (dP − D); dK grows by dSᵀQ, and dQ for ${queries} is read, grows by dS K and goes back.${ended ? " This tile of keys is done: dK and dV are written once." : ""}`;
  }
  return `Last, dQ for ${queries} is rounded from its fp32 sum to the inputs' dtype.`;
}
