/** The words and symbols of the lesson, explained once; the same text appears wherever one of them is hovered. */

import { h } from "tilewise/ui/dom.js";
import { explained } from "tilewise/ui/parts.js";

/** @type {Record<string, string>} */
export const GLOSSARY = {
  attention:
    "Every token asks a question (its query), compares it with the keys of all tokens, and takes the average of their values, weighted by how well the keys fit.",
  token: "A piece of text, about a word long.",
  tokens: "Pieces of text, each about a word long.",
  FlashAttention:
    "Attention that computes the scores tile by tile in fast memory and never writes them to slow memory. The result is the same.",
  "FA-1": "FlashAttention, first version (2022): tiles of K and V outside, tiles of Q inside.",
  "FA-2": "FlashAttention-2 (2023): the loops are swapped, tiles of Q outside.",
  "FA-3": "FlashAttention-3 (2024): loads, matrix products and softmax overlap on Hopper GPUs.",
  naive: "The textbook way: scores, softmax and output in three passes, each through slow memory.",
  HBM: "High-bandwidth memory: the main memory of a GPU. Large and, compared with SRAM, slow.",
  SRAM: "The memory on the chip, beside the arithmetic units: small and fast. On a GPU, the shared memory of each SM.",
  SM: "Streaming multiprocessor: one of the 100 or so cores of a GPU, with its own SRAM and tensor cores.",
  SMs: "Streaming multiprocessors: the 100 or so cores of a GPU, each with its own SRAM and tensor cores.",
  FLOP: "Floating-point operation: one addition or one multiplication.",
  bandwidth: "How many bytes a memory can deliver in a second.",
  "tensor cores": "The units of a GPU that multiply small matrices.",
  N: "The number of tokens.",
  d: "The head dimension: how many numbers a query, a key or a value has. Usually 64 or 128.",
  "√d": "The scores are divided by the square root of d, so that they do not grow with d.",
  Q: "The queries, one row of d numbers for each token.",
  K: "The keys, one row of d numbers for each token.",
  V: "The values, one row of d numbers for each token.",
  S: "The scores: S = Q Kᵀ / √d, one number for every pair of a query and a key.",
  P: "The probabilities (weights): the softmax of each row of S. A row sums to 1.",
  O: "The output: O = P V, for each query the weighted average of the values.",
  softmax: "Makes weights of scores: e^score divided by the sum of e^score over the row.",
  m: "The largest score of a row seen so far. It is subtracted before e^x, so that nothing overflows.",
  l: "The sum of e^(score − m) over the scores of a row seen so far: what the weights are divided by.",
  lse: "Log-sum-exp of a row: m + ln l. One number that holds both; P = e^(S − lse).",
  tile: "A block of the score matrix: some queries times some keys.",
  tiles: "Blocks of the score matrix: some queries times some keys each.",
  "causal mask": "A token sees only itself and the tokens before it: scores to the right of the diagonal are −∞.",
  gradient: "How much the loss changes with a number; training moves every number against its gradient.",
  gradients: "How much the loss changes with each number; training moves every number against its gradient.",
  dO: "The gradient of the loss with respect to O; it comes from the layers above.",
  dQ: "The gradient with respect to Q.",
  dK: "The gradient with respect to K.",
  dV: "The gradient with respect to V: Pᵀ dO.",
  dP: "The gradient with respect to P: dO Vᵀ.",
  dS: "The gradient with respect to S: P ∘ (dP − D).",
  D: "One number a row: the sum of dO ∘ O. The softmax's gradient needs it.",
  warpgroup: "128 threads of an SM that work together on a matrix product.",
  warpgroups: "Groups of 128 threads of an SM that work together on a matrix product.",
  TMA: "Tensor Memory Accelerator: a unit of Hopper GPUs that copies tiles while the threads do something else.",
  "ping-pong": "Two warpgroups take turns: while one computes its softmax, the other uses the tensor cores.",
  FP8: "Numbers of 8 bits. The tensor cores multiply them twice as fast as 16-bit numbers.",
  Hopper: "The GPU generation of H100 and H200.",
  "KV cache": "The keys and values of all tokens so far, kept while a text is being generated.",
  page: "A fixed number of tokens of the KV cache, anywhere in memory.",
  pages: "Parts of the KV cache with a fixed number of tokens each, anywhere in memory.",
  "page table": "For each request, the numbers of its pages in order.",
  "copy on write": "Shared pages are copied only when one of their holders wants to write.",
  "∘": "Element by element.",
};

const ESCAPE = /[.*+?^${}()|[\]\\]/g;
const TERMS = Object.keys(GLOSSARY).sort((one, other) => other.length - one.length);
const PATTERN = new RegExp(
  `(?<![\\p{L}\\p{N}_])(?:${TERMS.map((term) => term.replace(ESCAPE, "\\$&")).join("|")})(?![\\p{L}\\p{N}_])`,
  "gu",
);

/**
 * A text with its terms explained on hover, and on focus where it can be focused: the first time each.
 * @param {string} text @param {{focusable?: boolean, known?: Set<string>}} [how] @returns {(Node | string)[]}
 */
export function marked(text, { focusable = true, known = new Set() } = {}) {
  /** @type {(Node | string)[]} */
  const nodes = [];
  let from = 0;
  for (const found of text.matchAll(PATTERN)) {
    const [term] = found;
    if (known.has(term)) continue;
    known.add(term);
    nodes.push(text.slice(from, found.index));
    nodes.push(
      focusable ? explained(term, GLOSSARY[term]) : h("span", { class: "term", "data-tip": GLOSSARY[term] }, term),
    );
    from = (found.index ?? 0) + term.length;
  }
  nodes.push(text.slice(from));
  return nodes;
}
