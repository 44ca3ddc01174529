/** The algorithms as pseudocode, and which lines a step is. The lines say what the events do, in their order. */

/** @typedef {import("tilewise/engine/replay.js").Replay} Replay */
/** @typedef {{lines: string[], active: (replay: Replay) => number[]}} Code */

/** Whether the present step loads or stores a buffer. @param {Replay} replay @param {string} kind @param {string} buffer */
function does(replay, kind, buffer) {
  return replay.events.some((event) => event.kind === kind && event.buffer === buffer);
}

/** @param {Replay} replay @param {Record<string, number[]>} phases */
function byPhase(replay, phases) {
  return replay.stop === null ? [] : (phases[replay.stop.phase] ?? []);
}

/** @type {Record<string, Code>} */
export const CODE = {
  naive: {
    lines: [
      "load Q, K",
      "S = Q Kᵀ / √d",
      "store S",
      "load S",
      "P = softmax(S), row by row",
      "store P",
      "load P, V",
      "O = P V",
      "store O",
    ],
    active: (replay) => byPhase(replay, { scores: [0, 1, 2], softmax: [3, 4, 5], values: [6, 7, 8] }),
  },
  fa1: {
    lines: [
      "in HBM: O = 0, m = −∞, l = 0",
      "for each tile of keys j:",
      "  load Kⱼ, Vⱼ",
      "  for each tile of queries i:",
      "    if all pairs are masked: skip",
      "    load Qᵢ, Oᵢ, mᵢ, lᵢ",
      "    S = Qᵢ Kⱼᵀ / √d",
      "    m′ = max(m, rowmax S);  P = e^(S − m′)",
      "    c = e^(m − m′);  O = l·c·O;  l = c·l + rowsum P",
      "    O = (O + P Vⱼ) / l;  m = m′",
      "    store Oᵢ, mᵢ, lᵢ",
    ],
    active: (replay) => [
      ...(does(replay, "load", "k") ? [2] : []),
      ...(replay.skips.length ? [4] : []),
      ...byPhase(replay, { scores: [5, 6], softmax: [7, 8], values: [9, 10] }),
    ],
  },
  fa2: {
    lines: [
      "for each tile of queries i:",
      "  load Qᵢ;  O = 0, m = −∞, l = 0",
      "  for each tile of keys j:",
      "    if all pairs are masked: skip",
      "    load Kⱼ, Vⱼ",
      "    S = Qᵢ Kⱼᵀ / √d",
      "    m′ = max(m, rowmax S);  P = e^(S − m′)",
      "    c = e^(m − m′);  O = c·O;  l = c·l + rowsum P;  m = m′",
      "    O = O + P Vⱼ",
      "  O = O / l;  lse = m + ln l",
      "  store Oᵢ, lseᵢ",
    ],
    active: (replay) => [
      ...(does(replay, "load", "q") ? [1] : []),
      ...(replay.skips.length ? [3] : []),
      ...byPhase(replay, { scores: [4, 5], softmax: [6, 7], values: [8] }),
      ...(does(replay, "store", "acc") ? [9, 10] : []),
    ],
  },
  backward: {
    lines: [
      "for each tile of queries i:  Dᵢ = rowsum(dOᵢ ∘ Oᵢ)",
      "for each tile of keys j:",
      "  load Kⱼ, Vⱼ;  dK = 0, dV = 0",
      "  for each tile of queries i:",
      "    load Qᵢ, dOᵢ, lseᵢ, Dᵢ",
      "    P = e^(Qᵢ Kⱼᵀ / √d − lseᵢ)",
      "    dV = dV + Pᵀ dOᵢ;  dP = dOᵢ Vⱼᵀ",
      "    dS = P ∘ (dP − Dᵢ)",
      "    dK = dK + dSᵀ Qᵢ / √d;  dQᵢ = dQᵢ + dS Kⱼ / √d",
      "  store dKⱼ, dVⱼ",
      "round dQ to the inputs' dtype",
    ],
    active: (replay) => [
      ...(does(replay, "load", "k") ? [2] : []),
      ...byPhase(replay, { delta: [0], recompute: [4, 5], values: [6], gradients: [7, 8], round: [10] }),
      ...(does(replay, "store", "dk") ? [9] : []),
    ],
  },
  matmul_naive: {
    lines: [
      "for each row i of A, column j of B:",
      "  load row i of A, column j of B",
      "  C[i][j] = sum of their products",
      "  store C[i][j]",
    ],
    active: (replay) => byPhase(replay, { product: [1, 2, 3] }),
  },
  matmul: {
    lines: [
      "for each tile (i, j) of C:",
      "  C = 0 in SRAM",
      "  for each tile k along the inner dimension:",
      "    load A[i, k], B[k, j]",
      "    C = C + A[i, k] B[k, j]",
      "  store C[i, j]",
    ],
    active: (replay) => [
      ...(replay.stop?.part === 0 ? [1] : []),
      ...byPhase(replay, { product: [3, 4] }),
      ...(does(replay, "store", "c") ? [5] : []),
    ],
  },
};
