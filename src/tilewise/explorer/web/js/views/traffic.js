/** Memory traffic: naive against FA-1 and FA-2 as N grows, and what the score matrix takes. */

import { fa1, fa2 } from "tilewise/engine/attention.js";
import { Band } from "tilewise/engine/band.js";
import { differenceFromNaive } from "tilewise/engine/check.js";
import {
  elements,
  fa1Forward,
  naiveForward,
  scoreMatrixBytes,
  statisticsBytes,
  tiledForward,
} from "tilewise/engine/cost.js";
import { workload } from "tilewise/engine/recorder.js";
import { chart } from "tilewise/ui/chart.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { difference, formatBytes, formatCount, formatSeconds, grouped, short } from "tilewise/ui/format.js";
import { explained, folded, heading, table } from "tilewise/ui/parts.js";

/** @typedef {import("tilewise/main.js").Context} Context */
/** @typedef {import("tilewise/ui/form.js").Spec} Spec */
/** @typedef {Record<"naive" | "fa1" | "fa2", import("tilewise/engine/cost.js").Traffic>} Ways */

const LENGTHS = [256, 512, 1024, 2048, 4096];
const MORE_LENGTHS = [8192, 16384, 32768];
/** The slider goes over powers of two. */
const [SHORTEST_POWER, LONGEST_POWER, STANDARD_LENGTH] = [6, 17, 2048];
const HALF = 2;
const WIDE = 4;

/** @param {any} devices @returns {Spec[]} */
function specs(devices) {
  return [
    { key: "d", label: "Head dim d", type: "number", value: 64, min: 1, max: 512 },
    { key: "bm", label: "Query block", type: "number", value: 128, min: 1, max: 1024 },
    { key: "bn", label: "Key block", type: "number", value: 128, min: 1, max: 1024 },
    {
      key: "mask",
      label: "Mask",
      type: "select",
      value: "full",
      options: [
        ["full", "none (full)"],
        ["causal", "causal"],
      ],
    },
    {
      key: "unit",
      label: "Show",
      type: "select",
      value: "elements",
      options: [
        ["elements", "elements"],
        ["bytes", "bytes (fp16)"],
        ["time", "time on the device"],
      ],
    },
    {
      key: "device",
      label: "Device",
      type: "select",
      value: "a100",
      options: Object.entries(devices).map(([key, device]) => [key, device.name]),
      when: (values) => values.unit === "time",
    },
    {
      key: "scale",
      label: "Axes",
      type: "select",
      value: "linear",
      options: [
        ["linear", "linear"],
        ["log", "logarithmic"],
      ],
    },
  ];
}

/** @param {Context} context @returns {import("tilewise/main.js").View} */
export function createTrafficView(context) {
  return new TrafficView(context);
}

class TrafficView {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.devices = context.data.devices;
    this.specs = specs(this.devices);
    this.form = new Form(this.specs, valuesFrom(this.specs, context.params), () => this.#show());
    this.picture = h("div");
    this.rows = h("div");
    this.share = h("p", { "data-share": "" });
    this.check = h("p", { class: "result", "data-check": "" });
    this.sizes = folded("Sizes", [this.form.element]);
    this.length = h("input", {
      type: "range",
      id: "traffic-n",
      min: SHORTEST_POWER,
      max: LONGEST_POWER,
      step: 1,
      value: Math.log2(lengthFrom(context.params.n)),
      oninput: () => this.#show(),
    });
    this.lengthText = h("output", { for: "traffic-n", class: "step-counter" });
    this.race = h("div", { "data-race": "" });
    this.memory = h("div");
    this.element = h(
      "div",
      { class: "bench" },
      heading(
        "What crosses the memory",
        "Naive attention writes the N × N scores, reads them, writes their softmax and reads that. Tiled attention reads Q once, streams K and V past each tile of queries, and writes O once. One head, forward.",
      ),
      this.sizes.element,
      h(
        "section",
        { class: "panel", "aria-label": "One length" },
        h("div", { class: "slider" }, h("label", { for: "traffic-n" }, "Tokens N"), this.length, this.lengthText),
        this.race,
      ),
      h(
        "div",
        { class: "panels loose below" },
        h(
          "section",
          { class: "panel", "aria-label": "Chart" },
          h("h3", {}, "Traffic as N grows"),
          this.picture,
          this.share,
        ),
        h(
          "div",
          { class: "stack" },
          h("section", { class: "panel", "aria-label": "Table" }, h("h3", {}, "The same in numbers"), this.rows),
          h(
            "section",
            { class: "panel", "aria-label": "Memory" },
            h(
              "h3",
              {},
              "What the score matrix takes",
              h("small", {}, "one head, and the statistics m and l that replace it"),
            ),
            this.memory,
          ),
        ),
      ),
      this.check,
    );
    this.#show();
  }

