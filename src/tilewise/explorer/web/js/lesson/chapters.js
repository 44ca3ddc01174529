/** The tour, in order: twelve pages in ten chapters. */

import { causal } from "tilewise/lesson/chapters/causal.js";
import { fa1Chapter } from "tilewise/lesson/chapters/fa1.js";
import { fa2Chapter } from "tilewise/lesson/chapters/fa2.js";
import { fa3 } from "tilewise/lesson/chapters/fa3.js";
import { memory } from "tilewise/lesson/chapters/memory.js";
import { naiveChapter } from "tilewise/lesson/chapters/naive.js";
import { online } from "tilewise/lesson/chapters/online-softmax.js";
import { pages } from "tilewise/lesson/chapters/pages.js";
import { recompute } from "tilewise/lesson/chapters/recompute.js";
import { resists } from "tilewise/lesson/chapters/softmax-resists.js";
import { split } from "tilewise/lesson/chapters/split-decoding.js";
import { tiledMatmul } from "tilewise/lesson/chapters/tiled-matmul.js";

/** @type {import("tilewise/lesson/view.js").Chapter[]} */
export const CHAPTERS = [
  memory,
  naiveChapter,
  tiledMatmul,
  resists,
  online,
  fa1Chapter,
  fa2Chapter,
  causal,
  recompute,
  fa3,
  split,
  pages,
];
