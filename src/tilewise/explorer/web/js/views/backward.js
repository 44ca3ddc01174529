/** Backward: which tiles are recomputed, what is kept between the passes, and what it costs. */

import { fa2, naive } from "tilewise/engine/attention.js";
import { backward, naiveBackward } from "tilewise/engine/backward.js";
import { Machine } from "tilewise/engine/machine.js";
import { someNumbers } from "tilewise/engine/numbers.js";
import { workload } from "tilewise/engine/recorder.js";
import { Replay } from "tilewise/engine/replay.js";
import { countersAt } from "tilewise/engine/timeline.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { formatBytes, grouped, plural } from "tilewise/ui/format.js";
import { MemoryBox } from "tilewise/ui/memorybox.js";
import { caption, heading, legend, table } from "tilewise/ui/parts.js";
import { Player } from "tilewise/ui/player.js";
import { TileFigure } from "tilewise/ui/tilefigure.js";
import { masking, names, skipped } from "tilewise/views/captions.js";
import { sidesOf } from "tilewise/views/tiles.js";

/** @typedef {import("tilewise/main.js").Context} Context */
/** @typedef {import("tilewise/engine/recorder.js").Workload} Workload */

/** @type {import("tilewise/ui/form.js").Spec[]} */
const SPECS = [
  { key: "n", label: "Tokens N", type: "number", value: 6, min: 1, max: 64 },
  { key: "bm", label: "Query block", type: "number", value: 2, min: 1, max: 64 },
  { key: "bn", label: "Key block", type: "number", value: 2, min: 1, max: 64 },
  { key: "d", label: "Head dim d", type: "number", value: 4, min: 1, max: 64 },
  {
    key: "mask",
    label: "Mask",
    type: "select",
    value: "causal",
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
    this.check = h("p", { class: "small muted", "data-gradcheck": "" });
    this.player = new Player({ length: 1, at: 0, onStep: (at) => this.#show(at) });
    this.element = h(
      "div",
      {},
      heading(
        "Backward: recompute instead of remember",
        "The gradients need the probabilities P again. Keeping them takes N² memory. Tiled attention keeps one number a row, lse = m + ln l, and recomputes each tile as P = e^(S − lse). It does one product more and moves far less.",
      ),
      this.form.element,
      this.player.element,
      h(
        "div",
        { class: "panels loose" },
        h(
          "section",
          { class: "panel", "aria-label": "Tiles of the backward" },
          h("h3", {}, "K, V outside", h("small", {}, "dK and dV stay in SRAM while the queries stream past")),
          this.text,
          this.figure.element,
          this.box.element,
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
    const given = {
      q: someNumbers(values.n, values.d, 1),
      k: someNumbers(values.n, values.d, 2),
      v: someNumbers(values.n, values.d, 3),
    };
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
  }

  /** The two backwards on the same numbers. @param {Workload} work @param {Record<string, any>} given */
  #showCheck(work, given) {
    const p = slow(finished(naive(work), given), "p");
    const textbook = finished(naiveBackward(work), { ...given, p });
    const tiled = finished(backward(work), /** @type {Replay} */ (this.replay).inputs);
    const error = Math.max(
      ...["dq", "dk", "dv"].flatMap((name) =>
        Array.from(slow(tiled, name).data, (value, at) => Math.abs(value - slow(textbook, name).data[at])),
      ),
    );
    setText(
      this.check,
      `Both were run on the numbers of this page: their gradients differ by at most ${error === 0 ? "0" : error.toExponential(0)}.`,
    );
  }

  /** @param {number} at */
  #show(at) {
    const replay = /** @type {Replay} */ (this.replay).seek(at);
    this.figure.show(replay);
    this.box.show(replay, replay.counters);
    setText(this.text, sentence(replay));
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

/** @param {Replay} replay */
function sentence(replay) {
  if (replay.stop === null) return "From the forward there are Q, K, V, O and one lse a row. P is not there.";
  const { queries, keys } = names(replay);
  const { phase } = replay.stop;
  if (phase === "delta")
    return `First, D = rowsum(dO ∘ O) for ${queries}: one number a row that every tile of the row will need.`;
  if (phase === "recompute") {
    const fresh = replay.buffers.get("k")?.how === "loaded" ? `K and V for ${keys} come in and stay; ` : "";
    return `${fresh}Q, dO, lse and D for ${queries} are loaded, and P = e^(QKᵀ − lse) is recomputed.${masking(replay)}${skipped(replay)}`;
  }
  if (phase === "values") return `dV for ${keys} grows by PᵀdO, and dP = dO Vᵀ is computed.`;
  if (phase === "gradients") {
    const ended = replay.events.some((event) => event.array === "dk");
    return `dS = P ∘ (dP − D); dK grows by dSᵀQ, and dQ for ${queries} is read, grows by dS K and goes back.${ended ? " This tile of keys is done: dK and dV are written once." : ""}`;
  }
  return `Last, dQ for ${queries} is rounded from its fp32 sum to the inputs' dtype.`;
}

/**
 * A machine that has run a whole trace.
 * @param {import("tilewise/engine/recorder.js").Trace} trace @param {Record<string, any>} inputs
 */
function finished(trace, inputs) {
  const machine = new Machine(trace, inputs);
  for (const event of trace.events) machine.run(event);
  return machine;
}

/** @param {Machine} machine @param {string} name */
function slow(machine, name) {
  return /** @type {import("tilewise/engine/machine.js").Matrix} */ (machine.slow.get(name));
}
