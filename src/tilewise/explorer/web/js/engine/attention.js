/** The forward schedules as events: naive, FA-1 (K/V outside) and FA-2 (Q outside). Order: simulator/forward.py. */

import { blocks } from "tilewise/engine/band.js";
import { Recorder, array, bandOf, span } from "tilewise/engine/recorder.js";

/** @typedef {import("tilewise/engine/recorder.js").Workload} Workload */
/** @typedef {import("tilewise/engine/recorder.js").Trace} Trace */
/** @typedef {import("tilewise/engine/recorder.js").Span} Span */

/** Three kernels, each through slow memory: Q, K -> S; S -> P; P, V -> O. @param {Workload} work @returns {Trace} */
export function naive(work) {
  const band = bandOf(work);
  const wholeRows = { blockM: work.block_m, blockN: work.seqlen_k };
  const record = new Recorder("naive", work, {
    ...inputs(work),
    s: array(work.seqlen_q, work.seqlen_k, "empty"),
    p: array(work.seqlen_q, work.seqlen_k, "empty"),
    out: array(work.seqlen_q, work.head_dim_v, "empty"),
  });
  const mBlocks = blocks(work.seqlen_q, work.block_m);
  const keys = /** @type {Span} */ ([0, work.seqlen_k]);
  record.at("scores").load("k");
  for (let m = 0; m < mBlocks; m++) {
    const rows = span(m, work.block_m, work.seqlen_q);
    record.at("scores", m, 0).load("q", rows);
    scores(record, rows, keys);
    if (band.tileKind(m, 0, wholeRows) !== "full") mask(record, rows, keys);
    record.store("s", rows);
    record.free("q", "s");
  }
  record.at("scores").free("k");
  for (let m = 0; m < mBlocks; m++) {
    const rows = span(m, work.block_m, work.seqlen_q);
    record.at("softmax", m, 0).load("s", rows);
    record.compute("softmax", "p", ["s"], [rows[1] - rows[0], work.seqlen_k], { replaces: "s" });
    record.store("p", rows);
    record.free("p");
  }
  record.at("values").load("v");
  for (let m = 0; m < mBlocks; m++) {
    const rows = span(m, work.block_m, work.seqlen_q);
    const height = rows[1] - rows[0];
    record.at("values", m, 0).load("p", rows);
    const flops = 2 * height * work.seqlen_k * work.head_dim_v;
    record.compute("product", "acc", ["p", "v"], [height, work.head_dim_v], { flops });
    record.store("acc", rows, undefined, "out");
    record.free("p", "acc");
  }
  record.at("values").free("v");
  return record.trace;
}

/** Q outside: the state of a tile of rows stays in fast memory. @param {Workload} work @returns {Trace} */
export function fa2(work) {
  const record = new Recorder("fa2", work, {
    ...inputs(work),
    out: array(work.seqlen_q, work.head_dim_v, "empty"),
    lse: array(work.seqlen_q, 1, "empty", true),
  });
  const everyTile = { first: 0, stop: blocks(work.seqlen_k, work.block_n), part: null, out: "out", lse: "lse", row: 0 };
  for (let m = 0; m < blocks(work.seqlen_q, work.block_m); m++) queryTile(record, m, everyTile);
  return record.trace;
}

/**
 * The tiles of keys are split among workers, each of which does FA-2; then merged.
 * @param {Workload} work @returns {Trace}
 */
export function decode(work) {
  const several = work.num_splits > 1;
  const partialRows = work.num_splits * work.seqlen_q;
  const record = new Recorder("decode", work, {
    ...inputs(work),
    out: array(work.seqlen_q, work.head_dim_v, "empty"),
    lse: array(work.seqlen_q, 1, "empty", true),
    ...(several && { out_partial: array(partialRows, work.head_dim_v, "empty", true) }),
    ...(several && { lse_partial: array(partialRows, 1, "empty", true) }),
  });
  const nBlocks = blocks(work.seqlen_k, work.block_n);
  const mBlocks = blocks(work.seqlen_q, work.block_m);
  for (let part = 0; part < work.num_splits; part++) {
    const first = Math.floor((part * nBlocks) / work.num_splits);
    const stop = Math.floor(((part + 1) * nBlocks) / work.num_splits);
    const split = several
      ? { first, stop, part, out: "out_partial", lse: "lse_partial", row: part * work.seqlen_q }
      : { first, stop, part, out: "out", lse: "lse", row: 0 };
    for (let m = 0; m < mBlocks; m++) queryTile(record, m, split);
  }
  for (let m = 0; several && m < mBlocks; m++) mergeRows(record, m);
  return record.trace;
}

