/**
 * A trace as stops to step through. A stop is one step (see simulator/events.py), together with what merely surrounds
 * it: setting up and skipping belong to the step they lead to, finishing to the step before. In the backward, the
 * passes over rows alone (delta, round) are stops of their own, and so is the merging of splits.
 */

/** @typedef {import("tilewise/engine/recorder.js").Trace} Trace */
/** @typedef {import("tilewise/engine/recorder.js").TraceEvent} TraceEvent */
/**
 * @typedef {{phase: string, mBlock: number | null, nBlock: number | null, part: number | null, first: number,
 *   last: number, isStep: boolean}} Stop  events first .. last - 1
 * @typedef {{reads: number, writes: number, wide: number, readBytes: number, writtenBytes: number, fast: number,
 *   fastBytes: number, flops: number, skipped: number, rescaled: number}} Counters  elements in all but the bytes;
 *   reads and writes count elements of the inputs' dtype, wide those of statistics and sums
 */

const OWN_STOPS = new Set(["delta", "round", "merge"]);
const AROUND = new Set(["setup", "finish", "skip"]);

/** @param {TraceEvent} event */
function placeOf(event) {
  return `${event.phase} ${event.m_block} ${event.n_block} ${event.part}`;
}

/** @param {TraceEvent} event */
function isStep(event) {
  return event.m_block !== null && event.n_block !== null && !AROUND.has(event.phase);
}

/** How many steps, in the sense of events.py, a trace has. @param {Trace} trace */
export function countSteps(trace) {
  return stopsOf(trace, isStep).length;
}

/** @param {Trace} trace @returns {Stop[]} */
export function stops(trace) {
  const standsAlone = (/** @type {TraceEvent} */ event) => OWN_STOPS.has(event.phase) || isStep(event);
  const found = stopsOf(trace, standsAlone);
  found.forEach((stop, index) => {
    const next = found[index + 1];
    stop.last = next === undefined ? trace.events.length : leadIn(trace, stop.last, next.first);
  });
  if (found.length > 0) found[0].first = 0;
  found.forEach((stop, index) => {
    if (index > 0) stop.first = found[index - 1].last;
  });
  return found;
}

/**
 * Where between two steps the first ends: finishing is still its own.
 * @param {Trace} trace @param {number} from @param {number} to
 */
function leadIn(trace, from, to) {
  let at = from;
  while (at < to && (trace.events[at].phase === "finish" || trace.events[at].kind === "free")) at++;
  return at;
}

/** @param {Trace} trace @param {(event: TraceEvent) => boolean} belongs @returns {Stop[]} */
function stopsOf(trace, belongs) {
  /** @type {Stop[]} */
  const found = [];
  let place = "";
  trace.events.forEach((event, index) => {
    const here = placeOf(event);
    if (here !== place && belongs(event)) {
      found.push({
        phase: event.phase,
        mBlock: event.m_block,
        nBlock: event.n_block,
        part: event.part,
        first: index,
        last: index + 1,
        isStep: isStep(event),
      });
    } else if (here === place && belongs(event)) {
      found[found.length - 1].last = index + 1;
    }
    place = here;
  });
  return found;
}

/** @returns {Counters} */
export function noCounters() {
  return {
    reads: 0,
    writes: 0,
    wide: 0,
    readBytes: 0,
    writtenBytes: 0,
    fast: 0,
    fastBytes: 0,
    flops: 0,
    skipped: 0,
    rescaled: 0,
  };
}

/** @param {Counters} counters @param {TraceEvent} event */
export function count(counters, event) {
  if (event.kind === "load" || event.kind === "store") {
    if (event.wide) counters.wide += event.elements;
    else counters[event.kind === "load" ? "reads" : "writes"] += event.elements;
    counters[event.kind === "load" ? "readBytes" : "writtenBytes"] += event.bytes;
  }
  if (event.kind === "load" || event.kind === "compute") {
    counters.fast += event.elements;
    counters.fastBytes += event.bytes;
  }
  if (event.kind === "free") {
    counters.fast -= event.elements;
    counters.fastBytes -= event.bytes;
  }
  if (event.kind === "skip") counters.skipped += 1;
  if (event.kind === "rescale") counters.rescaled += 1;
  counters.flops += event.flops ?? 0;
}

/** The most bytes that fast memory holds at a time. @param {Trace} trace */
export function peakBytes(trace) {
  const counters = noCounters();
  return trace.events.reduce((most, event) => {
    count(counters, event);
    return Math.max(most, counters.fastBytes);
  }, 0);
}

/** The counters of all events before `stop`. @param {Trace} trace @param {number} [stop] */
export function countersAt(trace, stop = trace.events.length) {
  const counters = noCounters();
  for (let index = 0; index < stop; index++) count(counters, trace.events[index]);
  return counters;
}
