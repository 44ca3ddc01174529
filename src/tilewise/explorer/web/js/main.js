/** The frame of the page: links to chapters and benches, theme, presenter mode, keys, and the address. */

import { CHAPTERS } from "tilewise/lesson/chapters.js";
import { createChapterView } from "tilewise/lesson/view.js";
import { createTeacherView } from "tilewise/lesson/teacher.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { recall, remember } from "tilewise/ui/memory.js";
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
 * @typedef {{id: string, title: string, part: "lesson" | "bench" | "teacher", number?: string,
 *   create: (context: Context) => View}} Place
 */

const BENCHES = /** @type {[string, string, (context: Context) => View][]} */ ([
  ["tiles", "Tiles", createTilesView],
  ["softmax", "Online softmax", createSoftmaxView],
  ["traffic", "Memory traffic", createTrafficView],
  ["matmul", "Tiled matmul", createMatmulView],
  ["backward", "Backward", createBackwardView],
  ["paging", "Decode and paging", createPagingView],
  ["problem", "My problem", createProblemView],
]);

/** @type {Place[]} */
const ALL = [
  ...CHAPTERS.map((chapter) => ({
    id: chapter.id,
    title: chapter.title,
    number: chapter.number,
    part: /** @type {const} */ ("lesson"),
    create: createChapterView(chapter),
  })),
  ...BENCHES.map(([id, title, create]) => ({ id, title, part: /** @type {const} */ ("bench"), create })),
  { id: "teacher", title: "Teacher's page", part: "teacher", create: createTeacherView },
];

const PARTS = /** @type {const} */ ([
  ["lesson", "Lesson", "Chapters"],
  ["bench", "Play with it", "Benches"],
  ["teacher", "Teacher's page", ""],
]);

const WRITE_AFTER_MS = 400;

const KEYS = [
  ["← →", "one step back or forward; when presenting, on to the next chapter at the end"],
  ["Space", "play and pause"],
  ["Home End", "first and last step"],
  ["PageUp PageDown", "when presenting: the chapter before and after"],
  ["Escape", "stop presenting; hide an explanation"],
  ["Tab", "the next control; words with a dotted line explain themselves when focused"],
];

class App {
  constructor() {
    this.data = JSON.parse(element("tilewise-data").textContent || "{}");
    this.places = placesOf(this.data);
    this.main = element("main");
    /** @type {View | null} */
    this.view = null;
    this.place = this.places[0];
    /** The link to every place, with the state in which it was left. @type {Map<string, HTMLAnchorElement>} */
    this.links = new Map();
    /** The address of what is shown, written a little later. */
    this.wanted = "";
    /** The address last read or written here; another one is a visitor's, whose event may still be on its way. */
    this.known = "";
    /** @type {ReturnType<typeof setTimeout> | null} */
    this.timer = null;
  }

