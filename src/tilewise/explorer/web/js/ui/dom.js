/** Making elements: `h("p", {class: "lead"}, "text")`, and the same for SVG. */

const SVG = "http://www.w3.org/2000/svg";

/**
 * @typedef {Node | string | number | null | undefined | false} Child
 * @typedef {Child | Child[] | Child[][] | any[]} Children
 * @typedef {Record<string, unknown>} Attributes  `onclick` and the like are listeners; true is an empty attribute,
 *   false, null and undefined leave the attribute out.
 */

/**
 * An HTML element.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...Children} children
 * @returns {any}
 */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/**
 * An SVG element.
 * @param {string} tag
 * @param {Attributes} [attributes]
 * @param {...Children} children
 * @returns {any}
 */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Replace everything in an element. @param {Element} element @param {...Children} children */
export function fill(element, ...children) {
  element.replaceChildren(...nodes(children));
}

/** Write text only where it changed: what a screen reader watches should not be touched needlessly. */
export function setText(/** @type {Element} */ element, /** @type {string | number} */ text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** @param {Element} element @param {Attributes} attributes @param {Children[]} children */
function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on") && typeof value === "function") {
      element.addEventListener(name.slice(2), /** @type {EventListener} */ (value));
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...nodes(children));
  return element;
}

/** @param {Children[]} children @returns {(Node | string)[]} */
function nodes(children) {
  return children
    .flat(Infinity)
    .filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : String(child)));
}
