/** C = A B as events: element by element, and in tiles. Order: simulator/matmul.py. */

import { blocks } from "tilewise/engine/band.js";
import { Recorder, array, span } from "tilewise/engine/recorder.js";

/** @typedef {import("tilewise/engine/recorder.js").Workload} Workload */
/** @typedef {import("tilewise/engine/recorder.js").Trace} Trace */

/** @param {string} algorithm @param {Workload} work */
function recorder(algorithm, work) {
  return new Recorder(algorithm, work, {
    a: array(work.seqlen_q, work.head_dim),
    b: array(work.head_dim, work.seqlen_k),
    c: array(work.seqlen_q, work.seqlen_k, "empty"),
  });
}

/** Every element of C reads a row of A and a column of B of its own. @param {Workload} work @returns {Trace} */
export function matmulNaive(work) {
  const record = recorder("matmul_naive", work);
  for (let m = 0; m < work.seqlen_q; m++) {
    for (let n = 0; n < work.seqlen_k; n++) {
      record.at("product", m, n, 0).load("a", [m, m + 1]);
      record.load("b", undefined, [n, n + 1]);
      record.compute("init", "c", [], [1, 1]);
      record.inPlace("product_sum", "c", ["c", "a", "b"], 2 * work.head_dim);
      record.store("c", [m, m + 1], [n, n + 1]);
      record.free("a", "b", "c");
    }
  }
  return record.trace;
}

/** Tiles of A and B serve a whole tile of C. @param {Workload} work @returns {Trace} */
export function matmulTiled(work) {
  const record = recorder("matmul", work);
  for (let m = 0; m < blocks(work.seqlen_q, work.block_m); m++) {
    for (let n = 0; n < blocks(work.seqlen_k, work.block_n); n++) {
      const rows = span(m, work.block_m, work.seqlen_q);
      const cols = span(n, work.block_n, work.seqlen_k);
      const [height, width] = [rows[1] - rows[0], cols[1] - cols[0]];
      record.at("setup", m, n).compute("init", "c", [], [height, width]);
      for (let part = 0; part < blocks(work.head_dim, work.block_k); part++) {
        const inner = span(part, work.block_k, work.head_dim);
        record.at("product", m, n, part).load("a", rows, inner);
        record.load("b", inner, cols);
        record.inPlace("product_sum", "c", ["c", "a", "b"], 2 * height * width * (inner[1] - inner[0]));
        record.free("a", "b");
      }
      record.at("finish", m, n).store("c", rows, cols);
      record.free("c");
    }
  }
  return record.trace;
}
