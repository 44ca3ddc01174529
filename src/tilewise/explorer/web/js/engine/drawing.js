/** Masks that are neither causal nor a window: who sees whom, as the rows of a Drawn. */

import { blocks } from "tilewise/engine/band.js";

/** @param {number} n @param {(m: number, key: number) => boolean} sees @returns {string[]} */
function rowsOf(n, sees) {
  return Array.from({ length: n }, (_, m) =>
    Array.from({ length: n }, (_, key) => (sees(m, key) ? "1" : "0")).join(""),
  );
}

/** All see the first tokens, and the others causally. @param {number} n @param {number} prefix */
export function prefixRows(n, prefix) {
  return rowsOf(n, (m, key) => key < prefix || key <= m);
}

/** Documents one after the other, as equal as can be. @param {number} n @param {number} count */
export function documentRows(n, count) {
  const own = (/** @type {number} */ token) => Math.floor((token * count) / n);
  return rowsOf(n, (m, key) => own(m) === own(key));
}

/**
 * Tokens are the pixels of a picture, read row by row: each sees those at most one row and one column away.
 * @param {number} n @param {number} width
 */
export function neighbourRows(n, width) {
  const near = (/** @type {number} */ a, /** @type {number} */ b) => Math.abs(a - b) <= 1;
  return rowsOf(
    n,
    (m, key) => near(Math.floor(m / width), Math.floor(key / width)) && near(m % width, key % width),
  );
}

/**
 * Whole tiles. `drawn` has rows of 0 and 1 with - between them; a tile that it does not name is seen.
 * @param {number} n @param {number} blockM @param {number} blockN @param {string} drawn
 */
export function drawnRows(n, blockM, blockN, drawn) {
  const tiles = drawn.split("-");
  return rowsOf(n, (m, key) => (tiles[Math.floor(m / blockM)] ?? "")[Math.floor(key / blockN)] !== "0");
}

/**
 * What is drawn after a click: the tiles that are visited now, and the other choice for one of them.
 * @param {number} n @param {number} blockM @param {number} blockN @param {number} mBlock @param {number} nBlock
 * @param {(mBlock: number, nBlock: number) => boolean} isVisited
 */
export function toggled(n, blockM, blockN, mBlock, nBlock, isVisited) {
  return Array.from({ length: blocks(n, blockM) }, (_, m) =>
    Array.from({ length: blocks(n, blockN) }, (_, key) =>
      isVisited(m, key) !== (m === mBlock && key === nBlock) ? "1" : "0",
    ).join(""),
  ).join("-");
}
