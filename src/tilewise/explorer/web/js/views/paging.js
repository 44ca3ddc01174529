/** Decode and paging: requests arrive, grow and finish, in pages on demand and in contiguous reservations. */

import { decode, fa2 } from "tilewise/engine/attention.js";
import { MOST_ACTIONS, parseScript, play } from "tilewise/engine/script.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { grouped, plural } from "tilewise/ui/format.js";
import { caption, counter, folded, heading } from "tilewise/ui/parts.js";
import { Player } from "tilewise/ui/player.js";
import { happened } from "tilewise/views/pagingcaptions.js";
import { createSplitPanel } from "tilewise/views/splitpanel.js";

/** @typedef {import("tilewise/main.js").Context} Context */
/** @typedef {ReturnType<typeof play>} State */

const LECTURE =
  "A arrives 5\nB arrives 14\nC arrives 3\nD arrives 8\nE arrives 4\nC finishes\nE grows 1\nA grows 4\nB finishes";
const PROMPT =
  "A arrives 10\nB shares A\nC shares A\nB grows 3\nC grows 2\nD shares A\nA finishes\nB grows 4\nC finishes";
const SYSTEM =
  "A arrives 8\nB shares A\nC shares A\nD shares A\nA grows 6\nB grows 7\nC grows 5\nD grows 8\nA finishes\nB finishes";
const BUSY =
  "A arrives 3\nB arrives 6\nC arrives 2\nD arrives 4\nE arrives 5\nF arrives 3\nA grows 1\nC grows 2\nG arrives 7\nH arrives 4\nD finishes\nI arrives 6\nB grows 2\nE grows 3\nJ arrives 4\nK arrives 8";

/** @type {import("tilewise/ui/form.js").Spec[]} */
const SPECS = [
  { key: "pages", label: "Pages", type: "number", value: 20, min: 1, max: 64 },
  { key: "page", label: "Tokens a page", type: "number", value: 4, min: 1, max: 16 },
  {
    key: "max",
    label: "Longest request",
    type: "number",
    value: 16,
    min: 1,
    max: 256,
    help: "What a contiguous cache reserves for every request",
  },
  {
    key: "slots",
    label: "Batch slots",
    type: "number",
    value: 4,
    min: 0,
    max: 64,
    help: "Requests a contiguous cache is built for; 0: as many as fit",
  },
  { key: "script", label: "What happens", type: "text", value: LECTURE, parse: parseScript, rows: 9 },
];

const PRESETS = /** @type {[string, Record<string, any>][]} */ ([
  ["Four requests, 16 pages", { pages: 16, page: 4, max: 16, slots: 4, script: LECTURE }],
  ["Four requests and a fifth", { pages: 20, page: 4, max: 16, slots: 4, script: LECTURE }],
  ["Shared prompt, copy on write", { pages: 16, page: 4, max: 16, slots: 0, script: PROMPT }],
  ["A system prompt: 30–50 % saved", { pages: 16, page: 4, max: 16, slots: 4, script: SYSTEM }],
  ["A busy server", { pages: 16, page: 4, max: 32, slots: 0, script: BUSY }],
]);

/** @param {Context} context @returns {import("tilewise/main.js").View} */
export function createPagingView(context) {
  return new PagingView(context);
}

