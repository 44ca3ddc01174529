/** Tiled matmul: the same product element by element and in tiles, and how often each operand is loaded. */

import { matmulNaive, matmulTiled } from "tilewise/engine/matmul.js";
import { someDigits } from "tilewise/engine/numbers.js";
import { workload } from "tilewise/engine/recorder.js";
import { Replay } from "tilewise/engine/replay.js";
import { countersAt } from "tilewise/engine/timeline.js";
import { finished, largestDifference, slow } from "tilewise/engine/check.js";
import { CodeBox } from "tilewise/ui/code.js";
import { h, setText } from "tilewise/ui/dom.js";
import { Figure, cellText, label } from "tilewise/ui/figure.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { difference, grouped, plural } from "tilewise/ui/format.js";
import { caption, counter, folded, heading, legend } from "tilewise/ui/parts.js";
import { Player } from "tilewise/ui/player.js";
import { CODE } from "tilewise/views/pseudocode.js";

/** @typedef {import("tilewise/main.js").Context} Context */
/** @typedef {import("tilewise/engine/machine.js").Matrix} Matrix */

/** @type {import("tilewise/ui/form.js").Spec[]} */
const SPECS = [
  { key: "n", label: "Matrix n × n", type: "number", value: 4, min: 1, max: 16 },
  { key: "t", label: "Tile t × t", type: "number", value: 2, min: 1, max: 16 },
];

/** @param {Context} context @returns {import("tilewise/main.js").View} */
export function createMatmulView(context) {
  return new MatmulView(context);
}

class MatmulView {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.form = new Form(SPECS, valuesFrom(SPECS, context.params), () => this.#rebuild(0));
    this.panels = [
      this.#panel("naive", "Element by element", "a row of A and a column of B for each element of C", matmulNaive),
      this.#panel("tiled", "In tiles", "a tile of A and one of B serve a whole tile of C", matmulTiled),
    ];
    this.player = new Player({ length: 1, at: 0, onStep: (at) => this.#show(at) });
    this.verdict = h("p", { class: "message", "data-verdict": "" });
    this.check = h("p", { class: "result", "data-check": "" });
    this.sizes = folded("Sizes", [this.form.element]);
    this.element = h(
      "div",
      { class: "bench" },
      heading(
        "Why tiles: one load, many uses",
        "Multiplying matrices element by element loads every row of A and every column of B again and again. A tile in fast memory is used t times for each time it is loaded, so the loads fall by a factor of t.",
      ),
      this.sizes.element,
      this.player.element,
      h(
        "div",
        { class: "panels" },
        this.panels.map((panel) => panel.element),
      ),
      this.verdict,
      this.check,
      legend([
        ["loaded", "loaded in this step"],
        ["computing", "being summed up in SRAM"],
        ["stored", "written"],
      ]),
    );
    this.#rebuild(Number(context.params.step) || 0);
  }

  /** @param {string} id @param {string} title @param {string} what @param {typeof matmulNaive} schedule */
  #panel(id, title, what, schedule) {
    const steps = counter("steps", `matmul-${id}-steps`, "Times something is loaded and multiplied.");
    const loads = counter("element loads", `matmul-${id}-loads`, "Elements of A and B that came from slow memory.");
    const text = caption();
    const panel = {
      id,
      title,
      schedule,
      steps,
      loads,
      text,
      code: new CodeBox(CODE[id === "naive" ? "matmul_naive" : "matmul"].lines),
      replay: /** @type {Replay | null} */ (null),
      figure: /** @type {Figure | null} */ (null),
      element: h("section"),
    };
    panel.figure = new Figure(
      `${title}: matrices A, B and C`,
      () => 330,
      (context, width, colours) => this.#draw(panel, context, width, colours),
    );
    panel.element = h(
      "section",
      { class: "panel", "aria-label": title },
      h("h3", {}, title, h("small", {}, what)),
      panel.figure.element,
      text,
      h("dl", { class: "counters" }, steps.element, loads.element),
      panel.code.element,
    );
    return panel;
  }

  /** @param {number} at */
  #rebuild(at) {
    const { n, t } = this.form.values;
    const tile = Math.min(n, t);
    const work = workload({
      seqlen_q: n,
      seqlen_k: n,
      head_dim: n,
      head_dim_v: n,
      block_m: tile,
      block_n: tile,
      block_k: tile,
    });
    const inputs = { a: someDigits(n, n, 1), b: someDigits(n, n, 2) };
    for (const panel of this.panels) panel.replay = new Replay(panel.schedule(work), inputs);
    const [naive, tiled] = this.panels.map((panel) => countersAt(/** @type {Replay} */ (panel.replay).trace));
    const [many, few] = this.panels.map((panel) => panel.replay?.stops.length ?? 0);
    setText(
      this.verdict,
      `In the end: naive ${plural(many, "step")} and ${plural(naive.reads, "element load")}, tiled ${plural(few, "step")} and ${grouped(tiled.reads)}: ${(naive.reads / tiled.reads).toFixed(1)}× fewer. Attention does the same with Q, K and V.`,
    );
    const [one, other] = this.panels.map((panel) => slow(finished(panel.schedule(work), inputs), "c"));
    setText(
      this.check,
      `Same result as element by element: largest difference ${difference(largestDifference(one, other))}.`,
    );
    this.sizes.describe(`${n} × ${n} in tiles of ${tile} × ${tile}`);
    this.player.reset(many, at);
  }

