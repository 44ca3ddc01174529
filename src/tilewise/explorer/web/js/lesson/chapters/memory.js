import { fa2 } from "tilewise/engine/attention.js";
import { attention, sameAsNaive } from "tilewise/lesson/common.js";
import { HierarchyScene } from "tilewise/lesson/hierarchyscene.js";
import { formatBytes, formatCount, formatSeconds } from "tilewise/ui/format.js";

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const memory = {
  id: "memory",
  number: "1",
  title: "Where the time goes",
  text: [
    "Attention is the step in which every token of a text looks at every other, and its arithmetic is something a GPU is very good at.",
    "But numbers have to be fetched first: the main memory of a GPU, HBM, is large and slow, and the memory on the chip, SRAM, is fast and thousands of times smaller.",
    "So the time is decided by how many bytes cross between the two, and that is what FlashAttention saves.",
  ],
  bench: "problem",
  controls: (data) => [
    {
      key: "device",
      label: "Device",
      type: "select",
      value: data.lesson_devices[0].key,
      options: data.lesson_devices.map((/** @type {any} */ chip) => [chip.key, chip.name]),
    },
  ],
  scene: (data) => new HierarchyScene(data),
  code: [
    "4,096 tokens, one head, d = 64:",
    "  compute: 4 N² d operations",
    "  move, naive: 4 N² + 4 N d numbers",
    "  move, tiled: 2 N d + 2 N² d / 128 numbers",
    "time ≥ the longer of computing and moving",
  ],
  lines: (_, at) => [[], [1], [2], [3], [4]][at],
  say: (scene, at) => {
    const { facts, chip } = scene;
    const ratio = (/** @type {number} */ one, /** @type {number} */ other) => (one / other).toFixed(1);
    return [
      `${chip.name}: its ${chip.slow_name} holds ${formatCount(chip.slow_bytes, "B")} and delivers ${formatCount(chip.bandwidth, "B/s")}. On the chip there are ${formatBytes(chip.cores * chip.fast_bytes)} that deliver ${formatCount(chip.fast_bandwidth, "B/s")}.`,
      `The attention of 4,096 tokens in one head with d = 64 takes ${formatCount(facts.flops, "FLOP")}: at ${formatCount(chip.flops, "FLOP/s")} that is ${formatSeconds(facts.compute)}.`,
      `Naive attention moves ${formatBytes(facts.naive)} for it, which takes ${formatSeconds(facts.naiveTime)}: ${facts.naiveTime > facts.compute ? `${ratio(facts.naiveTime, facts.compute)} times as long as the arithmetic` : "less than the arithmetic, which is slow here"}.`,
      `In tiles of 128 × 128 it is ${formatBytes(facts.tiled)}, or ${formatSeconds(facts.tiledTime)}: ${ratio(facts.naiveTime, facts.tiledTime)} times less.`,
      `The slower of the two decides: ${formatSeconds(Math.max(facts.compute, facts.naiveTime))} for naive attention, ${formatSeconds(Math.max(facts.compute, facts.tiledTime))} in tiles. The next chapters show where the bytes go.`,
    ][at];
  },
  result: () => sameAsNaive(fa2, attention(16, 4, 4)),
  questions: [
    {
      ask: "A GPU becomes ten times faster at arithmetic, and its memory stays as it is. How much faster is naive attention?",
      choices: ["ten times", "about three times", "hardly at all"],
      right: 2,
      why: "The time is spent moving bytes; the arithmetic units wait.",
    },
    {
      ask: "How does the SRAM of a whole A100 compare with its HBM?",
      choices: ["about a tenth", "about a hundredth", "less than a thousandth"],
      right: 2,
      why: "108 SMs with 163 KiB each are 17 MiB, beside 80 GB.",
    },
  ],
  notes: {
    goal: "Everybody can say why counting bytes tells more about attention than counting operations.",
    minutes: 5,
    script: [
      "Choose the A100 and let the class guess the sizes before you step.",
      "Step through the three bars: arithmetic, naive, tiled.",
      "Change to the laptop: its arithmetic is so much slower that computing decides there. The bytes are the same.",
      "Say what the tiled bar does not show yet: how it is done.",
    ],
    question: "Which number on this page would you have to improve to make naive attention faster?",
    answer: "The bandwidth of the slow memory. More FLOP/s change nothing.",
  },
};
