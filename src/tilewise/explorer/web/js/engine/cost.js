/**
 * What attention costs, in closed form; the mirror of tilewise/plan/cost.py and roofline.py for dense problems without
 * bias, mask and dropout. The exported page computes with it what the served one asks Python, and a test compares them.
 */

import { Band } from "tilewise/engine/band.js";

/**
 * @typedef {import("tilewise/engine/band.js").TileGrid} TileGrid
 * @typedef {{reads: number, writes: number, wide: number}} Traffic
 * @typedef {{name: string, type: string, num_sms: number, l2_bytes: number, memory_bytes: number, bandwidth: number,
 *   flops: Record<string, number>}} Device
 * @typedef {{batch: number, seqlenQ: number, seqlenK: number, numHeads: number, numKvHeads: number, headDim: number,
 *   headDimV: number, dtype: string, left: number | null, right: number | null, needsGrad: boolean}} Problem
 * @typedef {{flops: number, traffic: Traffic, bytes_moved: number, bytes_from_memory: number, extra_memory: number,
 *   seconds: number | null, bound: "compute" | "memory" | null, intensity: number}} Work
 * @typedef {{inputs: number, outputs: number, saved_for_backward: number, gradients: number}} Memory
 */

/** @type {Record<string, number>} */
export const ITEMSIZE = { float16: 2, bfloat16: 2, float32: 4 };
const WIDE = 4;

/** @param {Traffic} traffic */
export function elements(traffic) {
  return traffic.reads + traffic.writes;
}

/** @param {Band} band @param {number} d @param {number} dv @returns {Traffic} */
export function naiveForward(band, d, dv) {
  const scores = band.seqlenQ * band.seqlenK;
  return {
    reads: band.seqlenQ * d + band.seqlenK * (d + dv) + 2 * scores,
    writes: 2 * scores + band.seqlenQ * dv,
    wide: 0,
  };
}

/** @param {Band} band @param {number} d @param {number} dv @returns {Traffic} */
export function naiveBackward(band, d, dv) {
  const scores = band.seqlenQ * band.seqlenK;
  const keySide = band.seqlenK * (d + dv);
  return {
    reads: 5 * scores + band.seqlenQ * (d + 2 * dv) + keySide,
    writes: 2 * scores + band.seqlenQ * d + keySide,
    wide: 0,
  };
}

/** @param {Band} band @param {TileGrid} grid @param {number} d @param {number} dv @returns {Traffic} */
export function tiledForward(band, grid, d, dv) {
  const { keys } = streams(band, grid);
  return { reads: band.seqlenQ * d + keys * (d + dv), writes: band.seqlenQ * dv, wide: band.seqlenQ };
}

/** @param {Band} band @param {TileGrid} grid @param {number} d @param {number} dv @returns {Traffic} */
export function tiledBackward(band, grid, d, dv) {
  const { rows } = streams(band, grid);
  const keySide = band.seqlenK * (d + dv);
  return {
    reads: 2 * band.seqlenQ * dv + keySide + rows * (d + dv),
    writes: keySide + band.seqlenQ * d,
    wide: band.seqlenQ + rows * (2 * d + 2) + band.seqlenQ * d,
  };
}

/**
 * FA-1 order: each tile of K and V that is seen once, and for it the queries that see it, with their state both ways.
 * @param {Band} band @param {TileGrid} grid @param {number} d @param {number} dv @returns {Traffic}
 */
export function fa1Forward(band, grid, d, dv) {
  const { rows } = streams(band, grid);
  // All queries as one tile: the keys that any of them sees, in whole tiles.
  const { keys } = streams(band, { blockM: Math.max(1, band.seqlenQ), blockN: grid.blockN });
  return { reads: (keys + rows) * (d + dv), writes: rows * dv, wide: 4 * rows };
}

/**
 * Keys streamed past the tiles of queries, and rows times the tiles they meet.
 * @param {Band} band @param {TileGrid} grid
 */
