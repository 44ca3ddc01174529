/** Step, play and scrub: buttons, a slider and keys over a number of steps. */

import { h, setText, svg } from "tilewise/ui/dom.js";

const SPEEDS = ["1", "3", "10", "60"];

/** Drawn, because fonts lack these signs or make pictures of them. @type {Record<string, string>} */
const ICONS = {
  first: "M2 2h2v12H2zM14 2v12L5 8z",
  back: "M12 2v12L3 8z",
  forward: "M4 2v12l9-6z",
  last: "M12 2h2v12h-2zM2 2v12l9-6z",
};

export class Player {
  /** @param {{length: number, at: number, onStep: (at: number) => void}} options */
  constructor({ length, at, onStep }) {
    this.length = length;
    this.at = Math.min(at, length);
    this.onStep = onStep;
    this.playing = false;
    this.due = 0;
    this.slider = h("input", {
      type: "range",
      min: 0,
      max: length,
      value: this.at,
      step: 1,
      "aria-label": "Step",
      oninput: () => this.go(Number(this.slider.value)),
    });
    this.counter = h("output", { class: "step-counter" });
    this.playButton = this.#button("Play", "Play or pause (space)", () => this.toggle(), "play");
    this.speed = h(
      "select",
      { "aria-label": "Steps per second", title: "Steps per second" },
      SPEEDS.map((value) => h("option", { value, selected: value === "3" }, `${value} / s`)),
    );
    this.element = h(
      "div",
      { class: "player", role: "group", "aria-label": "Steps" },
      h(
        "div",
        { class: "player-buttons" },
        this.#button("first", "First step (Home)", () => this.go(0)),
        this.#button("back", "Back (left arrow)", () => this.go(this.at - 1)),
        this.playButton,
        this.#button("forward", "Forward (right arrow)", () => this.go(this.at + 1)),
        this.#button("last", "Last step (End)", () => this.go(this.length)),
        this.speed,
      ),
      h("div", { class: "player-scrub" }, this.slider, this.counter),
    );
    this.#show();
  }

  /** Another number of steps, from the start. @param {number} length */
  reset(length, at = 0) {
    this.stop();
    this.length = length;
    this.slider.max = String(length);
    this.at = -1;
    this.go(at);
  }

  /** @param {number} at */
  go(at) {
    const wanted = Math.max(0, Math.min(this.length, at));
    if (wanted !== this.at) {
      this.at = wanted;
      this.#show();
      this.onStep(wanted);
    }
    if (this.playing && this.at === this.length) this.stop();
  }

  toggle() {
    if (this.playing) this.stop();
    else this.#start();
  }

  stop() {
    this.playing = false;
    this.#announce("polite");
    setText(this.playButton, "Play");
  }

  /** Keys that work anywhere in a view, unless a field wants them. @param {KeyboardEvent} event @returns {boolean} */
  onKey(event) {
    const moves = /** @type {Record<string, () => void>} */ ({
      ArrowRight: () => this.go(this.at + 1),
      ArrowLeft: () => this.go(this.at - 1),
      Home: () => this.go(0),
      End: () => this.go(this.length),
      " ": () => this.toggle(),
    });
    const move = moves[event.key];
    // At the end the key is free for what comes next.
    if (move === undefined || (event.key === "ArrowRight" && this.at === this.length)) return false;
    move();
    return true;
  }

  #start() {
    if (this.at === this.length) this.go(0);
    this.playing = true;
    this.#announce("off");
    setText(this.playButton, "Pause");
    this.due = performance.now() + 1000 / Number(this.speed.value);
    requestAnimationFrame((now) => this.#frame(now));
  }

  /** Captions are read out step by step, not sixty a second. @param {"polite" | "off"} how */
  #announce(how) {
    const captions = this.element.closest("main")?.querySelectorAll(".caption") ?? [];
    for (const caption of captions) caption.setAttribute("aria-live", how);
  }

  /** @param {number} now */
  #frame(now) {
    if (!this.playing || !this.element.isConnected) return;
    if (now >= this.due) {
      this.due = Math.max(now, this.due + 1000 / Number(this.speed.value));
      this.go(this.at + 1);
    }
    requestAnimationFrame((next) => this.#frame(next));
  }

  #show() {
    this.slider.value = String(this.at);
    this.playButton.disabled = this.length === 0;
    this.slider.disabled = this.length === 0;
    this.slider.setAttribute("aria-valuetext", `step ${this.at} of ${this.length}`);
    setText(this.counter, `step ${this.at} of ${this.length}`);
  }

  /** @param {string} text @param {string} label @param {() => void} onclick @param {string} [name] */
  #button(text, label, onclick, name = "") {
    return h(
      "button",
      { type: "button", "aria-label": label, title: label, class: name && "wide", onclick },
      ICONS[text] ? svg("svg", { viewBox: "0 0 16 16", "aria-hidden": "true" }, svg("path", { d: ICONS[text] })) : text,
    );
  }
}
