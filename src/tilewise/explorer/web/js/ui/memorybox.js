/** The two memories as boxes: what fast memory holds during a step, what lies in slow memory, what has crossed. */

import { fill, h, setText } from "tilewise/ui/dom.js";
import { formatBytes, grouped, plural, shortNumber } from "tilewise/ui/format.js";
import { counter } from "tilewise/ui/parts.js";

/**
 * @typedef {import("tilewise/engine/replay.js").Replay} Replay
 * @typedef {import("tilewise/engine/timeline.js").Counters} Counters
 */

/** @type {Record<string, string>} */
const NAMES = {
  q: "Q",
  k: "K",
  v: "V",
  acc: "O so far",
  s: "S",
  p: "P",
  row_max: "m",
  row_sum: "l",
  lse: "lse",
  out: "O",
  dout: "dO",
  delta: "D",
  dk: "dK",
  dv: "dV",
  dp: "dP",
  ds: "dS",
  dq: "dQ",
  dq_sum: "dQ sum",
  a: "A",
  b: "B",
  c: "C",
  out_partial: "O part",
  lse_partial: "lse part",
};
const SHOWN_ROWS = 6;
const SHOWN_COLS = 3;

/** What a buffer or array is called in the formulas. @param {string} name */
export function symbol(name) {
  return NAMES[name] ?? name;
}

export class MemoryBox {
  /** @param {string} id @param {{rowState: boolean}} options */
  constructor(id, { rowState }) {
    this.rowState = rowState;
    /** @type {import("tilewise/engine/recorder.js").Trace | null} */
    this.shownTrace = null;
    this.chips = h("div", { class: "chips" });
    this.fastSize = h("span");
    this.slowSize = h("span");
    this.slowChips = h("div", { class: "chips" });
    this.rows = h("tbody");
    this.reads = counter("elements read", `${id}-reads`, "Elements of the inputs' dtype that came from HBM into SRAM.");
    this.writes = counter("written", `${id}-writes`, "Elements of the inputs' dtype that went from SRAM to HBM.");
    this.total = counter("in all", `${id}-total`, "Reads and writes together: the figure papers compare.");
    this.wide = counter(
      "statistics",
      `${id}-wide`,
      "Elements of m, l, lse and sums, which are kept in fp32, both ways.",
    );
    this.moved = counter(
      "bytes",
      `${id}-bytes`,
      "All of it in bytes, 2 for an element of the inputs (fp16), 4 for statistics (fp32).",
    );
    this.total.value.classList.add("big");
    this.fastBox = h(
      "div",
      { class: "box sram" },
      h("strong", {}, "SRAM (fast, small)", this.fastSize),
      this.chips,
      rowState &&
        h(
          "div",
          { class: "table-scroll", tabindex: 0, role: "region", "aria-label": "State of the rows in work" },
          h(
            "table",
            { class: "rows-table" },
            h(
              "thead",
              {},
              h(
                "tr",
                {},
                [
                  ["row", "Number of the query."],
                  ["m", "The largest score of the row so far."],
                  ["l ×", "What l is multiplied by when the maximum rises: e^(old m − new m)."],
                  ["l", "The sum of e^(score − m) so far."],
                  [
                    "O ×",
                    "What O is multiplied by: the factor of l; in FA-1 order also the old l, by which O was divided.",
                  ],
                  ["O so far", "The output of the row, as far as its keys have been seen."],
                ].map(([text, why]) => h("th", { scope: "col", "data-tip": why }, text)),
              ),
            ),
            this.rows,
          ),
        ),
    );
    this.slowBox = h("div", { class: "box hbm" }, h("strong", {}, "HBM (slow, large)", this.slowSize), this.slowChips);
    this.counters = h(
      "dl",
      { class: "counters" },
      [this.total, this.reads, this.writes, this.wide, this.moved].map((one) => one.element),
    );
    this.element = h("div", {}, this.fastBox, this.slowBox, this.counters);
  }

