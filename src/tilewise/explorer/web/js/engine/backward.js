/** The backward schedules as events: recomputing (FA-2) and naive (which keeps P). Order: simulator/backward.py. */

import { blocks } from "tilewise/engine/band.js";
import { mask, scores } from "tilewise/engine/attention.js";
import { Recorder, array, bandOf, span } from "tilewise/engine/recorder.js";

/** @typedef {import("tilewise/engine/recorder.js").Workload} Workload */
/** @typedef {import("tilewise/engine/recorder.js").Trace} Trace */
/** @typedef {import("tilewise/engine/recorder.js").Span} Span */

/** K/V outside; P comes again from S and lse, tile by tile. @param {Workload} work @returns {Trace} */
export function backward(work) {
  const record = new Recorder("backward", work, {
    q: array(work.seqlen_q, work.head_dim),
    k: array(work.seqlen_k, work.head_dim),
    v: array(work.seqlen_k, work.head_dim_v),
    out: array(work.seqlen_q, work.head_dim_v),
    lse: array(work.seqlen_q, 1, "input", true),
    dout: array(work.seqlen_q, work.head_dim_v),
    delta: array(work.seqlen_q, 1, "empty", true),
    dq_sum: array(work.seqlen_q, work.head_dim, "zero", true),
    dq: array(work.seqlen_q, work.head_dim, "empty"),
    dk: array(work.seqlen_k, work.head_dim, "empty"),
    dv: array(work.seqlen_k, work.head_dim_v, "empty"),
  });
  const mBlocks = blocks(work.seqlen_q, work.block_m);
  for (let m = 0; m < mBlocks; m++) deltaOfRows(record, m);
  for (let n = 0; n < blocks(work.seqlen_k, work.block_n); n++) keyTile(record, n, mBlocks);
  for (let m = 0; m < mBlocks; m++) {
    const rows = span(m, work.block_m, work.seqlen_q);
    record.at("round", m).load("dq", rows, undefined, "dq_sum");
    record.store("dq", rows);
    record.free("dq");
  }
  return record.trace;
}

/** @param {Recorder} record @param {number} m */
function deltaOfRows(record, m) {
  const rows = span(m, record.work.block_m, record.work.seqlen_q);
  record.at("delta", m).load("out", rows);
  record.load("dout", rows);
  record.compute("delta", "delta", ["out", "dout"], [rows[1] - rows[0], 1]);
  record.store("delta", rows);
  record.free("out", "dout", "delta");
}

/** @param {Recorder} record @param {number} n @param {number} mBlocks */
function keyTile(record, n, mBlocks) {
  const { work } = record;
  const cols = span(n, work.block_n, work.seqlen_k);
  const width = cols[1] - cols[0];
  const grid = { blockM: work.block_m, blockN: work.block_n };
  record.at("setup", null, n).load("k", cols);
  record.load("v", cols);
  record.compute("init", "dk", [], [width, work.head_dim]);
  record.compute("init", "dv", [], [width, work.head_dim_v]);
  for (let m = 0; m < mBlocks; m++) {
    const kind = bandOf(work).tileKind(m, n, grid);
    const rows = span(m, work.block_m, work.seqlen_q);
    if (kind === "skip") record.at("skip", m, n).skip(rows, cols);
    else gradientTile(record, m, n, rows, cols, kind === "partial");
  }
  record.at("finish", null, n).store("dk", cols);
  record.store("dv", cols);
  record.free("dk", "dv", "k", "v");
}

/**
 * @param {Recorder} record @param {number} m @param {number} n @param {Span} rows @param {Span} cols
 * @param {boolean} partial
 */
