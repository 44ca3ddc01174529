/** The timeline of a pipeline: who does what when, and how busy the tensor cores are. */

import { UNITS, busyShare, pipeline, timeline } from "tilewise/engine/pipeline.js";
import { PictureScene, box, words } from "tilewise/lesson/picture.js";
import { grouped } from "tilewise/ui/format.js";
import { legend } from "tilewise/ui/parts.js";

/** @typedef {import("tilewise/engine/pipeline.js").Span} Span */
/** @typedef {import("tilewise/ui/form.js").Values} Values */

/** @type {Record<string, [string, string]>} */
const LOOK = {
  load_k: ["K", "loaded"],
  load_v: ["V", "loaded"],
  scores: ["S", "computing"],
  softmax: ["P", "rescaled"],
  values: ["O", "stored"],
};

export class GanttScene extends PictureScene {
  constructor() {
    super(
      legend([
        ["loaded", "load a tile of K or V"],
        ["computing", "S = Q Kᵀ"],
        ["rescaled", "P: exponentials of the softmax"],
        ["stored", "O = O + P V"],
      ]),
    );
  }

  /** @param {Values} values */
  set({ pingpong, dtype }) {
    const half = dtype === "fp8" ? 256 : 512;
    this.pipe = pipeline({ ping_pong: pingpong, load: half, product: half });
    this.spans = timeline(this.pipe);
    this.other = timeline({ ...this.pipe, ping_pong: !pingpong });
    this.length = this.spans.length;
  }

  /** What has been told so far, and how busy the tensor cores are in the end. */
  get state() {
    const spans = /** @type {Span[]} */ (this.spans);
    const other = /** @type {Span[]} */ (this.other);
    const shown = spans.slice(0, this.at);
    const end = (/** @type {Span[]} */ all) => Math.max(0, ...all.map((span) => span.stop));
    const last = shown[shown.length - 1] ?? null;
    const beside = last
      ? shown.filter((span) => span !== last && span.stop > last.start && span.consumer !== null)
      : [];
    return {
      shown,
      last,
      beside,
      cycles: end(spans),
      otherCycles: end(other),
      share: busyShare(spans),
      otherShare: busyShare(other),
    };
  }

  description() {
    const { shown, cycles, share } = this.state;
    return `${shown.length} of ${this.length} tasks shown. All tasks take ${grouped(cycles)} cycles; the tensor cores are busy ${Math.round(100 * share)} % of the time.`;
  }

  /** @param {boolean} narrow */
  draw(narrow) {
    const { shown, last, cycles, otherCycles } = this.state;
    const width = narrow ? 400 : 700;
    const left = narrow ? 8 : 104;
    const lane = narrow ? 62 : 56;
    const right = width - 12;
    const scale = (right - left) / Math.max(cycles, otherCycles);
    const lanes = [
      ["copies", "producer", (/** @type {Span} */ span) => span.consumer === null],
      ["warpgroup 1", "consumer", (/** @type {Span} */ span) => span.consumer === 0],
      ["warpgroup 2", "consumer", (/** @type {Span} */ span) => span.consumer === 1],
      ["tensor cores", "in use", (/** @type {Span} */ span) => UNITS[span.task] === "tensor"],
    ];
    const y = (/** @type {number} */ index) => 14 + index * lane + (narrow ? 16 : 0);
    const parts = lanes.map(([name, role, belongs], index) => [
      narrow
        ? words("note", left, y(index) - 4, `${name} (${role})`)
        : [
            words("name end", left - 10, y(index) + 18, String(name)),
            words("note end", left - 10, y(index) + 34, String(role)),
          ],
      box("lane", left, y(index), right - left, lane - 22, { rx: 3 }),
      shown.filter(/** @type {any} */ (belongs)).map((span) => {
        const [name_, kind] = LOOK[span.task];
        const [x, wide] = [left + span.start * scale, (span.stop - span.start) * scale];
        const label = index === 3 ? `${(span.consumer ?? 0) + 1}` : `${name_}${sub(span.tile)}`;
        return [
          box(`span ${kind} ${span === last ? "newest" : ""}`, x + 0.5, y(index), wide - 1, lane - 22, {
            rx: 2,
            "data-tip": `${name_}${sub(span.tile)}: cycles ${grouped(span.start)} to ${grouped(span.stop)}`,
          }),
          wide > 12 && words(`value ${wide < 30 ? "tight" : ""}`, x + wide / 2, y(index) + (lane - 22) / 2 + 4, label),
        ];
      }),
    ]);
    const bottom = y(3) + lane;
    const ticks = [0, 4096, 8192, 12288].filter((tick) => tick * scale + left < right - 20);
    return {
      width,
      height: bottom + 14,
      parts: [
        ...parts,
        ticks.map((tick) => words("note mid", left + tick * scale, bottom - 4, grouped(tick))),
        words("note end", right, bottom + 10, "cycles"),
      ],
    };
  }
}

/** A number as a subscript. @param {number} value */
function sub(value) {
  return String.fromCharCode(0x2080 + value);
}
