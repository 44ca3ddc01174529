/** A picture that is drawn whole at each step, in a wide and in a narrow form, and says in words what it shows. */

import { fill, h, svg } from "tilewise/ui/dom.js";

const NARROW = 560;

/** A scene of one such picture. A subclass has `set`, `draw` and `description`, and says its `length` in steps. */
export class PictureScene {
  /** @param {...HTMLElement} below what stands under the picture */
  constructor(...below) {
    this.at = 0;
    this.length = 1;
    this.narrow = innerWidth < NARROW;
    this.picture = h("div", { class: "picture" });
    this.element = h("div", { class: "scene" }, this.picture, ...below);
    this.observer = new ResizeObserver(([entry]) => {
      const narrow = entry.contentRect.width < NARROW;
      if (narrow === this.narrow || entry.contentRect.width === 0) return;
      this.narrow = narrow;
      this.redraw();
    });
    this.observer.observe(this.picture);
  }

  /** @param {number} at */
  show(at) {
    this.at = at;
    this.redraw();
  }

  redraw() {
    const { width, height, parts } = this.draw(this.narrow);
    fill(
      this.picture,
      svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.description() }, parts),
    );
  }

  /** @param {boolean} narrow @returns {{width: number, height: number, parts: any[]}} */
  draw(narrow) {
    throw new Error(`${this.constructor.name} draws nothing, narrow: ${narrow}`);
  }

  /** @returns {string} */
  description() {
    throw new Error(`${this.constructor.name} has no description`);
  }

  destroy() {
    this.observer.disconnect();
  }
}

/**
 * A text; `kind` is its class: name, note, value, big, or several.
 * @param {string} kind @param {number} x @param {number} y @param {string | number} words @param {any} [more]
 */
export function words(kind, x, y, words, more = {}) {
  return svg("text", { class: kind, x, y, ...more }, words);
}

/** @param {string} kind @param {number} x @param {number} y @param {number} width @param {number} height @param {any} [more] */
export function box(kind, x, y, width, height, more = {}) {
  return svg("rect", { class: kind, x, y, width: Math.max(0, width), height: Math.max(0, height), ...more });
}
