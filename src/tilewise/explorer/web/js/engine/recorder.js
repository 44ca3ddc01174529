/**
 * Events of a two-level memory, in the words of tilewise/simulator/events.py: that page says what each means. The keys
 * are spelt as there, because a test compares the events of both, one by one.
 */

import { Band, Drawn } from "tilewise/engine/band.js";

/**
 * @typedef {import("tilewise/engine/band.js").Span} Span
 * @typedef {{seqlen_q: number, seqlen_k: number, head_dim: number, head_dim_v: number, block_m: number,
 *   block_n: number, left: number | null, right: number | null, scale: number, itemsize: number,
 *   wide_itemsize: number, num_splits: number, block_k: number, block_table: number[] | null,
 *   seen: string[] | null}} Workload
 * @typedef {{rows: number, cols: number, wide: boolean, fill: "input" | "empty" | "zero" | "minus_infinity"}} ArraySpec
 * @typedef {{kind: "load" | "store" | "compute" | "rescale" | "skip" | "free", phase: string,
 *   m_block: number | null, n_block: number | null, part: number | null, elements: number, bytes: number,
 *   buffer?: string, array?: string, rows?: Span | null, cols?: Span | null, wide?: boolean, op?: string,
 *   target?: string, sources?: string[], shape?: [number, number], replaces?: string | null, flops?: number,
 *   buffers?: string[], normalised?: boolean}} TraceEvent
 * @typedef {{algorithm: string, workload: Workload, arrays: Record<string, ArraySpec>, events: TraceEvent[]}} Trace
 */

/** @type {Workload} */
const PLAIN = {
  seqlen_q: 0,
  seqlen_k: 0,
  head_dim: 1,
  head_dim_v: 1,
  block_m: 1,
  block_n: 1,
  left: null,
  right: null,
  scale: 1,
  itemsize: 2,
  wide_itemsize: 4,
  num_splits: 1,
  block_k: 1,
  block_table: null,
  seen: null,
};

/** A workload with what is not given as in Python. @param {Partial<Workload>} sizes @returns {Workload} */
export function workload(sizes) {
  return { ...PLAIN, ...sizes };
}

/** @param {Workload} work @returns {Band | Drawn} */
export function bandOf(work) {
  if (work.seen !== null) return new Drawn(work.seen);
  return new Band(work.seqlen_q, work.seqlen_k, work.left, work.right);
}

/**
 * @param {number} rows @param {number} cols @param {boolean} wide @param {ArraySpec["fill"]} fill @returns {ArraySpec}
 */
export function array(rows, cols, fill = "input", wide = false) {
  return { rows, cols, wide, fill };
}

/**
 * Tokens of a block, cut at the end.
 * @param {number} block @param {number} size @param {number} length @returns {Span}
 */
export function span(block, size, length) {
  return [block * size, Math.min((block + 1) * size, length)];
}

export class Recorder {
  /** @param {string} algorithm @param {Workload} work @param {Record<string, ArraySpec>} arrays */
  constructor(algorithm, work, arrays) {
    this.work = work;
    this.arrays = arrays;
    /** @type {Trace} */
    this.trace = { algorithm, workload: work, arrays, events: [] };
    /** @type {Map<string, {rows: number, cols: number, wide: boolean}>} */
    this.buffers = new Map();
    /** @type {{phase: string, m_block: number | null, n_block: number | null, part: number | null}} */
    this.place = { phase: "", m_block: null, n_block: null, part: null };
  }

  /** Where the following events happen. */
  at(
    /** @type {string} */ phase,
    /** @type {number | null} */ m = null,
    /** @type {number | null} */ n = null,
    /** @type {number | null} */ part = null,
  ) {
    this.place = { phase, m_block: m, n_block: n, part };
    return this;
  }

  /** @param {string} name @param {Span} [rows] @param {Span} [cols] @param {string} [from] */
  load(name, rows, cols, from = name) {
    const source = this.arrays[from];
    rows ??= [0, source.rows];
    cols ??= [0, source.cols];
    this.buffers.set(name, { rows: rows[1] - rows[0], cols: cols[1] - cols[0], wide: source.wide });
    this.#emit("load", this.#elements(name), source.wide, { buffer: name, array: from, rows, cols, wide: source.wide });
  }

  /** @param {string} name @param {Span} [rows] @param {Span} [cols] @param {string} [to] */
  store(name, rows, cols, to = name) {
    const target = this.arrays[to];
    rows ??= [0, target.rows];
    cols ??= [0, target.cols];
    this.#emit("store", this.#elements(name), target.wide, { buffer: name, array: to, rows, cols, wide: target.wide });
  }

  /**
   * @param {string} op @param {string} target @param {string[]} sources @param {[number, number]} shape
   * @param {{replaces?: string, flops?: number, rows?: Span, cols?: Span}} [more]
   */
  compute(op, target, sources, shape, { replaces, flops = 0, rows, cols } = {}) {
    const wide = replaces === undefined ? true : this.#buffer(replaces).wide;
    if (replaces !== undefined) this.buffers.delete(replaces);
    this.buffers.set(target, { rows: shape[0], cols: shape[1], wide });
    const taken = replaces === undefined ? shape[0] * shape[1] : 0;
    const details = {
      op,
      target,
      sources,
      shape,
      replaces: replaces ?? null,
      flops,
      rows: rows ?? null,
      cols: cols ?? null,
    };
    this.#emit("compute", taken, true, details);
  }

  /** An operation whose target is there already. */
  inPlace(/** @type {string} */ op, /** @type {string} */ target, /** @type {string[]} */ sources, flops = 0) {
    const { rows, cols } = this.#buffer(target);
    this.compute(op, target, sources, [rows, cols], { replaces: target, flops });
  }

  /** @param {string[]} buffers @param {boolean} normalised */
  rescale(buffers, normalised) {
    const touched = buffers.reduce((sum, name) => sum + this.#elements(name), 0);
    const bytes = buffers.reduce((sum, name) => sum + this.#elements(name) * this.#width(this.#buffer(name).wide), 0);
    this.trace.events.push({
      kind: "rescale",
      ...this.place,
      elements: touched,
      bytes,
      buffers,
      normalised,
    });
    this.free("new_max");
  }

  /** @param {Span} rows @param {Span} cols */
  skip(rows, cols) {
    const elements = (rows[1] - rows[0]) * (cols[1] - cols[0]);
    this.trace.events.push({ kind: "skip", ...this.place, elements, bytes: 0, rows, cols });
  }

  /** @param {...string} names */
  free(...names) {
    for (const name of names) {
      this.#emit("free", this.#elements(name), this.#buffer(name).wide, { buffer: name });
      this.buffers.delete(name);
    }
  }

  /** @param {TraceEvent["kind"]} kind @param {number} elements @param {boolean} wide @param {object} details */
  #emit(kind, elements, wide, details) {
    const bytes = elements * this.#width(wide);
    this.trace.events.push({ kind, ...this.place, elements, bytes, ...details });
  }

  /** @param {boolean} wide */
  #width(wide) {
    return wide ? this.work.wide_itemsize : this.work.itemsize;
  }

  /** @param {string} name */
  #buffer(name) {
    const found = this.buffers.get(name);
    if (found === undefined) throw new Error(`${name} is not in fast memory`);
    return found;
  }

  /** @param {string} name */
  #elements(name) {
    const { rows, cols } = this.#buffer(name);
    return rows * cols;
  }
}
