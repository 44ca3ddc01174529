/** Backward: which tiles are recomputed, what is kept between the passes, and what it costs. */

import { fa2, naive } from "tilewise/engine/attention.js";
import { backward, naiveBackward } from "tilewise/engine/backward.js";
import { finished, headInputs, largestDifference, slow } from "tilewise/engine/check.js";
import { someNumbers } from "tilewise/engine/numbers.js";
import { workload } from "tilewise/engine/recorder.js";
import { Replay } from "tilewise/engine/replay.js";
import { countersAt } from "tilewise/engine/timeline.js";
import { CodeBox } from "tilewise/ui/code.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { difference, formatBytes, grouped, plural } from "tilewise/ui/format.js";
import { MemoryBox } from "tilewise/ui/memorybox.js";
import { caption, folded, heading, legend, table } from "tilewise/ui/parts.js";
import { Player } from "tilewise/ui/player.js";
import { TileFigure } from "tilewise/ui/tilefigure.js";
import { backwardCaption } from "tilewise/views/captions.js";
import { CODE } from "tilewise/views/pseudocode.js";
import { MOST_TILES, sidesOf } from "tilewise/views/tiles.js";

/** @typedef {import("tilewise/main.js").Context} Context */
/** @typedef {import("tilewise/engine/recorder.js").Workload} Workload */

/** @type {import("tilewise/ui/form.js").Spec[]} */
const SPECS = [
  { key: "n", label: "Tokens N", type: "number", value: 16, min: 1, max: 64 },
  { key: "bm", label: "Query block", type: "number", value: 4, min: 1, max: 64 },
  { key: "bn", label: "Key block", type: "number", value: 4, min: 1, max: 64 },
  { key: "d", label: "Head dim d", type: "number", value: 2, min: 1, max: 64 },
  {
    key: "mask",
    label: "Mask",
    type: "select",
    value: "full",
    options: [
      ["full", "none (full)"],
      ["causal", "causal"],
      ["window", "causal window"],
    ],
  },
  { key: "w", label: "Window", type: "number", value: 2, min: 0, max: 64, when: (values) => values.mask === "window" },
];

const PHASES = /** @type {const} */ ({ recompute: "computing", values: "rescaled", gradients: "stored" });
const [HALF, WIDE] = [2, 4];

/** @param {Context} context @returns {import("tilewise/main.js").View} */
export function createBackwardView(context) {
  return new BackwardView(context);
}