function streams(band, { blockM, blockN }) {
  let keys = 0;
  let rows = 0;
  for (let start = 0; start < band.seqlenQ; start += blockM) {
    const height = Math.min(blockM, band.seqlenQ - start);
    const [first, stop] = band.keysSeen(start, start + height);
    if (stop <= first) continue;
    const [from, to] = [Math.floor(first / blockN), Math.ceil(stop / blockN)];
    keys += Math.min(to * blockN, band.seqlenK) - from * blockN;
    rows += height * (to - from);
  }
  return { keys, rows };
}

/** @param {number} pairs @param {number} d @param {number} dv */
export function forwardFlops(pairs, d, dv) {
  return 2 * pairs * (d + dv);
}

/** @param {number} pairs @param {number} d @param {number} dv */
export function backwardFlops(pairs, d, dv) {
  return 2 * pairs * (3 * d + 2 * dv);
}

/** P is stored: one product less. @param {number} pairs @param {number} d @param {number} dv */
export function naiveBackwardFlops(pairs, d, dv) {
  return 2 * pairs * (2 * d + 2 * dv);
}

/** Bytes of one materialised score matrix. @param {number} n @param {number} itemsize */
export function scoreMatrixBytes(n, itemsize) {
  return n * n * itemsize;
}

/** Bytes of row_max and row_sum. @param {number} n */
export function statisticsBytes(n, itemsize = 4) {
  return 2 * n * itemsize;
}

/**
 * Memory and the two ways of computing a problem on a device.
 * @param {Problem} problem @param {TileGrid} grid @param {Device} device
 */
export function estimate(problem, grid, device) {
  const band = new Band(problem.seqlenQ, problem.seqlenK, problem.left, problem.right);
  const memory = memoryOf(problem);
  const heads = problem.batch * problem.numHeads;
  const pairs = band.countPairs() * heads;
  return {
    memory,
    flops_forward: forwardFlops(pairs, problem.headDim, problem.headDimV),
    flops_backward: problem.needsGrad ? backwardFlops(pairs, problem.headDim, problem.headDimV) : 0,
    tiles: scaledTiles(band.countTiles(grid), problem.batch),
    naive: naiveWork(problem, band, memory, device),
    tiled: tiledWork(problem, band, grid, memory, device),
  };
}

/** @param {ReturnType<Band["countTiles"]>} tiles @param {number} times */
function scaledTiles(tiles, times) {
  return {
    full: tiles.full * times,
    partial: tiles.partial * times,
    skipped: tiles.skipped * times,
    visited: tiles.visited * times,
  };
}

/** @param {Problem} problem @returns {Memory} */
function memoryOf(problem) {
  const size = ITEMSIZE[problem.dtype];
  const queries = problem.batch * problem.seqlenQ * problem.numHeads;
  const q = queries * problem.headDim * size;
  const kv = problem.batch * problem.seqlenK * problem.numKvHeads * (problem.headDim + problem.headDimV) * size;
  const outputs = queries * problem.headDimV * size + queries * WIDE;
  const inputs = q + kv;
  return problem.needsGrad
    ? { inputs, outputs, saved_for_backward: inputs + outputs, gradients: q + kv }
    : { inputs, outputs, saved_for_backward: 0, gradients: 0 };
}

/** @param {Problem} problem @param {Band} band @param {Memory} memory @param {Device} device @returns {Work} */
function naiveWork(problem, band, memory, device) {
  const { headDim: d, headDimV: dv } = problem;
  const traffic = totalTraffic(problem, naiveForward(band, d, dv), naiveBackward(band, d, dv));
  const scores = band.seqlenQ * band.seqlenK * problem.batch * problem.numHeads;
  const moved = bytes(problem, traffic);
  const matrices = problem.needsGrad ? 3 : 2;
  const extra = memory.outputs + memory.gradients + matrices * scores * ITEMSIZE[problem.dtype];
  return work(problem, device, flopsOf(problem, scores, naiveBackwardFlops), traffic, moved, moved, extra);
}

/**
 * @param {Problem} problem @param {Band} band @param {TileGrid} grid @param {Memory} memory @param {Device} device
 * @returns {Work}
 */
