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
