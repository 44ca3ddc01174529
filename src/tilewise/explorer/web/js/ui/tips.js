/** One floating box that explains whatever is hovered or focused; it stays within the window, Escape hides it. */

import { h, setText } from "tilewise/ui/dom.js";

const MARGIN = 8;

export function startTips() {
  const box = document.body.appendChild(h("div", { class: "tip", hidden: true, "aria-hidden": "true" }));
  const show = (/** @type {Event} */ event) => {
    const target = /** @type {HTMLElement} */ (event.target)?.closest?.(".explained");
    box.hidden = target === null || target === undefined;
    if (!target) return;
    setText(box, document.getElementById(target.getAttribute("aria-describedby") ?? "")?.textContent ?? "");
    const [anchor, own] = [target.getBoundingClientRect(), box.getBoundingClientRect()];
    const below = anchor.bottom + MARGIN + own.height < innerHeight;
    const left = Math.max(MARGIN, Math.min(anchor.left, document.documentElement.clientWidth - own.width - MARGIN));
    box.style.left = `${left}px`;
    box.style.top = `${below ? anchor.bottom + MARGIN : Math.max(MARGIN, anchor.top - own.height - MARGIN)}px`;
  };
  const hide = () => {
    box.hidden = true;
  };
  document.addEventListener("pointerover", show);
  document.addEventListener("focusin", show);
  document.addEventListener("focusout", hide);
  document.addEventListener("scroll", hide, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
}
