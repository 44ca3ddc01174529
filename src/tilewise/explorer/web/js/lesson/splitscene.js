/** One query against a cache whose keys are split among workers: they run at the same time, and their parts are merged. */

import { decode } from "tilewise/engine/attention.js";
import { finished, largestDifference, slow } from "tilewise/engine/check.js";
import { naive } from "tilewise/engine/attention.js";
import { someNumbers } from "tilewise/engine/numbers.js";
import { workload } from "tilewise/engine/recorder.js";
import { PictureScene, box, words } from "tilewise/lesson/picture.js";
import { svg } from "tilewise/ui/dom.js";
import { shortNumber } from "tilewise/ui/format.js";

/** @typedef {import("tilewise/ui/form.js").Values} Values */

const [KEYS, PAGE, DIM] = [48, 4, 2];
const PAGES = KEYS / PAGE;

export class SplitScene extends PictureScene {
  /** @param {Values} values */
  set({ workers }) {
    const splits = Number(workers);
    const work = workload({
      seqlen_q: 1,
      seqlen_k: KEYS,
      head_dim: DIM,
      head_dim_v: DIM,
      block_m: 1,
      block_n: PAGE,
      scale: 1 / Math.sqrt(DIM),
      num_splits: splits,
    });
    const inputs = { q: someNumbers(1, DIM, 11), k: someNumbers(KEYS, DIM, 12), v: someNumbers(KEYS, DIM, 13) };
    const machine = finished(decode(work), inputs);
    const lse = Array.from((machine.slow.get("lse_partial") ?? slow(machine, "lse")).data);
    const parts = (machine.slow.get("out_partial") ?? slow(machine, "out")).data;
    const top = Math.max(...lse);
    const weights = lse.map((one) => Math.exp(one - top));
    const sum = weights.reduce((total, one) => total + one, 0);
    this.workers = Array.from({ length: splits }, (_, part) => ({
      first: Math.floor((part * PAGES) / splits),
      stop: Math.floor(((part + 1) * PAGES) / splits),
      lse: lse[part],
      weight: weights[part],
      share: weights[part] / sum,
      out: Array.from({ length: DIM }, (_, dim) => parts[part * DIM + dim]),
    }));
    this.merged = Array.from(slow(machine, "out").data);
    this.error = largestDifference(slow(machine, "out"), slow(finished(naive(work), inputs), "out"));
    this.rounds = Math.max(...this.workers.map((one) => one.stop - one.first));
    // Reading, then the weights, then the merge.
    this.length = this.rounds + (splits > 1 ? 2 : 1);
  }

  get state() {
    const rounds = /** @type {number} */ (this.rounds);
    const workers = /** @type {NonNullable<SplitScene["workers"]>} */ (this.workers);
    const read = workers.map((one) => Math.min(this.at, one.stop - one.first));
    return {
      workers,
      read,
      rounds,
      pages: PAGES,
      done: this.at >= rounds,
      weighed: this.at > rounds && workers.length > 1,
      merged: this.at === this.length ? /** @type {number[]} */ (this.merged) : null,
    };
  }

  description() {
    const { workers, read, merged } = this.state;
    const each = workers.map((one, at) => `worker ${at + 1} has read ${read[at]} of ${one.stop - one.first} pages`);
    return `${each.join(", ")}.${merged ? ` Merged output ${merged.map((one) => shortNumber(one)).join(", ")}.` : ""}`;
  }

  /** @param {boolean} narrow */
  draw(narrow) {
    const { workers, read, done, weighed, merged } = this.state;
    const width = narrow ? 400 : 700;
    const left = 10;
    const page = (width - 20) / PAGES;
    const pages = workers.flatMap((one, part) =>
      Array.from({ length: one.stop - one.first }, (_, at) => {
        const x = left + (one.first + at) * page;
        const active = at === read[part] - 1 && !done;
        return [
          box(`worker r${part} ${at < read[part] ? "read" : ""} ${active ? "active" : ""}`, x + 1, 34, page - 2, 44, {
            rx: 4,
          }),
          words(
            "note mid",
            x + page / 2,
            92,
            narrow ? (one.first + at) * PAGE : `${(one.first + at) * PAGE}–${(one.first + at) * PAGE + PAGE - 1}`,
          ),
        ];
      }),
    );
    const slot = (width - 20) / workers.length;
    const boxes = workers.map((one, part) => {
      const [x, wide] = [left + part * slot + 3, slot - 6];
      const head = left + ((one.first + one.stop) / 2) * page;
      const ready = read[part] >= one.stop - one.first;
      return [
        svg("path", { class: "wire plain", d: `M${head} 98C${head} 118 ${x + wide / 2} 108 ${x + wide / 2} 126` }),
        box(`worker r${part} frame-only`, x, 126, wide, 66, { rx: 6 }),
        words("name", x + wide / 2, 144, narrow && workers.length > 3 ? `${part + 1}` : `worker ${part + 1}`),
        words(
          "note mid",
          x + wide / 2,
          162,
          ready ? `lse ${shortNumber(one.lse, 2)}` : `${read[part]} of ${one.stop - one.first}`,
        ),
        ready &&
          !(narrow && workers.length > 3) &&
          words("note mid", x + wide / 2, 180, `O (${one.out.map((n) => shortNumber(n, 2)).join(", ")})`),
        weighed && box(`worker r${part} read`, x + wide * 0.2, 270 - 56 * one.weight, wide * 0.6, 56 * one.weight),
        weighed &&
          words(
            "note mid",
            x + wide / 2,
            284,
            narrow && workers.length > 3 ? shortNumber(one.share, 2) : `share ${shortNumber(one.share)}`,
          ),
      ];
    });
    return {
      width,
      height: 344,
      parts: [
        words(
          "note",
          left,
          22,
          narrow
            ? `${KEYS} keys of the cache, in pages of ${PAGE}`
            : `${KEYS} keys of the cache, in pages of ${PAGE}; the query is compared with all of them`,
        ),
        pages,
        boxes,
        weighed && words("note", left, 208, "e^(lse − largest lse)"),
        box(`cell ${merged ? "stored" : ""}`, width / 2 - 150, 298, 300, 40, { rx: 6 }),
        words(
          "name",
          width / 2,
          323,
          merged ? `O = (${merged.map((one) => shortNumber(one)).join(", ")})` : "O: not known yet",
        ),
      ],
    };
  }
}