/**
 * FA-2 for one tile of rows over some tiles of keys, and where its result goes.
 * @param {Recorder} record @param {number} m
 * @param {{first: number, stop: number, part: number | null, out: string, lse: string, row: number}} split
 */
function queryTile(record, m, split) {
  const rows = span(m, record.work.block_m, record.work.seqlen_q);
  record.at("setup", m, null, split.part).load("q", rows);
  initState(record, rows[1] - rows[0]);
  for (let n = split.first; n < split.stop; n++) streamedTile(record, m, n, split.part);
  record.at("finish", m, null, split.part);
  finishRows(record, [rows[0] + split.row, rows[1] + split.row], split.out, split.lse);
  record.free("q", "acc", "row_max", "lse");
}

/**
 * An online softmax whose scores are the splits' lse and whose values their out.
 * @param {Recorder} record @param {number} m
 */
function mergeRows(record, m) {
  const { work } = record;
  const rows = span(m, work.block_m, work.seqlen_q);
  const height = rows[1] - rows[0];
  record.at("setup", m);
  initState(record, height);
  for (let part = 0; part < work.num_splits; part++) {
    const partial = /** @type {Span} */ ([rows[0] + part * work.seqlen_q, rows[1] + part * work.seqlen_q]);
    record.at("merge", m, null, part).load("out_partial", partial);
    record.load("lse_partial", partial);
    record.compute("row_max", "new_max", ["row_max", "lse_partial"], [height, 1]);
    record.rescale(["acc", "row_sum"], false);
    record.inPlace("merge", "acc", ["acc", "out_partial", "lse_partial", "row_max"]);
    record.inPlace("merge_sum", "row_sum", ["row_sum", "lse_partial", "row_max"]);
    record.free("out_partial", "lse_partial");
  }
  record.at("finish", m);
  finishRows(record, rows, "out", "lse");
  record.free("acc", "row_max", "lse");
}

/** K/V outside: the state of every row crosses the memory once per tile. @param {Workload} work @returns {Trace} */
export function fa1(work) {
  const record = new Recorder("fa1", work, {
    ...inputs(work),
    out: array(work.seqlen_q, work.head_dim_v, "zero"),
    row_max: array(work.seqlen_q, 1, "minus_infinity", true),
    row_sum: array(work.seqlen_q, 1, "zero", true),
  });
  const band = bandOf(work);
  const grid = { blockM: work.block_m, blockN: work.block_n };
  const mBlocks = blocks(work.seqlen_q, work.block_m);
  for (let n = 0; n < blocks(work.seqlen_k, work.block_n); n++) {
    const cols = span(n, work.block_n, work.seqlen_k);
    const kinds = Array.from({ length: mBlocks }, (_, m) => band.tileKind(m, n, grid));
    const seen = kinds.some((kind) => kind !== "skip");
    if (seen) {
      record.at("setup", null, n);
      record.load("k", cols);
      record.load("v", cols);
    }
    for (let m = 0; m < mBlocks; m++) {
      const rows = span(m, work.block_m, work.seqlen_q);
      if (kinds[m] === "skip") record.at("skip", m, n).skip(rows, cols);
      else statefulTile(record, m, n, rows, cols, kinds[m] === "partial");
    }
    if (seen) record.at("finish", null, n).free("k", "v");
  }
  return record.trace;
}

/**
 * What FA-2 does with one tile of keys.
 * @param {Recorder} record @param {number} m @param {number} n @param {number | null} part
 */
