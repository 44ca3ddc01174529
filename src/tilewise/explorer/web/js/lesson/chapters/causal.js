import { fa2 } from "tilewise/engine/attention.js";
import { headInputs } from "tilewise/engine/check.js";
import { bandOf } from "tilewise/engine/recorder.js";
import { attention, sameAsNaive } from "tilewise/lesson/common.js";
import { MemoryScene } from "tilewise/lesson/memoryscene.js";
import { fa2Caption } from "tilewise/views/captions.js";
import { CODE } from "tilewise/views/pseudocode.js";

const SIDES = /** @type {Record<string, object>} */ ({ causal: { right: 0 }, window: { left: 2, right: 0 }, full: {} });

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const causal = {
  id: "causal",
  number: "7",
  title: "Skip what is masked",
  text: [
    "A text is read from left to right, so a token may only look back: with a causal mask the scores to the right of the diagonal are −∞, and their weights 0.",
    "A tile that is wholly masked is never loaded and never computed.",
    "Only the tiles on the diagonal need a mask, and at a long N almost half of the work is gone.",
  ],
  bench: "tiles?n=8&mask=causal",
  controls: () => [
    {
      key: "mask",
      label: "Mask",
      type: "select",
      value: "causal",
      options: [
        ["causal", "causal"],
        ["window", "causal, the last 3 keys"],
        ["full", "none"],
      ],
    },
  ],
  scene: () =>
    new MemoryScene({
      story: ({ mask }) => {
        const work = attention(8, 2, 2, SIDES[mask]);
        return {
          trace: fa2(work),
          inputs: headInputs(work),
          racers: [
            ["all tiles", "naive", fa2(attention(8, 2, 2))],
            ["with the mask", "fa2", fa2(work)],
          ],
        };
      },
      values: { mask: "causal" },
    }),
  code: CODE.fa2.lines,
  lines: (scene) => CODE.fa2.active(scene.replay),
  say: (scene) => {
    const { workload: work } = scene.replay.trace;
    const tiles = bandOf(work).countTiles({ blockM: work.block_m, blockN: work.block_n });
    const all = tiles.visited + tiles.skipped;
    return scene.replay.stop === null
      ? `${tiles.visited} of ${all} tiles will be visited, ${tiles.partial} of them with a mask; ${tiles.skipped} are skipped.`
      : fa2Caption(scene.replay);
  },
  result: (scene) => sameAsNaive(fa2, scene.replay.trace.workload),
  questions: [
    {
      ask: "8 tokens in 2 × 2 tiles with a causal mask: how many of the 16 tiles are visited?",
      choices: ["8", "10", "16"],
      right: 1,
      why: "4 on the diagonal and 6 below it. The larger the grid, the closer to one half.",
    },
    {
      ask: "At long N the mask makes attention about 1.7 times faster, not 2. Why?",
      choices: [
        "tiles on the diagonal are computed whole",
        "the softmax is slower",
        "K and V are still loaded for masked tiles",
      ],
      right: 0,
      why: "They are half masked but cost as much as others, rows differ in length, and what starts and ends a kernel stays.",
    },
  ],
  notes: {
    goal: "Everybody can tell full, partial and skipped tiles apart.",
    minutes: 4,
    script: [
      "Before the first step, count the white, the half-masked and the hatched tiles.",
      "Step through the first row of tiles: one tile only.",
      "Choose the window: the number of tiles now grows with N, not with N².",
    ],
    question: "Where is the mask itself stored?",
    answer: "Nowhere: it follows from the numbers of the tokens. Skipping needs no memory at all.",
  },
};
