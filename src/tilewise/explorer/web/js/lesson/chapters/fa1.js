import { fa1 } from "tilewise/engine/attention.js";
import { TOY_SRAM, attention, blockChoice, raceStory, sameAsNaive } from "tilewise/lesson/common.js";
import { MemoryScene } from "tilewise/lesson/memoryscene.js";
import { fa1Caption } from "tilewise/views/captions.js";
import { CODE } from "tilewise/views/pseudocode.js";

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const fa1Chapter = {
  id: "fa1",
  number: "5",
  title: "Tiles: the first FlashAttention",
  text: [
    "FlashAttention computes one tile of scores at a time in SRAM, with the online softmax, and throws it away: S and P never reach HBM.",
    "Its first version, FA-1, keeps a tile of K and V in SRAM and lets the queries stream past it.",
    "So the state of every row, O, m and l, is read and written again for each tile of keys.",
  ],
  bench: "tiles",
  controls: blockChoice,
  scene: () =>
    new MemoryScene({
      story: ({ block }) =>
        raceStory(attention(6, 2, Number(block)), fa1, { capacity: TOY_SRAM, racers: ["naive", "fa1"] }),
      values: { block: "2" },
    }),
  code: CODE.fa1.lines,
  lines: (scene) => CODE.fa1.active(scene.replay),
  say: (scene) => fa1Caption(scene.replay),
  result: (scene) => sameAsNaive(fa1, scene.replay.trace.workload),
  questions: [
    {
      ask: "Six tokens in tiles of 2 × 2. How often is each row of O written?",
      choices: ["once", "3 times", "9 times"],
      right: 1,
      why: "Once for each of the 3 tiles of keys. Look at the numbers under O in HBM at the end.",
    },
    {
      ask: "Tiles of 6 × 6 would need the fewest loads. Why not take them?",
      choices: ["they do not fit into SRAM", "the softmax would be wrong", "the mask would be lost"],
      right: 0,
      why: "Choose 6 × 6 above: that is the whole score matrix, and the small memory is too small for it.",
    },
  ],
  notes: {
    goal: "Everybody can follow one tile from load to store and say what FA-1 writes too often.",
    minutes: 8,
    script: [
      "Step through the first tile: scores, softmax, values. Nothing is corrected yet.",
      "Go on to the second column of tiles: O, m and l come back, are corrected, and go again.",
      "Watch the bars: naive has written S and P by now.",
      "Choose 6 × 6: the gauge turns red.",
    ],
    question: "In FA-1 order O is multiplied by l before the correction. Why?",
    answer:
      "It was stored divided by l, so that it is a valid output at any time; to add more values, the division has to be undone.",
  },
};
