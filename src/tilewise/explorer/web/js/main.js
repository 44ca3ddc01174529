/** The frame of the page: tabs, theme, keys, and the address that keeps the state. */

import { fill, h, setText } from "tilewise/ui/dom.js";
import { startTips } from "tilewise/ui/tips.js";
import { createBackwardView } from "tilewise/views/backward.js";
import { createMatmulView } from "tilewise/views/matmul.js";
import { createPagingView } from "tilewise/views/paging.js";
import { createProblemView } from "tilewise/views/problem.js";
import { createSoftmaxView } from "tilewise/views/softmax.js";
import { createTilesView } from "tilewise/views/tiles.js";
import { createTrafficView } from "tilewise/views/traffic.js";

/**
 * @typedef {{element: HTMLElement, onKey?: (event: KeyboardEvent) => boolean, destroy: () => void}} View
 * @typedef {{data: any, params: Record<string, string>, save: (params: Record<string, string>) => void}} Context
 */

/** @type {{id: string, title: string, create: (context: Context) => View}[]} */
const VIEWS = [
  { id: "tiles", title: "Tiles", create: createTilesView },
  { id: "softmax", title: "Online softmax", create: createSoftmaxView },
  { id: "traffic", title: "Memory traffic", create: createTrafficView },
  { id: "matmul", title: "Tiled matmul", create: createMatmulView },
  { id: "backward", title: "Backward", create: createBackwardView },
  { id: "paging", title: "Decode and paging", create: createPagingView },
  { id: "problem", title: "My problem", create: createProblemView },
];

const WRITE_AFTER_MS = 400;

const KEYS = [
  ["← →", "one step back or forward; on the tabs, the neighbouring view"],
  ["Space", "play and pause"],
  ["Home End", "first and last step"],
  ["Tab", "the next control; numbers with a dotted line explain themselves when focused"],
  ["1 – 7", "go to a view"],
];

class App {
  constructor() {
    this.data = JSON.parse(element("tilewise-data").textContent || "{}");
    this.main = element("main");
    /** @type {View | null} */
    this.view = null;
    /** What each view looked like when it was left. @type {Map<string, Record<string, string>>} */
    this.remembered = new Map();
    this.current = "";
    /** The address of what is shown, written a little later. */
    this.wanted = "";
    /** The address last read or written here; another one is a visitor's, whose event may still be on its way. */
    this.known = "";
    /** @type {ReturnType<typeof setTimeout> | null} */
    this.timer = null;
  }

