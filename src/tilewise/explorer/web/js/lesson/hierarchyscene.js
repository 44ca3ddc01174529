/** Two memories to scale, and what the attention of one head takes to compute and to move. */

import { Band } from "tilewise/engine/band.js";
import { elements, forwardFlops, naiveForward, tiledForward } from "tilewise/engine/cost.js";
import { PictureScene, box, words } from "tilewise/lesson/picture.js";
import { svg } from "tilewise/ui/dom.js";
import { formatBytes, formatCount, formatSeconds } from "tilewise/ui/format.js";

/** @typedef {import("tilewise/ui/form.js").Values} Values */

const [TOKENS, DIM, BLOCK, ITEM] = [4096, 64, 128, 2];

export class HierarchyScene extends PictureScene {
  /** @param {any} data */
  constructor(data) {
    super();
    this.chips = data.lesson_devices;
    this.length = 4;
    this.chip = this.chips[0];
  }

  /** @param {Values} values */
  set(values) {
    this.chip = this.chips.find((/** @type {any} */ chip) => chip.key === values.device) ?? this.chips[0];
    const band = new Band(TOKENS, TOKENS);
    const [naive, tiled] = [
      elements(naiveForward(band, DIM, DIM)) * ITEM,
      elements(tiledForward(band, { blockM: BLOCK, blockN: BLOCK }, DIM, DIM)) * ITEM,
    ];
    const flops = forwardFlops(TOKENS * TOKENS, DIM, DIM);
    this.facts = {
      flops,
      naive,
      tiled,
      compute: flops / this.chip.flops,
      naiveTime: naive / this.chip.bandwidth,
      tiledTime: tiled / this.chip.bandwidth,
    };
  }

  description() {
    const { chip } = this;
    return `${chip.name}: ${formatCount(chip.slow_bytes, "B")} of ${chip.slow_name} at ${formatCount(chip.bandwidth, "B/s")}; ${formatBytes(chip.cores * chip.fast_bytes)} of ${chip.fast_name} at ${formatCount(chip.fast_bandwidth, "B/s")}; ${formatCount(chip.flops, "FLOP/s")}.`;
  }

  /** @param {boolean} narrow */
  draw(narrow) {
    const { chip } = this;
    const width = narrow ? 400 : 700;
    const scale = Math.sqrt((chip.cores * chip.fast_bytes) / chip.slow_bytes);
    const hbm = narrow ? { x: 8, y: 24, width: 150, height: 130 } : { x: 4, y: 28, width: 220, height: 170 };
    const chipBox = narrow ? { x: 258, y: 24, width: 134, height: 130 } : { x: 432, y: 28, width: 264, height: 170 };
    const side = [Math.max(2, hbm.width * scale), Math.max(2, hbm.height * scale)];
    const middle = hbm.y + hbm.height / 2;
    // The pipes are as thick as the memories are fast.
    const thick = Math.max(2, (60 * chip.bandwidth) / chip.fast_bandwidth);
    const parts = [
      box("hbm-box", hbm.x, hbm.y, hbm.width, hbm.height, { rx: 8 }),
      words("name", hbm.x + hbm.width / 2, hbm.y - 8, `${chip.slow_name}: large and slow`),
      words("big", hbm.x + hbm.width / 2, middle, formatCount(chip.slow_bytes, "B")),
      words("note mid", hbm.x + hbm.width / 2, middle + 20, `${formatCount(chip.bandwidth, "B/s")}`),
      box("sram-box", chipBox.x, chipBox.y, chipBox.width, chipBox.height, { rx: 8 }),
      words(
        "name",
        chipBox.x + chipBox.width / 2,
        chipBox.y - 8,
        narrow ? "on the chip" : "on the chip: small and fast",
      ),
      words(
        "big",
        chipBox.x + chipBox.width / 2,
        chipBox.y + (narrow ? 26 : 34),
        formatBytes(chip.cores * chip.fast_bytes),
      ),
      words(
        "note mid",
        chipBox.x + chipBox.width / 2,
        chipBox.y + (narrow ? 44 : 54),
        narrow
          ? `${chip.cores} × ${formatBytes(chip.fast_bytes)}`
          : `${chip.fast_name}: ${chip.cores} × ${formatBytes(chip.fast_bytes)}`,
      ),
      words(
        "note mid",
        chipBox.x + chipBox.width / 2,
        chipBox.y + (narrow ? 60 : 74),
        formatCount(chip.fast_bandwidth, "B/s"),
      ),
      box("dot-scale", chipBox.x + chipBox.width / 2 - side[0] / 2, chipBox.y + (narrow ? 70 : 86), side[0], side[1]),
      words(
        "note mid",
        chipBox.x + chipBox.width / 2,
        chipBox.y + (narrow ? 92 : 112),
        narrow ? "dot: to scale" : "this dot: its size to scale",
      ),
      box(
        "alu",
        chipBox.x + 10,
        chipBox.y + chipBox.height - (narrow ? 32 : 46),
        chipBox.width - 20,
        narrow ? 26 : 38,
        { rx: 5 },
      ),
      words(
        "note mid strong",
        chipBox.x + chipBox.width / 2,
        chipBox.y + chipBox.height - (narrow ? 15 : 22),
        narrow ? formatCount(chip.flops, "FLOP/s") : `arithmetic: ${formatCount(chip.flops, "FLOP/s")}`,
      ),
      svg("path", { class: "pipe", d: `M${hbm.x + hbm.width} ${middle}H${chipBox.x}`, "stroke-width": thick }),
      svg("path", {
        class: "flow",
        d: `M${hbm.x + hbm.width} ${middle}H${chipBox.x}`,
        "stroke-width": Math.max(2, thick / 2),
      }),
      words(
        "note mid",
        (hbm.x + hbm.width + chipBox.x) / 2,
        middle - thick / 2 - 8,
        narrow
          ? `${(chip.fast_bandwidth / chip.bandwidth).toFixed(0)}× slower`
          : `${(chip.fast_bandwidth / chip.bandwidth).toFixed(0)}× slower than the chip's own`,
      ),
    ];
    return { width, height: narrow ? 350 : 372, parts: [...parts, this.#bars(narrow, width, narrow ? 186 : 232)] };
  }

  /** The three times, as far as they have been told. @param {boolean} narrow @param {number} width @param {number} top */
  #bars(narrow, width, top) {
    const facts = /** @type {NonNullable<HierarchyScene["facts"]>} */ (this.facts);
    const rows = /** @type {const} */ ([
      ["arithmetic", facts.compute, formatCount(facts.flops, "FLOP"), "computing"],
      ["moving bytes, naive", facts.naiveTime, formatBytes(facts.naive), "bad"],
      ["moving bytes, tiled", facts.tiledTime, formatBytes(facts.tiled), "loaded"],
    ]);
    const most = Math.max(...rows.map(([, seconds]) => seconds));
    const left = narrow ? 8 : 180;
    const room = width - left - (narrow ? 150 : 190);
    const step = narrow ? 50 : 44;
    return rows.slice(0, this.at).map(([name, seconds, amount, kind], at) => {
      const y = top + at * step + (narrow ? 16 : 0);
      return [
        narrow ? words("note", left, y - 4, name) : words("name end", left - 12, y + 19, name),
        box(`bar-fill ${kind}`, left, y, (room * seconds) / most, 26, { rx: 3 }),
        words("value start", left + (room * seconds) / most + 8, y + 18, `${formatSeconds(seconds)} (${amount})`),
      ];
    });
  }
}
