import { fa2 } from "tilewise/engine/attention.js";
import { busyShare, pipeline, timeline } from "tilewise/engine/pipeline.js";
import { attention, sameAsNaive } from "tilewise/lesson/common.js";
import { GanttScene } from "tilewise/lesson/ganttscene.js";
import { grouped } from "tilewise/ui/format.js";

const VERBS = /** @type {Record<string, string>} */ ({
  load_k: "The producer loads a tile of K",
  load_v: "The producer loads a tile of V",
  scores: "multiplies Q Kᵀ on the tensor cores",
  softmax: "computes exponentials for its softmax",
  values: "multiplies P V on the tensor cores",
});

const percent = (/** @type {number} */ share) => `${Math.round(100 * share)} %`;

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const fa3 = {
  id: "fa3",
  number: "9",
  title: "FlashAttention-3: everybody busy",
  text: [
    "Hopper GPUs (H100, H200) have a unit that copies tiles by itself, TMA, and tensor cores that multiply while other units compute exponentials.",
    "FA-3 gives each its own threads: a producer that loads, and two groups of consumers, called warpgroups, that take turns (ping-pong): one computes its softmax while the other multiplies.",
    "With FP8, numbers of 8 bits, products and loads take half the time, and the exponentials take as long as both products together.",
  ],
  bench: "problem",
  controls: () => [
    { key: "pingpong", label: "Ping-pong", type: "check", value: true },
    {
      key: "dtype",
      label: "Numbers",
      type: "select",
      value: "fp16",
      options: [
        ["fp16", "16 bits"],
        ["fp8", "FP8: 8 bits"],
      ],
    },
  ],
  scene: () => new GanttScene(),
  code: [
    "producer:",
    "  wait for a free stage;  load Kⱼ;  load Vⱼ",
    "each consumer:",
    "  S = Q Kⱼᵀ  (tensor cores)",
    "  with ping-pong: now the other one may multiply",
    "  P = softmax, online  (special function units)",
    "  O = O + P Vⱼ  (tensor cores);  free the stage",
  ],
  lines: (scene) => {
    const { last } = scene.state;
    if (last === null) return [];
    const lines = /** @type {Record<string, number[]>} */ ({
      load_k: [1],
      load_v: [1],
      scores: [3],
      softmax: [5],
      values: [6],
    })[last.task];
    return last.task === "softmax" && scene.pipe.ping_pong ? [4, ...lines] : lines;
  },
  say: (scene, at) => {
    const { last, beside, share, otherShare, cycles, otherCycles } = scene.state;
    const how = (/** @type {boolean} */ on) => (on ? "with ping-pong" : "in lockstep");
    if (last === null)
      return `A model of one SM of an H100: 4 tiles of 128 keys, 64 queries for each warpgroup, d = 128. A product takes ${grouped(scene.pipe.product)} cycles, a softmax ${grouped(scene.pipe.softmax)}.`;
    if (at === scene.length)
      return `${how(scene.pipe.ping_pong).replace(/^./, (c) => c.toUpperCase())}, all of it takes ${grouped(cycles)} cycles and the tensor cores are busy ${percent(share)} of the time; ${how(!scene.pipe.ping_pong)} ${grouped(otherCycles)} cycles and ${percent(otherShare)}.`;
    const times = `cycles ${grouped(last.start)} to ${grouped(last.stop)}`;
    if (last.consumer === null) return `${VERBS[last.task]}, number ${last.tile}: ${times}.`;
    const other = beside.find((/** @type {any} */ span) => span.consumer !== last.consumer && span.consumer !== null);
    const meanwhile = other ? ` Meanwhile warpgroup ${other.consumer + 1} ${VERBS[other.task]}.` : "";
    return `Warpgroup ${last.consumer + 1} ${VERBS[last.task]} for tile ${last.tile}: ${times}.${meanwhile}`;
  },
  result: () => `The order of work changes nothing in the numbers. ${sameAsNaive(fa2, attention(16, 4, 4))}`,
  questions: [
    {
      ask: "Without ping-pong, how busy are the tensor cores in 16 bits?",
      choices: ["about a third of the time", "about two thirds", "all the time"],
      right: 1,
      why: () =>
        `Products take 2 × 512 cycles for each warpgroup and tile, the softmax 512 in which nobody multiplies: ${percent(busyShare(timeline(pipeline({ ping_pong: false }))))}. With ping-pong it is ${percent(busyShare(timeline(pipeline({}))))}, start and end included.`,
    },
    {
      ask: "FP8 doubles the speed of the tensor cores. In lockstep, how much faster does everything become?",
      choices: ["twice", "about 1.5 times", "not at all"],
      right: 1,
      why: () => {
        const end = (/** @type {object} */ changes) =>
          Math.max(...timeline(pipeline({ ping_pong: false, ...changes })).map((span) => span.stop));
        const [half, eight] = [end({}), end({ load: 256, product: 256 })];
        return `${grouped(half)} cycles become ${grouped(eight)}, ${(half / eight).toFixed(2)} times less: the exponentials are as slow as before.`;
      },
    },
  ],
  notes: {
    goal: "Everybody can read the chart and say who waits for whom.",
    minutes: 7,
    script: [
      "Start without ping-pong: find the gaps in the lowest lane.",
      "Switch it on: the purple boxes of one warpgroup stand over the orange and green ones of the other.",
      "Switch to FP8: now the exponentials decide.",
      "Say what the model leaves out: registers, barriers, and overlap within one warpgroup.",
    ],
    question: "Why are exponentials a problem at all, with so few of them?",
    answer:
      "An SM of an H100 does 4,096 operations of a matrix product in a cycle, but only 16 exponentials. A tile has one exponential for every 512 operations of its products.",
  },
};
