/** What an action did to the two caches, in a sentence each. */

import { plural } from "tilewise/ui/format.js";

/**
 * @typedef {import("tilewise/engine/script.js").Action} Action
 * @typedef {ReturnType<typeof import("tilewise/engine/script.js").play>} State
 * @typedef {import("tilewise/engine/paging.js").PageEvent} PageEvent
 */

/** @param {Action | undefined} action @param {State} state */
export function happened(action, state) {
  if (action === undefined) return "Both caches are empty. Step through what happens, or write your own story below.";
  return `${asked(action)} Contiguous: ${contiguousAnswer(action, state)} Paged: ${pagedAnswer(action, state)}`;
}

/** @param {Action} action */
function asked({ kind, request, tokens, parent }) {
  if (kind === "arrives") return `${request} arrives with ${plural(tokens, "token")}.`;
  if (kind === "grows") return `${request} grows by ${plural(tokens, "token")}.`;
  return kind === "shares" ? `${request} starts from all that ${parent} has.` : `${request} is finished.`;
}

/** @param {Action} action @param {State} state */
function contiguousAnswer({ kind, request }, { contiguous, fresh, refusedContiguous }) {
  const events = contiguous.events.slice(fresh.contiguous);
  const wait =
    kind === "grows"
      ? "refused, its reservation is full."
      : `refused, ${contiguous.slots.length} of ${contiguous.slots.length} reservations are taken, although ${plural(contiguous.wastedPages, "page")} of them ${contiguous.wastedPages === 1 ? "is" : "are"} empty.`;
  if (events.some((event) => event.kind === "refuse")) return wait;
  if (refusedContiguous.has(request)) return "it was refused and is not here.";
  if (kind === "grows") return "it grows into its reservation.";
  return kind === "finishes"
    ? `${plural(contiguous.pagesPerSlot, "page")} ${contiguous.pagesPerSlot === 1 ? "comes" : "come"} back.`
    : `${plural(contiguous.pagesPerSlot, "page")} ${contiguous.pagesPerSlot === 1 ? "is" : "are"} reserved.`;
}

/** @param {Action} action @param {State} state */
function pagedAnswer({ kind, request }, { paged, fresh, refusedPaged }) {
  const events = paged.events.slice(fresh.paged);
  const pages = (/** @type {PageEvent["kind"]} */ wanted) => events.filter((event) => event.kind === wanted);
  if (pages("refuse").length > 0) return "refused, there are too few free pages.";
  if (refusedPaged.has(request)) return "it was refused and is not here.";
  const [copied] = pages("copy");
  const copy = copied
    ? `its last page is shared, so page ${copied.source} is copied to ${copied.page} before it writes`
    : "";
  const before = paged.events.slice(0, fresh.paged).filter((event) => event.kind === "free");
  const reused = pages("take")
    .map(({ page }) => before.filter((event) => event.page === page).pop())
    .filter((event) => event !== undefined);
  if (kind === "shares") return `the table names the same ${plural(pages("share").length, "page")}; none is taken.`;
  if (kind === "finishes")
    return pages("free").length === 0
      ? "no page is free: others still hold them."
      : `${list(pages("free"))} ${pages("free").length === 1 ? "is" : "are"} free at once.`;
  if (pages("take").length === 0) return copy ? `${copy}.` : "there is room in its last page.";
  return `${copy && `${copy}, and `}${list(pages("take"))} ${pages("take").length === 1 ? "goes" : "go"} out${reused.length > 0 ? `; ${reused.map((event) => `page ${event.page} was ${event.request}'s`).join(", ")}` : ""}.`;
}

/** @param {PageEvent[]} events */
function list(events) {
  const pages = events.map((event) => event.page);
  return pages.length === 1
    ? `page ${pages[0]}`
    : `pages ${pages.slice(0, -1).join(", ")} and ${pages[pages.length - 1]}`;
}
