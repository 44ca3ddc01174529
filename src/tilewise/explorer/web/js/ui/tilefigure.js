/** The score matrix as tiles, with the operands beside it: a canvas that shows where an algorithm is. */

import { Band, blocks } from "tilewise/engine/band.js";
import { bandOf } from "tilewise/engine/recorder.js";
import { Figure, cellText, hatch, label } from "tilewise/ui/figure.js";
import { shortNumber } from "tilewise/ui/format.js";
import { showTip } from "tilewise/ui/tips.js";

/**
 * @typedef {import("tilewise/engine/replay.js").Replay} Replay
 * @typedef {import("tilewise/engine/machine.js").Matrix} Matrix
 * @typedef {import("tilewise/ui/figure.js").Colours} Colours
 * @typedef {{side: "left" | "top" | "right" | "bottom", name: string, array: string, buffer: string,
 *   result?: boolean}} Strip  a result counts how often its rows were written
 * @typedef {{x: number, y: number, side: number, cell: number}} Frame
 */

const STRIP = 22;
const GAP = 6;
const LABEL = 18;
const EASY_TO_READ = 27;

export class TileFigure {
  /**
   * @param {string} name @param {Strip[]} strips
   * @param {Record<string, "loaded" | "computing" | "rescaled" | "stored">} phaseColours @param {number} [tall]
   */
  constructor(name, strips, phaseColours, tall = 440) {
    this.name = name;
    this.strips = strips;
    this.tall = tall;
    /** Keys of a tile: naive attention has whole rows. */
    this.blockN = 1;
    this.phaseColours = phaseColours;
    /** @type {Replay | null} */
    this.replay = null;
    /** @type {import("tilewise/engine/band.js").Band | import("tilewise/engine/band.js").Drawn} */
    this.band = new Band(0, 0);
    /** What a click on a tile does. @type {((mBlock: number, nBlock: number) => void) | null} */
    this.onTile = null;
    this.mBlocks = 0;
    this.nBlocks = 0;
    /** @type {import("tilewise/engine/band.js").TileKind[]} */
    this.kinds = [];
    /** The stops at which each tile is first and last in work. */
    this.first = new Int32Array();
    this.last = new Int32Array();
    this.figure = new Figure(
      name,
      (width) => this.#frame(width).height,
      (context, width, colours) => this.#draw(context, width, colours),
    );
    this.element = this.figure.element;
    this.element.addEventListener("pointermove", (/** @type {PointerEvent} */ event) => this.#hover(event));
    this.element.addEventListener("pointerleave", () => showTip(null));
    this.element.addEventListener("click", (/** @type {MouseEvent} */ event) => {
      const pair = this.#pairAt(event);
      if (pair === null || this.replay === null) return;
      const { block_m: height, block_n: width } = this.replay.trace.workload;
      this.onTile?.(Math.floor(pair[0] / height), Math.floor(pair[1] / width));
    });
  }

  /** @param {Replay} replay */
  show(replay) {
    if (replay !== this.replay) this.#index(replay);
    this.replay = replay;
    this.figure.redraw();
    this.figure.describe(this.#description());
  }

  /** The state of the picture in a sentence. */
  #description() {
    const replay = /** @type {Replay} */ (this.replay);
    const { stop } = replay;
    const done = this.last.reduce(
      (sum, at, tile) => sum + (at > 0 && replay.at > at && this.kinds[tile] !== "skip" ? 1 : 0),
      0,
    );
    const all = this.kinds.filter((kind) => kind !== "skip").length;
    const place =
      stop === null
        ? "nothing in work yet"
        : `${stop.phase}${stop.mBlock === null ? "" : `, tile of queries ${stop.mBlock}`}${stop.nBlock === null ? "" : `, tile of keys ${stop.nBlock}`}`;
    const writes = this.strips
      .filter((strip) => strip.result)
      .map((strip) => `${strip.name} written ${Math.max(0, ...(replay.written.get(strip.array) ?? []))} times at most`);
    return `${this.name}: ${place}; ${done} of ${all} tiles done; ${writes.join(", ")}.`;
  }

  /** The query and key under the pointer. @param {MouseEvent} event @returns {[number, number] | null} */
  #pairAt(event) {
    if (this.replay === null) return null;
    const frame = this.#frame(this.figure.width);
    const box = this.element.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - frame.y) / frame.cell);
    const col = Math.floor((event.clientX - box.left - frame.x) / frame.cell);
    const { workload } = this.replay.trace;
    return row >= 0 && col >= 0 && row < workload.seqlen_q && col < workload.seqlen_k ? [row, col] : null;
  }

  /** A cell's score and weight. @param {PointerEvent} event */
  #hover(event) {
    if (this.replay === null || !this.replay.inputs.q || !this.replay.inputs.k) return;
    const pair = this.#pairAt(event);
    showTip(pair && pairText(this.replay, ...pair), event.clientX, event.clientY);
  }

  /** When each tile is first touched and when it is done with. @param {Replay} replay */
  #index(replay) {
    const { workload: work } = replay.trace;
    this.band = bandOf(work);
    this.mBlocks = blocks(work.seqlen_q, work.block_m);
    this.blockN = replay.trace.algorithm === "naive" ? work.seqlen_k : work.block_n;
    this.nBlocks = blocks(work.seqlen_k, this.blockN);
    const grid = { blockM: work.block_m, blockN: this.blockN };
    const band = this.band;
    this.kinds = Array.from({ length: this.mBlocks * this.nBlocks }, (_, at) =>
      replay.trace.algorithm === "naive"
        ? /** @type {const} */ ("partial")
        : band.tileKind(Math.floor(at / this.nBlocks), at % this.nBlocks, grid),
    );
    this.first = new Int32Array(this.kinds.length).fill(-1);
    this.last = new Int32Array(this.kinds.length).fill(-1);
    replay.stops.forEach((stop, index) => {
      if (stop.mBlock === null || stop.nBlock === null) return;
      const at = stop.mBlock * this.nBlocks + stop.nBlock;
      if (this.first[at] < 0) this.first[at] = index + 1;
      this.last[at] = index + 1;
    });
  }

  /** @param {Strip["side"]} side */
  #on(side) {
    return this.strips.filter((strip) => strip.side === side);
  }

  /** @param {number} width @returns {Frame & {height: number}} */
  #frame(width) {
    const room = (/** @type {Strip["side"]} */ side) => this.#on(side).length * (STRIP + GAP);
    const work = this.replay?.trace.workload;
    const x = LABEL + room("left");
    const y = 4 + room("top") + LABEL;
    const most = width - x - room("right") - GAP;
    const [rows, cols] = work ? [work.seqlen_q, work.seqlen_k] : [1, 1];
    const cell = Math.max(1, Math.min(most / cols, this.tall / Math.max(rows, cols)));
    const height = y + cell * rows + room("bottom") + 4;
    // In the middle of its column, whatever the cells leave free.
    return { x: x + Math.max(0, (most - cell * cols) / 2), y, side: cell * cols, cell, height };
  }

  /** @param {CanvasRenderingContext2D} context @param {number} width @param {Colours} colours */
  #draw(context, width, colours) {
    if (this.replay === null) return;
    const frame = this.#frame(width);
    for (let m = 0; m < this.mBlocks; m++) {
      for (let n = 0; n < this.nBlocks; n++) this.#drawTile(context, frame, colours, m, n);
    }
    this.#drawCurrent(context, frame, colours);
    const sides = /** @type {Strip["side"][]} */ (["left", "top", "right", "bottom"]);
    for (const side of sides)
      this.#on(side).forEach((strip, index) => this.#drawStrip(context, frame, colours, strip, index));
  }

  /** @param {Frame} frame @param {number} m @param {number} n */
  #tileBox(frame, m, n) {
    const width = this.blockN;
    const { block_m: height, seqlen_q: rows, seqlen_k: cols } = /** @type {Replay} */ (this.replay).trace.workload;
    const [top, left] = [m * height, n * width];
    return {
      x: frame.x + left * frame.cell,
      y: frame.y + top * frame.cell,
      width: Math.min(width, cols - left) * frame.cell,
      height: Math.min(height, rows - top) * frame.cell,
    };
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {Frame} frame @param {Colours} colours @param {number} m
   * @param {number} n
   */
  #drawTile(context, frame, colours, m, n) {
    const box = this.#tileBox(frame, m, n);
    const at = m * this.nBlocks + n;
    const now = /** @type {Replay} */ (this.replay).at;
    const kind = this.kinds[at];
    const visited = kind !== "skip" && this.first[at] >= 0 && now >= this.first[at];
    context.fillStyle = kind === "skip" ? colours["skipped-soft"] : visited ? colours.sunken : colours.cell;
    context.fillRect(box.x, box.y, box.width, box.height);
    if (kind === "skip") hatch(context, box.x, box.y, box.width, box.height, colours.skipped);
    if (kind === "partial") this.#drawMasked(context, frame, colours, m, n);
    if (visited && now > this.last[at]) {
      context.fillStyle = colours.stored;
      const size = Math.min(3, box.width / 6);
      context.beginPath();
      context.arc(box.x + box.width / 2, box.y + box.height / 2, size, 0, 7);
      context.fill();
    }
    context.strokeStyle = colours.grid;
    context.lineWidth = 1;
    context.strokeRect(box.x + 0.5, box.y + 0.5, box.width - 1, box.height - 1);
  }

  /**
   * The pairs of a partial tile that are masked.
   * @param {CanvasRenderingContext2D} context @param {Frame} frame @param {Colours} colours @param {number} m
   * @param {number} n
   */
  #drawMasked(context, frame, colours, m, n) {
    const work = /** @type {Replay} */ (this.replay).trace.workload;
    context.fillStyle = colours.skipped;
    context.globalAlpha = 0.55;
    for (let row = m * work.block_m; row < Math.min((m + 1) * work.block_m, work.seqlen_q); row++) {
      for (let col = n * this.blockN; col < Math.min((n + 1) * this.blockN, work.seqlen_k); col++) {
        if (!this.band.sees(row, col))
          context.fillRect(frame.x + col * frame.cell, frame.y + row * frame.cell, frame.cell, frame.cell);
      }
    }
    context.globalAlpha = 1;
  }

  /**
   * The tile in work, with its numbers.
   * @param {CanvasRenderingContext2D} context @param {Frame} frame @param {Colours} colours
   */
  #drawCurrent(context, frame, colours) {
    const replay = /** @type {Replay} */ (this.replay);
    const stop = replay.stop;
    if (stop === null || stop.mBlock === null || stop.nBlock === null) return;
    const box = this.#tileBox(frame, stop.mBlock, stop.nBlock);
    const colour = this.phaseColours[stop.phase] ?? "computing";
    const work = replay.trace.workload;
    const shown = replay.buffers.get("p") ?? replay.buffers.get("ds") ?? replay.buffers.get("s");
    context.fillStyle = colours[`${colour}-soft`];
    context.fillRect(box.x, box.y, box.width, box.height);
    if (shown)
      this.#drawNumbers(
        context,
        frame,
        colours,
        colour,
        shown.matrix,
        stop.mBlock * work.block_m,
        stop.nBlock * this.blockN,
      );
    context.strokeStyle = colours[colour];
    context.lineWidth = 3;
    context.strokeRect(box.x + 1.5, box.y + 1.5, box.width - 3, box.height - 3);
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {Frame} frame @param {Colours} colours @param {string} colour
   * @param {Matrix} matrix @param {number} top @param {number} left
   */
  #drawNumbers(context, frame, colours, colour, matrix, top, left) {
    const most = Math.max(1e-9, ...Array.from(matrix.data, (value) => (Number.isFinite(value) ? Math.abs(value) : 0)));
    for (let row = 0; row < matrix.rows; row++) {
      for (let col = 0; col < matrix.cols; col++) {
        const value = matrix.data[row * matrix.cols + col];
        const [x, y] = [frame.x + (left + col) * frame.cell, frame.y + (top + row) * frame.cell];
        if (!this.band.sees(top + row, left + col)) {
          context.fillStyle = colours.skipped;
          context.fillRect(x, y, frame.cell, frame.cell);
          continue;
        }
        context.globalAlpha = 0.5 * Math.min(1, Math.abs(value) / most);
        context.fillStyle = colours[colour];
        context.fillRect(x, y, frame.cell, frame.cell);
        context.globalAlpha = 1;
        if (frame.cell >= EASY_TO_READ) {
          const size = frame.cell >= 44 ? 13 : 10;
          cellText(
            context,
            shortNumber(value, frame.cell >= 44 ? 2 : 1),
            x + frame.cell / 2,
            y + frame.cell / 2,
            frame.cell,
            colours.ink,
            size,
          );
        }
      }
    }
  }

  /**
   * One operand beside the matrix.
   * @param {CanvasRenderingContext2D} context @param {Frame} frame @param {Colours} colours @param {Strip} strip
   * @param {number} index
   */
  #drawStrip(context, frame, colours, strip, index) {
    const replay = /** @type {Replay} */ (this.replay);
    const work = replay.trace.workload;
    const upright = strip.side === "left" || strip.side === "right";
    const [length, block] = upright ? [work.seqlen_q, work.block_m] : [work.seqlen_k, this.blockN];
    const place = this.#stripPlace(frame, strip.side, index);
    for (let at = 0; at < blocks(length, block); at++) {
      const [from, to] = [at * block * frame.cell, Math.min((at + 1) * block, length) * frame.cell];
      const box = upright
        ? { x: place.x, y: place.y + from, width: STRIP, height: to - from }
        : { x: place.x + from, y: place.y, width: to - from, height: STRIP };
      this.#drawStripBlock(context, colours, strip, at * block, box);
    }
    const name = upright ? [place.x + STRIP / 2, place.y - LABEL / 2 + 1] : [place.x - 9, place.y + STRIP / 2 + 0.5];
    label(context, strip.name, name[0], name[1], colours.ink, upright ? "center" : "right");
  }

  /** @param {Frame} frame @param {Strip["side"]} side @param {number} index */
  #stripPlace(frame, side, index) {
    const step = STRIP + GAP;
    const rows = /** @type {Replay} */ (this.replay).trace.workload.seqlen_q * frame.cell;
    if (side === "left") return { x: frame.x - step * (this.#on(side).length - index), y: frame.y };
    if (side === "right") return { x: frame.x + frame.side + GAP + step * index, y: frame.y };
    if (side === "top") return { x: frame.x, y: frame.y - LABEL - step * (this.#on(side).length - index) };
    return { x: frame.x, y: frame.y + rows + GAP + step * index };
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {Colours} colours @param {Strip} strip @param {number} row
   * @param {{x: number, y: number, width: number, height: number}} box
   */
  #drawStripBlock(context, colours, strip, row, box) {
    const replay = /** @type {Replay} */ (this.replay);
    const buffer = replay.buffers.get(strip.buffer);
    const rows = buffer?.rows ?? this.#rowsInWork(strip);
    const here = buffer !== undefined && rows !== null && rows[0] === row;
    const writes = strip.result ? (replay.written.get(strip.array)?.[row] ?? 0) : 0;
    const how = here ? (buffer.stored ? "stored" : buffer.how === "held" ? "loaded" : buffer.how) : null;
    context.fillStyle = how ? colours[`${how}-soft`] : writes ? colours["stored-soft"] : colours.cell;
    context.fillRect(box.x, box.y, box.width, box.height);
    context.strokeStyle = how ? colours[how] : writes ? colours.stored : colours.grid;
    context.lineWidth = how ? 2.5 : 1;
    const inset = how ? 1.25 : 0.5;
    context.strokeRect(box.x + inset, box.y + inset, box.width - 2 * inset, box.height - 2 * inset);
    if (writes && Math.min(box.width, box.height) >= 12) {
      cellText(context, `${writes}×`, box.x + box.width / 2, box.y + box.height / 2 + 0.5, box.width, colours.ink, 11);
    }
  }

  /** Where a buffer belongs that was not loaded but set up in fast memory. @param {Strip} strip */
  #rowsInWork(strip) {
    const replay = /** @type {Replay} */ (this.replay);
    const work = replay.trace.workload;
    const upright = strip.side === "left" || strip.side === "right";
    const block = upright ? replay.stop?.mBlock : replay.stop?.nBlock;
    return block === null || block === undefined ? null : [block * (upright ? work.block_m : this.blockN), 0];
  }

  destroy() {
    this.figure.destroy();
  }
}

/**
 * "q₃·k₂ = 1.20, times 0.707 is the score 0.85; weight 0.31": computed from the inputs.
 * @param {Replay} replay @param {number} row @param {number} col
 */
export function pairText(replay, row, col) {
  const { workload: work } = replay.trace;
  const { q, k } = replay.inputs;
  const product = (/** @type {number} */ key) => {
    let sum = 0;
    for (let at = 0; at < work.head_dim; at++) sum += q.data[row * q.cols + at] * k.data[key * k.cols + at];
    return sum;
  };
  const band = bandOf(work);
  const own = product(col);
  const name = `Query ${row}, key ${col}: q·k = ${shortNumber(own, 2)}`;
  if (!band.sees(row, col)) return `${name}, but the pair is masked: its weight is 0.`;
  const scores = Array.from({ length: work.seqlen_k }, (_, key) =>
    band.sees(row, key) ? product(key) * work.scale : -Infinity,
  );
  const top = Math.max(...scores);
  const sum = scores.reduce((total, score) => total + Math.exp(score - top), 0);
  const weight = Math.exp(scores[col] - top) / sum;
  return `${name}; × ${shortNumber(work.scale)} = score ${shortNumber(scores[col])}; weight in the row's softmax ${shortNumber(weight)}.`;
}