  /** @param {number} at */
  #show(at) {
    for (const panel of this.panels) {
      const replay = /** @type {Replay} */ (panel.replay);
      replay.seek(Math.min(at, replay.stops.length));
      setText(panel.steps.value, grouped(replay.at));
      setText(panel.loads.value, grouped(replay.counters.reads));
      setText(
        panel.text,
        at > replay.stops.length ? `Done after ${plural(replay.stops.length, "step")}.` : sentence(panel.id, replay),
      );
      panel.figure?.redraw();
      panel.figure?.describe(
        `${panel.title}: ${panel.text.textContent} ${plural(replay.counters.reads, "element load")} so far.`,
      );
      panel.code.light(CODE[replay.trace.algorithm].active(replay));
    }
    this.context.save({ ...paramsOf(SPECS, this.form.values), ...(at > 0 && { step: String(at) }) });
  }

  /**
   * @param {{replay: Replay | null}} panel @param {CanvasRenderingContext2D} context @param {number} width
   * @param {Record<string, string>} colours
   */
  #draw(panel, context, width, colours) {
    const { replay } = panel;
    if (replay === null) return;
    const { n } = this.form.values;
    const room = Math.min(width - 30, 310);
    const cell = (room - 24) / (2 * n);
    const [x, y] = [(width - room) / 2, 8];
    const places = { b: [x + n * cell + 24, y], a: [x, y + n * cell + 24], c: [x + n * cell + 24, y + n * cell + 24] };
    const c = /** @type {Matrix} */ (replay.machine.slow.get("c"));
    for (const name of /** @type {const} */ (["a", "b", "c"])) {
      const matrix = name === "c" ? withBuffer(c, replay) : replay.inputs[name];
      drawMatrix(context, colours, matrix, places[name][0], places[name][1], cell, (row, col) =>
        stateOf(replay, name, row, col),
      );
      label(context, name.toUpperCase(), places[name][0] - 11, places[name][1] + (n * cell) / 2, colours.ink);
    }
    label(context, "A · B = C", x + (n * cell) / 2, y + (n * cell) / 2, colours.muted);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    return this.player.onKey(event);
  }

  destroy() {
    this.player.stop();
    this.panels.forEach((panel) => panel.figure?.destroy());
  }
}

