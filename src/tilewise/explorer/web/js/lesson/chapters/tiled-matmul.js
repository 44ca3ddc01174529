import { matmulNaive, matmulTiled } from "tilewise/engine/matmul.js";
import { finished, largestDifference, slow } from "tilewise/engine/check.js";
import { someDigits } from "tilewise/engine/numbers.js";
import { workload } from "tilewise/engine/recorder.js";
import { MemoryScene } from "tilewise/lesson/memoryscene.js";
import { difference, plural } from "tilewise/ui/format.js";
import { CODE } from "tilewise/views/pseudocode.js";

const WORK = workload({ seqlen_q: 4, seqlen_k: 4, head_dim: 4, head_dim_v: 4, block_m: 2, block_n: 2, block_k: 2 });
const INPUTS = { a: someDigits(4, 4, 1), b: someDigits(4, 4, 2) };

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const tiledMatmul = {
  id: "tiled-matmul",
  number: "3",
  title: "Tiles: one load, many uses",
  text: [
    "Fast memory helps when a number that was fetched is used more than once.",
    "In a matrix product C = A B computed element by element, every row of A is loaded again for each column of B; in tiles of t × t numbers, each load serves t results.",
    "Attention tiles the tokens, the rows of Q, K and V, but not d: with 64 or 128 numbers a whole row fits into SRAM.",
  ],
  bench: "matmul",
  controls: () => [
    {
      key: "how",
      label: "Multiply",
      type: "select",
      value: "tiled",
      options: [
        ["tiled", "in 2 × 2 tiles"],
        ["naive", "element by element"],
      ],
    },
  ],
  scene: () =>
    new MemoryScene({
      story: ({ how }) => ({
        trace: (how === "naive" ? matmulNaive : matmulTiled)(WORK),
        inputs: INPUTS,
        racers: [
          ["one by one", "naive", matmulNaive(WORK)],
          ["in tiles", "fa2", matmulTiled(WORK)],
        ],
      }),
      map: false,
    }),
  code: CODE.matmul.lines,
  lines: (scene) => (scene.replay.trace.algorithm === "matmul" ? CODE.matmul.active(scene.replay) : [0]),
  say: (scene) => {
    const { stop, counters, stops, trace } = scene.replay;
    const all = `${plural(stops.length, "step")}`;
    if (stop === null) return `A and B lie in HBM, C is to come. There will be ${all}.`;
    const loads = `${plural(counters.reads, "element load")} so far.`;
    const what =
      trace.algorithm === "matmul"
        ? `Tile (${stop.mBlock}, ${stop.nBlock}) of C: tile ${stop.part} along A's row and B's column are loaded and multiplied; each number loaded is used twice.`
        : `C[${stop.mBlock}][${stop.nBlock}]: a whole row of A and a whole column of B are loaded for one result.`;
    return `${what} ${loads}`;
  },
  result: () => {
    const [one, other] = [matmulNaive, matmulTiled].map((schedule) => slow(finished(schedule(WORK), INPUTS), "c"));
    return `Same result both ways: largest difference ${difference(largestDifference(one, other))}.`;
  },
  questions: [
    {
      ask: "4 × 4 matrices, element by element: 128 element loads. How many in 2 × 2 tiles?",
      choices: ["96", "64", "32"],
      right: 1,
      why: "Every loaded number is used for two results instead of one, so half the loads are left: 8 steps with 8 numbers each.",
    },
    {
      ask: "What limits the size of a tile?",
      choices: ["the size of SRAM", "the size of HBM", "the number of tokens"],
      right: 0,
      why: "All tiles in use have to fit into fast memory at the same time.",
    },
  ],
  notes: {
    goal: "Everybody can explain why a tile of t × t divides the loads by t.",
    minutes: 5,
    script: [
      "Start with element by element: the same row of A comes again and again.",
      "Switch to tiles and watch the bars at the same share of the work: 128 against 64.",
      "Ask what would happen with a tile of 4 × 4: everything is loaded once.",
      "Close with attention: the inner dimension is d, and it is small enough to need no tiles.",
    ],
    question: "Why not always use one tile that covers everything?",
    answer: "It does not fit: fast memory holds a few hundred kilobytes, the matrices have megabytes.",
  },
};
