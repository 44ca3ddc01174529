import { PagesScene } from "tilewise/lesson/pagesscene.js";
import { difference } from "tilewise/ui/format.js";
import { happened } from "tilewise/views/pagingcaptions.js";

const STORIES = {
  four: "A arrives 5\nB arrives 14\nC arrives 3\nD arrives 8\nE arrives 4\nC finishes\nE grows 1\nA grows 4\nB finishes",
  shared: "A arrives 10\nB shares A\nC shares A\nB grows 3\nC grows 2\nD shares A\nD grows 4\nA finishes",
};

/** @type {import("tilewise/lesson/view.js").Chapter} */
export const pages = {
  id: "pages",
  number: "10b",
  title: "Pages, sharing, copy on write",
  text: [
    "Nobody knows how long a request will become: if the KV cache is reserved for the longest, most of it stays empty.",
    "In pages of a few tokens memory goes out on demand and comes back at once; a page table says which pages hold a request's tokens.",
    "Requests with the same beginning can share its pages until one of them writes: then that page is copied first (copy on write).",
  ],
  bench: "paging",
  controls: () => [
    {
      key: "story",
      label: "Story",
      type: "select",
      value: "four",
      options: [
        ["four", "four requests and a fifth"],
        ["shared", "a shared prompt"],
      ],
    },
  ],
  scene: () => new PagesScene(STORIES),
  code: [
    "a request arrives: take a page for every 4 tokens",
    "it grows: use its last page, then take another",
    "it shares: copy the table, not the pages",
    "it writes to a shared page: copy that page first",
    "it finishes: give back what nobody else holds",
  ],
  lines: (scene) => {
    const { action, paged, fresh } = scene.state;
    if (action === undefined) return [];
    const copied = paged.events.slice(fresh.paged).some((/** @type {any} */ event) => event.kind === "copy");
    return /** @type {Record<string, number[]>} */ ({
      arrives: [0],
      grows: copied ? [1, 3] : [1],
      shares: [2],
      finishes: [4],
    })[action.kind];
  },
  say: (scene) => {
    const { action, saved, named } = scene.state;
    const share = saved > 0 ? ` Sharing saves ${saved} of ${named} pages, ${Math.round((100 * saved) / named)} %.` : "";
    return action === undefined
      ? "Both caches are empty: 16 pages of 4 tokens each."
      : happened(action, scene.state) + share;
  },
  result: (scene) =>
    `Same result as naive attention over the request's own keys, read through the page tables: largest difference ${difference(scene.error)}.`,
  questions: [
    {
      ask: "Requests of 5, 14, 3 and 8 tokens, pages of 4 tokens, 16 tokens reserved for each. How many reserved pages stay empty?",
      choices: ["2", "7", "9"],
      right: 1,
      why: "16 pages are reserved, and 2 + 4 + 1 + 2 = 9 of them hold a token.",
    },
    {
      ask: "B shares A's 10 tokens (3 pages) and then writes one token. How many pages are copied?",
      choices: ["none", "1", "3"],
      right: 1,
      why: "Only the last, half-filled page is written to. The two full ones stay shared.",
    },
  ],
  notes: {
    goal: "Everybody can read a page table and say when a page is copied.",
    minutes: 7,
    script: [
      "Four requests arrive: count the empty pages on the left.",
      "E is refused on the left although pages are empty, and fits on the right.",
      "C finishes; its page goes to E.",
      "Change the story: three requests share a prompt, and the first write copies one page.",
    ],
    question: "What does paging cost?",
    answer: "One look into the table for each page, and at most one page that is not full for each request.",
  },
};
