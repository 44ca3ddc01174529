/** Lines over N, linear or logarithmic, as SVG; every point is also in a table beside it. */

import { svg } from "tilewise/ui/dom.js";

/**
 * @typedef {{name: string, colour: string, dash?: string, below?: boolean, points: [number, number][]}} Series
 * @typedef {{label: string, scale: "linear" | "log", xLabel: string, yLabel: string, formatX: (x: number) => string,
 *   formatY: (y: number) => string, xTicks?: number[],
 *   dots?: {x: number, y: number, name: string, colour: string, below?: boolean}[]}} Options
 */

const [LEFT, RIGHT, TOP, BOTTOM] = [62, 26, 36, 46];
/** Letters keep their size on a phone: the picture has fewer units there, not smaller ones. */
const NARROW = 640;
const SHAPES = { wide: { width: 640, height: 360 }, narrow: { width: 380, height: 300 } };

/** @param {Series[]} series @param {Options} options */
export function chart(series, options) {
  const narrow = innerWidth < NARROW;
  const { width, height } = narrow ? SHAPES.narrow : SHAPES.wide;
  const points = [...series.flatMap((one) => one.points), ...(options.dots ?? []).map(({ x, y }) => [x, y])];
  const xs = axis(
    points.map(([x]) => x),
    options.scale,
    LEFT,
    width - RIGHT,
    options.xTicks,
  );
  const ys = axis(
    points.map(([, y]) => y),
    options.scale,
    height - BOTTOM,
    TOP,
  );
  return svg(
    "svg",
    { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label },
    ys.ticks
      .map((tick) => [
        svg("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: ys.at(tick), y2: ys.at(tick) }),
        svg("text", { class: "tick", x: LEFT - 8, y: ys.at(tick) + 4, "text-anchor": "end" }, options.formatY(tick)),
      ])
      .flat(),
    xs.ticks
      .filter((_, at) => !narrow || at % 2 === 0)
      .map((tick) =>
        svg(
          "text",
          { class: "tick", x: xs.at(tick), y: height - BOTTOM + 18, "text-anchor": "middle" },
          options.formatX(tick),
        ),
      ),
    svg(
      "text",
      { class: "axis", x: (LEFT + width - RIGHT) / 2, y: height - 6, "text-anchor": "middle" },
      options.xLabel,
    ),
    svg("text", { class: "axis", x: 4, y: 14, "text-anchor": "start" }, options.yLabel),
    series.map((one) => line(one, xs, ys, options)),
    (options.dots ?? [])
      .map((dot) => [
        svg("circle", { cx: xs.at(dot.x), cy: ys.at(dot.y), r: 7, class: `dot ${dot.colour}` }),
        svg(
          "text",
          {
            class: `mark ${dot.colour}`,
            x: xs.at(dot.x),
            y: ys.at(dot.y) + (dot.below ? 23 : -13),
            "text-anchor": "middle",
          },
          dot.name,
        ),
      ])
      .flat(),
  );
}

/** @param {Series} one @param {Axis} xs @param {Axis} ys @param {Options} options */
function line(one, xs, ys, options) {
  const path = one.points
    .map(([x, y], at) => `${at === 0 ? "M" : "L"}${xs.at(x).toFixed(1)} ${ys.at(y).toFixed(1)}`)
    .join("");
  const last = one.points[one.points.length - 1];
  return svg(
    "g",
    { class: `series ${one.colour}` },
    svg("path", { d: path, "stroke-dasharray": one.dash }),
    one.points.length > 2 &&
      one.points.map(([x, y]) =>
        svg(
          "circle",
          { cx: xs.at(x), cy: ys.at(y), r: 3.5 },
          svg("title", {}, `${one.name}, ${options.xLabel} ${options.formatX(x)}: ${options.formatY(y)}`),
        ),
      ),
    svg(
      "text",
      { class: "series-name", x: xs.at(last[0]) - 6, y: ys.at(last[1]) + (one.below ? 20 : -9), "text-anchor": "end" },
      one.name,
    ),
  );
}

/** @typedef {{at: (value: number) => number, ticks: number[]}} Axis */

/**
 * @param {number[]} values @param {"linear" | "log"} scale @param {number} from @param {number} to
 * @param {number[]} [given] @returns {Axis}
 */
function axis(values, scale, from, to, given) {
  const positive = values.filter((value) => value > 0 && Number.isFinite(value));
  const high = Math.max(...positive);
  const low = Math.min(...positive);
  if (given && scale === "log") {
    const [start, stop] = [Math.log(low), Math.log(high)];
    return { at: (value) => from + ((Math.log(value) - start) / (stop - start)) * (to - from), ticks: given };
  }
  if (given) return { at: (value) => from + (value / high) * (to - from), ticks: given };
  if (scale === "log") {
    const [start, stop] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high) + 0.05)];
    const every = Math.max(1, Math.ceil((stop - start) / 7));
    const ticks = Array.from({ length: Math.floor((stop - start) / every) + 1 }, (_, at) => 10 ** (start + at * every));
    return {
      at: (value) => from + ((Math.log10(Math.max(value, low / 10)) - start) / (stop - start)) * (to - from),
      ticks,
    };
  }
  const step = niceStep(high / 4);
  const count = Math.ceil(high / step - 1e-9);
  return {
    at: (value) => from + (value / (step * count)) * (to - from),
    ticks: Array.from({ length: count + 1 }, (_, at) => at * step),
  };
}

/** 1, 2 or 5 times a power of ten. @param {number} least */
function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5, 10].find((factor) => factor * power >= least) ?? 10);
}
