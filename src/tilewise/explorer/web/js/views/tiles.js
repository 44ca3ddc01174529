/** Tiles: FA-1 and FA-2 order side by side, step by step, on real numbers. */

import { fa1, fa2 } from "tilewise/engine/attention.js";
import { Band } from "tilewise/engine/band.js";
import { elements, naiveForward } from "tilewise/engine/cost.js";
import { someNumbers } from "tilewise/engine/numbers.js";
import { workload } from "tilewise/engine/recorder.js";
import { Replay } from "tilewise/engine/replay.js";
import { countersAt } from "tilewise/engine/timeline.js";
import { h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { grouped, plural } from "tilewise/ui/format.js";
import { MemoryBox } from "tilewise/ui/memorybox.js";
import { caption, heading, legend } from "tilewise/ui/parts.js";
import { Player } from "tilewise/ui/player.js";
import { TileFigure } from "tilewise/ui/tilefigure.js";
import { fa1Caption, fa2Caption } from "tilewise/views/captions.js";

/**
 * @typedef {import("tilewise/main.js").Context} Context
 * @typedef {import("tilewise/ui/form.js").Spec} Spec
 * @typedef {import("tilewise/ui/form.js").Values} Values
 * @typedef {import("tilewise/engine/timeline.js").Counters} Counters
 */

const MOST_TOKENS = 128;
/** Tiles of a head beyond which a figure shows nothing to a human eye. */
const MOST_TILES = 1024;

/** @type {Spec[]} */
const SPECS = [
  { key: "n", label: "Tokens N", type: "number", value: 6, min: 1, max: MOST_TOKENS },
  { key: "bm", label: "Query block", type: "number", value: 2, min: 1, max: MOST_TOKENS, help: "Rows of Q in a tile" },
  {
    key: "bn",
    label: "Key block",
    type: "number",
    value: 2,
    min: 1,
    max: MOST_TOKENS,
    help: "Rows of K and V in a tile",
  },
  { key: "d", label: "Head dim d", type: "number", value: 4, min: 1, max: 128 },
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
    ],
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
];

const PRESETS = /** @type {[string, Values][]} */ ([
  ["6 tokens, blocks of 2", { n: 6, bm: 2, bn: 2, d: 4, heads: 1, mask: "full" }],
  ["8 tokens, causal", { n: 8, bm: 2, bn: 2, d: 4, heads: 1, mask: "causal" }],
  ["16 tokens, window", { n: 16, bm: 2, bn: 2, d: 4, heads: 1, mask: "window", w: 4 }],
  ["64 tokens, blocks of 4", { n: 64, bm: 4, bn: 4, d: 8, heads: 1, mask: "causal" }],
]);

