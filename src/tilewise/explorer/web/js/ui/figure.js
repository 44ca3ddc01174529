/**
 * A canvas that stays sharp, follows the theme and the width of its column, and is redrawn whole: a step takes < 2 ms.
 */

import { h } from "tilewise/ui/dom.js";

/** @typedef {Record<string, string>} Colours  by the names of base.css, without the dashes */
/** @typedef {(context: CanvasRenderingContext2D, width: number, colours: Colours) => void} Draw */

const NAMES = [
  "paper",
  "card",
  "sunken",
  "ink",
  "muted",
  "line",
  "accent",
  "loaded",
  "loaded-soft",
  "computing",
  "computing-soft",
  "rescaled",
  "rescaled-soft",
  "stored",
  "stored-soft",
  "skipped",
  "skipped-soft",
  "bad",
  "bad-soft",
  "cell",
  "grid",
];

export class Figure {
  /** @param {string} label @param {(width: number) => number} heightOf @param {Draw} draw */
  constructor(label, heightOf, draw) {
    this.heightOf = heightOf;
    this.draw = draw;
    this.element = h("canvas", { class: "figure", role: "img", "aria-label": label });
    this.context = this.element.getContext("2d");
    this.colours = readColours();
    // Known from the observer: asking the element for its width at every step would lay out the page each time, 4 ms.
    this.width = 0;
    this.observer = new ResizeObserver(([entry]) => {
      this.width = entry.contentRect.width;
      this.redraw();
    });
    this.observer.observe(this.element);
    this.onTheme = () => {
      this.colours = readColours();
      this.redraw();
    };
    addEventListener("tilewise:theme", this.onTheme);
  }

  redraw() {
    const { width } = this;
    if (width === 0) return;
    const height = this.heightOf(width);
    const ratio = devicePixelRatio || 1;
    const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.element.width !== pixelWidth || this.element.height !== pixelHeight) {
      this.element.width = pixelWidth;
      this.element.height = pixelHeight;
      this.element.style.height = `${height}px`;
    }
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
    this.draw(this.context, width, this.colours);
  }

  /** What the picture shows now, for those who do not see it. @param {string} text */
  describe(text) {
    if (this.element.getAttribute("aria-label") !== text) this.element.setAttribute("aria-label", text);
  }

  destroy() {
    this.observer.disconnect();
    removeEventListener("tilewise:theme", this.onTheme);
  }
}

/** A canvas does not know light-dark(): an element has to resolve each colour first. @returns {Colours} */
function readColours() {
  const probe = document.body.appendChild(h("span", { hidden: true }));
  // Where the system imposes colours, it would impose one on all of them.
  probe.style.setProperty("forced-color-adjust", "none");
  const style = getComputedStyle(probe);
  const colours = Object.fromEntries(
    NAMES.map((name) => {
      probe.style.color = `var(--${name})`;
      return [name, style.color];
    }),
  );
  probe.remove();
  return colours;
}

/**
 * A tile that is never touched: hatched.
 * @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} width
 * @param {number} height @param {string} colour
 */
export function hatch(context, x, y, width, height, colour) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = -height; at < width; at += 5) {
    context.moveTo(x + at, y + height);
    context.lineTo(x + at + height, y);
  }
  context.stroke();
  context.restore();
}

/**
 * Centred text that fits its cell, or none.
 * @param {CanvasRenderingContext2D} context @param {string} text @param {number} x @param {number} y
 * @param {number} width @param {string} colour
 */
export function cellText(context, text, x, y, width, colour, size = 12) {
  context.font = `${size}px ${getMono()}`;
  if (context.measureText(text).width > width - 2) return;
  context.fillStyle = colour;
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText(text, x, y);
}

function getMono() {
  return "ui-monospace, Menlo, 'DejaVu Sans Mono', monospace";
}

/**
 * A label beside a figure.
 * @param {CanvasRenderingContext2D} context @param {string} text @param {number} x @param {number} y
 * @param {string} colour @param {CanvasTextAlign} align
 */
export function label(context, text, x, y, colour, align = "center") {
  context.font = "600 13px system-ui, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif";
  context.fillStyle = colour;
  context.textAlign = align;
  context.textBaseline = "middle";
  context.fillText(text, x, y);
}
