/** Online softmax: a row of scores in blocks, its running maximum and sum, and the correction. */

import { onlineSoftmax, term, trueSoftmax } from "tilewise/engine/softmax.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { shortNumber } from "tilewise/ui/format.js";
import { caption, counter, heading, legend, table } from "tilewise/ui/parts.js";
import { Player } from "tilewise/ui/player.js";

/** @typedef {import("tilewise/main.js").Context} Context */
/** @typedef {import("tilewise/engine/softmax.js").OnlineSoftmax} OnlineSoftmax */

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

/** The steps of a block: its maximum is found, the past is corrected, its terms are added. */
const STEPS = 3;

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
    this.element = h(
      "div",
      {},
      heading(
        "Softmax without seeing the whole row",
        "A softmax needs the row's maximum and sum before it can give the first probability. Online, it keeps a running maximum m and sum l. When a block brings a larger score, one multiplication by e^(old m − new m) makes everything before it right again.",
      ),
      h(
        "div",
        { class: "row" },
        h("span", { class: "small muted" }, "Try:"),
        PRESETS.map(([name, row]) => h("button", { type: "button", onclick: () => this.#preset(row) }, name)),
      ),
      this.form.element,
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
    this.truth = trueSoftmax(this.row);
    this.player.reset(this.online.states.length * STEPS, at);
  }

  /** @param {number} at */
  #show(at) {
    const { values } = this.form;
    const block = Math.max(0, Math.ceil(at / STEPS) - 1);
    const step = at === 0 ? -1 : (at - 1) % STEPS;
    const now = this.#state(block, step);
    setText(this.m.value, at === 0 ? "−∞" : text(now.rowMax));
    setText(this.factor.value, step < 1 ? "–" : text(now.correction));
    setText(this.l.value, text(now.rowSum));
    setText(this.text, this.#caption(block, step, now));
    this.#drawRow(block, step, values.block);
    this.#drawBars(now);
    this.#drawLog(at);
    this.context.save({ ...paramsOf(SPECS, values), ...(at > 0 && { step: String(at) }) });
  }

  /**
   * m, l and the correction in the middle of a block, and how many scores l holds.
   * @param {number} block @param {number} step
   */
  #state(block, step) {
    const { states } = /** @type {OnlineSoftmax} */ (this.online);
    const before = block > 0 ? states[block - 1] : { rowMax: -Infinity, rowSum: 0 };
    const size = this.form.values.block;
    if (step < 0) return { rowMax: -Infinity, oldMax: -Infinity, correction: 1, rowSum: 0, seen: 0 };
    const { rowMax, correction, rowSum } = states[block];
    const sums = [before.rowSum, before.rowSum * correction, rowSum];
    return {
      rowMax,
      oldMax: before.rowMax,
      correction,
      rowSum: sums[step],
      seen: step === 2 ? (block + 1) * size : block * size,
    };
  }

  /**
   * @param {number} block @param {number} step
   * @param {{rowMax: number, oldMax: number, correction: number, rowSum: number}} now
   */
  #caption(block, step, now) {
    if (step < 0) return "No score has been seen: the maximum is −∞ and the sum 0.";
    const first = block === 0;
    if (step === 0) {
      const rises = now.rowMax > now.oldMax;
      return `Block ${block + 1} is read. ${rises ? `Its largest score makes m = ${text(now.rowMax)}.` : `It has nothing above m = ${text(now.rowMax)}.`}`;
    }
    if (step === 1) {
      if (first) return "There is no sum to correct yet.";
      if (now.correction === 1) return "The maximum has not changed, so the correction is e^0 = 1 and the sum stays.";
      return `The old sum was taken with m = ${text(now.oldMax)}. Multiplied by e^(${text(now.oldMax)} − ${text(now.rowMax)}) = ${text(now.correction)} it is right for the new maximum.`;
    }
    return `The terms e^(score − m) of block ${block + 1} are added: l = ${text(now.rowSum)}.`;
  }

  /** @param {number} block @param {number} step @param {number} size */
  #drawRow(block, step, size) {
    const row = /** @type {number[]} */ (this.row);
    const rowMax = this.#state(block, step).rowMax;
    this.cells.setAttribute("aria-label", `Scores ${row.map(text).join(", ")} in blocks of ${size}`);
    fill(
      this.cells,
      row.map((score, at) => {
        const own = Math.floor(at / size);
        const state =
          step < 0 || own > block
            ? ""
            : own < block
              ? step === 1 && block > 0
                ? "rescaled"
                : "used"
              : step === 0
                ? "loaded"
                : step === 2
                  ? "computing"
                  : "loaded";
        const shown = step >= 0 && (own < block || (own === block && step === 2));
        return h(
          "div",
          {
            class: `score ${state} ${at % size === 0 && at > 0 ? "block-start" : ""} ${score === rowMax && step >= 0 && own <= block ? "largest" : ""}`,
          },
          h("b", {}, text(score)),
          h("small", {}, shown ? text(term(score, rowMax)) : " "),
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
        ? `The whole row has been seen: ${truth.map((p) => p.toFixed(6)).join(" ")}. Largest difference from the true softmax: ${error === 0 ? "0" : error.toExponential(1)}.`
        : `${Math.min(now.seen, row.length)} of ${row.length} scores are in l.`,
    );
  }

  /** @param {number} at */
  #drawLog(at) {
    const { states } = /** @type {OnlineSoftmax} */ (this.online);
    const done = states.slice(0, Math.floor(at / STEPS));
    const rows = done.map((state, block) => [
      `${block + 1}`,
      state.scores.map(text).join(" "),
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

/** Whole numbers as they are, others with some digits. @param {number} value */
function text(value, digits = 4) {
  if (value === -Infinity) return "−∞";
  if (Number.isInteger(value)) return String(value).replace("-", "−");
  return value !== 0 && Math.abs(value) < 5e-5 ? value.toExponential(1) : shortNumber(value, digits);
}