class PagingView {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.form = new Form(SPECS, valuesFrom(SPECS, context.params), () => this.#rebuild(0));
    this.text = caption();
    this.contiguous = this.#panel("contiguous", "Contiguous", "every request reserves the longest it may become");
    this.paged = this.#panel("paged", "Paged", "a page at a time, through a table");
    this.tables = h("div", { class: "page-tables" });
    this.paged.element.append(this.tables);
    this.player = new Player({ length: 1, at: 0, onStep: (at) => this.#show(at) });
    this.actions = h("div", { class: "row actions" });
    this.problem = h("p", { class: "message bad", role: "alert", hidden: true });
    this.story = h(
      "div",
      {},
      this.text,
      h("div", { class: "panels" }, this.contiguous.element, this.paged.element),
      h(
        "section",
        { class: "panel below", "aria-label": "Make something happen" },
        h("h3", {}, "Make something happen"),
        this.actions,
      ),
    );
    this.sizes = folded("Write the story", [this.form.element]);
    this.element = h(
      "div",
      { class: "bench" },
      heading(
        "Where the keys and values live",
        "While text is generated, each request keeps the keys and values of all its tokens, and nobody knows how long it will become. Reserved for the worst case, most of the memory is empty. In pages it goes out on demand, comes back at once, and equal beginnings can be shared until one of them writes.",
      ),
      h(
        "div",
        { class: "row" },
        h("span", { class: "small muted" }, "Try:"),
        PRESETS.map(([name, values]) => h("button", { type: "button", onclick: () => this.#preset(values) }, name)),
      ),
      this.problem,
      this.player.element,
      this.story,
      this.sizes.element,
      createSplitPanel(decode, fa2),
    );
    this.#rebuild(Number(context.params.step) || 0);
  }

  /** @param {string} id @param {string} title @param {string} what */
  #panel(id, title, what) {
    const pool = h("div", { class: `pool ${id}`, role: "img" });
    const counters =
      id === "paged"
        ? [
            counter("pages taken", "paged-reserved"),
            counter("free", "paged-free"),
            counter(
              "saved by sharing",
              "paged-saved",
              "Pages that the tables name more than once: what copies would take besides.",
            ),
            counter("in use", "paged-utilisation", "Token slots in use, of those in pages that are taken."),
          ]
        : [
            counter("pages reserved", "contiguous-reserved"),
            counter("used", "contiguous-used"),
            counter("wasted", "contiguous-wasted", "Reserved pages without a single token."),
            counter("in use", "contiguous-utilisation", "Token slots in use, of those reserved."),
          ];
    const note =
      id === "paged"
        ? "Double border: shared by several requests."
        : "A line of pages is one reservation. Hatched: reserved, and empty. Dashed: beyond the batch's slots.";
    const element = h(
      "section",
      { class: "panel", "aria-label": title },
      h("h3", {}, title, h("small", {}, what)),
      pool,
      h("p", { class: "small muted" }, note),
      h(
        "dl",
        { class: "counters" },
        counters.map((one) => one.element),
      ),
    );
    return { element, pool, counters };
  }

  /** @param {Record<string, any>} values */
  #preset(values) {
    this.form.set(values);
    this.#rebuild(0);
  }

  /** @param {number} at */
  #rebuild(at) {
    const { values } = this.form;
    const fits = values.max <= values.pages * values.page;
    this.problem.hidden = fits;
    setText(
      this.problem,
      `The longest request, ${values.max} tokens, is more than the ${values.pages * values.page} that all pages hold.`,
    );
    this.story.hidden = !fits;
    if (!fits) {
      this.sizes.element.open = true;
      this.script = [];
      this.player.reset(0);
      return;
    }
    this.script = parseScript(values.script);
    this.sizes.describe(
      `${plural(values.pages, "page")} of ${values.page} tokens; ${plural(this.script.length, "event")}`,
    );
    this.player.reset(this.script.length, at);
  }

  /** @param {number} at */
  #show(at) {
    const { values } = this.form;
    const actions = (this.script ?? []).slice(0, at);
    const state = play(actions, { pages: values.pages, page: values.page, max: values.max, slots: values.slots });
    this.letters = [...new Set((this.script ?? []).map((action) => action.request))];
    this.#showPaged(state);
    this.#showContiguous(state);
    this.#showActions(state, at);
    setText(this.text, happened(actions[at - 1], state));
    this.context.save({ ...paramsOf(SPECS, values), ...(at > 0 && { step: String(at) }) });
  }

  /** @param {string} request */
  #colour(request) {
    return `r${(this.letters ?? []).indexOf(request) % 10}`;
  }