  /** @param {Replay} replay @param {Counters} counters  so far, over all heads */
  show(replay, counters) {
    const held = [...replay.buffers];
    const elements = held.reduce((sum, [, buffer]) => sum + buffer.matrix.rows * buffer.matrix.cols, 0);
    setText(this.fastSize, held.length ? plural(elements, "element") : "empty");
    fill(
      this.chips,
      held.map(([name, buffer]) => {
        const state = buffer.stored ? "stored" : buffer.how === "held" ? "" : buffer.how;
        const size = `${buffer.matrix.rows}×${buffer.matrix.cols}`;
        return h(
          "span",
          {
            class: `chip ${state} ${buffer.leaving ? "leaving" : ""}`,
            title: buffer.leaving ? "freed after this step" : "stays",
          },
          h("b", {}, symbol(name)),
          " ",
          h("small", {}, size),
        );
      }),
    );
    if (this.rowState) this.#showRows(replay);
    this.#showSlow(replay);
    setText(this.reads.value, grouped(counters.reads));
    setText(this.writes.value, grouped(counters.writes));
    setText(this.total.value, grouped(counters.reads + counters.writes));
    setText(this.wide.value, grouped(counters.wide));
    setText(this.moved.value, formatBytes(counters.readBytes + counters.writtenBytes));
  }

  /** @param {Replay} replay */
  #showSlow(replay) {
    const arrays = Object.entries(replay.trace.arrays);
    const total = arrays.reduce((sum, [, spec]) => sum + spec.rows * spec.cols, 0);
    setText(this.slowSize, `${plural(total, "element")} a head`);
    if (this.shownTrace === replay.trace) return;
    this.shownTrace = replay.trace;
    fill(
      this.slowChips,
      arrays.map(([name, spec]) =>
        h("span", { class: "chip" }, h("b", {}, symbol(name)), " ", h("small", {}, `${spec.rows}×${spec.cols}`)),
      ),
    );
  }

  /** @param {Replay} replay */
  #showRows(replay) {
    const rowMax = replay.buffers.get("row_max")?.matrix;
    const sums = (replay.buffers.get("row_sum") ?? replay.buffers.get("lse"))?.matrix;
    const acc = replay.buffers.get("acc")?.matrix;
    const { block_m: blockM, seqlen_q: length } = replay.trace.workload;
    const top = (replay.stop?.mBlock ?? 0) * blockM;
    const height = Math.min(blockM, length - top);
    const ended = replay.buffers.has("lse") && !replay.buffers.has("row_sum");
    const rescaled = replay.events.some((event) => event.kind === "rescale");
    const correction = rescaled ? replay.machine.correction : null;
    // A row that has seen no key before has nothing to correct.
    const factor = (/** @type {"alpha" | "out"} */ which, /** @type {number} */ row) =>
      correction === null ? "" : correction.before[row] === -Infinity ? "–" : `×${shortNumber(correction[which][row])}`;
    fill(
      this.rows,
      Array.from({ length: Math.min(SHOWN_ROWS, height) }, (_, row) =>
        h(
          "tr",
          {},
          h("th", { scope: "row" }, top + row),
          h("td", {}, rowMax ? shortNumber(rowMax.data[row]) : "–"),
          h("td", {}, factor("alpha", row)),
          h("td", {}, sums && !ended ? shortNumber(sums.data[row]) : "–"),
          h("td", {}, factor("out", row)),
          h("td", {}, acc ? vector(acc, row) : "–"),
        ),
      ),
    );
  }
}

/** The first numbers of a row. @param {{cols: number, data: Float64Array}} matrix @param {number} row */
function vector(matrix, row) {
  const shown = Math.min(SHOWN_COLS, matrix.cols);
  const numbers = Array.from({ length: shown }, (_, col) => shortNumber(matrix.data[row * matrix.cols + col], 2));
  return `${numbers.join(" ")}${matrix.cols > shown ? " …" : ""}`;
}
