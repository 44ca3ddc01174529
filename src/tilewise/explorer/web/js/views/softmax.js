/** Online softmax: a row of scores in blocks, its running maximum and sum, and the correction. */

import { moments, onlineSoftmax, term, trueSoftmax } from "tilewise/engine/softmax.js";
import { CodeBox } from "tilewise/ui/code.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { difference, shortNumber } from "tilewise/ui/format.js";
import { caption, counter, folded, heading, legend, table } from "tilewise/ui/parts.js";
import { Player } from "tilewise/ui/player.js";

/** @typedef {import("tilewise/main.js").Context} Context */
/** @typedef {import("tilewise/engine/softmax.js").OnlineSoftmax} OnlineSoftmax */
/** @typedef {import("tilewise/engine/softmax.js").Moment} Moment */

const MOST_SCORES = 24;

/** Numbers between commas, spaces or bars; -inf is a masked score. @param {string} text @returns {number[]} */
export function parseRow(text) {
  const words = text.split(/[\s,|;]+/).filter((word) => word !== "");
  const row = words.map((word) => (/^[-−](inf|∞)$/i.test(word) ? -Infinity : Number(word.replace("−", "-"))));
  const wrong = words.find(
    (_, at) =>
      Number.isNaN(row[at]) || row[at] === Infinity || row[at] > 1e6 || (row[at] < -1e6 && row[at] !== -Infinity),
  );
  if (wrong !== undefined) throw new Error(`numbers up to a million, or -inf; "${wrong}" is none`);
  if (row.length < 1 || row.length > MOST_SCORES) throw new Error(`1 to ${MOST_SCORES} numbers, got ${row.length}`);
  return row;
}

/** @type {import("tilewise/ui/form.js").Spec[]} */
const SPECS = [
  { key: "row", label: "Scores of one row", type: "text", value: "2, 8, 1, 9, 3, 7", parse: parseRow },
  { key: "block", label: "Block", type: "number", value: 3, min: 1, max: MOST_SCORES },
];

const PRESETS = [
  ["2 8 1 | 9 3 7", "2, 8, 1, 9, 3, 7"],
  ["1 2 3 | 6 2 1", "1, 2, 3, 6, 2, 1"],
  ["maximum first", "9, 1, 2, 3, 4, 5"],
  ["large scores", "100, 200, 300, 400, 350, 50"],
];

/** The online softmax in pseudocode, and the lines of each kind of moment. */
export const ROW_CODE = [
  "m = −∞, l = 0",
  "for each block of scores s:",
  "  m′ = max(m, largest s)",
  "  l = l · e^(m − m′);  m = m′",
  "  l = l + sum of e^(s − m)",
  "pᵢ = e^(sᵢ − m) / l",
];
const LINES = /** @type {Record<string, number[]>} */ ({ start: [0], read: [2], correct: [3], add: [4], divide: [5] });

/** @param {Context} context @returns {import("tilewise/main.js").View} */
export function createSoftmaxView(context) {
  return new SoftmaxView(context);
}

