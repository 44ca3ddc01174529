/** The numbers of the articles the explorer follows, computed here, with what is counted. */

import { Band } from "tilewise/engine/band.js";
import { elements, naiveForward, scoreMatrixBytes, statisticsBytes, tiledForward } from "tilewise/engine/cost.js";
import { onlineSoftmax } from "tilewise/engine/softmax.js";
import { parseScript, play } from "tilewise/engine/script.js";
import { h } from "tilewise/ui/dom.js";
import { formatBytes, grouped } from "tilewise/ui/format.js";
import { table } from "tilewise/ui/parts.js";

const FOUR = "A arrives 5\nB arrives 14\nC arrives 3\nD arrives 8";
export const PROMPT = "A arrives 8\nB shares A\nC shares A\nD shares A\nA grows 6\nB grows 7\nC grows 5\nD grows 8";

/** @param {string} address @param {string} text */
function link(address, text) {
  return h("a", { href: `#${address}` }, text);
}

/** FA-1's rule: a quarter of the fast memory for each of Q, K, V and O. @param {number} kilobytes @param {number} d */
export function blockRule(kilobytes, d) {
  const numbers = (kilobytes * 1024) / 2;
  const keys = Math.ceil(numbers / (4 * d));
  return { keys, queries: Math.min(keys, d) };
}

export function articleTable() {
  const { states, probabilities } = onlineSoftmax([2, 8, 1, 9, 3, 7], 3);
  const six = onlineSoftmax([1, 2, 3, 6, 2, 1], 3);
  const grid = { blockM: 128, blockN: 128 };
  const rows = [256, 512, 1024, 2048, 4096].map((n) => {
    const band = new Band(n, n);
    const [one, other] = [elements(naiveForward(band, 64, 64)), elements(tiledForward(band, grid, 64, 64))];
    return `${grouped(n)}: ${grouped(one)} / ${grouped(other)} = ${(one / other).toFixed(1)}`;
  });
  const { contiguous } = play(parseScript(FOUR), { pages: 16, page: 4, max: 16, slots: 4 });
  const { paged } = play(parseScript(PROMPT), { pages: 16, page: 4, max: 16, slots: 4 });
  const named = [...paged.tables.values()].reduce((sum, pages) => sum + pages.length, 0);
  const saved = named - paged.reservedPages;
  return h(
    "section",
    { class: "panel lesson-notes", "aria-label": "Numbers of the articles" },
    h("h3", {}, "The articles' numbers", h("small", {}, "computed here, with what is counted")),
    table(
      ["what", "computed here", "what is counted"],
      [
        [
          link("softmax?step=5", "six numbers, 2 8 1 | 9 3 7"),
          `l = ${states[0].rowSum.toFixed(4)}, factor ${states[1].correction.toFixed(3)}, l = ${states[1].rowSum.toFixed(4)}; largest weight ${Math.max(...probabilities).toFixed(3)}`,
          "articles cut the last sum to 1.506; rounded it is 1.507",
        ],
        [
          link("softmax?row=1%2C+2%2C+3%2C+6%2C+2%2C+1", "six numbers, 1 2 3 | 6 2 1"),
          six.probabilities.map((p) => p.toFixed(6)).join(" "),
          `l = ${six.states[0].rowSum.toFixed(3)}, then ${six.states[1].rowSum.toFixed(4)}; articles cut it to 1.0998`,
        ],
        [
          link("traffic", "five rows of traffic"),
          rows.join("; "),
          "elements read and written by naive attention / FA-2, d = 64, tiles of 128 × 128, without fp32 statistics",
        ],
        [
          link("traffic", "size of the score matrix"),
          [1024, 4096, 16384]
            .map(
              (n) =>
                `${grouped(n)}: ${formatBytes(scoreMatrixBytes(n, 4))}, m and l ${formatBytes(statisticsBytes(n))}`,
            )
            .join("; "),
          "one head, 4-byte numbers; KiB, MiB and GiB are powers of 1,024",
        ],
        [
          link("tiles", "tile sizes for 96, 164, 228 KB"),
          [96, 164, 228]
            .map((size) => `${size} KB: ${blockRule(size, 64).keys} keys × ${blockRule(size, 64).queries} queries`)
            .join("; "),
          "FA-1's rule, keys = M / 4d, queries = min(keys, d), with M 2-byte numbers of SRAM and d = 64; scores and statistics are not counted, so real tiles are smaller",
        ],
        [
          link("paging?pages=16&step=4", "four paging steps, 16 pages"),
          `${contiguous.reservedPages} reserved, ${contiguous.usedPages} used, ${contiguous.wastedPages} wasted`,
          "pages of 4 tokens that hold at least one token are used",
        ],
        [
          link(`paging?pages=16&script=${encodeURIComponent(PROMPT)}&step=8`, "copy on write, 30–50 %"),
          `${saved} of ${named} pages saved, ${Math.round((100 * saved) / named)} %`,
          "pages that the tables name more than once, of all they name",
        ],
      ],
      "Numbers of the articles",
    ),
  );
}
