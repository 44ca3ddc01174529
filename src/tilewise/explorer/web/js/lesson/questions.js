/** Predict, then reveal: a question with choices, whose answer appears when it is asked for. */

import { marked } from "tilewise/lesson/glossary.js";
import { fill, h, setText } from "tilewise/ui/dom.js";

let serial = 0;

/** @param {import("tilewise/lesson/view.js").Question} question */
export function questionBox(question) {
  serial += 1;
  const name = `question-${serial}`;
  const answer = h("p", { class: "answer-text", role: "status" });
  const inputs = question.choices.map((_, at) => h("input", { type: "radio", name, id: `${name}-${at}`, value: at }));
  const reveal = () => {
    const chosen = inputs.findIndex((input) => input.checked);
    const verdict = chosen < 0 ? "" : chosen === question.right ? "Right. " : "Not quite. ";
    fill(
      answer,
      h("b", {}, `${verdict}${question.choices[question.right]}. `),
      marked(whyOf(question), { focusable: false }),
    );
    setText(button, "Answer shown");
    box.dataset.revealed = "true";
  };
  const button = h("button", { type: "button", onclick: reveal }, "Show the answer");
  const box = h(
    "fieldset",
    { class: "question" },
    h("legend", {}, question.ask),
    h(
      "div",
      { class: "choices" },
      question.choices.map((choice, at) => h("label", { for: `${name}-${at}` }, inputs[at], " ", choice)),
    ),
    button,
    answer,
  );
  return box;
}

/** @param {import("tilewise/lesson/view.js").Question} question */
export function whyOf({ why }) {
  return typeof why === "string" ? why : why();
}