class SoftmaxView {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.form = new Form(SPECS, valuesFrom(SPECS, context.params), () => this.#rebuild(0));
    this.cells = h("div", { class: "score-row", role: "img" });
    this.text = caption();
    this.m = counter("maximum m", "softmax-m", "The largest score seen so far.");
    this.factor = counter(
      "correction",
      "softmax-correction",
      "e^(old m − new m): what everything summed so far is multiplied by when the maximum rises.",
    );
    this.l = counter("sum l", "softmax-l", "The sum of e^(score − m) over all scores seen so far.");
    this.bars = h("div", { class: "bars", role: "img" });
    this.log = h("div");
    this.check = h("p", { class: "small muted", "data-check": "" });
    this.player = new Player({ length: 1, at: 0, onStep: (at) => this.#show(at) });
    this.code = new CodeBox(ROW_CODE);
    this.sizes = folded("Scores", [
      h(
        "div",
        { class: "row" },
        h("span", { class: "small muted" }, "Try:"),
        PRESETS.map(([name, row]) => h("button", { type: "button", onclick: () => this.#preset(row) }, name)),
      ),
      this.form.element,
    ]);
    this.element = h(
      "div",
      { class: "bench" },
      heading(
        "Softmax without seeing the whole row",
        "A softmax needs the row's maximum and sum before it can give the first probability. Online, it keeps a running maximum m and sum l. When a block brings a larger score, one multiplication by e^(old m − new m) makes everything before it right again.",
      ),
      this.sizes.element,
      this.player.element,
      h(
        "div",
        { class: "panels" },
        h(
          "section",
          { class: "panel", "aria-label": "The row and its state" },
          h("h3", {}, "The row", h("small", {}, "in blocks")),
          this.text,
          this.cells,
          h("dl", { class: "counters softmax-state" }, this.m.element, this.factor.element, this.l.element),
          this.code.element,
          this.log,
        ),
        h(
          "section",
          { class: "panel", "aria-label": "Probabilities" },
          h(
            "h3",
            {},
            "Probabilities",
            h("small", {}, "e^(score − m) / l with what is known now, against the true softmax"),
          ),
          this.bars,
          legend([
            ["rescaled", "as known now"],
            ["stored", "true softmax"],
          ]),
          this.check,
        ),
      ),
    );
    this.#rebuild(Number(context.params.step) || 0);
  }

  /** @param {string} row */
  #preset(row) {
    this.form.set({ row, block: 3 });
    this.#rebuild(0);
  }

  /** @param {number} at */
  #rebuild(at) {
    const { values } = this.form;
    this.row = parseRow(values.row);
    this.online = onlineSoftmax(this.row, values.block);
    this.moments = moments(this.row, values.block);
    this.truth = trueSoftmax(this.row);
    this.sizes.describe(`${values.row} in blocks of ${values.block}`);
    this.player.reset(this.moments.length - 1, at);
  }

  /** @param {number} at */
  #show(at) {
    const { values } = this.form;
    const now = /** @type {Moment[]} */ (this.moments)[at];
    setText(this.m.value, text(now.rowMax));
    setText(this.factor.value, now.kind === "correct" ? text(now.correction) : "–");
    setText(this.l.value, text(now.rowSum));
    const last = at === this.player.length;
    setText(this.text, sentence(now));
    this.code.light([...LINES[now.kind], ...(last ? [5] : [])]);
    this.#drawRow(now, values.block);
    this.#drawBars(now);
    this.#drawLog(now);
    this.context.save({ ...paramsOf(SPECS, values), ...(at > 0 && { step: String(at) }) });
  }

  /** @param {Moment} now @param {number} size */
  #drawRow(now, size) {
    const row = /** @type {number[]} */ (this.row);
    this.cells.setAttribute(
      "aria-label",
      `Scores ${row.map((score) => text(score)).join(", ")} in blocks of ${size}; ${now.seen} of them are in m and l.`,
    );
    fill(
      this.cells,
      row.map((score, at) => {
        const own = Math.floor(at / size);
        const seen = at < now.seen;
        const here = now.kind !== "start" && own === now.block;
        const state =
          now.kind === "correct" && seen ? "rescaled" : here ? (seen ? "computing" : "loaded") : seen ? "used" : "";
        return h(
          "div",
          {
            class: `score ${state} ${at % size === 0 && at > 0 ? "block-start" : ""} ${seen && score === now.rowMax ? "largest" : ""}`,
          },
          h("b", {}, text(score)),
          h("small", {}, seen ? text(term(score, now.rowMax)) : " "),
        );
      }),
    );
  }

  /** @param {{rowMax: number, rowSum: number, seen: number}} now */
  #drawBars(now) {
    const row = /** @type {number[]} */ (this.row);
    const truth = /** @type {number[]} */ (this.truth);
    const known = row.map((score, at) => (at < now.seen && now.rowSum > 0 ? term(score, now.rowMax) / now.rowSum : 0));
    this.bars.setAttribute("aria-label", `Probabilities as known now: ${known.map((p) => p.toFixed(6)).join(", ")}`);
    fill(
      this.bars,
      row.map((score, at) => {
        const [now_, true_] = [h("span", { class: "bar now" }), h("span", { class: "bar true" })];
        now_.style.height = `${100 * known[at]}%`;
        true_.style.height = `${100 * truth[at]}%`;
        return h(
          "div",
          { class: "bar-cell" },
          h("div", { class: "bar-pair" }, now_, true_),
          h("small", {}, text(score)),
        );
      }),
    );
    const done = now.seen >= row.length;
    const error = Math.max(...known.map((value, at) => Math.abs(value - truth[at])));
    setText(
      this.check,
      done
        ? `The whole row has been seen: ${known.map((p) => p.toFixed(6)).join(" ")}. Same result as the softmax of the whole row: largest difference ${difference(error)}.`
        : `${Math.min(now.seen, row.length)} of ${row.length} scores are in l.`,
    );
  }

  /** @param {Moment} now */
  #drawLog(now) {
    const { states } = /** @type {OnlineSoftmax} */ (this.online);
    const done = states.slice(0, Math.ceil(now.seen / this.form.values.block));
    const rows = done.map((state, block) => [
      `${block + 1}`,
      state.scores.map((score) => text(score)).join(" "),
      text(state.rowMax),
      block === 0 ? "–" : text(state.correction, 6),
      text(state.rowSum, 6),
    ]);
    fill(this.log, table(["block", "scores", "m", "correction", "l"], rows, "After each block"));
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    return this.player.onKey(event);
  }

  destroy() {
    this.player.stop();
  }
}

/** What a moment is, with the numbers of that moment. @param {Moment} now */
export function sentence(now) {
  if (now.kind === "start") return "No score has been seen: the maximum m is −∞ and the sum l is 0.";
  const name = `block ${now.block + 1}`;
  if (now.kind === "read") {
    const rises = now.blockMax > now.oldMax;
    return `Block ${now.block + 1} is read. Its largest score is ${text(now.blockMax)}${now.block === 0 ? "" : rises ? `, above m = ${text(now.oldMax)}: what was summed up so far has to be corrected` : `, not above m = ${text(now.oldMax)}: nothing has to be corrected`}.`;
  }
  if (now.kind === "correct")
    return `The sum was taken with m = ${text(now.oldMax)}. Multiplied by e^(${text(now.oldMax)} − ${text(now.rowMax)}) = ${text(now.correction)} it is right for the new maximum: m = ${text(now.rowMax)}, l = ${text(now.rowSum)}.`;
  return now.block === 0
    ? `Its maximum becomes m = ${text(now.rowMax)}, and the terms e^(score − m) of ${name} sum to l = ${text(now.rowSum)}.`
    : `The terms e^(score − m) of ${name}, ${text(now.added)} in all, are added: l = ${text(now.rowSum)}.`;
}

/** Whole numbers as they are, others with some digits. @param {number} value */
export function text(value, digits = 4) {
  if (value === -Infinity) return "−∞";
  if (Number.isInteger(value)) return String(value).replace("-", "−");
  return value !== 0 && Math.abs(value) < 5e-5 ? value.toExponential(1) : shortNumber(value, digits);
}
