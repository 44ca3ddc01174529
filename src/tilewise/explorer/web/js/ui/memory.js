/** What the browser remembers between visits; where it may not, nothing is remembered. */

const PREFIX = "tilewise.";

/** @param {string} name @returns {string | null} */
export function recall(name) {
  try {
    return localStorage.getItem(PREFIX + name);
  } catch {
    return session.get(name) ?? null;
  }
}

/** @param {string} name @param {string} value */
export function remember(name, value) {
  session.set(name, value);
  try {
    localStorage.setItem(PREFIX + name, value);
  } catch {
    // A browser that keeps nothing: the page remembers until it is closed.
  }
}

/** @type {Map<string, string>} */
const session = new Map();
