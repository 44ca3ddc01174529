/** A row of scores, its weights as known now and as they are in truth, and with values the running output. */

import { moments, term, trueSoftmax } from "tilewise/engine/softmax.js";
import { PictureScene, box, words } from "tilewise/lesson/picture.js";
import { svg } from "tilewise/ui/dom.js";
import { text } from "tilewise/views/softmax.js";

/** @typedef {import("tilewise/engine/softmax.js").Moment} Moment */
/** @typedef {import("tilewise/ui/form.js").Values} Values */

export const BLOCK = 3;

/** Why the row cannot be taken block by block: three passes, and then an attempt that goes wrong. */
export const RESISTANCE = /** @type {const} */ (["row", "maximum", "sum", "weights", "first", "second"]);

export class SoftmaxScene extends PictureScene {
  /** @param {"resists" | "online"} mode @param {number[][]} [values] */
  constructor(mode, values = []) {
    super();
    this.mode = mode;
    this.values = values;
  }

  /** @param {Values} values */
  set({ row }) {
    this.row = String(row).split(",").map(Number);
    this.truth = trueSoftmax(this.row);
    this.moments = moments(this.row, BLOCK, this.values);
    this.length = this.mode === "online" ? this.moments.length - 1 : RESISTANCE.length - 1;
  }

  /** The state that everything shown and said is read from. */
  get state() {
    const row = /** @type {number[]} */ (this.row);
    const truth = /** @type {number[]} */ (this.truth);
    if (this.mode === "online") {
      const now = /** @type {Moment[]} */ (this.moments)[this.at];
      const known = row.map((score, at) =>
        at < now.seen && now.rowSum > 0 ? term(score, now.rowMax) / now.rowSum : 0,
      );
      return { row, truth, known, now, kind: now.kind };
    }
    const kind = RESISTANCE[this.at];
    const rowMax = Math.max(...row);
    const rowSum = row.reduce((sum, score) => sum + term(score, rowMax), 0);
    const first = trueSoftmax(row.slice(0, BLOCK));
    const known = row.map((_, at) =>
      kind === "weights" ? truth[at] : (kind === "first" || kind === "second") && at < BLOCK ? first[at] : 0,
    );
    return { row, truth, known, kind, rowMax, rowSum, first };
  }

  description() {
    const { row, known, now } = this.state;
    const state = now
      ? ` m = ${text(now.rowMax)}, l = ${text(now.rowSum)}${now.out.length ? `, O = ${now.out.map((one) => text(one)).join(", ")}` : ""}.`
      : "";
    return `Scores ${row.map((score) => text(score)).join(", ")}. Weights known now: ${known.map((p) => p.toFixed(3)).join(", ")}.${state}`;
  }

  /** @param {boolean} narrow */
  draw(narrow) {
    const { row, truth, known, now, kind } = this.state;
    const width = narrow ? 400 : 700;
    const cell = narrow ? 54 : 68;
    const left = 10;
    const gap = narrow ? 12 : 20;
    const x = (/** @type {number} */ at) => left + at * cell + (at >= BLOCK ? gap : 0);
    const top = 34;
    const valueRow = this.values.length > 0 ? 46 : 0;
    const barsTop = top + 52 + valueRow + 24;
    const tall = narrow ? 110 : 130;
    const seen = now ? now.seen : 0;
    const mark = (/** @type {number} */ at) => {
      const own = Math.floor(at / BLOCK);
      if (now) {
        if (now.kind === "correct" && at < seen) return "rescaled";
        if (now.kind === "divide") return "stored";
        if (now.kind !== "start" && own === now.block) return at < seen ? "computing" : "loaded";
        return at < seen ? "used" : "";
      }
      if (kind === "first") return at < BLOCK ? "loaded" : "absent";
      if (kind === "second") return at < BLOCK ? "bad" : "loaded";
      return kind === "row" ? "" : "loaded";
    };
    const parts = [
      words("note", left, 20, "scores s of one row"),
      row.map((score, at) => [
        box(`cell ${mark(at)}`, x(at), top, cell - 4, 40, { rx: 6 }),
        words("value large", x(at) + cell / 2 - 2, top + 26, text(score)),
        valueRow > 0 && words("value", x(at) + cell / 2 - 2, top + 78, `(${this.values[at].join(", ")})`),
        words(
          "note mid",
          x(at) + cell / 2 - 2,
          barsTop + tall + 16,
          known[at] > 0 ? known[at].toFixed(narrow ? 2 : 4) : "–",
        ),
        box("bar-fill rescaled", x(at) + cell / 2 - 18, barsTop + tall * (1 - known[at]), 15, tall * known[at]),
        box("bar-fill stored", x(at) + cell / 2, barsTop + tall * (1 - truth[at]), 15, tall * truth[at]),
      ]),
      valueRow > 0 && words("note", left, top + 58, "the value v of each key, two numbers"),
      svg("path", { class: "axis-line", d: `M${left} ${barsTop + tall}H${x(row.length - 1) + cell}` }),
      words("note", left, barsTop - 8, "weights: purple as known now, green in truth"),
    ];
    const panelTop = narrow ? barsTop + tall + 34 : 20;
    const panelLeft = narrow ? 10 : x(row.length - 1) + cell + 18;
    const panel = now ? this.#panel(now, panelLeft, panelTop, width - panelLeft - 8) : [];
    return { width, height: barsTop + tall + 28 + (narrow && now ? 150 : 0), parts: [...parts, panel] };
  }

  /** m, l and O. @param {Moment} now @param {number} x @param {number} y @param {number} width */
  #panel(now, x, y, width) {
    const rows = [
      ["m", text(now.rowMax), now.kind === "correct"],
      ["l", text(now.rowSum), now.kind === "correct"],
      ...(now.out.length ? [["O", `(${now.out.map((one) => text(one, 2)).join(", ")})`, now.kind === "correct"]] : []),
    ];
    return rows.map(([name, value, touched], at) => [
      box(
        `cell ${touched ? "rescaled" : now.kind === "add" ? "computing" : now.kind === "divide" ? "stored" : ""}`,
        x,
        y + at * 48,
        width,
        42,
        { rx: 6 },
      ),
      words("name start", x + 10, y + at * 48 + 26, String(name)),
      words("value large end", x + width - 10, y + at * 48 + 27, String(value)),
    ]);
  }
}
