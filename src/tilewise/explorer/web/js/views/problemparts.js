/** The parts of the answer to "what will my problem cost", each number with its explanation. */

import { chart } from "tilewise/ui/chart.js";
import { h } from "tilewise/ui/dom.js";
import { formatBytes, formatCount, formatSeconds, grouped, short } from "tilewise/ui/format.js";
import { explained, table } from "tilewise/ui/parts.js";

/** @typedef {{plan: any, values: Record<string, any>}} Facts */

/** @param {string} title @param {string} what @param {...any} children */
function card(title, what, ...children) {
  return h("section", { class: "panel", "aria-label": title }, h("h3", {}, title, h("small", {}, what)), children);
}

/** A number under its name. @param {string} name @param {string} value @param {string} why @param {string} id */
function fact(name, value, why, id) {
  return h("div", { class: "counter" }, h("dt", {}, name), h("dd", { "data-fact": id }, explained(value, why)));
}

/** @param {Facts} facts */
export function backendPart({ plan }) {
  const tile = `${plan.tile.block_m} × ${plan.tile.block_n}`;
  const all = plan.tiles.visited + plan.tiles.skipped;
  return card(
    "Backend that would run",
    plan.device.name,
    h("p", { class: "verdict", "data-fact": "backend" }, plan.backend ?? "none"),
    plan.rejected.length > 0 &&
      h(
        "ul",
        { class: "small rejected" },
        plan.rejected.map((/** @type {any} */ one) => h("li", {}, h("b", {}, `not ${one.backend}: `), one.reason)),
      ),
    h(
      "dl",
      { class: "counters" },
      fact(
        "tile",
        tile,
        "Queries × keys that this kernel's forward works on at a time. Larger tiles reuse more and need more registers and shared memory.",
        "tile",
      ),
      fact(
        "tiles visited",
        `${grouped(plan.tiles.visited)} of ${grouped(all)}`,
        `For each head, over the batch: ${grouped(plan.tiles.partial)} of the visited ones need a mask, ${grouped(plan.tiles.skipped)} are skipped.`,
        "tiles",
      ),
    ),
  );
}

/** @param {Facts} facts */
export function timePart({ plan, values }) {
  const passes =
    values.phase === "train"
      ? "forward and backward"
      : values.phase === "decode"
        ? "one new token a sequence"
        : "forward";
  const speed = plan.naive.seconds / plan.tiled.seconds;
  return card(
    "Roofline time",
    `one layer, ${passes}`,
    h(
      "dl",
      { class: "counters" },
      fact("tiled", seconds(plan.tiled), because(plan, plan.tiled), "seconds-tiled"),
      fact("naive", seconds(plan.naive), because(plan, plan.naive), "seconds-naive"),
      fact(
        "naive / tiled",
        Number.isFinite(speed) ? `${speed.toFixed(1)}×` : "–",
        "The ratio of the two estimates.",
        "speed",
      ),
      fact(
        `all ${values.layers} layers`,
        plan.tiled.seconds === null ? "unknown" : formatSeconds(plan.tiled.seconds * values.layers),
        "The tiled time of a layer times the layers; projections and the MLP are not in it.",
        "seconds-model",
      ),
    ),
  );
}

/** @param {any} work */
function seconds(work) {
  return work.seconds === null ? "unknown" : formatSeconds(work.seconds);
}

/** @param {any} plan @param {any} work */
function because(plan, work) {
  if (work.seconds === null) return "The rates of this device are not known.";
  const bytes = `${formatBytes(work.bytes_from_memory)} at ${formatCount(plan.device.bandwidth, "B/s")}`;
  const flops = `${formatCount(work.flops, "FLOP")} at the peak rate of the device`;
  return work.bound === "memory"
    ? `Bound by memory: ${bytes} take longer than ${flops}.`
    : `Bound by arithmetic: ${flops} take longer than ${bytes}.`;
}

/** Columns of DeepSeek's latents: values (keys too), and a rotary part of the keys. */
const LATENT = [512, 64];

