/**
 * The plan of a problem without Python: closed forms, and the kernel from the table that Python wrote into the page
 * (tilewise/explorer/kernels.py). Gives what `tilewise.explain(...).to_dict()` gives, as far as the page shows it.
 */

import { estimate } from "tilewise/engine/cost.js";

/**
 * @typedef {{batch: number, context: number, heads: number, kv_heads: number, head_dim: number, dtype: string,
 *   device: string, phase: "prefill" | "train" | "decode", causal: boolean, window: number | null}} Question
 * @typedef {{backend: string | null, tile: [number, number], rejected: [string, string][]}} Kernel
 */

/** The sides of the window. @param {Question} question */
function sides({ causal, window }) {
  return { left: window, right: causal ? 0 : null };
}

/** @param {Question} question @param {any} data */
export function localPlan(question, data) {
  const device = data.devices[question.device];
  const kernel = kernelFor(question, data.kernels);
  const grid = { blockM: kernel.tile[0], blockN: kernel.tile[1] };
  const seqlenQ = question.phase === "decode" ? 1 : question.context;
  const costs = estimate(
    {
      batch: question.batch,
      seqlenQ,
      seqlenK: question.context,
      numHeads: question.heads,
      numKvHeads: question.kv_heads,
      headDim: question.head_dim,
      headDimV: question.head_dim,
      dtype: question.dtype,
      needsGrad: question.phase === "train",
      ...sides(question),
    },
    grid,
    device,
  );
  return {
    ...costs,
    device,
    backend: kernel.backend,
    rejected: kernel.rejected.map(([backend, reason]) => ({ backend, reason })),
    tile: { block_m: kernel.tile[0], block_n: kernel.tile[1] },
  };
}

/**
 * The kernel that would run. Python lists, for each combination of choices, from which length on which row holds. In
 * decoding the number of query heads for each K/V head counts, else the number of tokens. Decoding also asks whether
 * keys are few, and whether a K/V head has more query rows than there are (sequence, K/V head) pairs.
 * @param {Question} question @param {any} kernels @returns {Kernel}
 */
export function kernelFor(question, kernels) {
  const cuts = question.window !== null && question.window < question.context - 1;
  const name = [question.device, question.dtype, question.head_dim, question.phase].join(" ");
  const rows = question.heads / question.kv_heads;
  const choices = [question.causal, cuts];
  if (question.phase === "decode") {
    choices.push(question.context < kernels.few_keys, rows > question.batch * question.kv_heads);
  }
  // The first of each choice is named first: causal, with a window, few keys, crowded heads.
  const variant = choices.reduce((at, chosen) => 2 * at + (chosen ? 0 : 1), 0);
  const steps = kernels.pieces[kernels.steps[name][variant]];
  const measure = question.phase === "decode" ? rows : question.context;
  const found = steps.filter((/** @type {[number, number]} */ [from]) => from <= measure);
  return kernels.rows[(found[found.length - 1] ?? steps[0])[1]];
}
