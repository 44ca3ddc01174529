import { naive } from "tilewise/engine/attention.js";
import { headInputs, finished, largestDifference, slow } from "tilewise/engine/check.js";
import { scoreMatrixBytes } from "tilewise/engine/cost.js";
import { attention } from "tilewise/lesson/common.js";
import { MemoryScene } from "tilewise/lesson/memoryscene.js";
import { difference, formatBytes, plural } from "tilewise/ui/format.js";
import { naiveCaption } from "tilewise/views/captions.js";
import { CODE } from "tilewise/views/pseudocode.js";

const WORK = attention(6, 2, 2);

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const naiveChapter = {
  id: "naive",
  number: "2",
  title: "Naive attention: three passes",
  text: [
    "Each of N tokens has a query, a key and a value, rows of d numbers each: the matrices Q, K and V.",
    "The textbook computes the scores S = Q Kᵀ / √d, makes weights P of them by a softmax of each row, and averages the values, O = P V.",
    "S and P have N × N numbers: they pile up in HBM, and each is written once and read once.",
  ],
  bench: "traffic",
  scene: () => new MemoryScene({ story: () => ({ trace: naive(WORK), inputs: headInputs(WORK) }), map: false }),
  code: CODE.naive.lines,
  lines: (scene) => CODE.naive.active(scene.replay),
  say: (scene) => {
    const { counters, written } = scene.replay;
    const scores =
      ["s", "p"].reduce(
        (sum, name) =>
          sum + (written.get(name) ?? []).reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0),
        0,
      ) * WORK.seqlen_k;
    const sofar =
      scores > 0 ? ` Of ${plural(counters.writes, "number")} written so far, ${scores} belong to S and P.` : "";
    return naiveCaption(scene.replay) + sofar;
  },
  result: (scene) => {
    // The textbook formula, computed without any memory model.
    const { q, k, v } = scene.replay.inputs;
    const rows = q.rows;
    const out = new Float64Array(rows * v.cols);
    for (let i = 0; i < rows; i++) {
      const scores = Array.from({ length: k.rows }, (_, j) => {
        let sum = 0;
        for (let at = 0; at < q.cols; at++) sum += q.data[i * q.cols + at] * k.data[j * k.cols + at];
        return Math.exp(sum * WORK.scale);
      });
      const total = scores.reduce((a, b) => a + b, 0);
      for (let c = 0; c < v.cols; c++)
        out[i * v.cols + c] = scores.reduce((a, p, j) => a + (p / total) * v.data[j * v.cols + c], 0);
    }
    const own = slow(finished(naive(WORK), scene.replay.inputs), "out");
    return `Same result as the formula: largest difference ${difference(largestDifference(own, { rows, cols: v.cols, data: out }))}.`;
  },
  questions: [
    {
      ask: "The text becomes twice as long. How much more memory do S and P take?",
      choices: ["twice as much", "four times as much", "eight times as much"],
      right: 1,
      why: () =>
        `N × N grows with the square: one matrix in 4-byte numbers takes ${formatBytes(scoreMatrixBytes(4096, 4))} at 4,096 tokens and ${formatBytes(scoreMatrixBytes(16384, 4))} at 16,384, for every head.`,
    },
    {
      ask: "Which part of naive attention's traffic comes from S and P at N = 2,048 and d = 64?",
      choices: ["about half", "about 75 %", "about 97 %"],
      right: 2,
      why: "4 N² of 4 N² + 4 N d numbers: 16,777,216 of 17,301,504.",
    },
  ],
  notes: {
    goal: "Everybody can name the three passes and say what is written and read in each.",
    minutes: 6,
    script: [
      "At step 0, name the matrices: the numbers in the picture are real.",
      "Step through the first pass; ask what happens to the scores of the first two queries (they are written away).",
      "In the second pass the same numbers come back, and go again as P.",
      "Count at the end: the small matrices Q, K, V and O are a minor part.",
    ],
    question: "Why is P written, if O is all we want?",
    answer:
      "Because each pass is a program of its own (a kernel); what it leaves for the next one has to go through HBM.",
  },
};
