import { fa2, naive } from "tilewise/engine/attention.js";
import { backward, naiveBackward } from "tilewise/engine/backward.js";
import { finished, headInputs, largestDifference, slow } from "tilewise/engine/check.js";
import { someNumbers } from "tilewise/engine/numbers.js";
import { countersAt } from "tilewise/engine/timeline.js";
import { attention } from "tilewise/lesson/common.js";
import { MemoryScene } from "tilewise/lesson/memoryscene.js";
import { difference } from "tilewise/ui/format.js";
import { backwardCaption } from "tilewise/views/captions.js";
import { CODE } from "tilewise/views/pseudocode.js";

const WORK = attention(6, 2, 2);

function inputs() {
  const given = headInputs(WORK);
  const forward = finished(fa2(WORK), given);
  return {
    ...given,
    dout: someNumbers(WORK.seqlen_q, WORK.head_dim_v, 4),
    out: slow(forward, "out"),
    lse: slow(forward, "lse"),
  };
}

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const recompute = {
  id: "recompute",
  number: "8",
  title: "Backward: recompute, don't remember",
  text: [
    "Training needs gradients, dQ, dK and dV, and they need the weights P again.",
    "Instead of keeping N × N weights from the forward pass, FlashAttention keeps one number a row, lse, and recomputes each tile as P = e^(S − lse).",
    "That is one matrix product more for each tile, and nothing of size N × N is ever stored: from P and dP = dO Vᵀ come dS, and from it the gradients.",
  ],
  bench: "backward",
  scene: () => new MemoryScene({ story: () => ({ trace: backward(WORK), inputs: inputs() }), map: false }),
  code: CODE.backward.lines,
  lines: (scene) => CODE.backward.active(scene.replay),
  say: (scene) => backwardCaption(scene.replay),
  result: (scene) => {
    const given = scene.replay.inputs;
    const p = slow(finished(naive(WORK), given), "p");
    const [own, textbook] = [finished(backward(WORK), given), finished(naiveBackward(WORK), { ...given, p })];
    const error = Math.max(
      ...["dq", "dk", "dv"].map((name) => largestDifference(slow(own, name), slow(textbook, name))),
    );
    return `Same gradients as the naive backward: largest difference ${difference(error)}.`;
  },
  questions: [
    {
      ask: "How much more arithmetic does the recomputing backward do than one that kept P?",
      choices: ["a quarter more", "twice as much", "none"],
      right: 0,
      why: () => {
        const [tiled, kept] = [backward, naiveBackward].map((schedule) => countersAt(schedule(WORK)).flops);
        return `Five matrix products instead of four: here ${tiled} FLOP instead of ${kept}.`;
      },
    },
    {
      ask: "At 4,096 tokens and d = 128, what is kept for the backward pass instead of P?",
      choices: ["O and lse", "S", "m and P of the last tile"],
      right: 0,
      why: "Q, K and V are kept either way. O and lse grow with N, P grows with N².",
    },
  ],
  notes: {
    goal: "Everybody can say what is kept, what is recomputed, and why lse is enough.",
    minutes: 7,
    script: [
      "The first three steps compute D, one number a row.",
      "Then tiles, with K and V outside: watch P appear from Q, K and lse alone.",
      "dP, dS, then dK and dQ grow. dK and dV stay in SRAM, dQ goes back and forth.",
      "At the end compare the gradients with those of the naive backward.",
    ],
    question: "When does recomputing not pay?",
    answer:
      "With tiny tiles or a large d: each tile reads its rows of Q, dO and dQ again. Try 64 tokens, d = 64 and blocks of 4 in the bench.",
  },
};
