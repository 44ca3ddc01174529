import { SoftmaxScene } from "tilewise/lesson/softmaxscene.js";
import { difference } from "tilewise/ui/format.js";
import { sentence, text } from "tilewise/views/softmax.js";

const VALUES = [
  [1, 0],
  [0, 2],
  [1, 1],
  [2, 0],
  [0, 1],
  [1, 2],
];

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const online = {
  id: "online-softmax",
  number: "4b",
  title: "Online softmax",
  text: [
    "Keep three things for each row: m, the largest score so far; l, the sum of e^(s − m) so far; and O, the values summed up with the weights e^(s − m), not yet divided by l.",
    "When a block brings a larger score, one factor, e^(old m − new m), makes l and O right again, whatever came before.",
    "At the end O / l is exactly what the whole row would have given, and no row was ever kept.",
  ],
  bench: "softmax",
  controls: () => [
    {
      key: "row",
      label: "Scores",
      type: "select",
      value: "2, 8, 1, 9, 3, 7",
      options: [
        ["2, 8, 1, 9, 3, 7", "2 8 1 | 9 3 7"],
        ["1, 2, 3, 6, 2, 1", "1 2 3 | 6 2 1"],
        ["9, 1, 2, 3, 4, 5", "9 1 2 | 3 4 5: the largest comes first"],
      ],
    },
  ],
  scene: () => new SoftmaxScene("online", VALUES),
  code: [
    "m = −∞, l = 0, O = 0",
    "for each block of scores s with values v:",
    "  m′ = max(m, largest s)",
    "  c = e^(m − m′);  l = c·l;  O = c·O;  m = m′",
    "  l = l + sum of e^(s − m)",
    "  O = O + sum of e^(s − m) v",
    "O = O / l",
  ],
  lines: (scene) =>
    /** @type {Record<string, number[]>} */ ({ start: [0], read: [2], correct: [3], add: [4, 5], divide: [6] })[
      scene.state.now.kind
    ],
  say: (scene) => {
    const { now } = scene.state;
    const out = `(${now.out.map((/** @type {number} */ one) => text(one)).join(", ")})`;
    if (now.kind === "divide")
      return `The row is done: O is divided by l = ${text(now.rowSum)} once and becomes ${out}.`;
    const more =
      now.kind === "correct"
        ? ` O is multiplied by the same ${text(now.correction)}.`
        : now.kind === "add"
          ? ` O becomes ${out}.`
          : "";
    return sentence(now) + more;
  },
  result: (scene) => {
    const { now, truth } = scene.state;
    const exact = VALUES[0].map((_, dim) =>
      truth.reduce(
        (/** @type {number} */ sum, /** @type {number} */ p, /** @type {number} */ at) => sum + p * VALUES[at][dim],
        0,
      ),
    );
    const error = Math.max(...exact.map((one, dim) => Math.abs(one - now.out[dim])));
    return now.kind === "divide"
      ? `Same result as the softmax of the whole row: largest difference ${difference(error)}.`
      : "Not finished: at the end the result is compared with the softmax of the whole row.";
  },
  questions: [
    {
      ask: "After the first block of 2 8 1 | 9 3 7 the sum is l = 1.0034 with m = 8. The next block brings a 9. What happens to l before its terms are added?",
      choices: ["nothing", "it is multiplied by e^(8 − 9) = 0.368", "it is divided by 9 / 8"],
      right: 1,
      why: "Every term e^(s − 8) has to become e^(s − 9), and that is the same factor for all of them.",
    },
    {
      ask: "The largest score comes in the first block. How often is something corrected?",
      choices: ["never", "once", "once for each block"],
      right: 0,
      why: "The maximum never rises again, so every factor is e^0 = 1. Choose the third row above and see.",
    },
  ],
  notes: {
    goal: "Everybody can carry out the update of m, l and O by hand.",
    minutes: 8,
    script: [
      "Step to the end of block 1: m = 8, l = 1.0034, and O is what block 1 alone gives.",
      "Read the correction aloud: old maximum minus new maximum, as an exponent.",
      "Watch the purple bars in the correction step: they do not move, because l and the terms shrink together.",
      "At the end divide by l. Compare with the green bars.",
    ],
    question: "Some articles give l = 1.506 at the end. What do they count?",
    answer: "The same sum, 0.3691 + 1.1378 = 1.5069, cut after three digits instead of rounded.",
  },
};
