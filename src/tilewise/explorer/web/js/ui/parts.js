/** Small parts that several views share: headings, boxes, counters, legends, tables and numbers with an explanation. */

import { h } from "tilewise/ui/dom.js";

let serial = 0;

/** @param {string} title @param {string} lead */
export function heading(title, lead) {
  return h("div", { class: "heading" }, h("h2", {}, title), h("p", { class: "lead" }, lead));
}

/** One sentence about the present step; read out by screen readers. */
export function caption() {
  return h("p", { class: "caption", role: "status", "aria-live": "polite" });
}

/** @param {[string, string][]} entries  class and text */
export function legend(entries) {
  return h(
    "ul",
    { class: "legend", "aria-label": "Colours" },
    entries.map(([name, text]) => h("li", {}, h("span", { class: `swatch ${name}`, "aria-hidden": "true" }), text)),
  );
}

/** A number with a name; `id` finds its value. @param {string} name @param {string} id @param {string} [hint] */
export function counter(name, id, hint) {
  const value = h("dd", { "data-counter": id }, "0");
  const element = h("div", { class: "counter" }, h("dt", {}, hint ? explained(name, hint) : name), value);
  return { element, value };
}

/**
 * A part that is folded away until it is wanted; its title says what is in it now.
 * @param {string} title @param {any[]} children
 */
export function folded(title, children) {
  const state = h("span", { class: "muted" });
  const element = h(
    "details",
    { class: "folded" },
    h("summary", {}, h("b", {}, title), " ", state),
    h("div", { class: "folded-body" }, children),
  );
  return {
    element,
    describe: (/** @type {string} */ text) => {
      state.textContent = text;
    },
  };
}

/** A word whose explanation appears on hover and on focus. @param {string} text @param {string} explanation */
export function explained(text, explanation) {
  serial += 1;
  const id = `tip-${serial}`;
  return h(
    "span",
    { class: "explained", tabindex: 0, "aria-describedby": id },
    text,
    h("span", { id, hidden: true }, explanation),
  );
}

/** @param {string[]} head @param {(string | Node)[][]} rows @param {string} name */
export function table(head, rows, name) {
  return h(
    "div",
    { class: "table-scroll", tabindex: 0, role: "region", "aria-label": name },
    h(
      "table",
      {},
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          head.map((text) => h("th", { scope: "col" }, text)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) =>
          h(
            "tr",
            {},
            row.map((cell, at) => h(at === 0 ? "th" : "td", at === 0 ? { scope: "row" } : {}, cell)),
          ),
        ),
      ),
    ),
  );
}