/** What the ways to share K and V keep of a token. @param {Facts} facts */
export function cachePart({ values }) {
  const size = values.dtype === "float32" ? 4 : 2;
  const { heads, kv, layers } = values;
  const own = (/** @type {number} */ count) => 2 * count * Number(values.dim) * size;
  const ways = /** @type {[string, string, number, string][]} */ ([
    ["mha", `${heads} heads (MHA)`, own(heads), "Each query head has a K and a V of its own."],
    [
      "gqa",
      `${kv} (this problem)`,
      own(kv),
      "The K/V heads of this problem. If they are fewer than the query heads, each serves a group of them (GQA).",
    ],
    ["mqa", "1 (MQA)", own(1), "One K/V head serves all query heads."],
    [
      "latent",
      `latent (${LATENT.join(" + ")})`,
      (LATENT[0] + LATENT[1]) * size,
      "One row serves all heads, as DeepSeek's: the first columns are keys and values at once, the others a part of the keys.",
    ],
  ]);
  const most = values.batch * values.context * layers;
  const rows = ways.map(([key, name, bytes, why]) => {
    const first = h("span", { "data-cache": key }, explained(name, why));
    return [first, `${grouped(bytes)} B`, formatBytes(bytes * most)];
  });
  return card(
    "KV cache by the way heads share it",
    `a token in one layer; ${grouped(values.batch * values.context)} tokens in ${layers} layers`,
    table(["", "a token", "all"], rows, "KV cache by the way heads share it"),
  );
}

/** @param {Facts} facts */
export function memoryPart({ plan, values }) {
  const size = values.dtype === "float32" ? 4 : 2;
  const cache = 2 * values.batch * values.context * values.kv * Number(values.dim) * size;
  const whole = cache * values.layers;
  const room = plan.device.memory_bytes;
  const needs = plan.memory.inputs + plan.naive.extra_memory;
  return card(
    "Memory",
    "beside the weights",
    h(
      "dl",
      { class: "counters" },
      fact(
        "KV, one layer",
        formatBytes(cache),
        `K and V: 2 × ${grouped(values.batch)} × ${grouped(values.context)} tokens × ${values.kv} heads × ${values.dim} × ${size} bytes.`,
        "kv-layer",
      ),
      fact(
        `KV, ${values.layers} layers`,
        formatBytes(whole),
        "What a KV cache for these sequences takes in the whole model.",
        "kv-model",
      ),
      fact(
        "extra, tiled",
        formatBytes(plan.tiled.extra_memory),
        "Allocated beside the inputs at the peak: the results, and with gradients theirs.",
        "extra-tiled",
      ),
      fact(
        "extra, naive",
        formatBytes(plan.naive.extra_memory),
        "The same, and the score matrices: scores and probabilities, in training P, dP and dS.",
        "extra-naive",
      ),
      values.phase === "train" &&
        fact(
          "kept for backward",
          formatBytes(plan.memory.saved_for_backward),
          "q, k, v, out and lse of a layer: linear in the context.",
          "saved",
        ),
    ),
    room > 0 &&
      needs > room &&
      h(
        "p",
        { class: "small" },
        `Naive attention does not fit: it needs ${formatBytes(needs)} of ${formatBytes(room)}.`,
      ),
    room > 0 &&
      whole > room &&
      h(
        "p",
        { class: "small" },
        `The KV cache of all layers does not fit on one device: ${formatBytes(whole)} of ${formatBytes(room)}.`,
      ),
  );
}

/** @param {Facts} facts */
export function rooflinePart({ plan, values }) {
  const rate = plan.device.flops[values.dtype];
  if (rate === undefined || plan.device.bandwidth <= 0)
    return card("Roofline", "", h("p", {}, "The rates of this device are not known."));
  const ridge = rate / plan.device.bandwidth;
  const points = [plan.naive, plan.tiled].map((work) => ({ x: work.intensity, y: work.flops / work.seconds }));
  const low = Math.min(0.5, ...points.map((point) => point.x / 2));
  const high = Math.max(ridge * 20, ...points.map((point) => point.x * 2));
  const roof = /** @type {[number, number][]} */ ([
    [low, low * plan.device.bandwidth],
    [ridge, rate],
    [high, rate],
  ]);
  const picture = chart(
    [
      { name: "", colour: "c-roof", points: roof.slice(0, 2) },
      { name: formatCount(rate, "FLOP/s"), colour: "c-roof", points: roof.slice(1) },
    ],
    {
      label: `Roofline of ${plan.device.name}: naive ${plan.naive.intensity.toFixed(1)}, tiled ${plan.tiled.intensity.toFixed(1)} FLOP per byte`,
      scale: "log",
      xLabel: "FLOP per byte from memory",
      yLabel: "FLOP/s that can be reached",
      formatX: (x) => (x < 1 ? String(x) : short(formatCount(x))),
      formatY: (y) => short(formatCount(y)),
      dots: dots(points),
    },
  );
  return card(
    "Roofline",
    "left of the bend memory decides, right of it arithmetic",
    picture,
    h(
      "dl",
      { class: "counters" },
      fact("tiled", ratio(plan.tiled.intensity), "FLOP for each byte that comes from memory.", "intensity-tiled"),
      fact("naive", ratio(plan.naive.intensity), "FLOP for each byte that comes from memory.", "intensity-naive"),
      fact(
        "bend",
        ridge.toFixed(0),
        `${formatCount(rate, "FLOP/s")} divided by ${formatCount(plan.device.bandwidth, "B/s")}: below it the arithmetic units wait for memory.`,
        "ridge",
      ),
      fact("bound by", plan.tiled.bound ?? "unknown", because(plan, plan.tiled), "bound"),
    ),
  );
}

