/**
 * Executes events on numbers: arrays in slow memory, buffers in fast memory. Running the events one by one gives the
 * exact result, and whatever a view shows is read from here.
 */

import { bandOf } from "tilewise/engine/recorder.js";

/**
 * @typedef {{rows: number, cols: number, data: Float64Array}} Matrix
 * @typedef {import("tilewise/engine/recorder.js").Trace} Trace
 * @typedef {import("tilewise/engine/recorder.js").TraceEvent} TraceEvent
 * @typedef {import("tilewise/engine/recorder.js").Span} Span
 */

const FILLS = { input: NaN, empty: NaN, zero: 0, minus_infinity: -Infinity };

/** @param {number} rows @param {number} cols @param {number} [value] @returns {Matrix} */
export function matrix(rows, cols, value = 0) {
  return { rows, cols, data: new Float64Array(rows * cols).fill(value) };
}

export class Machine {
  /** @param {Trace} trace @param {Record<string, Matrix>} inputs */
  constructor(trace, inputs) {
    this.work = trace.workload;
    this.band = bandOf(trace.workload);
    /** @type {Map<string, Matrix>} */
    this.slow = new Map();
    for (const [name, spec] of Object.entries(trace.arrays)) {
      const given = spec.fill === "input" ? inputs[name] : undefined;
      this.slow.set(name, given ?? matrix(spec.rows, spec.cols, FILLS[spec.fill]));
    }
    /** @type {Map<string, Matrix>} */
    this.fast = new Map();
    /**
     * The last correction of each row in the tile: its maximum before, the factor of l, and the factor of O, which in
     * FA-1 order has been divided by l and is multiplied by it again.
     * @type {{before: Float64Array, alpha: Float64Array, out: Float64Array} | null}
     */
    this.correction = null;
  }