/** @param {string} id @param {Replay} replay */
function sentence(id, replay) {
  const { stop } = replay;
  if (stop === null) return "Nothing is loaded yet.";
  const size = replay.trace.workload.head_dim;
  if (id === "naive")
    return `C[${stop.mBlock}][${stop.nBlock}]: row ${stop.mBlock} of A and column ${stop.nBlock} of B are loaded, ${2 * size} elements for one result.`;
  const loaded = replay.events.filter((event) => event.kind === "load").reduce((sum, event) => sum + event.elements, 0);
  const whole = replay.events.some((event) => event.kind === "store");
  return `Tile (${stop.mBlock}, ${stop.nBlock}) of C: tile ${stop.part} of A's row and of B's column are loaded, ${loaded} elements, and multiplied.${whole ? " The tile of C is whole and written." : ""}`;
}

/**
 * C as it is: written numbers, and those being summed up.
 * @param {Matrix} c @param {Replay} replay @returns {Matrix}
 */
function withBuffer(c, replay) {
  const data = c.data.slice();
  const buffer = replay.buffers.get("c");
  const work = replay.trace.workload;
  const [height, width] = blockOf(replay);
  if (buffer && replay.stop) {
    for (let row = 0; row < buffer.matrix.rows; row++) {
      for (let col = 0; col < buffer.matrix.cols; col++) {
        const at = ((replay.stop.mBlock ?? 0) * height + row) * work.seqlen_k + (replay.stop.nBlock ?? 0) * width + col;
        data[at] = buffer.matrix.data[row * buffer.matrix.cols + col];
      }
    }
  }
  return { ...c, data };
}

/** @param {Replay} replay @returns {[number, number]} */
function blockOf(replay) {
  const work = replay.trace.workload;
  return replay.trace.algorithm === "matmul_naive" ? [1, 1] : [work.block_m, work.block_n];
}

/** @param {Replay} replay @param {"a" | "b" | "c"} name @param {number} row @param {number} col */
function stateOf(replay, name, row, col) {
  const within = (/** @type {any} */ span, /** @type {number} */ index) => span[0] <= index && index < span[1];
  if (name !== "c") {
    const touched = replay.events.some(
      (event) => event.kind === "load" && event.array === name && within(event.rows, row) && within(event.cols, col),
    );
    return touched ? "loaded" : "";
  }
  const [height, width] = blockOf(replay);
  const current =
    replay.stop && replay.stop.mBlock === Math.floor(row / height) && replay.stop.nBlock === Math.floor(col / width);
  const written =
    replay.machine !== undefined &&
    !Number.isNaN(replay.machine.slow.get("c")?.data[row * replay.trace.workload.seqlen_k + col]);
  if (current) return replay.events.some((event) => event.kind === "store") ? "stored" : "computing";
  return written ? "done" : "";
}

/**
 * @param {CanvasRenderingContext2D} context @param {Record<string, string>} colours @param {Matrix} matrix
 * @param {number} x @param {number} y @param {number} cell @param {(row: number, col: number) => string} state
 */
function drawMatrix(context, colours, matrix, x, y, cell, state) {
  for (let row = 0; row < matrix.rows; row++) {
    for (let col = 0; col < matrix.cols; col++) {
      const how = state(row, col);
      const [left, top] = [x + col * cell, y + row * cell];
      context.fillStyle = how === "done" ? colours.sunken : how ? colours[`${how}-soft`] : colours.cell;
      context.fillRect(left, top, cell, cell);
      context.strokeStyle = how && how !== "done" ? colours[how] : colours.grid;
      context.lineWidth = how && how !== "done" ? 1.75 : 1;
      context.strokeRect(left + 0.5, top + 0.5, cell - 1, cell - 1);
      const value = matrix.data[row * matrix.cols + col];
      if (!Number.isNaN(value))
        cellText(context, String(value), left + cell / 2, top + cell / 2, cell, colours.ink, cell > 26 ? 14 : 10);
    }
  }
}