/** 63.8, 14,464. @param {number} value */
function ratio(value) {
  return value < 1000 ? value.toFixed(1) : grouped(value);
}

/** Two points, named together where they would cover each other. @param {{x: number, y: number}[]} points */
function dots([naive, tiled]) {
  const alike = Math.abs(Math.log(naive.x / tiled.x)) < 0.5;
  return alike
    ? [{ ...tiled, name: "naive and tiled", colour: "c-fa2", below: true }]
    : [
        { ...naive, name: "naive", colour: "c-naive", below: true },
        { ...tiled, name: "tiled", colour: "c-fa2", below: true },
      ];
}

/**
 * PyTorch's scaled_dot_product_attention at its best. It has no sliding window: that takes a mask of all pairs, and then
 * every pair is computed and the mask is read. Otherwise its flash kernel has the same bound as ours.
 * @param {Facts} facts
 */
function sdpaWork({ plan, values }) {
  const cuts = values.mask === "window" && values.w < values.context - 1;
  const rate = plan.device.flops[values.dtype];
  if (!cuts || rate === undefined || plan.tiled.seconds === null) return { seconds: plan.tiled.seconds, masked: false };
  const queries = values.phase === "decode" ? 1 : values.context;
  const mask = queries * values.context * (values.dtype === "float32" ? 4 : 2);
  const bytes = plan.tiled.bytes_from_memory + mask;
  return { seconds: Math.max(plan.naive.flops / rate, bytes / plan.device.bandwidth), masked: true };
}

/** The three ways on this device in one picture. @param {Facts} facts */
export function waysPart(facts) {
  const { plan } = facts;
  const sdpa = sdpaWork(facts);
  const ways = /** @type {[string, string, number | null][]} */ ([
    ["naive", "naive", plan.naive.seconds],
    ["PyTorch SDPA", "fa1", sdpa.seconds],
    [`tilewise (${plan.backend ?? "none"})`, "fa2", plan.tiled.seconds],
  ]);
  const most = Math.max(...ways.map(([, , seconds]) => seconds ?? 0));
  const note = sdpa.masked
    ? "SDPA has no sliding window: it takes a mask of all pairs, computes them all and reads the mask."
    : "SDPA's flash kernel visits the same tiles, so its bound is that of tilewise; how close a kernel comes to it is not estimated here.";
  return card(
    "Three ways on this device",
    "an estimate: the least time, not a measurement",
    ways.map(([name, kind, seconds]) => {
      const bar = h("span", { class: `bar-${kind}` });
      bar.style.width = most > 0 ? `${(100 * (seconds ?? 0)) / most}%` : "0";
      return h(
        "div",
        { class: "bar-line ways" },
        h("span", {}, name),
        h("div", { class: "meter", "aria-hidden": "true" }, bar),
        h("b", { "data-way": kind }, seconds === null ? "unknown" : formatSeconds(seconds)),
      );
    }),
    h("p", { class: "small muted" }, note),
  );
}

/** @type {[string, string, (work: any) => string][]} */
const ROWS = [
  [
    "work",
    "Multiplications and additions. Naive attention computes masked pairs, too; tiled attention counts visible pairs.",
    (work) => formatCount(work.flops, "FLOP"),
  ],
  [
    "elements moved",
    "Elements of the inputs' dtype that enter or leave fast memory.",
    (work) => grouped(work.traffic.reads + work.traffic.writes),
  ],
  ["bytes moved", "The same in bytes, with fp32 statistics.", (work) => formatBytes(work.bytes_moved)],
  [
    "… from memory",
    "What the last-level cache does not serve: tiles that run together share what they stream.",
    (work) => formatBytes(work.bytes_from_memory),
  ],
  ["extra memory", "Allocated beside the inputs at the peak.", (work) => formatBytes(work.extra_memory)],
];

/** @param {Facts} facts */
export function comparisonPart({ plan, values }) {
  const rows = ROWS.map(([name, why, show]) => [explained(name, why), show(plan.naive), show(plan.tiled)]);
  const heads = `${grouped(values.batch)} × ${values.heads} heads`;
  return card(
    "Naive against tiled",
    `all ${heads} of a layer`,
    table(["", "naive", "tiled"], rows, "Naive against tiled"),
  );
}