class BackwardView {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.form = new Form(SPECS, valuesFrom(SPECS, context.params), () => this.#rebuild(0));
    this.figure = new TileFigure(
      "Backward: tiles of the score matrix with Q, dO, K, V and the gradients",
      [
        { side: "left", name: "dO", array: "dout", buffer: "dout" },
        { side: "left", name: "Q", array: "q", buffer: "q" },
        { side: "top", name: "K", array: "k", buffer: "k" },
        { side: "top", name: "V", array: "v", buffer: "v" },
        { side: "right", name: "dQ", array: "dq_sum", buffer: "dq", result: true },
        { side: "bottom", name: "dK", array: "dk", buffer: "dk", result: true },
        { side: "bottom", name: "dV", array: "dv", buffer: "dv", result: true },
      ],
      PHASES,
    );
    this.box = new MemoryBox("backward", { rowState: false });
    this.text = caption();
    this.kept = h("div");
    this.cost = h("div");
    this.verdict = h("p", { class: "message", "data-verdict": "" });
    this.check = h("p", { class: "result", "data-gradcheck": "" });
    this.code = new CodeBox(CODE.backward.lines);
    this.problem = h("p", { class: "message bad", role: "alert", hidden: true });
    this.sizes = folded("Sizes", [this.form.element]);
    this.player = new Player({ length: 1, at: 0, onStep: (at) => this.#show(at) });
    this.element = h(
      "div",
      { class: "bench" },
      heading(
        "Backward: recompute instead of remember",
        "The gradients need the probabilities P again. Keeping them takes N² memory. Tiled attention keeps one number a row, lse = m + ln l, and recomputes each tile as P = e^(S − lse): one matrix product more for every tile, and no N × N matrix in memory.",
      ),
      this.sizes.element,
      this.problem,
      this.player.element,
      h(
        "div",
        { class: "panels loose" },
        h(
          "section",
          { class: "panel", "aria-label": "Tiles of the backward" },
          h("h3", {}, "K, V outside", h("small", {}, "dK and dV stay in SRAM while the queries stream past")),
          this.figure.element,
          this.text,
          this.box.element,
          this.code.element,
        ),
        h(
          "div",
          { class: "stack" },
          h(
            "section",
            { class: "panel", "aria-label": "What is kept" },
            h("h3", {}, "Kept from forward to backward"),
            this.kept,
          ),
          h(
            "section",
            { class: "panel", "aria-label": "Cost" },
            h("h3", {}, "Forward and backward together", h("small", {}, "one head, elements of the inputs' dtype")),
            this.cost,
            this.verdict,
            this.check,
          ),
        ),
      ),
      legend([
        ["loaded", "in SRAM"],
        ["computing", "S and P recomputed"],
        ["rescaled", "dV += PᵀdO, dP = dO Vᵀ"],
        ["stored", "dS, dK, dQ"],
        ["skipped", "skipped tile"],
      ]),
    );
    this.#rebuild(Number(context.params.step) || 0);
  }

  /** @param {number} at */
  #rebuild(at) {
    const { values } = this.form;
    const tiles = Math.ceil(values.n / values.bm) * Math.ceil(values.n / values.bn);
    this.problem.hidden = tiles <= MOST_TILES;
    setText(this.problem, `${grouped(tiles)} tiles are more than the ${grouped(MOST_TILES)} that can be told apart.`);
    this.sizes.describe(`N = ${values.n}, blocks ${values.bm} × ${values.bn}, d = ${values.d}, mask: ${values.mask}`);
    if (tiles > MOST_TILES) {
      this.sizes.element.open = true;
      return;
    }
    const work = workload({
      seqlen_q: values.n,
      seqlen_k: values.n,
      head_dim: values.d,
      head_dim_v: values.d,
      block_m: values.bm,
      block_n: values.bn,
      scale: 1 / Math.sqrt(values.d),
      ...sidesOf(values),
    });
    const given = headInputs(work);
    const dout = someNumbers(values.n, values.d, 4);
    const forward = finished(fa2(work), given);
    this.replay = new Replay(backward(work), { ...given, dout, out: slow(forward, "out"), lse: slow(forward, "lse") });
    this.#showKept(work);
    this.#showCost(work);
    this.#showCheck(work, { ...given, dout });
    this.player.reset(this.replay.stops.length, at);
  }

  /** @param {Workload} work */
  #showKept(work) {
    const [n, d] = [work.seqlen_q, work.head_dim];
    const bytes = (/** @type {number} */ tokens, /** @type {number} */ dim) => ({
      naive: (3 * tokens * dim + tokens * tokens) * HALF,
      tiled: 4 * tokens * dim * HALF + tokens * WIDE,
    });
    const row = (/** @type {string} */ name, /** @type {number} */ tokens, /** @type {number} */ dim) => {
      const { naive, tiled } = bytes(tokens, dim);
      return [name, formatBytes(naive), formatBytes(tiled), `${(naive / tiled).toFixed(1)}×`];
    };
    fill(
      this.kept,
      h("p", { class: "small" }, h("b", {}, "Naive: "), `Q, K, V and P, ${plural(3 * n * d + n * n, "element")} here.`),
      h(
        "p",
        { class: "small" },
        h("b", {}, "Tiled: "),
        `Q, K, V, O and lse, ${plural(4 * n * d + n, "element")} here.`,
      ),
      keptBars(bytes),
      table(
        ["in fp16, lse in fp32", "naive", "tiled", "ratio"],
        [
          row(`here, N = ${n}, d = ${d}`, n, d),
          row("N = 4,096, d = 128", 4096, 128),
          row("N = 32,768, d = 128", 32768, 128),
        ],
        "Memory kept between the passes",
      ),
    );
  }

