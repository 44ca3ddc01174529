/**
 * Numbers to compute with: the same ones for the same seed, one digit after the point so that they are easy to read.
 */

import { matrix } from "tilewise/engine/machine.js";

/** A small generator of uniform numbers in [0, 1). @param {number} seed */
function generator(seed) {
  let state = (seed * 2654435761 + 40503) >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
}

/** Numbers from -2.0 to 2.0 in steps of 0.1. @param {number} rows @param {number} cols @param {number} seed */
export function someNumbers(rows, cols, seed) {
  const next = generator(seed);
  const numbers = matrix(rows, cols);
  numbers.data.forEach((_, at) => {
    numbers.data[at] = Math.round((next() * 4 - 2) * 10) / 10;
  });
  return numbers;
}

/** Digits from 0 to 5. @param {number} rows @param {number} cols @param {number} seed */
export function someDigits(rows, cols, seed) {
  const next = generator(seed);
  const numbers = matrix(rows, cols);
  numbers.data.forEach((_, at) => {
    numbers.data[at] = Math.floor(next() * 6);
  });
  return numbers;
}
