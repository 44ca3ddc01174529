/** Two caches that live through the same story: reserved for the longest request, and in pages. */

import { fa2 } from "tilewise/engine/attention.js";
import { differenceFromNaive } from "tilewise/engine/check.js";
import { someNumbers } from "tilewise/engine/numbers.js";
import { workload } from "tilewise/engine/recorder.js";
import { parseScript, play } from "tilewise/engine/script.js";
import { PictureScene, box, words } from "tilewise/lesson/picture.js";
import { plural } from "tilewise/ui/format.js";

/** @typedef {import("tilewise/ui/form.js").Values} Values */

const SIZES = { pages: 16, page: 4, max: 16, slots: 4 };
const DIM = 2;

export class PagesScene extends PictureScene {
  /** @param {Record<string, string>} stories */
  constructor(stories) {
    super();
    this.stories = stories;
  }

  /** @param {Values} values */
  set({ story }) {
    this.script = parseScript(this.stories[story]);
    this.letters = [...new Set(this.script.map((action) => action.request))];
    this.length = this.script.length;
  }

  /** @param {number} at */
  show(at) {
    this.played = play((this.script ?? []).slice(0, at), SIZES);
    super.show(at);
  }

  get state() {
    const played = /** @type {ReturnType<typeof play>} */ (this.played);
    const named = [...played.paged.tables.values()].reduce((sum, table) => sum + table.length, 0);
    return { ...played, action: (this.script ?? [])[this.at - 1], named, saved: named - played.paged.reservedPages };
  }

  /** Attention of one query over a request's keys, read through its page table: the difference from naive. */
  get error() {
    const { paged } = this.state;
    const errors = [...paged.tables].map(([request, table], index) => {
      const tokens = paged.tokens.get(request) ?? 0;
      const work = workload({
        seqlen_q: 1,
        seqlen_k: tokens,
        head_dim: DIM,
        head_dim_v: DIM,
        block_m: 1,
        block_n: paged.pageSize,
      });
      const inputs = {
        q: someNumbers(1, DIM, index + 1),
        k: someNumbers(tokens, DIM, index + 2),
        v: someNumbers(tokens, DIM, index + 3),
      };
      // Written to the pages of the table, and read back through it.
      const store = {
        k: new Float64Array(paged.numPages * paged.pageSize * DIM),
        v: new Float64Array(paged.numPages * paged.pageSize * DIM),
      };
      const slot = (/** @type {number} */ token) =>
        table[Math.floor(token / paged.pageSize)] * paged.pageSize + (token % paged.pageSize);
      const back = /** @type {const} */ (["k", "v"]).map((name) => {
        for (let token = 0; token < tokens; token++)
          store[name].set(inputs[name].data.subarray(token * DIM, (token + 1) * DIM), slot(token) * DIM);
        const data = new Float64Array(tokens * DIM);
        for (let token = 0; token < tokens; token++)
          data.set(store[name].subarray(slot(token) * DIM, (slot(token) + 1) * DIM), token * DIM);
        return { rows: tokens, cols: DIM, data };
      });
      const through = differenceFromNaive(fa2, work, { q: inputs.q, k: back[0], v: back[1] });
      const moved = Math.max(...back[0].data.map((one, at) => Math.abs(one - inputs.k.data[at])));
      return Math.max(through, moved);
    });
    return Math.max(0, ...errors);
  }

  description() {
    const { paged, contiguous } = this.state;
    return `Reserved: ${contiguous.reservedPages} of ${contiguous.numPages} pages, ${contiguous.wastedPages} of them empty. Paged: ${paged.reservedPages} of ${paged.numPages} pages taken, ${plural(paged.free.length, "page")} free.`;
  }

  /** @param {boolean} narrow */
  draw(narrow) {
    const { paged, contiguous, fresh } = this.state;
    const width = narrow ? 400 : 700;
    const side = narrow ? 384 : 336;
    const filled = paged.fill();
    const fresh_ = (/** @type {any[]} */ events, /** @type {number} */ from, /** @type {number} */ page) =>
      events
        .slice(from)
        .filter((event) => event.page === page)
        .map((event) => event.kind)
        .pop() ?? "";
    const reserved = Array.from({ length: SIZES.pages }, (_, page) => {
      const request = contiguous.slots[Math.floor(page / contiguous.pagesPerSlot)] ?? null;
      const tokens =
        request === null ? 0 : (contiguous.tokens.get(request) ?? 0) - (page % contiguous.pagesPerSlot) * SIZES.page;
      return {
        holders: request === null ? [] : [request],
        filled: Math.max(0, Math.min(SIZES.page, tokens)),
        event: fresh_(contiguous.events, fresh.contiguous, page),
      };
    });
    const onDemand = Array.from({ length: SIZES.pages }, (_, page) => ({
      holders: [...paged.tables].filter(([, table]) => table.includes(page)).map(([request]) => request),
      filled: filled.get(page) ?? 0,
      event: fresh_(paged.events, fresh.paged, page),
    }));
    const second = narrow ? { x: 8, y: 206 } : { x: 360, y: 0 };
    const tables = [...paged.tables];
    const tableTop = narrow ? 412 : 214;
    return {
      width,
      height: tableTop + (narrow ? 108 : 96),
      parts: [
        words(
          "name start",
          8,
          18,
          `reserved: ${contiguous.reservedPages} of ${SIZES.pages} pages, ${contiguous.wastedPages} of them empty`,
        ),
        this.#pool(reserved, 8, 28, side),
        words(
          "name start",
          second.x,
          second.y + 18,
          `in pages: ${paged.reservedPages} of ${SIZES.pages} taken, ${paged.free.length} free`,
        ),
        this.#pool(onDemand, second.x, second.y + 28, side),
        words(
          "note",
          8,
          tableTop,
          tables.length
            ? "page tables: which pages hold a request's tokens, in order"
            : "page tables: no request is here",
        ),
        tables.map(([request, table], at) => {
          const columns = narrow ? 2 : 4;
          const [x, y] = [8 + (at % columns) * ((width - 16) / columns), tableTop + 12 + Math.floor(at / columns) * 30];
          return [
            box(`worker ${this.#colour(request)} read`, x, y, 24, 22, { rx: 4 }),
            words("value on-colour", x + 12, y + 16, request),
            words("value start", x + 32, y + 16, `${table.join(", ")}`),
          ];
        }),
      ],
    };
  }

  /** @param {string} request */
  #colour(request) {
    return `r${(this.letters ?? []).indexOf(request) % 10}`;
  }

  /** @param {{holders: string[], filled: number, event: string}[]} pages @param {number} x @param {number} y @param {number} side */
  #pool(pages, x, y, side) {
    const [wide, tall] = [side / 4, 40];
    return pages.map(({ holders, filled, event }, page) => {
      const [left, top] = [x + (page % 4) * wide, y + Math.floor(page / 4) * tall];
      const colour = holders.length ? this.#colour(holders[0]) : "";
      const slot = (wide - 16) / SIZES.page;
      return [
        box(
          `page-box ${colour} ${holders.length > 1 ? "shared" : ""} ${event}`,
          left + 2,
          top + 2,
          wide - 5,
          tall - 5,
          { rx: 5 },
        ),
        words("note tiny start", left + 7, top + 15, String(page)),
        words("value end", left + wide - 9, top + 16, holders.join(" ")),
        Array.from({ length: SIZES.page }, (_, at) =>
          box(`slot-box ${colour} ${at < filled ? "full" : ""}`, left + 6 + at * slot, top + 20, slot - 2, 11, {
            rx: 2,
          }),
        ),
      ];
    });
  }
}
