/** My problem: sizes in, and out come memory, time, roofline and the backend that would run, each number explained. */

import { fa2 } from "tilewise/engine/attention.js";
import { differenceFromNaive } from "tilewise/engine/check.js";
import { localPlan } from "tilewise/engine/localplan.js";
import { workload } from "tilewise/engine/recorder.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { difference, grouped, plural } from "tilewise/ui/format.js";
import { folded, heading } from "tilewise/ui/parts.js";
import {
  backendPart,
  cachePart,
  comparisonPart,
  memoryPart,
  rooflinePart,
  timePart,
  waysPart,
} from "tilewise/views/problemparts.js";

/**
 * @typedef {import("tilewise/main.js").Context} Context
 * @typedef {import("tilewise/engine/localplan.js").Question} Question
 * @typedef {import("tilewise/ui/form.js").Spec} Spec
 * @typedef {import("tilewise/ui/form.js").Values} Values
 */

const SHAPE = ["heads", "kv", "dim", "layers"];
/** Keystrokes come faster than answers are wanted. */
const PATIENCE_MS = 120;
const WAIT_MS = 150;
/** Tokens on which the two ways are compared. */
const SMALL = 64;

/** @param {any} data @returns {Spec[]} */
function specs(data) {
  const [start] = data.presets;
  return [
    {
      key: "model",
      label: "Model",
      type: "select",
      value: start.name,
      options: [...data.presets.map((/** @type {any} */ one) => [one.name, one.name]), ["own", "own sizes"]],
    },
    {
      key: "device",
      label: "Device",
      type: "select",
      value: "h100",
      options: Object.entries(data.devices).map(([key, device]) => [key, device.name]),
    },
    {
      key: "dtype",
      label: "Numbers",
      type: "select",
      value: "bfloat16",
      options: [
        ["bfloat16", "bf16"],
        ["float16", "fp16"],
        ["float32", "fp32"],
      ],
    },
    {
      key: "phase",
      label: "Phase",
      type: "select",
      value: "prefill",
      options: [
        ["prefill", "prefill (read a prompt)"],
        ["train", "training step"],
        ["decode", "decode (one token)"],
      ],
    },
    {
      key: "context",
      label: "Context",
      type: "number",
      value: 8192,
      min: data.limits.context[0],
      max: data.limits.context[1],
      help: "Tokens of each sequence",
    },
    { key: "batch", label: "Sequences", type: "number", value: 1, min: 1, max: data.limits.batch[1] },
    { key: "heads", label: "Query heads", type: "number", value: start.heads, min: 1, max: data.limits.heads[1] },
    {
      key: "kv",
      label: "K/V heads",
      type: "number",
      value: start.kv_heads,
      min: 1,
      max: data.limits.heads[1],
      help: "Fewer than query heads: GQA, or MQA for one",
    },
    {
      key: "dim",
      label: "Head dim",
      type: "select",
      value: String(start.head_dim),
      options: data.head_dims.map((/** @type {number} */ dim) => [String(dim), String(dim)]),
    },
    { key: "layers", label: "Layers", type: "number", value: start.layers, min: 1, max: 1000 },
    {
      key: "mask",
      label: "Mask",
      type: "select",
      value: "causal",
      options: [
        ["causal", "causal"],
        ["full", "none (full)"],
        ["window", "causal window"],
      ],
    },
    {
      key: "w",
      label: "Window",
      type: "number",
      value: 4095,
      min: 0,
      max: data.limits.context[1],
      help: "Keys before its own that a query sees",
      when: (values) => values.mask === "window",
    },
  ];
}

/** @param {Context} context @returns {import("tilewise/main.js").View} */
export function createProblemView(context) {
  return new ProblemView(context);
}

