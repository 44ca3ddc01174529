/** The online softmax of one row, block after block; the mirror of tilewise/simulator/online.py. */

/**
 * @typedef {{scores: number[], rowMax: number, correction: number, rowSum: number, terms: number[]}} BlockState
 * @typedef {{states: BlockState[], probabilities: number[]}} OnlineSoftmax
 */

/** exp(score - rowMax), where nothing but masked scores so far gives 0. @param {number} score @param {number} rowMax */
export function term(score, rowMax) {
  return score === -Infinity ? 0 : Math.exp(score - rowMax);
}

/** @param {number[]} row @param {number} block @returns {OnlineSoftmax} */
export function onlineSoftmax(row, block) {
  let rowMax = -Infinity;
  let rowSum = 0;
  /** @type {BlockState[]} */
  const states = [];
  for (let start = 0; start < row.length; start += block) {
    const scores = row.slice(start, start + block);
    const newMax = Math.max(rowMax, ...scores);
    const correction = term(rowMax, newMax);
    const terms = scores.map((score) => term(score, newMax));
    rowSum = rowSum * correction + terms.reduce((sum, value) => sum + value, 0);
    rowMax = newMax;
    states.push({ scores, rowMax, correction, rowSum, terms });
  }
  return { states, probabilities: row.map((score) => term(score, rowMax) / (rowSum || 1)) };
}

/** The textbook softmax: the whole row at once. @param {number[]} row */
export function trueSoftmax(row) {
  const rowMax = Math.max(...row);
  const terms = row.map((score) => term(score, rowMax));
  const sum = terms.reduce((total, value) => total + value, 0);
  return terms.map((value) => value / (sum || 1));
}

/**
 * @typedef {{kind: "start" | "read" | "correct" | "add" | "divide", block: number, seen: number, rowMax: number,
 *   rowSum: number, out: number[], oldMax: number, blockMax: number, correction: number, added: number}} Moment
 *   m, l and out always belong together; `seen` scores are in them. `added` is what the block's terms sum to.
 */

/**
 * The online softmax as a series of states that exist. A block is read (nothing changes yet), the past is corrected
 * where the maximum rises, the block's terms are added. With values there is a running output, divided by l at the end.
 * @param {number[]} row @param {number} block @param {number[][]} [values]  one vector a score @returns {Moment[]}
 */
export function moments(row, block, values = []) {
  const dims = values[0]?.length ?? 0;
  let state = { rowMax: -Infinity, rowSum: 0, out: new Array(dims).fill(0), seen: 0 };
  /** @type {Moment[]} */
  const found = [
    { kind: "start", block: 0, oldMax: -Infinity, blockMax: -Infinity, correction: 1, added: 0, ...state },
  ];
  for (let start = 0, at = 0; start < row.length; start += block, at++) {
    const scores = row.slice(start, start + block);
    const oldMax = state.rowMax;
    const blockMax = Math.max(...scores);
    const rowMax = Math.max(oldMax, blockMax);
    const correction = oldMax === -Infinity ? 1 : term(oldMax, rowMax);
    const terms = scores.map((score) => term(score, rowMax));
    const about = { block: at, oldMax, blockMax, correction, added: terms.reduce((sum, one) => sum + one, 0) };
    found.push({ kind: "read", ...about, ...state });
    if (correction !== 1) {
      state = { ...state, rowMax, rowSum: state.rowSum * correction, out: state.out.map((one) => one * correction) };
      found.push({ kind: "correct", ...about, ...state });
    }
    const out = state.out.map((one, dim) => one + terms.reduce((sum, p, i) => sum + p * values[start + i][dim], 0));
    state = { rowMax, rowSum: state.rowSum + about.added, out, seen: Math.min(row.length, start + block) };
    found.push({ kind: "add", ...about, ...state });
  }
  if (dims > 0) {
    const last = found[found.length - 1];
    found.push({ ...last, kind: "divide", out: last.out.map((one) => one / (last.rowSum || 1)) });
  }
  return found;
}
