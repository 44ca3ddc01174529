/** Whether an algorithm gives what naive attention gives, on the numbers of the page. */

import { naive } from "tilewise/engine/attention.js";
import { Machine } from "tilewise/engine/machine.js";
import { someNumbers } from "tilewise/engine/numbers.js";

/**
 * @typedef {import("tilewise/engine/machine.js").Matrix} Matrix
 * @typedef {import("tilewise/engine/recorder.js").Trace} Trace
 * @typedef {import("tilewise/engine/recorder.js").Workload} Workload
 */

/** A machine that has run a whole trace. @param {Trace} trace @param {Record<string, Matrix>} inputs */
export function finished(trace, inputs) {
  const machine = new Machine(trace, inputs);
  for (const event of trace.events) machine.run(event);
  return machine;
}

/** An array of slow memory. @param {Machine} machine @param {string} name */
export function slow(machine, name) {
  return /** @type {Matrix} */ (machine.slow.get(name));
}

/** @param {Matrix} one @param {Matrix} other */
export function largestDifference(one, other) {
  return Math.max(0, ...Array.from(one.data, (value, at) => Math.abs(value - other.data[at])));
}

/** Q, K and V of one head. @param {Workload} work @param {number} [head] */
export function headInputs(work, head = 0) {
  return {
    q: someNumbers(work.seqlen_q, work.head_dim, 3 * head + 1),
    k: someNumbers(work.seqlen_k, work.head_dim, 3 * head + 2),
    v: someNumbers(work.seqlen_k, work.head_dim_v, 3 * head + 3),
  };
}

/**
 * The largest difference between an algorithm's O and naive attention's.
 * @param {(work: Workload) => Trace} schedule @param {Workload} work @param {Record<string, Matrix>} [inputs]
 */
export function differenceFromNaive(schedule, work, inputs = headInputs(work)) {
  const [own, textbook] = [schedule, naive].map((one) => slow(finished(one(work), inputs), "out"));
  return largestDifference(own, textbook);
}
