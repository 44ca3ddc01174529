import { SoftmaxScene } from "tilewise/lesson/softmaxscene.js";
import { trueSoftmax } from "tilewise/engine/softmax.js";
import { difference } from "tilewise/ui/format.js";
import { text } from "tilewise/views/softmax.js";

const ROW = "2, 8, 1, 9, 3, 7";

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const resists = {
  id: "softmax-resists",
  number: "4a",
  title: "Why softmax resists",
  text: [
    "The two products, Q Kᵀ and P V, can be tiled, but between them stands the softmax: each weight is e^s divided by the sum of e^s over its whole row of scores s.",
    "So that e^s does not overflow, the largest score m is subtracted first, and the sum is then called l: the weight is e^(s − m) / l.",
    "Both m and l are known only when the whole row has been seen, so a tile by itself gives wrong weights.",
  ],
  bench: "softmax",
  controls: () => [
    {
      key: "row",
      label: "Scores",
      type: "select",
      value: ROW,
      options: [
        [ROW, "2 8 1 | 9 3 7"],
        ["1, 2, 3, 6, 2, 1", "1 2 3 | 6 2 1"],
      ],
    },
  ],
  scene: () => new SoftmaxScene("resists"),
  code: [
    "read the row:  m = largest s",
    "read it again:  l = sum of e^(s − m)",
    "read it again:  p = e^(s − m) / l",
    "or, in blocks: weights from one block alone",
    "…  wrong as soon as the next block comes",
  ],
  lines: (_, at) => [[], [0], [1], [2], [3], [4]][at],
  say: (scene) => {
    const { row, truth, kind, rowMax, rowSum, first } = scene.state;
    const largest = first.indexOf(Math.max(...first));
    return {
      row: `A row of ${row.length} scores: how much one query wants each of ${row.length} values. The green bars are the weights we want.`,
      maximum: `First reading: the largest score is m = ${text(rowMax)}.`,
      sum: `Second reading: l = ${row.map((/** @type {number} */ s) => `e^(${text(s)} − ${text(rowMax)})`).join(" + ")} = ${text(rowSum)}.`,
      weights: `Third reading: every weight is e^(s − ${text(rowMax)}) / ${text(rowSum)}. The row had to be kept somewhere between the readings: in HBM.`,
      first: `Now in blocks of 3, and only the first has come. Its own softmax gives score ${text(row[largest])} the weight ${first[largest].toFixed(4)}.`,
      second: `The second block brings ${text(Math.max(...row.slice(3)))}. The true weight of ${text(row[largest])} is ${truth[largest].toFixed(4)}: what was computed from the first block is too large by a factor of ${(first[largest] / truth[largest]).toFixed(2)}, and so are the other two.`,
    }[/** @type {"row"} */ (kind)];
  },
  result: (scene) => {
    const { row, truth } = scene.state;
    const plain = row.map((/** @type {number} */ s) => Math.exp(s));
    const sum = plain.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);
    const error = Math.max(
      ...truth.map((/** @type {number} */ p, /** @type {number} */ at) => Math.abs(p - plain[at] / sum)),
    );
    return `Same result as e^s / sum of e^s without subtracting m: largest difference ${difference(error)}.`;
  },
  questions: [
    {
      ask: "All three weights of the first block are wrong. Are they wrong by the same factor?",
      choices: ["yes", "no, the largest is off most", "it depends on the scores"],
      right: 0,
      why: () => {
        const row = ROW.split(",").map(Number);
        const [truth, first] = [trueSoftmax(row), trueSoftmax(row.slice(0, 3))];
        return `Each is too large by ${first.map((p, at) => (p / truth[at]).toFixed(3)).join(", ")}. One number repairs them all: that is the way out, in the next chapter.`;
      },
    },
    {
      ask: "Why subtract the largest score at all?",
      choices: ["to make the weights sum to 1", "so that e^s does not overflow", "to save a division"],
      right: 1,
      why: "In 16 bits e^12 is already too large; e^(s − m) is never above 1. The weights are the same with and without.",
    },
  ],
  notes: {
    goal: "Everybody sees that a softmax needs the whole row, and that a part of it is wrong by one common factor.",
    minutes: 5,
    script: [
      "Steps 1 to 3: three readings of the same row.",
      "Step 4: cover the second block; the bars look fine.",
      "Step 5: the second block arrives and the bars are far too high.",
      "Let somebody compute the factor for each of the three bars.",
    ],
    question: "What would have to be remembered of the first block, to repair its weights later?",
    answer: "Its maximum m and its sum l: two numbers, however long the block was.",
  },
};
