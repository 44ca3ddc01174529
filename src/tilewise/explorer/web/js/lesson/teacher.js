/** The teacher's page: for each chapter the goal, a script, a question and its answer, and the articles' numbers. */

import { articleTable } from "tilewise/lesson/articles.js";
import { CHAPTERS } from "tilewise/lesson/chapters.js";
import { whyOf } from "tilewise/lesson/questions.js";
import { h } from "tilewise/ui/dom.js";
import { plural } from "tilewise/ui/format.js";

/** @typedef {import("tilewise/main.js").Context} Context */

/** @param {Context} context @returns {import("tilewise/main.js").View} */
export function createTeacherView({ data, params }) {
  const wanted = data.chapter ?? params.chapter;
  const shown = CHAPTERS.filter((chapter) => wanted === undefined || chapter.id === wanted);
  const chapters = shown.length > 0 ? shown : CHAPTERS;
  const minutes = chapters.reduce((sum, chapter) => sum + chapter.notes.minutes, 0);
  return {
    element: h(
      "div",
      { class: "teacher" },
      h("h2", {}, chapters.length === 1 ? `Notes for teachers: ${chapters[0].title}` : "Notes for teachers"),
      h(
        "p",
        { class: "lead" },
        `${plural(minutes, "minute")} in all. Show a chapter with Present: large type, arrow keys for the steps, PageDown for the next chapter. Every chapter has an address of its own that also keeps the step.`,
      ),
      h(
        "p",
        { class: "row no-print" },
        h("button", { type: "button", onclick: () => print() }, "Print these notes"),
        chapters.length < CHAPTERS.length && data.chapter === undefined && h("a", { href: "#teacher" }, "All chapters"),
      ),
      chapters.map((chapter) => notesOf(chapter)),
      chapters.length > 1 && articleTable(),
    ),
    destroy() {},
  };
}

/** @param {import("tilewise/lesson/view.js").Chapter} chapter */
function notesOf(chapter) {
  const { notes } = chapter;
  return h(
    "section",
    { class: "panel lesson-notes", "aria-label": chapter.title, "data-notes": chapter.id },
    h(
      "h3",
      {},
      `${chapter.number}. ${chapter.title}`,
      h("small", {}, h("a", { href: `#${chapter.id}` }, `#${chapter.id}`), `, ${plural(notes.minutes, "minute")}`),
    ),
    h(
      "dl",
      {},
      h("dt", {}, "Goal"),
      h("dd", {}, notes.goal),
      h("dt", {}, "Script"),
      h(
        "dd",
        {},
        h(
          "ol",
          {},
          notes.script.map((line) => h("li", {}, line)),
        ),
      ),
      h("dt", {}, "Question"),
      h("dd", {}, notes.question),
      h("dt", {}, "Answer"),
      h("dd", {}, notes.answer),
      h("dt", {}, "Questions in the chapter"),
      h(
        "dd",
        {},
        h(
          "ul",
          {},
          chapter.questions.map((question) =>
            h("li", {}, `${question.ask} ${question.choices[question.right]}. ${whyOf(question)}`),
          ),
        ),
      ),
    ),
  );
}