class ProblemView {
  /** @param {Context} context */
  constructor(context) {
    this.context = context;
    this.data = context.data;
    this.specs = specs(this.data);
    const values = valuesFrom(this.specs, { ...presetParams(this.data, context.params.model), ...context.params });
    this.form = new Form(this.specs, values, (now, key) => this.#changed(now, key));
    this.problem = h("p", { class: "message bad", role: "alert", hidden: true });
    this.answer = h("div", { class: "answer", "aria-live": "polite" });
    this.asked = 0;
    this.sizes = folded("Problem", [this.form.element]);
    this.sizes.element.open = true;
    this.element = h(
      "div",
      {},
      heading(
        "What will my problem cost?",
        "Attention of one layer, from its sizes and the datasheet of a device: a roofline estimate, and what naive attention would take. Every number with a dotted line explains itself on hover and on focus.",
      ),
      this.sizes.element,
      this.problem,
      this.answer,
    );
    this.#ask();
  }

  /** @param {Values} values @param {string} key */
  #changed(values, key) {
    if (key === "model" && values.model !== "own") {
      const preset = this.data.presets.find((/** @type {any} */ one) => one.name === values.model);
      this.form.set({
        heads: preset.heads,
        kv: preset.kv_heads,
        dim: String(preset.head_dim),
        layers: preset.layers,
        mask: preset.window === null ? "causal" : "window",
        ...(preset.window !== null && { w: preset.window }),
      });
    } else if (SHAPE.includes(key)) {
      this.form.set({ model: "own" });
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#ask(), PATIENCE_MS);
  }

  async #ask() {
    const { values } = this.form;
    this.context.save(paramsOf(this.specs, values));
    this.sizes.describe(
      `${grouped(values.context)} tokens, ${values.heads} query heads, ${values.kv} K/V heads, d = ${values.dim}, ${values.device}`,
    );
    this.asked += 1;
    const own = this.asked;
    const kv = divisor(values.heads, values.kv);
    const ratio =
      kv === values.kv
        ? ""
        : `Query heads (${values.heads}) must be a multiple of K/V heads (${values.kv}). Shown for ${plural(kv, "K/V head")}.`;
    // A long context takes Python seconds: say so before the answer, not after.
    const waiting = setTimeout(() => this.#wait(values), WAIT_MS);
    const [plan, wrong] = await this.#plan({ ...values, kv });
    clearTimeout(waiting);
    if (own !== this.asked || !this.answer) return;
    this.answer.removeAttribute("aria-busy");
    const message = wrong || ratio;
    this.problem.hidden = message === "";
    this.problem.classList.add("bad");
    setText(this.problem, message);
    if (plan !== null) this.#show(plan, { ...values, kv });
  }

  /** @param {Values} values */
  #wait(values) {
    this.answer.setAttribute("aria-busy", "true");
    this.problem.hidden = false;
    this.problem.classList.remove("bad");
    setText(this.problem, `Planning ${grouped(values.context)} tokens …`);
  }

  /** The plan, or what is wrong. @param {Values} values @returns {Promise<[any, string]>} */
  async #plan(values) {
    const question = questionOf(values);
    if (!this.data.served) return [localPlan(question, this.data), ""];
    try {
      const reply = await fetch("api/plan", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(question),
      });
      const answer = await reply.json();
      return reply.ok ? [answer, ""] : [null, answer.error];
    } catch {
      return [null, "The server does not answer. Start it again with: tilewise explore"];
    }
  }

  /** @param {any} plan @param {Values} values */
  #show(plan, values) {
    const facts = { plan, values };
    fill(
      this.answer,
      h(
        "div",
        { class: "panels loose" },
        h(
          "div",
          { class: "stack" },
          waysPart(facts),
          backendPart(facts),
          timePart(facts),
          memoryPart(facts),
          cachePart(facts),
        ),
        h("div", { class: "stack" }, rooflinePart(facts), comparisonPart(facts)),
      ),
      h("p", { class: "result", "data-check": "" }, check(values)),
    );
    this.answer.dataset.answered = String(this.asked);
  }

  destroy() {
    clearTimeout(this.timer);
    this.asked = -1;
  }
}

/** The largest number of K/V heads up to the wanted one that divides the query heads. @param {number} heads @param {number} wanted */
function divisor(heads, wanted) {
  let kv = Math.min(heads, wanted);
  while (heads % kv !== 0) kv -= 1;
  return kv;
}

/** Both ways on a small problem with the same mask. @param {Values} values */
function check(values) {
  const work = workload({
    seqlen_q: SMALL,
    seqlen_k: SMALL,
    head_dim: 8,
    head_dim_v: 8,
    block_m: 16,
    block_n: 16,
    scale: 1 / Math.sqrt(8),
    left: values.mask === "window" ? Math.min(values.w, SMALL) : null,
    right: values.mask === "full" ? null : 0,
  });
  return `Same result as naive attention: computed here on ${SMALL} tokens, the largest difference is ${difference(differenceFromNaive(fa2, work))}.`;
}

/** @param {Values} values @returns {Question} */
export function questionOf(values) {
  return {
    batch: values.batch,
    context: values.context,
    heads: values.heads,
    kv_heads: values.kv,
    head_dim: Number(values.dim),
    dtype: values.dtype,
    device: values.device,
    phase: values.phase,
    causal: values.mask !== "full",
    window: values.mask === "window" ? values.w : null,
  };
}

/**
 * An address that names a model means its sizes, too.
 * @param {any} data @param {string | undefined} name @returns {Record<string, string>}
 */
function presetParams(data, name) {
  const preset = data.presets.find((/** @type {any} */ one) => one.name === name);
  if (preset === undefined) return {};
  /** @type {Record<string, string>} */
  const window = preset.window === null ? {} : { mask: "window", w: String(preset.window) };
  return {
    heads: String(preset.heads),
    kv: String(preset.kv_heads),
    dim: String(preset.head_dim),
    layers: String(preset.layers),
    ...window,
  };
}