const PHASES = /** @type {const} */ ({ scores: "computing", softmax: "rescaled", values: "stored" });

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
    this.form = new Form(SPECS, valuesFrom(SPECS, context.params), () => this.#rebuild(0));
    this.panels = [
      this.#panel("fa1", "FA-1 order", "K, V outside; Q inside", fa1, fa1Caption, ["m, l", "row_max", "row_max"]),
      this.#panel("fa2", "FA-2 order", "Q outside; K, V inside", fa2, fa2Caption, ["lse", "lse", "lse"]),
    ];
    this.summary = h("p", { class: "muted small", "data-summary": "" });
    this.problem = h("p", { class: "message bad", role: "alert", hidden: true });
    this.player = new Player({ length: 1, at: 0, onStep: (at) => this.#show(at) });
    this.element = h(
      "div",
      {},
      heading(
        "The score matrix, tile by tile",
        "The N × N scores are never stored. Tiles of Q, K and V come into the small fast memory, their scores are computed, softmaxed online, multiplied with V and thrown away. What differs between FA-1 and FA-2 is which loop is outside, and with it how often the running result crosses the memory.",
      ),
      h(
        "div",
        { class: "row" },
        h("span", { class: "small muted" }, "Try:"),
        PRESETS.map(([name, values]) => h("button", { type: "button", onclick: () => this.#preset(values) }, name)),
      ),
      this.form.element,
      this.problem,
      this.summary,
      this.player.element,
      h(
        "div",
        { class: "panels" },
        this.panels.map((panel) => panel.element),
      ),
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
    );
    this.#rebuild(Number(context.params.step) || 0);
  }

  /**
   * @param {string} id @param {string} title @param {string} order @param {typeof fa1} schedule
   * @param {typeof fa1Caption} say @param {string[]} statistics
   */
  #panel(id, title, order, schedule, say, statistics) {
    const figure = new TileFigure(
      `${title}: tiles of the score matrix with Q, K, V and O`,
      [
        { side: "left", name: "Q", array: "q", buffer: "q" },
        { side: "top", name: "K", array: "k", buffer: "k" },
        { side: "top", name: "V", array: "v", buffer: "v" },
        { side: "right", name: "O", array: "out", buffer: "acc", result: true },
        { side: "right", name: statistics[0], array: statistics[1], buffer: statistics[2], result: true },
      ],
      PHASES,
    );
    const box = new MemoryBox(id, { rowState: true });
    const text = caption();
    const bar = h("span", { class: `bar-${id}` });
    const meter = h("div", { class: "meter", role: "img" }, bar);
    const versus = h("p", { class: "small muted", "data-versus": id });
    const element = h(
      "section",
      { class: "panel", "aria-label": title },
      h("h3", {}, title, h("small", {}, order)),
      text,
      figure.element,
      box.element,
      meter,
      versus,
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
      replays: /** @type {Replay[]} */ ([]),
      total: countersAt({ algorithm: "", workload: workload({}), arrays: {}, events: [] }),
    };
  }

  /** @param {Values} values */
  #preset(values) {
    this.form.set(values);
    this.#rebuild(0);
  }

  /** @param {number} at */
  #rebuild(at) {
    const { values } = this.form;
    const tiles = Math.ceil(values.n / values.bm) * Math.ceil(values.n / values.bn);
    this.problem.hidden = tiles <= MOST_TILES;
    setText(
      this.problem,
      `${grouped(tiles)} tiles are more than the ${grouped(MOST_TILES)} that can be told apart: take larger blocks or fewer tokens.`,
    );
    if (tiles > MOST_TILES) return;
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
    for (const panel of this.panels) {
      const trace = panel.schedule(work);
      panel.total = countersAt(trace);
      panel.replays = Array.from(
        { length: values.heads },
        (_, head) =>
          new Replay(trace, {
            q: someNumbers(values.n, values.d, 3 * head + 1),
            k: someNumbers(values.n, values.d, 3 * head + 2),
            v: someNumbers(values.n, values.d, 3 * head + 3),
          }),
      );
    }
    this.#summarise();
    const steps = this.panels[0].replays[0].stops.length * values.heads;
    this.player.reset(steps, Math.min(at, steps));
  }

  #summarise() {
    const { values } = this.form;
    const sides = sidesOf(values);
    const band = new Band(values.n, values.n, sides.left, sides.right);
    const tiles = band.countTiles({ blockM: values.bm, blockN: values.bn });
    const steps = this.panels[0].replays[0].stops.length;
    const all = tiles.visited + tiles.skipped;
    const heads = values.heads > 1 ? `, for each of ${values.heads} heads` : "";
    const masked =
      tiles.skipped || tiles.partial
        ? ` ${plural(tiles.visited, "tile")} visited, ${grouped(tiles.partial)} of them partial, ${grouped(tiles.skipped)} skipped.`
        : "";
    setText(
      this.summary,
      `${plural(all, "tile")}, 3 steps for each one visited: ${plural(steps, "step")}${heads}.${masked}`,
    );
    this.naive = elements(naiveForward(band, values.d, values.d)) * values.heads;
  }

  /** @param {number} at */
  #show(at) {
    const { values } = this.form;
    const perHead = this.panels[0].replays[0].stops.length;
    const head = Math.min(values.heads - 1, at === 0 ? 0 : Math.floor((at - 1) / perHead));
    const most = Math.max(
      this.naive ?? 1,
      ...this.panels.map((panel) => (panel.total.reads + panel.total.writes) * values.heads),
    );
    for (const panel of this.panels) {
      const replay = panel.replays[head].seek(at - head * perHead);
      const counters = plus(replay.counters, panel.total, head);
      panel.figure.show(replay);
      panel.box.show(replay, counters);
      setText(panel.text, (values.heads > 1 && at > 0 ? `Head ${head + 1}: ` : "") + panel.say(replay));
      this.#showMeter(panel, counters.reads + counters.writes, most);
    }
    this.context.save({ ...paramsOf(SPECS, values), ...(at > 0 && { step: String(at) }) });
  }

  /** @param {TilesView["panels"][0]} panel @param {number} sofar @param {number} most */
  #showMeter(panel, sofar, most) {
    panel.bar.style.width = `${(100 * sofar) / most}%`;
    const whole = (panel.total.reads + panel.total.writes) * this.form.values.heads;
    panel.meter.setAttribute("aria-label", `${grouped(sofar)} of ${grouped(whole)} elements moved`);
    setText(
      panel.versus,
      `${grouped(sofar)} of ${grouped(whole)} elements in the end; naive attention would move ${grouped(this.naive ?? 0)}.`,
    );
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