  /** @param {Workload} work */
  #showCost(work) {
    const totals = [naive, naiveBackward, fa2, backward].map((schedule) => countersAt(schedule(work)));
    const [naiveForward, naiveBack, tiledForward, tiledBack] = totals;
    const moved = (/** @type {typeof naiveForward} */ one) => grouped(one.reads + one.writes);
    fill(
      this.cost,
      table(
        ["", "naive", "tiled"],
        [
          ["forward", moved(naiveForward), moved(tiledForward)],
          ["backward", moved(naiveBack), moved(tiledBack)],
          [
            "fp32 sums and statistics",
            grouped(naiveForward.wide + naiveBack.wide),
            grouped(tiledForward.wide + tiledBack.wide),
          ],
          ["FLOP, backward", grouped(naiveBack.flops), grouped(tiledBack.flops)],
        ],
        "Traffic and work",
      ),
    );
    const bytes = (/** @type {typeof naiveForward} */ one) => one.readBytes + one.writtenBytes;
    setText(this.verdict, verdict(naiveBack.flops, tiledBack.flops, bytes(naiveBack), bytes(tiledBack), work));
  }

  /** The two backwards on the same numbers. @param {Workload} work @param {Record<string, any>} given */
  #showCheck(work, given) {
    const p = slow(finished(naive(work), given), "p");
    const textbook = finished(naiveBackward(work), { ...given, p });
    const tiled = finished(backward(work), /** @type {Replay} */ (this.replay).inputs);
    const error = Math.max(
      ...["dq", "dk", "dv"].map((name) => largestDifference(slow(tiled, name), slow(textbook, name))),
    );
    setText(this.check, `Same gradients as the naive backward: largest difference ${difference(error)}.`);
  }

  /** @param {number} at */
  #show(at) {
    if (!this.replay) return;
    const replay = this.replay.seek(at);
    this.code.light(CODE.backward.active(replay));
    this.figure.show(replay);
    this.box.show(replay, replay.counters);
    setText(this.text, backwardCaption(replay));
    this.context.save({ ...paramsOf(SPECS, this.form.values), ...(at > 0 && { step: String(at) }) });
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    return this.player.onKey(event);
  }

  destroy() {
    this.player.stop();
    this.figure.destroy();
  }
}

/**
 * What is kept at 4,096 tokens, as bars.
 * @param {(tokens: number, dim: number) => {naive: number, tiled: number}} bytes
 */
function keptBars(bytes) {
  const { naive, tiled } = bytes(4096, 128);
  return ["naive", "tiled"].map((name) => {
    const size = name === "naive" ? naive : tiled;
    const bar = h("span", { class: name === "naive" ? "bar-naive" : "bar-fa2" });
    bar.style.width = `${(100 * size) / naive}%`;
    return h(
      "div",
      { class: "bar-line small" },
      h("span", {}, `${name}, N = 4,096`),
      h("div", { class: "meter", role: "img", "aria-label": `${name}: ${formatBytes(size)}` }, bar),
    );
  });
}

/**
 * What recomputing costs and saves at these sizes, and when it saves nothing.
 * @param {number} flopsNaive @param {number} flopsTiled @param {number} bytesNaive @param {number} bytesTiled
 * @param {Workload} work
 */
function verdict(flopsNaive, flopsTiled, bytesNaive, bytesTiled, work) {
  const arithmetic =
    flopsTiled >= flopsNaive
      ? `The tiled backward computes ${(flopsTiled / flopsNaive).toFixed(2)}× the FLOP of the naive one`
      : `The tiled backward computes ${(flopsTiled / flopsNaive).toFixed(2)}× the FLOP of the naive one, because it skips masked tiles`;
  const traffic = `moves ${formatBytes(bytesTiled)} instead of ${formatBytes(bytesNaive)}`;
  const why = `every tile reads its rows of Q, dO and dQ again, so tiny blocks or a large d cost more than P would`;
  return bytesTiled < bytesNaive
    ? `${arithmetic} and ${traffic}. It would fail with tiny blocks: ${why}.`
    : `${arithmetic} and ${traffic}: at these sizes recomputing moves more. Blocks of ${work.block_m} × ${work.block_n} are too small for d = ${work.head_dim}: ${why}.`;
}