function tiledWork(problem, band, grid, memory, device) {
  const { headDim: d, headDimV: dv } = problem;
  const traffic = totalTraffic(problem, tiledForward(band, grid, d, dv), tiledBackward(band, grid, d, dv));
  const heads = problem.batch * problem.numHeads;
  const moved = bytes(problem, traffic);
  const fromMemory = Math.min(moved, behindCache(problem, band, grid, device));
  const delta = problem.needsGrad ? heads * problem.seqlenQ * WIDE : 0;
  const extra = memory.outputs + memory.gradients + delta;
  const flops = flopsOf(problem, band.countPairs() * heads, backwardFlops);
  return work(problem, device, flops, traffic, moved, fromMemory, extra);
}

/**
 * @param {Problem} problem @param {number} pairs
 * @param {(pairs: number, d: number, dv: number) => number} backward
 */
function flopsOf(problem, pairs, backward) {
  const { headDim: d, headDimV: dv } = problem;
  return forwardFlops(pairs, d, dv) + (problem.needsGrad ? backward(pairs, d, dv) : 0);
}

/**
 * @param {Problem} problem @param {Device} device @param {number} flops @param {Traffic} traffic
 * @param {number} moved @param {number} fromMemory @param {number} extra @returns {Work}
 */
function work(problem, device, flops, traffic, moved, fromMemory, extra) {
  const rate = device.flops[problem.dtype];
  const known = rate !== undefined && device.bandwidth > 0;
  const [compute, memory] = [flops / rate, fromMemory / device.bandwidth];
  return {
    flops,
    traffic,
    bytes_moved: moved,
    bytes_from_memory: fromMemory,
    extra_memory: extra,
    seconds: known ? Math.max(compute, memory) : null,
    bound: known ? (compute >= memory ? "compute" : "memory") : null,
    intensity: flops / Math.max(1, fromMemory),
  };
}

/** @param {Problem} problem @param {Traffic} forward @param {Traffic} backward @returns {Traffic} */
function totalTraffic(problem, forward, backward) {
  const times = problem.batch * problem.numHeads;
  const both = (/** @type {keyof Traffic} */ key) => (forward[key] + (problem.needsGrad ? backward[key] : 0)) * times;
  return { reads: both("reads"), writes: both("writes"), wide: both("wide") };
}

/** @param {Problem} problem @param {Traffic} traffic */
function bytes(problem, traffic) {
  return elements(traffic) * ITEMSIZE[problem.dtype] + traffic.wide * WIDE;
}

/**
 * Bytes from memory: everything once, and what streams past once per wave of tiles.
 * @param {Problem} problem @param {Band} band @param {TileGrid} grid @param {Device} device
 */
function behindCache(problem, band, grid, device) {
  const size = ITEMSIZE[problem.dtype];
  const [first, stop] = band.keysSeen(0, band.seqlenQ);
  const q = band.seqlenQ * problem.numHeads * problem.headDim * size;
  const kv = (stop - first) * problem.numKvHeads * (problem.headDim + problem.headDimV) * size;
  const out = band.seqlenQ * problem.numHeads * problem.headDimV * size;
  const lse = band.seqlenQ * problem.numHeads * WIDE;
  const group = Math.floor(problem.numHeads / problem.numKvHeads);
  const mBlocks = Math.ceil(band.seqlenQ / grid.blockM);
  let one = q + kv * waves(Math.floor(kv / problem.numKvHeads), mBlocks * group, device) + out + lse;
  if (problem.needsGrad) {
    const again = waves(Math.floor((q + out) / problem.numHeads), Math.ceil(band.seqlenK / grid.blockN), device);
    one += (q + out) * again + lse + out + q + 2 * kv;
  }
  return one * problem.batch;
}

/** @param {number} streamed @param {number} consumers @param {Device} device */
function waves(streamed, consumers, device) {
  return streamed <= device.l2_bytes ? 1 : Math.max(1, Math.ceil(consumers / Math.max(1, device.num_sms)));
}
