/** A trace that can be stood in the middle of: what fast memory holds, what was touched, what it has cost so far. */

import { Machine } from "tilewise/engine/machine.js";
import { count, noCounters, stops } from "tilewise/engine/timeline.js";

/**
 * @typedef {import("tilewise/engine/machine.js").Matrix} Matrix
 * @typedef {import("tilewise/engine/recorder.js").Trace} Trace
 * @typedef {import("tilewise/engine/recorder.js").TraceEvent} TraceEvent
 * @typedef {import("tilewise/engine/recorder.js").Span} Span
 * @typedef {import("tilewise/engine/timeline.js").Stop} Stop
 * @typedef {import("tilewise/engine/timeline.js").Counters} Counters
 * @typedef {{matrix: Matrix, how: "held" | "loaded" | "computing" | "rescaled", leaving: boolean, stored: boolean,
 *   array: string | null, rows: Span | null}} Buffer
 */

export class Replay {
  /** @param {Trace} trace @param {Record<string, Matrix>} inputs */
  constructor(trace, inputs) {
    this.trace = trace;
    this.inputs = inputs;
    this.stops = stops(trace);
    this.machine = new Machine(trace, inputs);
    this.counters = noCounters();
    this.at = 0;
    /** What fast memory holds during the present stop. @type {Map<string, Buffer>} */
    this.buffers = new Map();
    /** How often each row of an array has been written. @type {Map<string, Uint16Array>} */
    this.written = new Map();
    /** @type {TraceEvent[]} */
    this.skips = [];
  }

  restart() {
    this.machine = new Machine(this.trace, this.inputs);
    this.counters = noCounters();
    this.at = 0;
    this.buffers.clear();
    this.written.clear();
    this.skips = [];
  }

  /** The state after so many stops. @param {number} at */
  seek(at) {
    if (at < this.at) this.restart();
    while (this.at < at) this.#forward();
    return this;
  }

  /** The stop that has just happened. @returns {Stop | null} */
  get stop() {
    return this.at === 0 ? null : this.stops[this.at - 1];
  }

  /** The events of that stop. @returns {TraceEvent[]} */
  get events() {
    return this.stop === null ? [] : this.trace.events.slice(this.stop.first, this.stop.last);
  }

  #forward() {
    for (const [name, buffer] of this.buffers) {
      if (buffer.leaving) this.buffers.delete(name);
      else Object.assign(buffer, { how: "held", stored: false });
    }
    const { first, last } = this.stops[this.at];
    this.skips = [];
    for (let index = first; index < last; index++) this.#run(this.trace.events[index]);
    this.at += 1;
  }

  /** @param {TraceEvent} event */
  #run(event) {
    this.machine.run(event);
    count(this.counters, event);
    if (event.kind === "load") this.#hold(event.buffer, "loaded", event.array, event.rows);
    else if (event.kind === "compute") this.#computed(event);
    else if (event.kind === "rescale")
      [...(event.buffers ?? []), "row_max"].forEach((name) => this.#hold(name, "rescaled"));
    else if (event.kind === "store") this.#stored(event);
    else if (event.kind === "free") this.#freed(event.buffer ?? "");
    else this.skips.push(event);
  }

  /** @param {TraceEvent} event */
  #computed(event) {
    const before = this.buffers.get(event.target ?? "");
    if (event.replaces && event.replaces !== event.target) this.buffers.delete(event.replaces);
    // What a correction touched in this step stays marked as corrected, whatever is added to it.
    this.#hold(event.target, before?.how === "rescaled" ? "rescaled" : "computing");
  }

  /**
   * @param {string | undefined} name @param {Buffer["how"]} how @param {string | null} [array]
   * @param {Span | null} [rows]
   */
  #hold(name = "", how, array = null, rows = null) {
    const matrix = /** @type {Matrix} */ (this.machine.fast.get(name));
    const before = this.buffers.get(name);
    this.buffers.set(name, {
      matrix,
      how,
      leaving: false,
      stored: false,
      array: array ?? before?.array ?? null,
      rows: rows ?? before?.rows ?? null,
    });
  }

  /** @param {TraceEvent} event */
  #stored(event) {
    const buffer = this.buffers.get(event.buffer ?? "");
    if (buffer) buffer.stored = true;
    const array = event.array ?? "";
    const rows = this.written.get(array) ?? new Uint16Array(this.trace.arrays[array].rows);
    const [start, stop] = event.rows ?? [0, 0];
    for (let row = start; row < stop; row++) rows[row] += 1;
    this.written.set(array, rows);
  }

  /** @param {string} name */
  #freed(name) {
    const buffer = this.buffers.get(name);
    if (name === "new_max") this.buffers.delete(name);
    else if (buffer) buffer.leaving = true;
  }
}