  start() {
    fill(
      element("tabs"),
      VIEWS.map((view) =>
        h(
          "button",
          {
            type: "button",
            role: "tab",
            id: `tab-${view.id}`,
            "aria-controls": "main",
            tabindex: -1,
            onclick: () => this.open(view.id, this.remembered.get(view.id) ?? {}),
          },
          view.title,
        ),
      ),
    );
    element("tabs").addEventListener("keydown", (event) => this.#onTabKey(/** @type {KeyboardEvent} */ (event)));
    document.addEventListener("keydown", (event) => this.#onKey(event));
    addEventListener("hashchange", () => this.#onAddress());
    document.querySelector("[data-skip]")?.addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
    this.#startTheme();
    this.#startHelp();
    startTips();
    setText(element("footer"), footer(this.data));
    this.#onAddress();
    performance.mark("tilewise-ready");
    document.documentElement.dataset.ready = "true";
  }

  /** @param {string} id @param {Record<string, string>} params */
  open(id, params) {
    const found = VIEWS.find((view) => view.id === id) ?? VIEWS[0];
    this.view?.destroy();
    this.current = found.id;
    for (const view of VIEWS) {
      const tab = element(`tab-${view.id}`);
      tab.setAttribute("aria-selected", String(view === found));
      tab.tabIndex = view === found ? 0 : -1;
    }
    this.main.setAttribute("aria-labelledby", `tab-${found.id}`);
    element(`tab-${found.id}`).scrollIntoView?.({ block: "nearest", inline: "nearest" });
    this.#save(found.id, params);
    this.view = found.create({ data: this.data, params, save: (state) => this.#save(found.id, state) });
    fill(this.main, this.view.element);
  }

  /** @param {string} id @param {Record<string, string>} params */
  #save(id, params) {
    this.remembered.set(id, params);
    const query = new URLSearchParams(params).toString();
    this.wanted = `#${id}${query && `?${query}`}`;
    // Browsers refuse more than about a hundred changes of the address in half a minute; playing makes sixty a second.
    this.timer ??= setTimeout(() => this.#writeAddress(), WRITE_AFTER_MS);
  }

  #writeAddress() {
    this.timer = null;
    if (location.hash !== this.known) return;
    history.replaceState(null, "", this.wanted);
    this.known = location.hash;
  }

  #onAddress() {
    if (this.view !== null && location.hash === this.known) return;
    this.known = location.hash;
    const [id, query = ""] = location.hash.slice(1).split("?");
    this.open(id, Object.fromEntries(new URLSearchParams(query)));
  }

  /** @param {KeyboardEvent} event */
  #onTabKey(event) {
    const at = VIEWS.findIndex((view) => view.id === this.current);
    const targets = /** @type {Record<string, number>} */ ({
      ArrowRight: (at + 1) % VIEWS.length,
      ArrowLeft: (at + VIEWS.length - 1) % VIEWS.length,
      Home: 0,
      End: VIEWS.length - 1,
    });
    if (!(event.key in targets)) return;
    event.preventDefault();
    event.stopPropagation();
    const { id } = VIEWS[targets[event.key]];
    this.open(id, this.remembered.get(id) ?? {});
    element(`tab-${id}`).focus();
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.closest("input:not([type=range]), select, textarea") || (event.key === " " && target.closest("button")))
      return;
    if (/^[1-9]$/.test(event.key) && VIEWS[Number(event.key) - 1]) {
      const { id } = VIEWS[Number(event.key) - 1];
      this.open(id, this.remembered.get(id) ?? {});
    } else if (this.view?.onKey?.(event)) {
      event.preventDefault();
    }
  }

  #startTheme() {
    const system = matchMedia("(prefers-color-scheme: dark)");
    /** @type {boolean | null} */
    let chosen = null;
    const apply = () => {
      const dark = chosen ?? system.matches;
      document.documentElement.dataset.theme = dark ? "dark" : "light";
      setText(element("theme-button"), dark ? "Light" : "Dark");
      element("theme-button").setAttribute("aria-label", dark ? "Switch to light colours" : "Switch to dark colours");
      dispatchEvent(new Event("tilewise:theme"));
    };
    system.addEventListener("change", apply);
    element("theme-button").addEventListener("click", () => {
      chosen = !(chosen ?? system.matches);
      apply();
    });
    apply();
  }

  #startHelp() {
    fill(
      element("help"),
      h(
        "dl",
        {},
        KEYS.map(([keys, what]) => [
          h(
            "dt",
            {},
            keys
              .split(" ")
              .map((key) => [h("kbd", {}, key), " "])
              .flat(),
          ),
          h("dd", {}, what),
        ]).flat(),
      ),
    );
    element("help-button").addEventListener("click", () => {
      const shown = element("help").hidden;
      element("help").hidden = !shown;
      element("help-button").setAttribute("aria-expanded", String(shown));
    });
  }
}

/** @param {any} data */
function footer(data) {
  const source = data.served
    ? "served by tilewise on this machine; stop it with Ctrl+C where it was started"
    : "a self-contained page: everything is computed in the browser";
  return `tilewise ${data.version ?? ""}: ${source}. Nothing is sent anywhere.`;
}

/** @param {string} id @returns {HTMLElement} */
function element(id) {
  return /** @type {HTMLElement} */ (document.getElementById(id));
}

new App().start();
