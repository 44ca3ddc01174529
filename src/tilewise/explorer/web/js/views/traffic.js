/** Memory traffic: naive against FA-1 and FA-2 as N grows, and what the score matrix takes. */

import { Band } from "tilewise/engine/band.js";
import {
  elements,
  fa1Forward,
  naiveForward,
  scoreMatrixBytes,
  statisticsBytes,
  tiledForward,
} from "tilewise/engine/cost.js";
import { chart } from "tilewise/ui/chart.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { formatBytes, formatCount, formatSeconds, grouped, short } from "tilewise/ui/format.js";
import { explained, heading, table } from "tilewise/ui/parts.js";

/** @typedef {import("tilewise/main.js").Context} Context */
/** @typedef {import("tilewise/ui/form.js").Spec} Spec */
/** @typedef {Record<"naive" | "fa1" | "fa2", import("tilewise/engine/cost.js").Traffic>} Ways */

const LENGTHS = [256, 512, 1024, 2048, 4096];
const MORE_LENGTHS = [8192, 16384, 32768];
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
    this.memory = h("div");
    this.element = h(
      "div",
      {},
      heading(
        "What crosses the memory",
        "Naive attention writes the N × N scores, reads them, writes their softmax and reads that. Tiled attention reads Q once, streams K and V past each tile of queries, and writes O once. One head, forward.",
      ),
      this.form.element,
      h(
        "div",
        { class: "panels loose" },
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
    this.#showTable(points);
    this.#showShare();
    this.#showMemory();
    this.context.save(paramsOf(this.specs, values));
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
          ? "Elements of the inputs' dtype; the fp32 statistics, N for FA-2, are left out, as papers do."
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
    const kept = long * 128 * HALF + statisticsBytes(long);
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
          "O has 131,072 rows of d = 128 in fp16, 32 MiB; m and l are two fp32 numbers a row, 1 MiB.",
        ),
        " are ",
        h("b", {}, formatWhole(kept)),
        ".",
      ),
    );
  }

  destroy() {}
}

/** Powers of two without digits after the point. @param {number} size */
function formatWhole(size) {
  return formatBytes(size).replace(/\.0+ /, " ");
}