  /** The three ways at one length. @param {number} n */
  #at(n) {
    const { d, bm, bn, mask } = this.form.values;
    const band = new Band(n, n, null, mask === "causal" ? 0 : null);
    const grid = { blockM: bm, blockN: bn };
    return { naive: naiveForward(band, d, d), fa1: fa1Forward(band, grid, d, d), fa2: tiledForward(band, grid, d, d) };
  }

  /** A traffic in the unit that is shown. @param {import("tilewise/engine/cost.js").Traffic} traffic */
  #measure(traffic) {
    const { unit, device } = this.form.values;
    if (unit === "elements") return elements(traffic);
    const bytes = elements(traffic) * HALF + traffic.wide * WIDE;
    return unit === "bytes" ? bytes : bytes / this.devices[device].bandwidth;
  }

  /** @param {number} value */
  #format(value) {
    const { unit } = this.form.values;
    if (value === 0) return "0";
    return unit === "elements" ? formatCount(value) : unit === "bytes" ? formatBytes(value) : formatSeconds(value);
  }

  #show() {
    const { values } = this.form;
    const lengths = values.scale === "log" ? [...LENGTHS, ...MORE_LENGTHS] : LENGTHS;
    const points = lengths.map((n) => ({ n, ...this.#at(n) }));
    const series = /** @type {const} */ ([
      ["naive", "naive", "c-naive"],
      ["fa1", "FA-1", "c-fa1"],
      ["fa2", "FA-2", "c-fa2"],
    ]);
    fill(
      this.picture,
      chart(
        series.map(([key, name, colour]) => ({
          name,
          colour,
          below: key === "fa2",
          dash: key === "fa1" ? "6 4" : undefined,
          points: points.map((point) => [point.n, this.#measure(point[key])]),
        })),
        {
          label: `Traffic of naive, FA-1 and FA-2 attention against N, ${values.scale} axes`,
          scale: values.scale,
          xLabel: "tokens N",
          yLabel:
            values.unit === "elements"
              ? "elements moved"
              : values.unit === "bytes"
                ? "bytes moved"
                : "time at full bandwidth",
          xTicks: values.scale === "log" ? lengths : [0, 1024, 2048, 3072, 4096],
          formatX: grouped,
          formatY: (value) => short(this.#format(value)),
        },
      ),
    );
    this.sizes.describe(`d = ${values.d}, blocks ${values.bm} × ${values.bn}, mask: ${values.mask}, in ${values.unit}`);
    this.#showLength();
    this.#showTable(points);
    this.#showShare();
    this.#showMemory();
    const n = 2 ** Number(this.length.value);
    this.context.save({ ...paramsOf(this.specs, values), ...(n !== STANDARD_LENGTH && { n: String(n) }) });
  }

  /** The three ways at the length of the slider, as bars, and whether they agree. */
  #showLength() {
    const { values } = this.form;
    const n = 2 ** Number(this.length.value);
    const ways = this.#at(n);
    setText(this.lengthText, grouped(n));
    this.length.setAttribute("aria-valuetext", `${grouped(n)} tokens`);
    const rows = /** @type {const} */ ([
      ["naive", "naive"],
      ["fa1", "FA-1"],
      ["fa2", "FA-2"],
    ]);
    const most = Math.max(...rows.map(([key]) => this.#measure(ways[key])));
    fill(
      this.race,
      rows.map(([key, name]) => {
        const size = this.#measure(ways[key]);
        const bar = h("span", { class: `bar-${key}` });
        bar.style.width = `${(100 * size) / most}%`;
        return h(
          "div",
          { class: "bar-line" },
          h("span", {}, name),
          h("div", { class: "meter", "aria-hidden": "true" }, bar),
          h("b", { "data-race-value": key }, values.unit === "elements" ? grouped(size) : this.#format(size)),
        );
      }),
      h(
        "p",
        { class: "small" },
        moral(this.#measure(ways.naive), this.#measure(ways.fa1), this.#measure(ways.fa2), values),
      ),
    );
    const small = workload({
      seqlen_q: 64,
      seqlen_k: 64,
      head_dim: 8,
      head_dim_v: 8,
      block_m: 16,
      block_n: 16,
      scale: 1 / Math.sqrt(8),
      right: values.mask === "causal" ? 0 : null,
    });
    const error = Math.max(...[fa1, fa2].map((schedule) => differenceFromNaive(schedule, small)));
    setText(
      this.check,
      `Same result as naive attention: computed here on 64 tokens, the largest difference is ${difference(error)}.`,
    );
  }

  /** @param {({n: number} & Ways)[]} points */
  #showTable(points) {
    const exact = this.form.values.unit === "elements";
    const text = (/** @type {import("tilewise/engine/cost.js").Traffic} */ traffic) =>
      exact ? grouped(elements(traffic)) : this.#format(this.#measure(traffic));
    fill(
      this.rows,
      table(
        ["N", "naive", "FA-1", "FA-2", "naive / FA-2"],
        points.map((point) => [
          grouped(point.n),
          text(point.naive),
          text(point.fa1),
          text(point.fa2),
          `${(this.#measure(point.naive) / this.#measure(point.fa2)).toFixed(1)}×`,
        ]),
        "Traffic by N",
      ),
      h(
        "p",
        { class: "small muted" },
        exact
          ? "Counted: elements of the inputs' dtype that are read or written. The fp32 statistics, N for FA-2, are left out, as papers do. With them the ratios change in the third digit."
          : "With the fp32 statistics.",
      ),
    );
  }

  #showShare() {
    const n = 2048;
    const { naive } = this.#at(n);
    const squares = 4 * n * n;
    setText(
      this.share,
      `Naive attention at N = 2,048, d = ${this.form.values.d}: reads ${grouped(naive.reads)}, writes ${grouped(naive.writes)}, in all ${grouped(elements(naive))}, of which N² terms ${grouped(squares)} (${Math.round((100 * squares) / elements(naive))}\u00a0%).`,
    );
  }

  #showMemory() {
    const rows = [1024, 4096, 16384].map((n) => [
      grouped(n),
      formatWhole(scoreMatrixBytes(n, 4)),
      formatWhole(statisticsBytes(n)),
    ]);
    const long = 131072;
    const { d } = this.form.values;
    const kept = (/** @type {number} */ dim) => long * dim * HALF + statisticsBytes(long);
    fill(
      this.memory,
      table(["N", "scores, fp32", "m and l, fp32"], rows, "Memory by N"),
      h(
        "p",
        { class: "long-context" },
        "At 128K tokens in fp16 the matrix is ",
        h("b", {}, `${formatWhole(scoreMatrixBytes(long, HALF))} a head`),
        "; ",
        explained(
          "O and the statistics",
          `O has 131,072 rows of d = ${d} in fp16, ${formatWhole(long * d * HALF)}; m and l are two fp32 numbers a row, ${formatWhole(statisticsBytes(long))}.`,
        ),
        ` at d = ${d} are `,
        h("b", {}, formatWhole(kept(d))),
        d === 128 ? "." : `; at d = 128 they are ${formatWhole(kept(128))}.`,
      ),
    );
  }

  destroy() {}
}

/** @param {string | undefined} text */
function lengthFrom(text) {
  const power = Math.log2(Number(text));
  return Number.isInteger(power) && power >= SHORTEST_POWER && power <= LONGEST_POWER ? 2 ** power : STANDARD_LENGTH;
}

/** Who moves how much, and when tiles do not help. @param {number} naive @param {number} fa1 @param {number} fa2 @param {any} values */
function moral(naive, fa1, fa2, { bm, bn, d }) {
  const ratios = `FA-2 moves ${(naive / fa2).toFixed(1)}× less than naive attention, FA-1 ${(naive / fa1).toFixed(1)}×.`;
  return fa2 < naive && fa1 < naive
    ? ratios
    : `${ratios} Blocks of ${bm} × ${bn} are too small for d = ${d}: K and V (in FA-1 order Q and O) cross the memory more often than the scores would.`;
}

/** Powers of two without digits after the point. @param {number} size */
function formatWhole(size) {
  return formatBytes(size).replace(/\.0+ /, " ");
}
