/** Pseudocode with the active lines lit. */

import { h } from "tilewise/ui/dom.js";

export class CodeBox {
  /** @param {string[]} lines  two spaces indent */
  constructor(lines) {
    this.element = h("ol", { class: "code", "aria-label": "Pseudocode" });
    this.set(lines);
  }

  /** @param {string[]} lines */
  set(lines) {
    this.lines = lines.map((line) => {
      const depth = Math.floor((line.length - line.trimStart().length) / 2);
      return h("li", { class: `indent-${depth}` }, line.trim());
    });
    this.element.replaceChildren(...this.lines);
  }

  /** @param {number[]} active */
  light(active) {
    this.lines?.forEach((line, at) => {
      const lit = active.includes(at);
      line.classList.toggle("lit", lit);
      if (lit) line.setAttribute("aria-current", "step");
      else line.removeAttribute("aria-current");
    });
  }
}
