/**
 * HBM above, SRAM below: the arrays and buffers of a trace with their numbers, and blocks that travel between them.
 * Everything shown is read from the replay of the trace.
 */

import { bandOf } from "tilewise/engine/recorder.js";
import { Replay } from "tilewise/engine/replay.js";
import { countersAt, peakBytes } from "tilewise/engine/timeline.js";
import { fill, h, svg } from "tilewise/ui/dom.js";
import { formatBytes, grouped, plural, shortNumber } from "tilewise/ui/format.js";
import { symbol } from "tilewise/ui/memorybox.js";
import { pairText } from "tilewise/ui/tilefigure.js";

/**
 * @typedef {import("tilewise/engine/recorder.js").Trace} Trace
 * @typedef {import("tilewise/engine/recorder.js").TraceEvent} TraceEvent
 * @typedef {import("tilewise/engine/machine.js").Matrix} Matrix
 * @typedef {import("tilewise/ui/form.js").Values} Values
 * @typedef {{x: number, y: number, cell: number, rows: number, cols: number}} Grid
 * @typedef {{trace: Trace, inputs: Record<string, Matrix>, racers?: [string, string, Trace][], capacity?: number}} Story
 *   racers: name, class and trace of those that run alongside; capacity: bytes of a toy SRAM
 */

const LABEL = 17;
const FOOT = 15;
const GAP = 14;
/** Below this many pixels the parts stand under one another. */
const NARROW = 560;
/** Steps that follow each other faster than this are shown without travelling blocks. */
const CALM_MS = 240;
const TRAVEL_MS = 650;
/** Buffers that take over the memory of another, and are shown in its slot. @type {Record<string, string>} */
const TAKES = { p: "s", ds: "dp", lse: "row_sum" };

export class MemoryScene {
  /** @param {{story: (values: Values) => Story, values?: Values, map?: boolean, hide?: string[]}} options */
  constructor({ story, values = {}, map = true, hide = [] }) {
    this.story = story;
    this.map = map;
    this.hidden = new Set(hide);
    this.picture = h("div", { class: "picture" });
    this.race = h("div", { class: "race" });
    this.element = h("div", { class: "scene memory-scene" }, this.picture, this.race);
    this.width = 0;
    this.at = 0;
    this.shownAt = 0;
    this.observer = new ResizeObserver(([entry]) => {
      const narrow = entry.contentRect.width < NARROW;
      if (this.width > 0 && narrow === this.width < NARROW) return;
      this.width = entry.contentRect.width;
      this.#lay();
      this.#draw(null);
    });
    this.observer.observe(this.picture);
    this.set(values);
  }

  /** @param {Values} values */
  set(values) {
    const { trace, inputs, racers = [], capacity = 0 } = this.story(values);
    this.replay = new Replay(trace, inputs);
    this.capacity = capacity;
    this.peak = peakBytes(trace);
    this.racers = racers.map(([name, kind, one]) => ({
      name,
      kind,
      replay: new Replay(one, inputs),
      total: moved(countersAt(one)),
    }));
    this.slots = slotsOf(trace);
    this.length = this.replay.stops.length;
    this.#lay();
  }

  /** @param {number} at */
  show(at) {
    const forward = at === this.at + 1;
    const calm = performance.now() - this.shownAt > CALM_MS;
    this.shownAt = performance.now();
    this.at = at;
    this.replay.seek(at);
    this.#draw(forward && calm ? this.replay.events : null);
    this.#drawRace(at);
  }

  /** What the picture shows, in words. */
  description() {
    const { counters, buffers } = this.replay;
    const held = [...buffers.keys()].filter((name) => name !== "new_max").map(symbol);
    return `SRAM holds ${held.length ? held.join(", ") : "nothing"}. ${plural(counters.reads, "element")} read from HBM, ${grouped(counters.writes)} written to it so far.`;
  }