  start() {
    for (const { id, title, number } of this.places) {
      const text = number ? [h("b", {}, number), " ", h("span", {}, title)] : [title];
      this.links.set(id, h("a", { href: `#${id}`, id: `to-${id}`, "data-tip": number ? title : null }, text));
    }
    fill(
      element("parts"),
      PARTS.filter(([part]) => this.places.some((place) => place.part === part)).map(([part, title]) => {
        const first = /** @type {Place} */ (this.places.find((place) => place.part === part));
        return h("a", { href: `#${first.id}`, "data-part": part }, title);
      }),
    );
    document.addEventListener("keydown", (event) => this.#onKey(event));
    addEventListener("hashchange", () => this.#onAddress());
    document.querySelector("[data-skip]")?.addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
    this.#startTheme();
    this.#startHelp();
    this.#startPresenting();
    startTips();
    setText(element("footer"), footer(this.data));
    this.#onAddress();
    performance.mark("tilewise-ready");
    document.documentElement.dataset.ready = "true";
  }

  /** @param {Place} place @param {Record<string, string>} params */
  #open(place, params) {
    const moved = this.view !== null;
    this.view?.destroy();
    const samePart = moved && this.place.part === place.part;
    this.place = place;
    document.title = `${place.title} · tilewise explorer`;
    document.documentElement.dataset.part = place.part;
    if (!samePart) this.#listPlaces(place);
    for (const [id, link] of this.links) current(link, id === place.id);
    for (const link of element("parts").children) current(link, link.getAttribute("data-part") === place.part);
    this.links.get(place.id)?.scrollIntoView?.({ block: "nearest", inline: "nearest" });
    this.#save(place, params);
    this.view = place.create({ data: this.data, params, save: (state) => this.#save(place, state) });
    fill(this.main, this.view.element);
    if (!moved) return;
    // What a link led to is read from its start, and Tab goes on from there.
    scrollTo(0, 0);
    const title = this.main.querySelector("h2");
    title?.setAttribute("tabindex", "-1");
    title?.focus({ preventScroll: true });
  }

  /** The chapters or the benches, as the second line of the frame. @param {Place} place */
  #listPlaces({ part }) {
    const [, , name] = /** @type {(typeof PARTS)[number]} */ (PARTS.find(([one]) => one === part));
    const shown = this.places.filter((one) => one.part === part);
    const nav = element("places");
    nav.hidden = shown.length < 2;
    nav.dataset.part = part;
    nav.setAttribute("aria-label", name || "Places");
    fill(
      nav,
      h(
        "ol",
        {},
        shown.map(({ id }) => h("li", {}, this.links.get(id))),
      ),
    );
  }

  /** @param {Place} place @param {Record<string, string>} params */
  #save(place, params) {
    const query = new URLSearchParams(params).toString();
    const address = `#${place.id}${query && `?${query}`}`;
    this.links.get(place.id)?.setAttribute("href", address);
    if (place !== this.place) return;
    this.wanted = address;
    // Browsers refuse more than about a hundred changes of the address in half a minute; playing makes sixty a second.
    this.timer ??= setTimeout(() => this.#writeAddress(), WRITE_AFTER_MS);
  }

  /** A step replaces the address, a link adds to the history: Back goes to the place before, not through its steps. */
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
    const place = this.places.find((one) => one.id === id) ?? this.places[0];
    this.#open(place, place.id === id ? Object.fromEntries(new URLSearchParams(query)) : {});
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const target = /** @type {HTMLElement} */ (event.target);
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    // Fields keep their keys; the slider of the steps means the same by them as the page does.
    if (target.closest("input, select, textarea") && !target.closest(".player-scrub")) return;
    if (event.key === " " && target.closest("button, a, summary")) return;
    if (this.#presentingKey(event) || this.view?.onKey?.(event)) event.preventDefault();
  }

  /** @param {KeyboardEvent} event @returns {boolean} */
  #presentingKey(event) {
    if (!document.documentElement.hasAttribute("data-present")) return false;
    if (event.key === "Escape") this.#present(false);
    else if (event.key === "PageDown") this.#neighbour(1);
    else if (event.key === "PageUp") this.#neighbour(-1);
    else if (event.key === "ArrowRight" && !this.view?.onKey?.(event)) this.#neighbour(1);
    else if (event.key !== "ArrowRight") return false;
    return true;
  }

  /** @param {1 | -1} by */
  #neighbour(by) {
    const shown = this.places.filter((place) => place.part === this.place.part);
    const next = shown[shown.indexOf(this.place) + by];
    if (next !== undefined) location.hash = next.id;
  }

  #startPresenting() {
    element("present-button").addEventListener("click", () =>
      this.#present(!document.documentElement.hasAttribute("data-present")),
    );
  }

  /** Large type and nothing but the lesson. @param {boolean} on */
  #present(on) {
    document.documentElement.toggleAttribute("data-present", on);
    element("present-button").setAttribute("aria-pressed", String(on));
    setText(element("present-button"), on ? "Stop presenting" : "Present");
    if (on && this.place.part !== "lesson") location.hash = this.places[0].id;
  }

  #startTheme() {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const apply = () => {
      const chosen = recall("theme");
      const dark = chosen === null ? system.matches : chosen === "dark";
      document.documentElement.dataset.theme = dark ? "dark" : "light";
      setText(element("theme-button"), dark ? "Light" : "Dark");
      element("theme-button").setAttribute("aria-label", dark ? "Switch to light colours" : "Switch to dark colours");
      dispatchEvent(new Event("tilewise:theme"));
    };
    system.addEventListener("change", apply);
    element("theme-button").addEventListener("click", () => {
      remember("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
      apply();
    });
    // A canvas has to be drawn again for paper and for colours the system imposes.
    for (const query of ["print", "(forced-colors: active)"]) {
      matchMedia(query).addEventListener("change", () => dispatchEvent(new Event("tilewise:theme")));
    }
    apply();
  }

  #startHelp() {
    const keys = KEYS.map(([names, what]) => [
      h(
        "dt",
        {},
        names.split(" ").flatMap((key) => [h("kbd", {}, key), " "]),
      ),
      h("dd", {}, what),
    ]);
    fill(element("help"), h("dl", {}, keys.flat()));
    element("help-button").addEventListener("click", () => {
      const shown = element("help").hidden;
      element("help").hidden = !shown;
      element("help-button").setAttribute("aria-expanded", String(shown));
    });
  }
}

/** Where one can go: everything, or the one chapter of its own file with its bench. @param {any} data */
function placesOf(data) {
  const only = CHAPTERS.find((chapter) => chapter.id === data.chapter);
  if (only === undefined) return ALL;
  const bench = only.bench.split("?")[0];
  return ALL.filter((place) => [only.id, bench === "problem" ? "" : bench, "teacher"].includes(place.id));
}

/** @param {Element} link @param {boolean} here */
function current(link, here) {
  if (here) link.setAttribute("aria-current", "page");
  else link.removeAttribute("aria-current");
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