function streamedTile(record, m, n, part) {
  const { work } = record;
  const rows = span(m, work.block_m, work.seqlen_q);
  const cols = span(n, work.block_n, work.seqlen_k);
  const kind = bandOf(work).tileKind(m, n, { blockM: work.block_m, blockN: work.block_n });
  if (kind === "skip") {
    record.at("skip", m, n, part).skip(rows, cols);
    return;
  }
  record.at("scores", m, n, part);
  record.load("k", cols);
  record.load("v", cols);
  scores(record, rows, cols);
  if (kind === "partial") mask(record, rows, cols);
  record.at("softmax", m, n, part);
  onlineSoftmax(record, rows, cols, false);
  record.at("values", m, n, part);
  addValues(record, rows, cols);
  record.free("p", "k", "v");
}

/**
 * What FA-1 does with one tile of queries.
 * @param {Recorder} record @param {number} m @param {number} n @param {Span} rows @param {Span} cols
 * @param {boolean} partial
 */
function statefulTile(record, m, n, rows, cols, partial) {
  record.at("scores", m, n);
  record.load("q", rows);
  record.load("acc", rows, undefined, "out");
  record.load("row_max", rows);
  record.load("row_sum", rows);
  scores(record, rows, cols);
  if (partial) mask(record, rows, cols);
  record.at("softmax", m, n);
  onlineSoftmax(record, rows, cols, true);
  record.at("values", m, n);
  addValues(record, rows, cols);
  record.inPlace("normalise", "acc", ["acc", "row_sum"]);
  record.store("acc", rows, undefined, "out");
  record.store("row_max", rows);
  record.store("row_sum", rows);
  record.free("p", "q", "acc", "row_max", "row_sum");
}

/** @param {Workload} work */
function inputs(work) {
  return {
    q: array(work.seqlen_q, work.head_dim),
    k: array(work.seqlen_k, work.head_dim),
    v: array(work.seqlen_k, work.head_dim_v),
  };
}

/** @param {Recorder} record @param {number} height */
function initState(record, height) {
  record.compute("init", "acc", [], [height, record.work.head_dim_v]);
  record.compute("init", "row_max", [], [height, 1]);
  record.compute("init", "row_sum", [], [height, 1]);
}

/** @param {Recorder} record @param {Span} rows @param {string} out @param {string} lse */
function finishRows(record, rows, out, lse) {
  record.inPlace("normalise", "acc", ["acc", "row_sum"]);
  record.compute("lse", "lse", ["row_sum", "row_max"], [rows[1] - rows[0], 1], { replaces: "row_sum" });
  record.store("acc", rows, undefined, out);
  record.store("lse", rows, undefined, lse);
}

/** @param {Recorder} record @param {Span} rows @param {Span} cols */
export function scores(record, rows, cols) {
  const [height, width] = [rows[1] - rows[0], cols[1] - cols[0]];
  record.compute("scores", "s", ["q", "k"], [height, width], { flops: 2 * height * width * record.work.head_dim });
}

/** @param {Recorder} record @param {Span} rows @param {Span} cols */
export function mask(record, rows, cols) {
  record.compute("mask", "s", ["s"], [rows[1] - rows[0], cols[1] - cols[0]], { replaces: "s", rows, cols });
}

/** @param {Recorder} record @param {Span} rows @param {Span} cols @param {boolean} normalised */
function onlineSoftmax(record, rows, cols, normalised) {
  const [height, width] = [rows[1] - rows[0], cols[1] - cols[0]];
  record.compute("row_max", "new_max", ["row_max", "s"], [height, 1]);
  record.compute("exp", "p", ["s", "new_max"], [height, width], { replaces: "s" });
  record.rescale(["acc", "row_sum"], normalised);
  record.inPlace("row_sum", "row_sum", ["row_sum", "p"]);
}

/** @param {Recorder} record @param {Span} rows @param {Span} cols */
function addValues(record, rows, cols) {
  const flops = 2 * (rows[1] - rows[0]) * (cols[1] - cols[0]) * record.work.head_dim_v;
  record.inPlace("values", "acc", ["acc", "p", "v"], flops);
}
