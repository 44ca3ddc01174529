/** One floating box that explains whatever is hovered or focused; it stays within the window, Escape hides it. */

import { h, setText } from "tilewise/ui/dom.js";

const MARGIN = 8;
const box = h("div", { class: "tip", hidden: true, "aria-hidden": "true" });
/** The focused element whose text is shown. Its tip stays and moves with it: focus itself may scroll the page, also below
 * a pointer that rests.
 * @type {HTMLElement | null} */
let focused = null;

export function startTips() {
  document.body.append(box);
  const show = (/** @type {Event} */ event) => {
    const target = /** @type {HTMLElement} */ (event.target)?.closest?.(".explained, [data-tip]");
    if (!target) {
      if (!focused) box.hidden = true;
      return;
    }
    focused = event.type === "focusin" ? target : null;
    const text =
      target.getAttribute("data-tip") ??
      document.getElementById(target.getAttribute("aria-describedby") ?? "")?.textContent ??
      "";
    setText(box, text);
    box.hidden = false;
    place(target.getBoundingClientRect());
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("focusout", () => showTip(null));
  const follow = () => (focused ? place(focused.getBoundingClientRect()) : showTip(null));
  document.addEventListener("scroll", follow, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") showTip(null);
  });
}

/** A text beside the pointer, for pictures whose parts are no elements. @param {string | null} text */
export function showTip(text, x = 0, y = 0) {
  focused = null;
  box.hidden = text === null;
  if (text === null) return;
  setText(box, text);
  place({ left: x + 12, top: y, bottom: y + 12 });
}

/** @param {{left: number, top: number, bottom: number}} anchor */
function place(anchor) {
  const own = box.getBoundingClientRect();
  const below = anchor.bottom + MARGIN + own.height < innerHeight;
  const left = Math.max(MARGIN, Math.min(anchor.left, document.documentElement.clientWidth - own.width - MARGIN));
  box.style.left = `${left}px`;
  box.style.top = `${below ? anchor.bottom + MARGIN : Math.max(MARGIN, anchor.top - own.height - MARGIN)}px`;
}
