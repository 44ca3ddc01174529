/** A day in the life of a KV cache as lines of text: "A arrives 5", "A grows 3", "F shares A", "C finishes". */

import { ContiguousPool, PagePool } from "tilewise/engine/paging.js";

/**
 * @typedef {{kind: "arrives" | "grows" | "shares" | "finishes", request: string, tokens: number, parent: string}} Action
 * @typedef {{pages: number, page: number, max: number, slots: number}} Sizes
 */

export const MOST_ACTIONS = 60;
const LINE = /^(\S{1,6})\s+(arrives|grows|shares|finishes)(?:\s+(\S+))?$/;

/** The actions of a script; throws with the first line that makes no sense. @param {string} text @returns {Action[]} */
export function parseScript(text) {
  const lines = text
    .split("\n")
    .map((line) => line.trim())
    .filter((line) => line !== "");
  if (lines.length > MOST_ACTIONS) throw new Error(`at most ${MOST_ACTIONS} lines, got ${lines.length}`);
  const there = new Set();
  const known = new Set();
  return lines.map((line, at) => {
    const action = parseLine(line, at + 1);
    const wrong = (/** @type {string} */ why) => new Error(`line ${at + 1} to make sense: ${why}`);
    const fresh = action.kind === "arrives" || action.kind === "shares";
    if (fresh && known.has(action.request)) throw wrong(`${action.request} has been there before`);
    if (!fresh && !there.has(action.request)) throw wrong(`${action.request} is not there`);
    if (action.kind === "shares" && !there.has(action.parent)) throw wrong(`${action.parent} is not there`);
    if (fresh) there.add(action.request);
    known.add(action.request);
    if (action.kind === "finishes") there.delete(action.request);
    return action;
  });
}

/** @param {string} line @param {number} number @returns {Action} */
function parseLine(line, number) {
  const found = LINE.exec(line);
  const kind = found?.[2];
  const tokens = Number(found?.[3]);
  const counts = Number.isInteger(tokens) && tokens >= 1 && tokens <= 4096;
  const right = kind === "finishes" ? found?.[3] === undefined : kind === "shares" ? found?.[3] !== undefined : counts;
  if (!found || !right) {
    throw new Error(`"A arrives 5", "A grows 3", "F shares A" or "C finishes" in line ${number}, got "${line}"`);
  }
  return {
    kind: /** @type {Action["kind"]} */ (kind),
    request: found[1],
    tokens: counts ? tokens : 0,
    parent: kind === "shares" ? found[3] : "",
  };
}

/** Both caches after the first actions of a script. @param {Action[]} actions @param {Sizes} sizes */
export function play(actions, sizes) {
  const paged = new PagePool(sizes.pages, sizes.page);
  const contiguous = new ContiguousPool(sizes.pages, sizes.page, sizes.max, sizes.slots || null);
  const state = {
    paged,
    contiguous,
    refusedPaged: new Set(),
    refusedContiguous: new Set(),
    fresh: { paged: 0, contiguous: 0 },
  };
  for (const action of actions) {
    state.fresh = { paged: paged.events.length, contiguous: contiguous.events.length };
    playPaged(paged, action, state.refusedPaged);
    playContiguous(contiguous, action, state.refusedContiguous, paged);
  }
  return state;
}

/** @param {PagePool} pool @param {Action} action @param {Set<string>} refused */
function playPaged(pool, action, refused) {
  const { request, tokens, parent } = action;
  if (action.kind === "arrives" && !pool.arrive(request, tokens)) refused.add(request);
  if (action.kind === "shares" && pool.tables.has(parent)) pool.fork(parent, request);
  if (action.kind === "shares" && !pool.tables.has(parent)) refused.add(request);
  if (action.kind === "grows" && pool.tables.has(request)) pool.append(request, tokens);
  if (action.kind === "finishes" && pool.tables.has(request)) pool.finish(request);
}

/**
 * Without pages there is nothing to share: a copy takes a reservation of its own.
 * @param {ContiguousPool} pool @param {Action} action @param {Set<string>} refused @param {PagePool} paged
 */
function playContiguous(pool, action, refused, paged) {
  const { request, tokens, parent } = action;
  const copied = pool.tokens.get(parent) ?? paged.tokens.get(request) ?? 1;
  if (action.kind === "arrives" && !pool.arrive(request, tokens)) refused.add(request);
  if (action.kind === "shares" && !pool.arrive(request, copied)) refused.add(request);
  if (action.kind === "grows" && pool.tokens.has(request)) pool.append(request, tokens);
  if (action.kind === "finishes" && pool.tokens.has(request)) pool.finish(request);
}
