/** Tiles: naive, FA-1 and FA-2 order side by side, step by step, on real numbers. */

import { fa1, fa2, naive } from "tilewise/engine/attention.js";
import { differenceFromNaive, headInputs } from "tilewise/engine/check.js";
import { documentRows, drawnRows, neighbourRows, prefixRows, toggled } from "tilewise/engine/drawing.js";
import { bandOf, workload } from "tilewise/engine/recorder.js";
import { Replay } from "tilewise/engine/replay.js";
import { countersAt, peakBytes } from "tilewise/engine/timeline.js";
import { CodeBox } from "tilewise/ui/code.js";
import { h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { difference, formatBytes, grouped, plural } from "tilewise/ui/format.js";
import { MemoryBox } from "tilewise/ui/memorybox.js";
import { caption, counter, folded, heading, legend } from "tilewise/ui/parts.js";
import { Player } from "tilewise/ui/player.js";
import { TileFigure } from "tilewise/ui/tilefigure.js";
import { fa1Caption, fa2Caption, naiveCaption } from "tilewise/views/captions.js";
import { CODE } from "tilewise/views/pseudocode.js";

/**
 * @typedef {import("tilewise/main.js").Context} Context
 * @typedef {import("tilewise/ui/form.js").Spec} Spec
 * @typedef {import("tilewise/ui/form.js").Values} Values
 * @typedef {import("tilewise/engine/timeline.js").Counters} Counters
 */

const MOST_TOKENS = 128;
/** Tiles of a head beyond which a figure shows nothing to a human eye. */
export const MOST_TILES = 1024;

/** @param {any} devices @returns {Spec[]} */
function specs(devices) {
  return [
    { key: "n", label: "Tokens N", type: "number", value: 6, min: 1, max: MOST_TOKENS },
    {
      key: "bm",
      label: "Query block",
      type: "number",
      value: 2,
      min: 1,
      max: MOST_TOKENS,
      help: "Rows of Q in a tile",
    },
    {
      key: "bn",
      label: "Key block",
      type: "number",
      value: 2,
      min: 1,
      max: MOST_TOKENS,
      help: "Rows of K and V in a tile",
    },
    { key: "d", label: "Head dim d", type: "number", value: 2, min: 1, max: 128 },
    { key: "heads", label: "Heads", type: "number", value: 1, min: 1, max: 8, help: "Heads run one after the other" },
    {
      key: "mask",
      label: "Mask",
      type: "select",
      value: "full",
      options: [
        ["full", "none (full)"],
        ["causal", "causal"],
        ["window", "causal window"],
        ["band", "window, both sides"],
        ["prefix", "prefix, then causal"],
        ["documents", "documents"],
        ["neighbours", "neighbours in a picture"],
        ["drawn", "drawn: click tiles"],
      ],
      help: "A click on a tile of a figure hides or shows it",
    },
    {
      key: "prefix",
      label: "Prefix",
      type: "number",
      value: 2,
      min: 1,
      max: MOST_TOKENS,
      help: "First tokens, which all see",
      when: (values) => values.mask === "prefix",
    },
    {
      key: "documents",
      label: "Documents",
      type: "number",
      value: 2,
      min: 1,
      max: MOST_TOKENS,
      help: "Tokens see those of their own document",
      when: (values) => values.mask === "documents",
    },
    {
      key: "width",
      label: "Picture width",
      type: "number",
      value: 3,
      min: 1,
      max: MOST_TOKENS,
      help: "Tokens are pixels, row by row; each sees those next to it",
      when: (values) => values.mask === "neighbours",
    },
    {
      key: "tiles",
      label: "Tiles",
      type: "text",
      value: "",
      parse: (text) => {
        if (!/^[01-]*$/.test(text)) throw new Error("rows of 0 and 1 with - between them, such as 10-11");
      },
      help: "A row of tiles after the other: 1 is seen, 0 is skipped; tiles that are not named are seen",
      when: (values) => values.mask === "drawn",
    },
    {
      key: "w",
      label: "Window",
      type: "number",
      value: 2,
      min: 0,
      max: MOST_TOKENS,
      help: "Keys seen beside the own one",
      when: (values) => values.mask === "window" || values.mask === "band",
    },
    {
      key: "device",
      label: "Fast memory of",
      type: "select",
      value: "a100",
      options: Object.entries(devices)
        .filter(([, device]) => device.smem_bytes > 0)
        .map(([key, device]) => [key, `${device.name}: ${formatBytes(device.smem_bytes)}`]),
      help: "Shared memory that a block of threads can have",
    },
  ];
}

const PRESETS = /** @type {[string, Values][]} */ ([
  ["6 tokens, blocks of 2", { n: 6, bm: 2, bn: 2, d: 2, heads: 1, mask: "full" }],
  ["the same with d = 4: FA-1 loses", { n: 6, bm: 2, bn: 2, d: 4, heads: 1, mask: "full" }],
  ["8 tokens, causal", { n: 8, bm: 2, bn: 2, d: 2, heads: 1, mask: "causal" }],
  ["12 tokens, prefix", { n: 12, bm: 2, bn: 2, d: 2, heads: 1, mask: "prefix", prefix: 4 }],
  ["12 tokens, 3 documents", { n: 12, bm: 2, bn: 2, d: 2, heads: 1, mask: "documents", documents: 3 }],
  ["16 tokens, window", { n: 16, bm: 2, bn: 2, d: 2, heads: 1, mask: "window", w: 4 }],
  ["64 tokens, blocks of 8", { n: 64, bm: 8, bn: 8, d: 8, heads: 1, mask: "causal" }],
  ["128 × 128 blocks, d = 128", { n: 128, bm: 128, bn: 128, d: 128, heads: 1, mask: "full" }],
]);

const PHASES = /** @type {const} */ ({ scores: "computing", softmax: "rescaled", values: "stored" });

/** The part of a workload that a mask means: sides of a window, or who sees whom. @param {Values} values */
function maskOf(values) {
  const { mask, n } = values;
  if (mask === "prefix") return { seen: prefixRows(n, values.prefix) };
  if (mask === "documents") return { seen: documentRows(n, values.documents) };
  if (mask === "neighbours") return { seen: neighbourRows(n, values.width) };
  if (mask === "drawn") return { seen: drawnRows(n, values.bm, values.bn, values.tiles) };
  return sidesOf(values);
}

/** The sides of the window that a mask means. @param {Values} values */
export function sidesOf(values) {
  if (values.mask === "full") return { left: null, right: null };
  if (values.mask === "causal") return { left: null, right: 0 };
  return { left: values.w, right: values.mask === "band" ? values.w : 0 };
}

/** @param {Context} context @returns {import("tilewise/main.js").View} */
export function createTilesView(context) {
  return new TilesView(context);
}

class TilesView {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.devices = context.data.devices;
    this.specs = specs(this.devices);
    this.form = new Form(this.specs, valuesFrom(this.specs, context.params), () => this.#rebuild(0));
    this.panels = [
      this.#panel("naive", "Naive", "three passes", naive, naiveCaption, null),
      this.#panel("fa1", "FA-1 order", "K, V outside; Q inside", fa1, fa1Caption, ["m, l", "row_max", "row_max"]),
      this.#panel("fa2", "FA-2 order", "Q outside; K, V inside", fa2, fa2Caption, ["lse", "lse", "lse"]),
    ];
    this.summary = h("p", { class: "muted small", "data-summary": "" });
    this.verdict = h("p", { class: "message", "data-verdict": "" });
    this.capacity = h("p", { class: "small", "data-capacity": "" });
    this.check = h("p", { class: "result", "data-check": "" });
    this.problem = h("p", { class: "message bad", role: "alert", hidden: true });
    this.player = new Player({ length: 1, at: 0, onStep: (at) => this.#show(at) });
    this.sizes = folded("Sizes", [
      h(
        "div",
        { class: "row" },
        h("span", { class: "small muted" }, "Try:"),
        PRESETS.map(([name, values]) => h("button", { type: "button", onclick: () => this.#preset(values) }, name)),
      ),
      this.form.element,
    ]);
    this.shown = h(
      "div",
      { class: "panels three" },
      this.panels.map((panel) => panel.element),
    );
    this.element = h(
      "div",
      { class: "bench" },
      heading(
        "The score matrix, tile by tile",
        "Naive attention writes the N × N scores to slow memory and reads them back. FlashAttention computes them tile by tile in fast memory and throws them away; FA-1 and FA-2 differ in which loop is outside.",
      ),
      this.sizes.element,
      this.problem,
      this.player.element,
      this.shown,
      this.verdict,
      this.capacity,
      legend([
        ["loaded", "loaded, in SRAM"],
        ["computing", "computing scores"],
        ["rescaled", "softmax, rescaled"],
        ["stored", "accumulated, stored"],
        ["used", "used and thrown away"],
        ["masked", "masked pair in a partial tile"],
        ["skipped", "skipped tile: never touched"],
        ["leaving", "in SRAM, freed after this step"],
      ]),
      this.summary,
      this.check,
    );
    this.#rebuild(Number(context.params.step) || 0);
  }

  /**
   * @param {string} id @param {string} title @param {string} order @param {typeof fa1} schedule
   * @param {typeof fa1Caption} say @param {string[] | null} statistics
   */
  #panel(id, title, order, schedule, say, statistics) {
    const figure = new TileFigure(
      `${title}: tiles of the score matrix with Q, K, V and O`,
      [
        { side: "left", name: "Q", array: "q", buffer: "q" },
        { side: "top", name: "K", array: "k", buffer: "k" },
        { side: "top", name: "V", array: "v", buffer: "v" },
        { side: "right", name: "O", array: "out", buffer: "acc", result: true },
        ...(statistics
          ? [
              {
                side: /** @type {const} */ ("right"),
                name: statistics[0],
                array: statistics[1],
                buffer: statistics[2],
                result: true,
              },
            ]
          : []),
      ],
      PHASES,
      // Figure and memory on one screen, also on a projector.
      innerHeight < 850 ? 140 : 260,
    );
    figure.onTile = (mBlock, nBlock) => this.#toggle(mBlock, nBlock);
    const box = new MemoryBox(id, { rowState: statistics !== null });
    const text = caption();
    const bar = h("span", { class: `bar-${id}` });
    const meter = h("div", { class: "meter", role: "img" }, bar);
    const versus = h("p", { class: "small muted", "data-versus": id });
    const scoresWritten = counter(
      "score tiles written",
      `${id}-score-tiles`,
      "Tiles of S and of P that were written to slow memory.",
    );
    box.counters.append(scoresWritten.element);
    const code = new CodeBox(CODE[id].lines);
    const element = h(
      "section",
      { class: "panel", "aria-label": title },
      h("h3", {}, title, h("small", {}, order)),
      text,
      figure.element,
      box.element,
      meter,
      versus,
      code.element,
    );
    return {
      id,
      element,
      schedule,
      say,
      figure,
      box,
      text,
      meter,
      bar,
      versus,
      scoresWritten,
      code,
      replays: /** @type {Replay[]} */ ([]),
      total: countersAt({ algorithm: "", workload: workload({}), arrays: {}, events: [] }),
    };
  }

  /** @param {Values} values */
  #preset(values) {
    this.form.set(values);
    this.#rebuild(0);
  }

  /** Hide or show a tile: the mask becomes a drawn one. @param {number} mBlock @param {number} nBlock */
  #toggle(mBlock, nBlock) {
    const { n, bm, bn } = this.form.values;
    const band = bandOf(this.panels[1].replays[0].trace.workload);
    const grid = { blockM: bm, blockN: bn };
    const tiles = toggled(n, bm, bn, mBlock, nBlock, (m, key) => band.tileKind(m, key, grid) !== "skip");
    this.form.set({ mask: "drawn", tiles });
    this.#rebuild(0);
  }

  /** Heads one after the other; all ways end together. */
  get #steps() {
    return this.panels[1].replays[0]?.stops.length ?? 0;
  }

  /** @param {number} at */
  #rebuild(at) {
    const { values } = this.form;
    const tiles = Math.ceil(values.n / values.bm) * Math.ceil(values.n / values.bn);
    const fits = tiles <= MOST_TILES;
    this.problem.hidden = fits;
    for (const part of [this.shown, this.verdict, this.capacity, this.summary, this.check]) part.hidden = !fits;
    setText(
      this.problem,
      `${grouped(tiles)} tiles are more than the ${grouped(MOST_TILES)} that can be told apart: take larger blocks or fewer tokens.`,
    );
    this.sizes.describe(
      `N = ${values.n}, blocks ${values.bm} × ${values.bn}, d = ${values.d}${values.heads > 1 ? `, ${values.heads} heads` : ""}, mask: ${values.mask}`,
    );
    if (!fits) {
      for (const panel of this.panels) panel.replays = [];
      this.sizes.element.open = true;
      this.player.reset(0);
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
      ...maskOf(values),
    });
    for (const panel of this.panels) {
      const trace = panel.schedule(work);
      panel.total = countersAt(trace);
      panel.replays = Array.from({ length: values.heads }, (_, head) => new Replay(trace, headInputs(work, head)));
    }
    this.#summarise(work);
    const steps = this.#steps * values.heads;
    this.player.reset(steps, Math.min(at, steps));
  }

  /** @param {import("tilewise/engine/recorder.js").Workload} work */
  #summarise(work) {
    const { values } = this.form;
    const tiles = bandOf(work).countTiles({ blockM: values.bm, blockN: values.bn });
    const all = tiles.visited + tiles.skipped;
    const heads = values.heads > 1 ? `, for each of ${values.heads} heads` : "";
    const masked =
      tiles.skipped || tiles.partial
        ? ` ${plural(tiles.visited, "tile")} visited, ${grouped(tiles.partial)} of them partial, ${grouped(tiles.skipped)} skipped.`
        : "";
    setText(
      this.summary,
      `${plural(all, "tile")}, 3 steps for each one visited: ${plural(this.#steps, "step")}${heads}.${masked}`,
    );
    setText(
      this.verdict,
      verdict(
        this.panels.map((panel) => panel.total.reads + panel.total.writes),
        values,
      ),
    );
    const device = this.devices[values.device];
    const needs = this.panels.slice(1).map((panel) => peakBytes(panel.replays[0].trace));
    setText(this.capacity, capacity(needs, device, values));
    this.capacity.classList.toggle("bad", Math.max(...needs) > device.smem_bytes);
    const errors = [fa1, fa2].map((schedule) => differenceFromNaive(schedule, work));
    setText(
      this.check,
      `Same result as naive attention: largest difference ${difference(errors[0])} (FA-1), ${difference(errors[1])} (FA-2).`,
    );
  }

  /** @param {number} at */
  #show(at) {
    const { values } = this.form;
    const perHead = this.#steps;
    this.context.save({ ...paramsOf(this.specs, values), ...(at > 0 && { step: String(at) }) });
    if (perHead === 0) return;
    const head = Math.min(values.heads - 1, at === 0 ? 0 : Math.floor((at - 1) / perHead));
    const own = at - head * perHead;
    const most = Math.max(...this.panels.map((panel) => (panel.total.reads + panel.total.writes) * values.heads));
    for (const panel of this.panels) {
      const replay = panel.replays[head];
      // Naive attention has fewer and longer steps; all three reach their end together.
      replay.seek(Math.floor((own * replay.stops.length) / perHead));
      const counters = plus(replay.counters, panel.total, head);
      panel.figure.show(replay);
      panel.box.show(replay, counters);
      panel.code.light(CODE[panel.id].active(replay));
      setText(panel.text, (values.heads > 1 && at > 0 ? `Head ${head + 1}: ` : "") + panel.say(replay));
      setText(panel.scoresWritten.value, grouped(scoreTiles(replay) + head * scoreTilesInAll(replay)));
      this.#showMeter(panel, counters.reads + counters.writes, most);
    }
  }

  /** @param {TilesView["panels"][0]} panel @param {number} sofar @param {number} most */
  #showMeter(panel, sofar, most) {
    panel.bar.style.width = `${(100 * sofar) / most}%`;
    const whole = (panel.total.reads + panel.total.writes) * this.form.values.heads;
    panel.meter.setAttribute("aria-label", `${grouped(sofar)} of ${grouped(whole)} elements moved`);
    setText(panel.versus, `${grouped(sofar)} of ${grouped(whole)} elements in the end.`);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    return this.player.onKey(event);
  }

  destroy() {
    this.player.stop();
    this.panels.forEach((panel) => panel.figure.destroy());
  }
}

