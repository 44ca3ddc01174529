/** A picture that is drawn whole at each step, in a wide and in a narrow form, and says in words what it shows. */

import { fill, h, svg } from "tilewise/ui/dom.js";

const NARROW = 560;

export class Picture {
  /** @param {(narrow: boolean) => {width: number, height: number, parts: any[]}} draw @param {() => string} describe */
  constructor(draw, describe) {
    this.draw = draw;
    this.describe = describe;
    this.narrow = innerWidth < NARROW;
    this.element = h("div", { class: "picture" });
    this.observer = new ResizeObserver(([entry]) => {
      const narrow = entry.contentRect.width < NARROW;
      if (narrow === this.narrow || entry.contentRect.width === 0) return;
      this.narrow = narrow;
      this.redraw();
    });
    this.observer.observe(this.element);
  }

  redraw() {
    const { width, height, parts } = this.draw(this.narrow);
    fill(
      this.element,
      svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.describe() }, parts),
    );
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