  /** Where everything stands, for the present width. */
  #lay() {
    const narrow = this.width > 0 && this.width < NARROW;
    const width = narrow ? 400 : 700;
    const arrays = Object.entries(this.replay.trace.arrays)
      .filter(([name]) => !this.hidden.has(name))
      .map(([name, spec]) => ({ name, rows: spec.rows, cols: spec.cols }));
    const hbm = fitted(arrays, width - 24, narrow ? 230 : 118, narrow ? 14 : 17);
    const room = !narrow && this.map ? width - 24 - 178 : width - 24;
    const sram = fitted(this.slots, room, narrow ? 260 : 200, 36);
    const hbmHeight = hbm.height + 34;
    const top = hbmHeight + 44;
    const sramHeight = Math.max(sram.height + 50, !narrow && this.map ? 180 : 0);
    const mapPlace = narrow ? { x: 110, y: top + sramHeight + 24 } : { x: width - 156, y: top + 24 };
    this.layout = {
      width,
      height: top + sramHeight + (narrow && this.map ? 210 : 2),
      hbm: shifted(hbm.places, 12, 28),
      sram: shifted(sram.places, 12, top + 28),
      hbmHeight,
      top,
      sramHeight,
      sramWidth: narrow || !this.map ? width : width - 178,
      mapPlace,
    };
  }

  /** @param {TraceEvent[] | null} travelling */
  #draw(travelling) {
    const { layout, replay } = this;
    if (!layout) return;
    const touched = replay.events.filter(
      (event) => (event.kind === "load" || event.kind === "store") && !this.hidden.has(event.array ?? ""),
    );
    const picture = svg(
      "svg",
      { viewBox: `0 0 ${layout.width} ${layout.height}`, role: "img", "aria-label": this.description() },
      svg(
        "defs",
        {},
        ["loaded", "stored"].map((kind) =>
          svg(
            "marker",
            {
              id: `arrow-${kind}`,
              viewBox: "0 0 8 8",
              refX: 7,
              refY: 4,
              markerWidth: 7,
              markerHeight: 7,
              orient: "auto",
            },
            svg("path", { d: "M0 0L8 4L0 8z", class: `arrow ${kind}` }),
          ),
        ),
      ),
      this.#boxes(),
      Object.entries(layout.hbm).map(([name, place]) => this.#array(name, place)),
      this.#buffers(),
      this.map && this.#scoreMap(),
      touched.map((event) => this.#wire(event)),
      this.#counters(),
    );
    fill(this.picture, picture);
    if (travelling && !matchMedia("(prefers-reduced-motion: reduce)").matches) {
      touched.forEach((event, index) => this.#travel(picture, event, index));
    }
  }

  #boxes() {
    const { width, hbmHeight, top, sramHeight, sramWidth } = this.layout;
    const { counters } = this.replay;
    const over = this.capacity > 0 && this.peak > this.capacity;
    const use = this.capacity
      ? `${formatBytes(counters.fastBytes)} in use, ${formatBytes(this.peak)} at most, of ${formatBytes(this.capacity)}`
      : `${formatBytes(counters.fastBytes)} in use after this step, ${formatBytes(this.peak)} at most`;
    const gauge = this.capacity ? Math.min(1, this.peak / this.capacity) * (sramWidth - 24) : 0;
    return [
      svg("rect", { class: "hbm-box", x: 1, y: 1, width: width - 2, height: hbmHeight - 2, rx: 8 }),
      svg("text", { class: "box-name", x: 12, y: 18 }, "HBM: large and slow"),
      this.replay.written.size > 0 &&
        svg("text", { class: "note", x: width - 12, y: 18, "text-anchor": "end" }, "2×: written twice so far"),
      svg("rect", { class: "sram-box", x: 1, y: top, width: sramWidth - 2, height: sramHeight - 2, rx: 8 }),
      svg("text", { class: "box-name", x: 12, y: top + 18 }, "SRAM: small and fast"),
      svg(
        "text",
        { class: `note ${over ? "over" : ""}`, x: 12, y: top + sramHeight - 10 },
        over ? `${use}: it does not fit` : use,
      ),
      gauge > 0 &&
        svg("rect", {
          class: `gauge ${over ? "over" : ""}`,
          x: 12,
          y: top + sramHeight - 32,
          width: gauge,
          height: 6,
          rx: 3,
        }),
    ];
  }

  /** An array of slow memory. @param {string} name @param {Grid} place */
  #array(name, place) {
    const matrix = /** @type {Matrix} */ (this.replay.machine.slow.get(name));
    const writes = Math.max(0, ...(this.replay.written.get(name) ?? []));
    return [
      svg(
        "text",
        { class: "name", x: place.x + (place.cols * place.cell) / 2, y: place.y - 4 },
        symbol(name),
        writes > 0 && svg("tspan", { class: "times", dx: 4 }, `${writes}×`),
      ),
      this.#cells(matrix, place, "", null),
    ];
  }

  #buffers() {
    const { sram } = this.layout;
    return Object.entries(sram).map(([name, slot]) => {
      const heir = Object.keys(TAKES).find((one) => TAKES[one] === name && this.replay.buffers.has(one));
      const shown = heir ?? name;
      const held = this.replay.buffers.get(shown);
      const label = svg(
        "text",
        { class: held ? "name" : "name faint", x: slot.x + (slot.cols * slot.cell) / 2, y: slot.y - 4 },
        symbol(shown),
      );
      if (!held) {
        return [
          label,
          svg("rect", {
            class: "slot",
            x: slot.x,
            y: slot.y,
            width: slot.cols * slot.cell,
            height: slot.rows * slot.cell,
          }),
        ];
      }
      const state = held.stored ? "stored" : held.how === "held" ? "held" : held.how;
      const grid = { ...slot, rows: held.matrix.rows, cols: held.matrix.cols };
      const scores = shown === "s" || shown === "p" ? this.#pairOf() : null;
      return [
        label,
        svg(
          "g",
          { class: held.leaving ? "leaving" : "" },
          this.#cells(held.matrix, grid, state, scores),
          svg("rect", {
            class: `frame ${state}`,
            x: grid.x,
            y: grid.y,
            width: grid.cols * grid.cell,
            height: grid.rows * grid.cell,
          }),
        ),
      ];
    });
  }

  /** The query and key of a score in SRAM, as an explanation. */
  #pairOf() {
    const { stop, inputs, trace } = this.replay;
    if (!stop || !inputs.q || !inputs.k) return null;
    const work = trace.workload;
    const top = (stop.mBlock ?? 0) * work.block_m;
    const left = trace.algorithm === "naive" ? 0 : (stop.nBlock ?? 0) * work.block_n;
    return (/** @type {number} */ row, /** @type {number} */ col) => pairText(this.replay, top + row, left + col);
  }

  /**
   * @param {Matrix} matrix @param {Grid} grid @param {string} state
   * @param {((row: number, col: number) => string) | null} explain
   */
  #cells(matrix, grid, state, explain) {
    const most = Math.max(1e-9, ...Array.from(matrix.data, (value) => (Number.isFinite(value) ? Math.abs(value) : 0)));
    return Array.from(matrix.data, (value, at) => {
      const [row, col] = [Math.floor(at / matrix.cols), at % matrix.cols];
      const [x, y] = [grid.x + col * grid.cell, grid.y + row * grid.cell];
      const there = !Number.isNaN(value);
      const heat = there && Number.isFinite(value) ? (0.4 * Math.abs(value)) / most : 0;
      const text = fitting(value, grid.cell);
      return svg(
        "g",
        explain ? { "data-tip": explain(row, col) } : {},
        svg("rect", { class: `cell ${there ? state : "missing"}`, x, y, width: grid.cell, height: grid.cell }),
        heat > 0.01 &&
          svg("rect", { class: "heat", x, y, width: grid.cell, height: grid.cell, "fill-opacity": heat.toFixed(2) }),
        there &&
          grid.cell >= 20 &&
          svg(
            "text",
            { class: `value ${grid.cell < 28 ? "tight" : ""}`, x: x + grid.cell / 2, y: y + grid.cell / 2 + 4 },
            text,
          ),
      );
    });
  }

  /** Both ends of what crosses the memory. @param {TraceEvent} event */
  #ends(event) {
    const place = this.layout.hbm[event.array ?? ""];
    const { sram } = this.layout;
    const slot = sram[event.buffer ?? ""] ?? sram[TAKES[event.buffer ?? ""] ?? ""];
    const [top, bottom] = event.rows ?? [0, place.rows];
    const [left, right] = event.cols ?? [0, place.cols];
    return {
      block: {
        x: place.x + left * place.cell,
        y: place.y + top * place.cell,
        width: (right - left) * place.cell,
        height: (bottom - top) * place.cell,
      },
      far: { x: place.x + ((left + right) / 2) * place.cell, y: place.y + place.rows * place.cell },
      near: slot ? { x: slot.x + (slot.cols * slot.cell) / 2, y: slot.y - LABEL } : { x: 60, y: this.layout.top },
    };
  }

  /** @param {TraceEvent} event */
  #wire(event) {
    const { block, far, near } = this.#ends(event);
    const kind = event.kind === "load" ? "loaded" : "stored";
    const [from, to] = event.kind === "load" ? [far, near] : [near, far];
    const middle = (from.y + to.y) / 2;
    return [
      svg("rect", { class: `frame ${kind}`, ...block }),
      svg("path", {
        class: `wire ${kind}`,
        d: `M${from.x} ${from.y}C${from.x} ${middle} ${to.x} ${middle} ${to.x} ${to.y}`,
        "marker-end": `url(#arrow-${kind})`,
      }),
    ];
  }

  /** A block on its way. @param {SVGElement} picture @param {TraceEvent} event @param {number} index */
  #travel(picture, event, index) {
    const { block, near } = this.#ends(event);
    const kind = event.kind === "load" ? "loaded" : "stored";
    const packet = svg("rect", { class: `packet ${kind}`, ...block, rx: 2 });
    picture.append(packet);
    const [dx, dy] = [near.x - block.x - block.width / 2, near.y - block.y];
    const ends = [{ transform: "translate(0, 0)" }, { transform: `translate(${dx}px, ${dy}px)` }];
    const motion = packet.animate(event.kind === "load" ? ends : ends.reverse(), {
      duration: TRAVEL_MS,
      delay: index * 70,
      easing: "ease-in-out",
      fill: "backwards",
    });
    motion.onfinish = () => packet.remove();
    motion.oncancel = () => packet.remove();
  }

  /** Done, in work, to come, and never touched. */
  #scoreMap() {
    const { mapPlace } = this.layout;
    const { workload: work, algorithm } = this.replay.trace;
    const [rows, cols] = [work.seqlen_q, work.seqlen_k];
    const cell = 140 / Math.max(rows, cols);
    const [height, width] = [work.block_m, algorithm === "naive" ? cols : work.block_n];
    const band = bandOf(work);
    const { stop } = this.replay;
    const done = new Set(
      this.replay.stops.slice(0, Math.max(0, this.replay.at)).map((one) => `${one.mBlock} ${one.nBlock}`),
    );
    const tiles = [];
    for (let m = 0; m * height < rows; m++) {
      for (let n = 0; n * width < cols; n++) {
        const kind = band.tileKind(m, n, { blockM: height, blockN: width });
        const here = stop?.mBlock === m && stop?.nBlock === n;
        const state = kind === "skip" ? "skipped" : here ? "computing" : done.has(`${m} ${n}`) ? "used" : "";
        tiles.push(
          svg("rect", {
            class: `tile ${state}`,
            x: mapPlace.x + n * width * cell,
            y: mapPlace.y + m * height * cell,
            width: (Math.min((n + 1) * width, cols) - n * width) * cell,
            height: (Math.min((m + 1) * height, rows) - m * height) * cell,
          }),
        );
      }
    }
    const masked = [];
    for (let row = 0; row < rows; row++) {
      for (let col = 0; col < cols; col++) {
        masked.push(
          svg("rect", {
            class: band.sees(row, col) ? "pair" : "pair masked",
            x: mapPlace.x + col * cell,
            y: mapPlace.y + row * cell,
            width: cell,
            height: cell,
            "data-tip": pairText(this.replay, row, col),
          }),
        );
      }
    }
    const stored = algorithm === "naive";
    return [
      svg(
        "text",
        { class: "name", x: mapPlace.x + 70, y: mapPlace.y - 6 },
        stored ? "scores: stored above" : "scores: never stored",
      ),
      tiles,
      masked,
      svg("text", { class: "note mid", x: mapPlace.x + 70, y: mapPlace.y + 157 }, "queries ↓   keys →"),
    ];
  }

  #counters() {
    const { counters } = this.replay;
    const { hbmHeight, sramWidth } = this.layout;
    const y = hbmHeight + 26;
    const wide = counters.wide > 0 ? ` and ${grouped(counters.wide)} of statistics` : "";
    return svg(
      "text",
      { class: "traffic", x: Math.min(sramWidth, this.layout.width) - 12, y, "text-anchor": "end" },
      `${grouped(counters.reads)} read, ${grouped(counters.writes)} written${wide}`,
    );
  }

  /** Everybody at the same share of their steps. @param {number} at */
  #drawRace(at) {
    if (this.racers.length === 0) return;
    const most = Math.max(...this.racers.map((racer) => racer.total));
    fill(
      this.race,
      this.racers.map(({ name, kind, replay, total }) => {
        replay.seek(Math.floor((at * replay.stops.length) / this.length));
        const sofar = moved(replay.counters);
        const bar = h("span", { class: `bar-${kind}` });
        bar.style.width = `${(100 * sofar) / most}%`;
        return h(
          "div",
          { class: "bar-line" },
          h("span", {}, name),
          h("div", { class: "meter", "aria-hidden": "true" }, bar),
          h("span", { class: "race-value", "data-race": kind }, `${grouped(sofar)} of ${grouped(total)}`),
        );
      }),
    );
  }

  destroy() {
    this.observer.disconnect();
  }
}