/**
 * What the totals say, and when the thesis fails: a tile saves four crossings of its scores, and costs FA-1 three times
 * its rows of Q and O, FA-2 twice its rows of K.
 * @param {number[]} totals  naive, FA-1, FA-2 @param {Values} values
 */
function verdict([naiveTotal, fa1Total, fa2Total], { bm, bn, d }) {
  const totals = `In the end naive attention moves ${grouped(naiveTotal)} elements, FA-1 ${grouped(fa1Total)}, FA-2 ${grouped(fa2Total)}.`;
  const rule = `A tile saves 4 × ${bm} × ${bn} crossings of its scores; it costs FA-1 3 × ${bm} × ${d} (Q in, O in and out) and FA-2 2 × ${bn} × ${d} (K and V in).`;
  const losers = [...(fa1Total >= naiveTotal ? ["FA-1"] : []), ...(fa2Total >= naiveTotal ? ["FA-2"] : [])];
  if (losers.length === 0) return `${totals} ${rule} With tiny blocks or a large d this turns around.`;
  return `${totals} Here ${losers.join(" and ")} ${losers.length > 1 ? "do" : "does"} not save traffic: the blocks are too small for d = ${d}. ${rule} Real kernels take blocks of 64 to 128.`;
}

/** @param {number[]} needs  FA-1, FA-2 @param {any} device @param {Values} values */
function capacity(needs, device, { bm, bn, d }) {
  const need = Math.max(...needs);
  const blocks = `Blocks of ${bm} × ${bn} with d = ${d} need ${formatBytes(need)} of fast memory`;
  const has = `${device.name} has ${formatBytes(device.smem_bytes)} for a block of threads`;
  return need <= device.smem_bytes
    ? `${blocks}; ${has}: they fit. (Here all buffers are counted; real kernels keep S and O in registers.)`
    : `${blocks}, and ${has}: they do not fit. Take smaller blocks. (Here all buffers are counted; real kernels keep S and O in registers.)`;
}

/** Tiles of S and P written so far. @param {Replay} replay */
function scoreTiles(replay) {
  const { block_m: height, block_n: width, seqlen_k: keys } = replay.trace.workload;
  const rows = ["s", "p"].reduce((sum, name) => sum + (replay.written.get(name) ?? []).reduce((a, b) => a + b, 0), 0);
  return Math.ceil(rows / height) * Math.ceil(keys / width);
}

/** @param {Replay} replay */
function scoreTilesInAll(replay) {
  const { block_m: height, block_n: width, seqlen_q: rows, seqlen_k: keys } = replay.trace.workload;
  return replay.trace.arrays.s ? 2 * Math.ceil(rows / height) * Math.ceil(keys / width) : 0;
}

/**
 * A head's counters on top of the heads before it.
 * @param {Counters} own @param {Counters} total @param {number} heads @returns {Counters}
 */
function plus(own, total, heads) {
  const sums = Object.entries(own).map(([name, value]) => [
    name,
    value + total[/** @type {keyof Counters} */ (name)] * heads,
  ]);
  return /** @type {Counters} */ (Object.fromEntries(sums));
}
