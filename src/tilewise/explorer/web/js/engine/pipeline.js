/**
 * FlashAttention-3's inner loop as a timeline: a producer that loads tiles, and consumers that multiply and softmax.
 *
 * Three units do one thing at a time each: the copy engine, the tensor cores, and the special function units, which
 * compute exponentials. Per tile of keys a consumer (a warpgroup) computes its scores, its softmax and its values. A
 * stage of the ring of tiles is free again when every consumer has used it. With ping-pong, whoever is ready takes a
 * unit. Without it, the consumers go in lockstep: all scores, then all softmaxes, then all values.
 */

/**
 * @typedef {"load_k" | "load_v" | "scores" | "softmax" | "values"} Task
 * @typedef {{tiles: number, consumers: number, stages: number, load: number, product: number, softmax: number,
 *   ping_pong: boolean}} Pipeline
 * @typedef {{task: Task, consumer: number | null, tile: number, start: number, stop: number}} Span
 * @typedef {{task: Task, consumer: number | null, tile: number}} Item
 */

/** @type {Record<Task, "copy" | "tensor" | "special">} */
export const UNITS = { load_k: "copy", load_v: "copy", scores: "tensor", softmax: "special", values: "tensor" };

/** @type {Pipeline} */
const H100 = { tiles: 4, consumers: 2, stages: 2, load: 512, product: 512, softmax: 512, ping_pong: true };

/** An H100's numbers in fp16, with changes. @param {Partial<Pipeline>} changes @returns {Pipeline} */
export function pipeline(changes) {
  return { ...H100, ...changes };
}

/** Every task in the order in which they start. @param {Pipeline} pipe @returns {Span[]} */
export function timeline(pipe) {
  const cycles = { copy: pipe.load, tensor: pipe.product, special: pipe.softmax };
  const free = { copy: 0, tensor: 0, special: 0 };
  /** @type {Map<string, number>} */
  const ends = new Map();
  /** @type {Span[]} */
  const spans = [];
  const todo = [loads(pipe), ...Array.from({ length: pipe.consumers }, (_, consumer) => products(pipe, consumer))];
  while (todo.some((queue) => queue.length > 0)) {
    const waiting = todo.flatMap((queue, index) => {
      const ready = queue.length > 0 ? readyAt(pipe, queue[0], ends) : null;
      return ready === null ? [] : [{ start: Math.max(ready, free[UNITS[queue[0].task]]), ready, index }];
    });
    waiting.sort((one, other) => one.start - other.start || one.ready - other.ready || one.index - other.index);
    const [{ start, index }] = waiting;
    const item = /** @type {Item} */ (todo[index].shift());
    const unit = UNITS[item.task];
    free[unit] = start + cycles[unit];
    ends.set(name(item), free[unit]);
    spans.push({ ...item, start, stop: free[unit] });
  }
  return spans;
}

/** How much of the time from the first product to the last the tensor cores work. @param {Span[]} spans */
export function busyShare(spans) {
  const found = spans.filter((span) => UNITS[span.task] === "tensor");
  if (found.length === 0) return 0;
  const window = Math.max(...found.map((span) => span.stop)) - Math.min(...found.map((span) => span.start));
  return found.reduce((sum, span) => sum + span.stop - span.start, 0) / window;
}

/** @param {Item} item */
function name({ task, consumer, tile }) {
  return `${task} ${consumer} ${tile}`;
}

/** @param {Pipeline} pipe @returns {Item[]} */
function loads({ tiles }) {
  const kinds = /** @type {const} */ (["load_k", "load_v"]);
  return Array.from({ length: tiles }, (_, tile) => kinds.map((task) => ({ task, consumer: null, tile }))).flat();
}

/** @param {Pipeline} pipe @param {number} consumer @returns {Item[]} */
function products({ tiles }, consumer) {
  const kinds = /** @type {const} */ (["scores", "softmax", "values"]);
  return Array.from({ length: tiles }, (_, tile) => kinds.map((task) => ({ task, consumer, tile }))).flat();
}

/** @param {Pipeline} pipe @param {Item} item @param {Map<string, number>} ends @returns {number | null} */
function readyAt(pipe, item, ends) {
  const needed = needs(pipe, item).map((one) => ends.get(name(one)));
  return needed.includes(undefined) ? null : Math.max(0, .../** @type {number[]} */ (needed));
}

/** @param {Pipeline} pipe @param {Item} item @returns {Item[]} */
function needs(pipe, { task, consumer, tile }) {
  const everybody = Array.from({ length: pipe.consumers }, (_, one) => one);
  if (consumer === null) {
    const user = task === "load_k" ? "scores" : "values";
    return tile < pipe.stages ? [] : everybody.map((one) => ({ task: user, consumer: one, tile: tile - pipe.stages }));
  }
  /** @type {Record<string, [Task, number] | null>} */
  const steps = {
    scores: tile > 0 ? ["values", tile - 1] : null,
    softmax: ["scores", tile],
    values: ["softmax", tile],
  };
  const before = steps[task];
  const who = pipe.ping_pong ? [consumer] : everybody;
  /** @type {Item[]} */
  const needed = before ? who.map((one) => ({ task: before[0], consumer: one, tile: before[1] })) : [];
  if (task !== "softmax") needed.push({ task: task === "scores" ? "load_k" : "load_v", consumer: null, tile });
  return needed;
}
