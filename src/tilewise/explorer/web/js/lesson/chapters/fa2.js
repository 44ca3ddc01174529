import { fa2 } from "tilewise/engine/attention.js";
import { TOY_SRAM, attention, blockChoice, raceStory, sameAsNaive } from "tilewise/lesson/common.js";
import { MemoryScene } from "tilewise/lesson/memoryscene.js";
import { fa2Caption } from "tilewise/views/captions.js";
import { CODE } from "tilewise/views/pseudocode.js";

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const fa2Chapter = {
  id: "fa2",
  number: "6",
  title: "Swap the loops: FlashAttention-2",
  text: [
    "FA-2 swaps the two loops: a tile of queries stays in SRAM, and the keys and values stream past it.",
    "O, m and l never leave SRAM until their rows are done, and O is divided by l once, at the end.",
    "Only O is written, and one number a row for later, lse = m + ln l.",
  ],
  bench: "tiles",
  controls: blockChoice,
  scene: () =>
    new MemoryScene({
      story: ({ block }) => raceStory(attention(6, 2, Number(block)), fa2, { capacity: TOY_SRAM }),
      values: { block: "2" },
    }),
  code: CODE.fa2.lines,
  lines: (scene) => CODE.fa2.active(scene.replay),
  say: (scene) => fa2Caption(scene.replay),
  result: (scene) => sameAsNaive(fa2, scene.replay.trace.workload),
  questions: [
    {
      ask: "How often is each row of O written now?",
      choices: ["once", "3 times", "never"],
      right: 0,
      why: "It stays in SRAM while all keys stream past, and is written when the row is done.",
    },
    {
      ask: "What is read more often than in FA-1?",
      choices: ["Q", "K and V", "nothing"],
      right: 1,
      why: "Each tile of queries streams all of K and V. That costs less than reading and writing O again and again.",
    },
  ],
  notes: {
    goal: "Everybody can say which loop is outside, and what that saves.",
    minutes: 6,
    script: [
      "Same six tokens, same tiles: only the order has changed.",
      "Follow O in SRAM through three tiles: it is corrected in place.",
      "The write at the end of a row of tiles is the first and only one.",
      "Compare the three bars at the end.",
    ],
    question: "Why does this order also suit a GPU with a hundred SMs?",
    answer:
      "Tiles of queries do not depend on each other: each SM can take one, and nobody has to wait for another's O.",
  },
};