  /** @param {State} state */
  #showPaged({ paged, fresh }) {
    const filled = paged.fill();
    const events = paged.events.slice(fresh.paged);
    this.paged.pool.style.setProperty("--columns", String(columns(this.form.values)));
    fill(
      this.paged.pool,
      Array.from({ length: paged.numPages }, (_, page) => {
        const holders = [...paged.tables].filter(([, table]) => table.includes(page)).map(([request]) => request);
        const event = events
          .filter((one) => one.page === page)
          .map((one) => one.kind)
          .pop();
        return this.#page(page, holders, filled.get(page) ?? 0, paged.pageSize, event);
      }),
    );
    this.paged.pool.setAttribute("aria-label", `${paged.reservedPages} of ${paged.numPages} pages taken`);
    const named = [...paged.tables.values()].reduce((sum, table) => sum + table.length, 0);
    const texts = [
      grouped(paged.reservedPages),
      grouped(paged.free.length),
      named > paged.reservedPages
        ? `${grouped(named - paged.reservedPages)} (${Math.round((100 * (named - paged.reservedPages)) / named)} %)`
        : "0",
      percent(paged),
    ];
    this.paged.counters.forEach((one, at) => setText(one.value, texts[at]));
    fill(
      this.tables,
      h("h4", {}, "Page tables"),
      paged.tables.size === 0
        ? h("p", { class: "small muted" }, "No request is here.")
        : [...paged.tables].map(([request, table]) =>
            h(
              "div",
              { class: "page-table" },
              h("span", { class: `badge ${this.#colour(request)}` }, request),
              h(
                "span",
                { class: "mono" },
                table.map((page) => h("span", { class: paged.holdersOf(page) > 1 ? "entry shared" : "entry" }, page)),
              ),
              h("small", { class: "muted" }, plural(paged.tokens.get(request) ?? 0, "token")),
            ),
          ),
    );
  }

  /** @param {State} state */
  #showContiguous({ contiguous, fresh }) {
    const events = contiguous.events.slice(fresh.contiguous);
    this.contiguous.pool.style.setProperty("--columns", String(columns(this.form.values)));
    fill(
      this.contiguous.pool,
      Array.from({ length: contiguous.numPages }, (_, page) => {
        const slot = Math.floor(page / contiguous.pagesPerSlot);
        const request = contiguous.slots[slot] ?? null;
        const tokens =
          request === null
            ? 0
            : (contiguous.tokens.get(request) ?? 0) - (page % contiguous.pagesPerSlot) * contiguous.pageSize;
        const event = events
          .filter((one) => one.page === page)
          .map((one) => one.kind)
          .pop();
        const beyond = slot >= contiguous.slots.length;
        return this.#page(
          page,
          request === null ? [] : [request],
          Math.max(0, Math.min(contiguous.pageSize, tokens)),
          contiguous.pageSize,
          event,
          beyond,
        );
      }),
    );
    this.contiguous.pool.setAttribute(
      "aria-label",
      `${contiguous.reservedPages} of ${contiguous.numPages} pages reserved, ${contiguous.wastedPages} of them empty`,
    );
    const texts = [
      grouped(contiguous.reservedPages),
      grouped(contiguous.usedPages),
      grouped(contiguous.wastedPages),
      percent(contiguous),
    ];
    this.contiguous.counters.forEach((one, at) => setText(one.value, texts[at]));
  }

  /**
   * @param {number} page @param {string[]} holders @param {number} filled @param {number} size
   * @param {string | undefined} event @param {boolean} [beyond]
   */
  #page(page, holders, filled, size, event, beyond = false) {
    const colour = holders.length > 0 ? this.#colour(holders[0]) : "";
    return h(
      "div",
      {
        class: `page ${colour} ${holders.length > 1 ? "shared" : ""} ${event ?? ""} ${holders.length > 0 && filled === 0 ? "wasted" : ""} ${beyond ? "beyond" : ""}`,
      },
      h("span", { class: "page-head" }, h("small", {}, page), h("b", {}, holders.join(""))),
      h(
        "span",
        { class: "slots" },
        Array.from({ length: size }, (_, at) => h("i", { class: at < filled ? "full" : "" })),
      ),
    );
  }

  /** Buttons that write the next line of the script. @param {State} state @param {number} at */
  #showActions({ paged }, at) {
    const name = nextName(this.letters ?? []);
    const add = (/** @type {string} */ line) => this.#append(line, at);
    fill(
      this.actions,
      h("button", { type: "button", class: "primary", onclick: () => add(`${name} arrives 6`) }, `New request ${name}`),
      [...paged.tables.keys()].map((request) =>
        h(
          "span",
          { class: "request-actions" },
          h("span", { class: `badge ${this.#colour(request)}` }, request),
          h(
            "button",
            { type: "button", onclick: () => add(`${request} grows 1`), "aria-label": `${request} grows by one token` },
            "+1",
          ),
          h(
            "button",
            {
              type: "button",
              onclick: () => add(`${name} shares ${request}`),
              "aria-label": `a new request shares ${request}`,
            },
            "share",
          ),
          h(
            "button",
            { type: "button", onclick: () => add(`${request} finishes`), "aria-label": `${request} finishes` },
            "end",
          ),
        ),
      ),
    );
  }

  /** Inserted at this moment; what comes after it stays, as far as it still makes sense. @param {string} line @param {number} at */
  #append(line, at) {
    const lines = String(this.form.values.script)
      .split("\n")
      .filter((one) => one.trim() !== "");
    if (lines.length >= MOST_ACTIONS) return;
    const story = [...lines.slice(0, at), line];
    for (const later of lines.slice(at)) {
      if (makesSense([...story, later])) story.push(later);
    }
    this.form.set({ script: story.join("\n") });
    this.#rebuild(at + 1);
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    return this.player.onKey(event);
  }

  destroy() {
    this.player.stop();
  }
}

/** @param {string[]} lines */
function makesSense(lines) {
  try {
    parseScript(lines.join("\n"));
    return true;
  } catch {
    return false;
  }
}

/** A reservation is a line, where it fits one. @param {Record<string, number>} values */
function columns({ max, page }) {
  const each = Math.ceil(max / page);
  return each >= 3 && each <= 8 ? each : each === 2 ? 6 : 8;
}

/** @param {{utilisation: number, reservedPages: number}} pool */
function percent(pool) {
  return pool.reservedPages === 0 ? "–" : `${Math.round(100 * pool.utilisation)} %`;
}

/** The first letter nobody has. @param {string[]} taken */
function nextName(taken) {
  const letters = Array.from({ length: 26 }, (_, at) => String.fromCharCode(65 + at));
  return letters.find((letter) => !taken.includes(letter)) ?? `R${taken.length + 1}`;
}
