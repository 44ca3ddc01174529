/** One chapter: two or three sentences, a picture that moves, pseudocode, questions, and the way on. */

import { CHAPTERS } from "tilewise/lesson/chapters.js";
import { marked } from "tilewise/lesson/glossary.js";
import { questionBox } from "tilewise/lesson/questions.js";
import { CodeBox } from "tilewise/ui/code.js";
import { fill, h, setText } from "tilewise/ui/dom.js";
import { Form, paramsOf, valuesFrom } from "tilewise/ui/form.js";
import { caption } from "tilewise/ui/parts.js";
import { Player } from "tilewise/ui/player.js";

/**
 * @typedef {import("tilewise/main.js").Context} Context
 * @typedef {import("tilewise/ui/form.js").Values} Values
 * @typedef {{element: HTMLElement, length: number, set: (values: Values) => void, show: (at: number) => void,
 *   description: () => string, destroy: () => void}} Scene
 * @typedef {{ask: string, choices: string[], right: number, why: string | (() => string)}} Question
 * @typedef {{goal: string, minutes: number, script: string[], question: string, answer: string}} Notes
 * @typedef {{id: string, number: string, title: string, text: string[], bench: string, scene: (data: any) => any,
 *   controls?: (data: any) => import("tilewise/ui/form.js").Spec[], code: string[],
 *   lines: (scene: any, at: number) => number[], say: (scene: any, at: number) => string,
 *   result: (scene: any) => string, questions: Question[], notes: Notes}} Chapter
 *   `say`, `lines` and `result` are asked after the scene has shown the step, and read their numbers from it
 */

/** @param {Chapter} chapter */
export function createChapterView(chapter) {
  return (/** @type {Context} */ context) => new ChapterView(context, chapter);
}

class ChapterView {
  /** @param {Context} context @param {Chapter} chapter */
  constructor(context, chapter) {
    this.context = context;
    this.chapter = chapter;
    this.specs = chapter.controls?.(context.data) ?? [];
    const values = valuesFrom(this.specs, context.params);
    this.form = new Form(this.specs, values, (now) => {
      this.scene.set(now);
      this.player.reset(this.scene.length);
    });
    /** @type {Scene} */
    this.scene = chapter.scene(context.data);
    this.scene.set(values);
    this.text = caption();
    this.code = new CodeBox(chapter.code);
    this.result = h("p", { class: "result", "data-check": "" });
    this.player = new Player({ length: 1, at: 0, onStep: (at) => this.#show(at) });
    this.element = this.#page();
    this.player.reset(this.scene.length, Math.min(this.scene.length, Number(context.params.step) || 0));
  }

  #page() {
    const { chapter, context } = this;
    const known = new Set();
    const alone = context.data.chapter === chapter.id;
    const at = CHAPTERS.indexOf(chapter);
    const [before, after] = alone ? [] : [CHAPTERS[at - 1], CHAPTERS[at + 1]];
    const bench = alone && chapter.bench.startsWith("problem") ? null : chapter.bench;
    return h(
      "article",
      { class: "chapter", "data-chapter": chapter.id },
      h(
        "div",
        { class: "chapter-text" },
        h(
          "p",
          { class: "eyebrow" },
          `Chapter ${chapter.number}`,
          before && h("a", { href: `#${before.id}`, "aria-label": `Back: ${before.title}` }, "‹ Back"),
          after && h("a", { href: `#${after.id}`, "aria-label": `Next: ${after.title}` }, "Next ›"),
        ),
        h("h2", {}, chapter.title),
        chapter.text.map((sentence) => h("p", {}, marked(sentence, { known }))),
      ),
      h(
        "div",
        { class: "chapter-stage" },
        this.specs.length > 0 && this.form.element,
        this.scene.element,
        this.player.element,
        this.text,
        this.result,
      ),
      h("div", { class: "chapter-code" }, h("h3", {}, "What runs"), this.code.element),
      h(
        "div",
        { class: "chapter-questions" },
        h("h3", {}, "Predict, then look"),
        chapter.questions.map((question) => questionBox(question)),
      ),
      h(
        "nav",
        { class: "tour", "aria-label": "Tour" },
        before ? h("a", { class: "button", href: `#${before.id}`, rel: "prev" }, `Back: ${before.title}`) : h("span"),
        bench && h("a", { class: "button", href: `#${bench}`, "data-bench": "" }, "Play with it"),
        after
          ? h("a", { class: "button primary", href: `#${after.id}`, rel: "next" }, `Next: ${after.title}`)
          : h("a", { class: "button primary", href: "#teacher", "data-end": "" }, "The end: to the teacher's page"),
      ),
      h(
        "p",
        { class: "chapter-tools small muted" },
        h("a", { href: `#teacher?chapter=${chapter.id}` }, "Notes for teachers"),
        context.data.served && [
          " · ",
          h(
            "a",
            { href: `export/${chapter.id}.html`, download: `${chapter.id}.html` },
            "Save this chapter as one file",
          ),
        ],
      ),
    );
  }

  /** @param {number} at */
  #show(at) {
    this.scene.show(at);
    const said = this.chapter.say(this.scene, at);
    if (this.text.textContent !== said) fill(this.text, marked(said, { focusable: false }));
    this.code.light(this.chapter.lines(this.scene, at));
    setText(this.result, this.chapter.result(this.scene));
    this.context.save({ ...paramsOf(this.specs, this.form.values), ...(at > 0 && { step: String(at) }) });
  }

  /** @param {KeyboardEvent} event */
  onKey(event) {
    return this.player.onKey(event);
  }

  destroy() {
    this.player.stop();
    this.scene.destroy();
  }
}
