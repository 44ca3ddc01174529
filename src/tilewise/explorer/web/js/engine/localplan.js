/**
 * The plan of a problem without Python: closed forms, and the kernel from the table that Python wrote into the page
 * (tilewise/explorer/kernels.py). Gives what `tilewise.explain(...).to_dict()` gives, as far as the page shows it.
 */

import { estimate } from "tilewise/engine/cost.js";

/**
 * @typedef {{batch: number, context: number, heads: number, kv_heads: number, head_dim: number, dtype: string,
 *   device: string, phase: "prefill" | "train" | "decode", causal: boolean, window: number | null}} Question
 * @typedef {{backend: string | null, tile: [number, number], rejected: [string, string][]}} Kernel
 * @typedef {{names: Record<string, number>, rows: Kernel[]}} KernelTable  names are `keyOf`, each with [from, row] pairs
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
 * The kernel that would run. Python lists, for each combination of choices, from which length on which row holds: in
 * decoding the number of query heads for each K/V head counts, else the number of tokens. Decoding also asks whether
 * keys are few, and whether a K/V head has more query rows than there are (sequence, K/V head) pairs.
 * @param {Question} question @param {any} kernels @returns {Kernel}
 */
export function kernelFor(question, kernels) {
  const cuts = question.window !== null && question.window < question.context - 1;
  const choices = [
    question.device,
    question.dtype,
    question.head_dim,
    question.phase,
    question.causal ? "causal" : "full",
    cuts ? "window" : "open",
  ];
  const rows = question.heads / question.kv_heads;
  if (question.phase === "decode") {
    const crowded = rows > question.batch * question.kv_heads;
    choices.push(question.context < kernels.few_keys ? "few" : "many", crowded ? "crowded" : "apart");
  }
  const steps = kernels.steps[choices.join(" ")];
  const measure = question.phase === "decode" ? rows : question.context;
  const found = steps.filter((/** @type {[number, number]} */ [from]) => from <= measure);
  return kernels.rows[(found[found.length - 1] ?? steps[0])[1]];
}