/** A number with as many digits as its cell has room for. @param {number} value @param {number} cell */
function fitting(value, cell) {
  const room = (cell - 2) / (cell < 28 ? 6 : 7.2);
  if (Number.isInteger(value)) return shortNumber(value, 0);
  const texts = [2, 1, 0].map((digits) => shortNumber(value, digits));
  return texts.find((text) => text.length <= room) ?? texts[2];
}

/** @param {import("tilewise/engine/timeline.js").Counters} counters */
function moved(counters) {
  return counters.reads + counters.writes;
}

/** Every buffer that a trace ever holds, at its largest; one that takes over another's memory stands in its slot. @param {Trace} trace */
function slotsOf(trace) {
  /** @type {Map<string, {name: string, rows: number, cols: number}>} */
  const slots = new Map();
  for (const event of trace.events) {
    const name = event.kind === "load" ? event.buffer : event.kind === "compute" ? event.target : undefined;
    if (!name || name === "new_max") continue;
    const into = TAKES[name] && slots.has(TAKES[name]) ? TAKES[name] : name;
    const [rows, cols] =
      event.kind === "load"
        ? [(event.rows?.[1] ?? 0) - (event.rows?.[0] ?? 0), (event.cols?.[1] ?? 0) - (event.cols?.[0] ?? 0)]
        : /** @type {[number, number]} */ (event.shape);
    const before = slots.get(into);
    slots.set(into, { name: into, rows: Math.max(rows, before?.rows ?? 0), cols: Math.max(cols, before?.cols ?? 0) });
  }
  return [...slots.values()];
}