  /** @param {TraceEvent} event */
  run(event) {
    if (event.kind === "load") this.fast.set(str(event.buffer), cut(this.#slow(event.array), event.rows, event.cols));
    else if (event.kind === "store") paste(this.#slow(event.array), this.#fast(event.buffer), event.rows, event.cols);
    else if (event.kind === "compute") this.#compute(event);
    else if (event.kind === "rescale") this.#rescale(event);
    else if (event.kind === "free") this.fast.delete(str(event.buffer));
  }

  /** @param {TraceEvent} event */
  #compute(event) {
    const operation = OPERATIONS[str(event.op)];
    const sources = (event.sources ?? []).map((name) => this.#fast(name));
    const result = operation(sources, event, this);
    if (event.replaces) this.fast.delete(event.replaces);
    this.fast.set(str(event.target), result);
  }

  /** @param {TraceEvent} event */
  #rescale(event) {
    const [before, after] = [this.#fast("row_max"), this.#fast("new_max")];
    const sums = Float64Array.from(this.fast.get("row_sum")?.data ?? []);
    const alpha = before.data.map((value, row) => Math.exp(value - finite(after.data[row])));
    for (const name of event.buffers ?? []) {
      const buffer = this.#fast(name);
      const undo = event.normalised && name === "acc";
      buffer.data.forEach((value, at) => {
        const row = Math.floor(at / buffer.cols);
        buffer.data[at] = value * alpha[row] * (undo ? sums[row] : 1);
      });
    }
    const out = alpha.map((factor, row) => factor * (event.normalised ? sums[row] : 1));
    this.correction = { before: before.data.slice(), alpha, out };
    this.fast.set("row_max", { ...after, data: after.data.slice() });
  }

  /** @param {string | undefined} name @returns {Matrix} */
  #slow(name) {
    return found(this.slow, name);
  }

  /** @param {string | undefined} name @returns {Matrix} */
  #fast(name) {
    return found(this.fast, name);
  }
}

/** @type {Record<string, (sources: Matrix[], event: TraceEvent, machine: Machine) => Matrix>} */
const OPERATIONS = {
  init: (_, event) => matrix(...shapeOf(event), event.target === "row_max" ? -Infinity : 0),
  scores: ([q, k], _, machine) => times(q, k, { turned: true, factor: machine.work.scale }),
  mask: ([s], event, machine) =>
    each(s, (value, row, col) => {
      const [m, n] = [(event.rows ?? [0])[0] + row, (event.cols ?? [0])[0] + col];
      return machine.band.sees(m, n) ? value : -Infinity;
    }),
  softmax: ([s]) => softmaxRows(s),
  product: ([p, v]) => times(p, v),
  row_max: ([before, s]) => each(before, (value, row) => Math.max(value, ...rowOf(s, row))),
  exp: ([s, newMax]) => each(s, (value, row) => Math.exp(value - finite(newMax.data[row]))),
  row_sum: ([sums, p]) => each(sums, (value, row) => value + total(rowOf(p, row))),
  values: ([acc, p, v]) => plus(acc, times(p, v)),
  normalise: ([acc, sums]) => each(acc, (value, row) => value / (sums.data[row] || 1)),
  lse: ([sums, rowMax]) => each(rowMax, (value, row) => value + Math.log(sums.data[row])),
  delta: ([out, dout]) => ({
    rows: out.rows,
    cols: 1,
    data: Float64Array.from({ length: out.rows }, (_, row) =>
      total(rowOf(out, row).map((x, i) => x * rowOf(dout, row)[i])),
    ),
  }),
  probabilities: ([s, lse]) => each(s, (value, row) => (value === -Infinity ? 0 : Math.exp(value - lse.data[row]))),
  dv: ([dv, p, dout]) => plus(dv, times(transposed(p), dout)),
  dp: ([dout, v]) => times(dout, v, { turned: true }),
  ds: ([dp, p, delta]) => each(p, (value, row, col) => value * (dp.data[row * dp.cols + col] - delta.data[row])),
  dk: ([dk, ds, q], _, machine) => plus(dk, times(transposed(ds), q, { factor: machine.work.scale })),
  dq: ([dq, ds, k], _, machine) => plus(dq, times(ds, k, { factor: machine.work.scale })),
  softmax_gradient: ([dp, p]) => {
    const delta = Array.from({ length: p.rows }, (_, row) => total(rowOf(p, row).map((x, i) => x * rowOf(dp, row)[i])));
    return each(p, (value, row, col) => value * (dp.data[row * dp.cols + col] - delta[row]));
  },
  merge: ([acc, out, lse, rowMax]) =>
    each(acc, (value, row, col) => value + weight(lse, rowMax, row) * out.data[row * out.cols + col]),
  merge_sum: ([sums, lse, rowMax]) => each(sums, (value, row) => value + weight(lse, rowMax, row)),
  product_sum: ([c, a, b]) => plus(c, times(a, b)),
};

/** A row that has seen no key has maximum -inf; subtracting 0 instead gives 0, not NaN. @param {number} value */
function finite(value) {
  return value === -Infinity ? 0 : value;
}

/** How much a split counts beside the others. @param {Matrix} lse @param {Matrix} rowMax @param {number} row */
function weight(lse, rowMax, row) {
  return Math.exp(lse.data[row] - finite(rowMax.data[row]));
}

/** @param {Map<string, Matrix>} memory @param {string | undefined} name */
function found(memory, name) {
  const matrix = memory.get(str(name));
  if (matrix === undefined) throw new Error(`${name} is not there`);
  return matrix;
}

/** @param {string | undefined} name */
function str(name) {
  return name ?? "";
}

/** @param {TraceEvent} event */
function shapeOf(event) {
  return /** @type {[number, number]} */ (event.shape);
}

/** @param {Matrix} from @param {Span | null | undefined} rows @param {Span | null | undefined} cols */
function cut(from, rows, cols) {
  const [top, bottom] = rows ?? [0, from.rows];
  const [start, stop] = cols ?? [0, from.cols];
  const part = matrix(bottom - top, stop - start);
  for (let row = top; row < bottom; row++) {
    part.data.set(from.data.subarray(row * from.cols + start, row * from.cols + stop), (row - top) * part.cols);
  }
  return part;
}

/**
 * @param {Matrix} into @param {Matrix} part @param {Span | null | undefined} rows @param {Span | null | undefined} cols
 */
function paste(into, part, rows, cols) {
  const top = (rows ?? [0])[0];
  const start = (cols ?? [0])[0];
  for (let row = 0; row < part.rows; row++) {
    into.data.set(part.data.subarray(row * part.cols, (row + 1) * part.cols), (top + row) * into.cols + start);
  }
}

/** @param {Matrix} of @param {(value: number, row: number, col: number) => number} change @returns {Matrix} */
function each(of, change) {
  return { ...of, data: of.data.map((value, at) => change(value, Math.floor(at / of.cols), at % of.cols)) };
}

/** @param {Matrix} a @param {Matrix} b */
function plus(a, b) {
  return { ...a, data: a.data.map((value, at) => value + b.data[at]) };
}

/** @param {Matrix} a @param {Matrix} b @param {{turned?: boolean, factor?: number}} [how]  turned: a b^T */
function times(a, b, { turned = false, factor = 1 } = {}) {
  const [right, inner] = turned ? [b.rows, b.cols] : [b.cols, b.rows];
  const product = matrix(a.rows, right);
  for (let row = 0; row < a.rows; row++) {
    for (let col = 0; col < right; col++) {
      let sum = 0;
      for (let i = 0; i < inner; i++) {
        sum += a.data[row * a.cols + i] * b.data[turned ? col * b.cols + i : i * b.cols + col];
      }
      product.data[row * right + col] = sum * factor;
    }
  }
  return product;
}

/** @param {Matrix} a */
function transposed(a) {
  const turned = matrix(a.cols, a.rows);
  a.data.forEach((value, at) => {
    turned.data[(at % a.cols) * a.rows + Math.floor(at / a.cols)] = value;
  });
  return turned;
}

/** @param {Matrix} s */
function softmaxRows(s) {
  const tops = Array.from({ length: s.rows }, (_, row) => finite(Math.max(...rowOf(s, row))));
  const p = each(s, (value, row) => Math.exp(value - tops[row]));
  const sums = Array.from({ length: s.rows }, (_, row) => total(rowOf(p, row)) || 1);
  return each(p, (value, row) => value / sums[row]);
}

/** @param {Matrix} of @param {number} row */
export function rowOf(of, row) {
  return of.data.subarray(row * of.cols, (row + 1) * of.cols);
}

/** @param {Float64Array} values */
function total(values) {
  let sum = 0;
  for (const value of values) sum += value;
  return sum;
}
