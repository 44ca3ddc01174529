/** Input fields that judge what is typed: a wrong value is named beside its field and changes nothing. */

import { h, setText } from "tilewise/ui/dom.js";

/**
 * @typedef {{key: string, label: string, type: "number", value: number, min: number, max: number, help?: string,
 *   when?: (values: Values) => boolean}} NumberSpec
 * @typedef {{key: string, label: string, type: "select", value: string, options: [string, string][], help?: string,
 *   when?: (values: Values) => boolean}} SelectSpec
 * @typedef {{key: string, label: string, type: "check", value: boolean, help?: string,
 *   when?: (values: Values) => boolean}} CheckSpec
 * @typedef {{key: string, label: string, type: "text", value: string, parse: (text: string) => unknown, rows?: number,
 *   help?: string, when?: (values: Values) => boolean}} TextSpec  parse throws an Error that says what is wrong
 * @typedef {NumberSpec | SelectSpec | CheckSpec | TextSpec} Spec
 * @typedef {Record<string, any>} Values
 */

/** The value a text stands for; throws with what was expected. @param {Spec} spec @param {string} text */
export function parsed(spec, text) {
  if (spec.type === "number") {
    const value = Number(text);
    if (text.trim() === "" || !Number.isInteger(value) || value < spec.min || value > spec.max) {
      throw new Error(`a whole number from ${spec.min} to ${spec.max}`);
    }
    return value;
  }
  if (spec.type === "select") {
    if (!spec.options.some(([value]) => value === text)) throw new Error("one of the listed choices");
    return text;
  }
  if (spec.type === "check") {
    if (text !== "1" && text !== "0") throw new Error("1 or 0");
    return text === "1";
  }
  spec.parse(text);
  return text;
}

/**
 * Values from the address: what is missing or wrong there is as if it were not given.
 * @param {Spec[]} specs @param {Record<string, string>} params @returns {Values}
 */
export function valuesFrom(specs, params) {
  return Object.fromEntries(
    specs.map((spec) => {
      try {
        return [spec.key, params[spec.key] === undefined ? spec.value : parsed(spec, params[spec.key])];
      } catch {
        return [spec.key, spec.value];
      }
    }),
  );
}

/**
 * What to keep in the address: whatever differs from the default.
 * @param {Spec[]} specs @param {Values} values @returns {Record<string, string>}
 */
export function paramsOf(specs, values) {
  const changed = specs.filter((spec) => values[spec.key] !== spec.value);
  return Object.fromEntries(changed.map((spec) => [spec.key, textOf(spec, values[spec.key])]));
}

/** @param {Spec} spec @param {any} value */
function textOf(spec, value) {
  return spec.type === "check" ? (value ? "1" : "0") : String(value);
}

export class Form {
  /** @param {Spec[]} specs @param {Values} values @param {(values: Values, key: string) => void} onChange */
  constructor(specs, values, onChange) {
    this.specs = specs;
    this.values = { ...values };
    this.onChange = onChange;
    /** @type {Map<string, {row: HTMLElement, input: any, problem: HTMLElement}>} */
    this.fields = new Map();
    this.element = h(
      "form",
      { class: "form", onsubmit: (/** @type {Event} */ event) => event.preventDefault() },
      specs.map((spec) => this.#field(spec)),
    );
    this.#refresh();
  }

  /** Values from outside, such as a preset's. @param {Values} values */
  set(values) {
    Object.assign(this.values, values);
    for (const spec of this.specs) {
      const field = this.fields.get(spec.key);
      if (field === undefined || !(spec.key in values)) continue;
      if (spec.type === "check") field.input.checked = this.values[spec.key];
      else field.input.value = textOf(spec, this.values[spec.key]);
      this.#judge(spec, "");
    }
    this.#refresh();
  }

  /** @param {Spec} spec */
  #field(spec) {
    const id = `field-${spec.key}`;
    const input = this.#input(spec, id);
    const problem = h("span", { class: "problem", id: `${id}-problem`, role: "alert" });
    const label = h("label", { for: id }, spec.label);
    const row = h(
      "div",
      { class: `field field-${spec.type}`, title: spec.help },
      spec.type === "check" ? [input, label] : [label, input],
      problem,
    );
    this.fields.set(spec.key, { row, input, problem });
    return row;
  }

  /** @param {Spec} spec @param {string} id */
  #input(spec, id) {
    const changed = () => this.#changed(spec);
    const shared = { id, name: spec.key, "aria-describedby": `${id}-problem` };
    if (spec.type === "select") {
      const choices = spec.options.map(([value, text]) =>
        h("option", { value, selected: value === this.values[spec.key] }, text),
      );
      return h("select", { ...shared, onchange: changed }, choices);
    }
    if (spec.type === "check") {
      return h("input", { ...shared, type: "checkbox", checked: this.values[spec.key], onchange: changed });
    }
    if (spec.type === "text" && spec.rows) {
      const area = h("textarea", { ...shared, rows: spec.rows, spellcheck: "false", oninput: changed });
      area.value = this.values[spec.key];
      return area;
    }
    const limits =
      spec.type === "number"
        ? { type: "number", min: spec.min, max: spec.max, step: 1, inputmode: "numeric" }
        : { type: "text" };
    return h("input", {
      ...shared,
      ...limits,
      value: textOf(spec, this.values[spec.key]),
      autocomplete: "off",
      oninput: changed,
    });
  }

  /** @param {Spec} spec */
  #changed(spec) {
    const { input } = /** @type {{input: any}} */ (this.fields.get(spec.key));
    try {
      const value = parsed(spec, spec.type === "check" ? (input.checked ? "1" : "0") : input.value);
      this.#judge(spec, "");
      if (value === this.values[spec.key]) return;
      this.values[spec.key] = value;
    } catch (error) {
      this.#judge(spec, `Expected ${/** @type {Error} */ (error).message}.`);
      return;
    }
    this.#refresh();
    this.onChange({ ...this.values }, spec.key);
  }

  /** @param {Spec} spec @param {string} problem */
  #judge(spec, problem) {
    const field = /** @type {{row: HTMLElement, input: any, problem: HTMLElement}} */ (this.fields.get(spec.key));
    setText(field.problem, problem);
    field.input.setAttribute("aria-invalid", String(problem !== ""));
  }

  /** Hide what does not matter for the present choices. */
  #refresh() {
    for (const spec of this.specs) {
      const field = this.fields.get(spec.key);
      if (field) field.row.hidden = spec.when !== undefined && !spec.when(this.values);
    }
  }
}
