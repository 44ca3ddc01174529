import { SplitScene } from "tilewise/lesson/splitscene.js";
import { difference, plural, shortNumber } from "tilewise/ui/format.js";

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const split = {
  id: "split-decoding",
  number: "10a",
  title: "Decoding: split the keys",
  text: [
    "While a text is being generated there is one new query at a time, against the keys and values of all tokens so far, the KV cache.",
    "One worker (one SM of the GPU) would stream the whole cache alone while all others idle, so the keys are split among several.",
    "Each worker leaves its O and its lse; a part counts e^(lse − largest lse), and its share is that divided by the sum over all parts.",
  ],
  bench: "paging",
  controls: () => [
    {
      key: "workers",
      label: "Workers",
      type: "select",
      value: "4",
      options: ["1", "2", "3", "4", "6"].map((count) => [count, count]),
    },
  ],
  scene: () => new SplitScene(),
  code: [
    "for each worker, at the same time:",
    "  O, lse = attention over its own keys",
    "w = e^(lse − largest lse)",
    "O = sum of w·O / sum of w",
  ],
  lines: (scene, at) => {
    const { done, weighed, merged } = scene.state;
    return at === 0 ? [] : merged ? [3] : weighed ? [2] : done ? [1] : [0, 1];
  },
  say: (scene, at) => {
    const { workers, read, rounds, pages, done, weighed, merged } = scene.state;
    if (at === 0)
      return `${plural(pages, "page")} of keys, ${plural(workers.length, "worker")}: it will take ${plural(rounds, "round")}${workers.length > 1 ? ` instead of ${pages}` : ""}.`;
    if (merged) {
      return workers.length > 1
        ? `The parts are added up with their shares, ${workers.map((/** @type {any} */ one) => shortNumber(one.share)).join(", ")}: O = (${merged.map((/** @type {number} */ one) => shortNumber(one)).join(", ")}).`
        : `The only worker has seen all keys: O = (${merged.map((/** @type {number} */ one) => shortNumber(one)).join(", ")}).`;
    }
    if (weighed)
      return `Each lse says how much its part weighs: e^(lse − largest lse) = ${workers.map((/** @type {any} */ one) => shortNumber(one.weight)).join(", ")}.`;
    if (done)
      return `All keys have been read after ${plural(rounds, "round")}. Each worker has the O and the lse of its own keys.`;
    const sum = read.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0);
    return `Round ${at}: ${sum} of ${plural(pages, "page")} have been read, by ${plural(workers.length, "worker")} at the same time.`;
  },
  result: (scene) => `Same result as naive attention over all keys: largest difference ${difference(scene.error)}.`,
  questions: [
    {
      ask: "12 pages and 4 workers: how many rounds?",
      choices: ["3", "4", "12"],
      right: 0,
      why: "Each worker has 3 pages, and all work at the same time. The merge is small: one lse and one O for each worker.",
    },
    {
      ask: "A worker's lse is 2 below the largest. How much does its O count, compared with the largest part?",
      choices: ["2 less", "e^(−2) = 0.135 times as much", "the same"],
      right: 1,
      why: "The merge is an online softmax over the parts: their lse are the scores, their O the values.",
    },
  ],
  notes: {
    goal: "Everybody sees that merging parts is the online softmax once more.",
    minutes: 5,
    script: [
      "One worker first: 12 rounds.",
      "Then 4: three rounds and a merge.",
      "Show that a share is not the number of keys: it depends on the scores.",
    ],
    question: "Why is splitting not needed in the chapters before?",
    answer: "There were many queries, and each tile of them is work for an SM. Here there is only one.",
  },
};