/**
 * Boxes in lines, with the largest cells that fit.
 * @param {{name: string, rows: number, cols: number}[]} items @param {number} width @param {number} height
 * @param {number} largest
 */
function fitted(items, width, height, largest) {
  for (let cell = largest; ; cell -= 1) {
    const laid = lines(items, width, cell);
    if (laid.height <= height || cell <= 4) return laid;
  }
}

/** @param {{name: string, rows: number, cols: number}[]} items @param {number} width @param {number} cell */
function lines(items, width, cell) {
  /** @type {Record<string, Grid>} */
  const places = {};
  let [x, y, tallest] = [0, LABEL, 0];
  for (const { name, rows, cols } of items) {
    const own = Math.max(cols * cell, 9 * symbol(name).length);
    if (x > 0 && x + own > width) {
      [x, y, tallest] = [0, y + tallest + LABEL + FOOT, 0];
    }
    places[name] = { x: x + (own - cols * cell) / 2, y, cell, rows, cols };
    x += own + Math.max(GAP, 62 - own);
    tallest = Math.max(tallest, rows * cell);
  }
  return { places, height: y + tallest + FOOT };
}

/** @param {Record<string, Grid>} places @param {number} dx @param {number} dy */
function shifted(places, dx, dy) {
  return Object.fromEntries(
    Object.entries(places).map(([name, place]) => [name, { ...place, x: place.x + dx, y: place.y + dy }]),
  );
}