function gradientTile(record, m, n, rows, cols, partial) {
  const { head_dim: d, head_dim_v: dv } = record.work;
  const [height, width] = [rows[1] - rows[0], cols[1] - cols[0]];
  const pairs = 2 * height * width;
  record.at("recompute", m, n).load("q", rows);
  record.load("dout", rows);
  record.load("lse", rows);
  record.load("delta", rows);
  scores(record, rows, cols);
  if (partial) mask(record, rows, cols);
  record.compute("probabilities", "p", ["s", "lse"], [height, width], { replaces: "s" });
  record.at("values", m, n).inPlace("dv", "dv", ["dv", "p", "dout"], pairs * dv);
  record.compute("dp", "dp", ["dout", "v"], [height, width], { flops: pairs * dv });
  record.at("gradients", m, n).load("dq", rows, undefined, "dq_sum");
  record.compute("ds", "ds", ["dp", "p", "delta"], [height, width], { replaces: "dp" });
  record.inPlace("dk", "dk", ["dk", "ds", "q"], pairs * d);
  record.inPlace("dq", "dq", ["dq", "ds", "k"], pairs * d);
  record.store("dq", rows, undefined, "dq_sum");
  record.free("p", "ds", "dq", "q", "dout", "lse", "delta");
}

/** Five kernels on a stored P. @param {Workload} work @returns {Trace} */
export function naiveBackward(work) {
  const matrix = () => array(work.seqlen_q, work.seqlen_k, "empty");
  const record = new Recorder("naive_backward", work, {
    q: array(work.seqlen_q, work.head_dim),
    k: array(work.seqlen_k, work.head_dim),
    v: array(work.seqlen_k, work.head_dim_v),
    p: array(work.seqlen_q, work.seqlen_k),
    dout: array(work.seqlen_q, work.head_dim_v),
    dp: matrix(),
    ds: matrix(),
    dq: array(work.seqlen_q, work.head_dim, "empty"),
    dk: array(work.seqlen_k, work.head_dim, "empty"),
    dv: array(work.seqlen_k, work.head_dim_v, "empty"),
  });
  const pairs = (/** @type {Span} */ rows) => 2 * (rows[1] - rows[0]) * work.seqlen_k;
  const shape = (/** @type {Span} */ rows) => /** @type {[number, number]} */ ([rows[1] - rows[0], work.seqlen_k]);
  record.at("dv").compute("init", "dv", [], [work.seqlen_k, work.head_dim_v]);
  perRows(record, "dv", (rows) => {
    record.load("p", rows);
    record.load("dout", rows);
    record.inPlace("dv", "dv", ["dv", "p", "dout"], pairs(rows) * work.head_dim_v);
    record.free("p", "dout");
  });
  record.at("dv").store("dv");
  record.free("dv");
  record.at("dp").load("v");
  perRows(record, "dp", (rows) => {
    record.load("dout", rows);
    record.compute("dp", "dp", ["dout", "v"], shape(rows), { flops: pairs(rows) * work.head_dim_v });
    record.store("dp", rows);
    record.free("dout", "dp");
  });
  record.at("dp").free("v");
  perRows(record, "ds", (rows) => {
    record.load("p", rows);
    record.load("dp", rows);
    record.compute("softmax_gradient", "ds", ["dp", "p"], shape(rows), { replaces: "dp" });
    record.store("ds", rows);
    record.free("p", "ds");
  });
  record.at("dq").load("k");
  perRows(record, "dq", (rows) => {
    record.load("ds", rows);
    record.compute("init", "dq", [], [rows[1] - rows[0], work.head_dim]);
    record.inPlace("dq", "dq", ["dq", "ds", "k"], pairs(rows) * work.head_dim);
    record.store("dq", rows);
    record.free("ds", "dq");
  });
  record.at("dq").free("k");
  record.at("dk").compute("init", "dk", [], [work.seqlen_k, work.head_dim]);
  perRows(record, "dk", (rows) => {
    record.load("ds", rows);
    record.load("q", rows);
    record.inPlace("dk", "dk", ["dk", "ds", "q"], pairs(rows) * work.head_dim);
    record.free("ds", "q");
  });
  record.at("dk").store("dk");
  record.free("dk");
  return record.trace;
}

/** @param {Recorder} record @param {string} phase @param {(rows: Span) => void} body */
function perRows(record, phase, body) {
  for (let m = 0; m < blocks(record.work.seqlen_q, record.work.block_m); m++) {
    record.at(phase, m, 0);
    body(span(m, record.work.block_m, record.work.seqlen_q));
  }
}
