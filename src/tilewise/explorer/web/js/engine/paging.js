/**
 * A KV cache's memory under two policies, pages on demand and contiguous reservation; the mirror of
 * tilewise/simulator/paging.py. A request for which there is no room is refused and changes nothing.
 */

/**
 * @typedef {{kind: "take" | "share" | "copy" | "free" | "refuse", request: string, page: number | null, source: number | null}} PageEvent
 */

export class PagePool {
  /** @param {number} numPages @param {number} pageSize */
  constructor(numPages, pageSize) {
    this.numPages = numPages;
    this.pageSize = pageSize;
    /** @type {Map<string, number[]>} */
    this.tables = new Map();
    /** @type {Map<string, number>} */
    this.tokens = new Map();
    /** @type {Map<number, number>} */
    this.holders = new Map();
    /** @type {PageEvent[]} */
    this.events = [];
    this.free = Array.from({ length: numPages }, (_, page) => numPages - 1 - page);
  }

  /** @param {string} request @param {number} tokens @returns {boolean} */
  arrive(request, tokens) {
    if (!this.#room(request, this.#pages(tokens))) return false;
    this.tables.set(request, []);
    this.tokens.set(request, 0);
    this.#extend(request, tokens);
    return true;
  }

  /** @param {string} request @param {number} tokens @returns {boolean} */
  append(request, tokens) {
    const table = this.tableOf(request);
    const have = this.tokens.get(request) ?? 0;
    const copies = have % this.pageSize !== 0 && this.holdersOf(table[table.length - 1]) > 1;
    if (!this.#room(request, this.#pages(have + tokens) - table.length + (copies ? 1 : 0))) return false;
    if (copies) this.#copyLast(request);
    this.#extend(request, tokens);
    return true;
  }

  /** @param {string} parent @param {string} request */
  fork(parent, request) {
    this.tables.set(request, [...this.tableOf(parent)]);
    this.tokens.set(request, this.tokens.get(parent) ?? 0);
    for (const page of this.tableOf(request)) {
      this.holders.set(page, this.holdersOf(page) + 1);
      this.#note("share", request, page);
    }
  }

  /** @param {string} request */
  finish(request) {
    const table = this.tableOf(request);
    this.tables.delete(request);
    this.tokens.delete(request);
    for (const page of table.reverse()) this.#release(request, page);
  }

  /** @param {string} request @returns {number[]} */
  tableOf(request) {
    return this.tables.get(request) ?? [];
  }

  /** How many requests hold a page. @param {number} page */
  holdersOf(page) {
    return this.holders.get(page) ?? 0;
  }

  get reservedPages() {
    return this.holders.size;
  }

  /** Slots with a token, of those in held pages; a shared page counts once. */
  get utilisation() {
    const filled = [...this.fill().values()].reduce((sum, tokens) => sum + tokens, 0);
    return filled / Math.max(1, this.reservedPages * this.pageSize);
  }

  /** Tokens in each held page. @returns {Map<number, number>} */
  fill() {
    /** @type {Map<number, number>} */
    const fill = new Map();
    for (const [request, table] of this.tables) {
      table.forEach((page, index) => {
        const filled = Math.min(this.pageSize, (this.tokens.get(request) ?? 0) - index * this.pageSize);
        fill.set(page, Math.max(fill.get(page) ?? 0, filled));
      });
    }
    return fill;
  }

  /** @param {number} tokens */
  #pages(tokens) {
    return Math.ceil(tokens / this.pageSize);
  }

  /** @param {string} request @param {number} pages */
  #room(request, pages) {
    if (pages <= this.free.length) return true;
    this.#note("refuse", request);
    return false;
  }

  #take() {
    const page = /** @type {number} */ (this.free.pop());
    this.holders.set(page, 1);
    return page;
  }

  /** @param {string} request @param {number} tokens */
  #extend(request, tokens) {
    const total = (this.tokens.get(request) ?? 0) + tokens;
    this.tokens.set(request, total);
    const table = this.tableOf(request);
    while (table.length < this.#pages(total)) {
      const page = this.#take();
      table.push(page);
      this.#note("take", request, page);
    }
  }

  /** @param {string} request */
  #copyLast(request) {
    const table = this.tableOf(request);
    const source = table[table.length - 1];
    this.holders.set(source, this.holdersOf(source) - 1);
    table[table.length - 1] = this.#take();
    this.#note("copy", request, table[table.length - 1], source);
  }

  /** @param {string} request @param {number} page */
  #release(request, page) {
    const left = this.holdersOf(page) - 1;
    if (left > 0) {
      this.holders.set(page, left);
      return;
    }
    this.holders.delete(page);
    this.free.push(page);
    this.#note("free", request, page);
  }

  /**
   * @param {PageEvent["kind"]} kind @param {string} request @param {number | null} page @param {number | null} source
   */
  #note(kind, request, page = null, source = null) {
    this.events.push({ kind, request, page, source });
  }
}

export class ContiguousPool {
  /** @param {number} numPages @param {number} pageSize @param {number} maxTokens @param {number | null} slots */
  constructor(numPages, pageSize, maxTokens, slots = null) {
    this.numPages = numPages;
    this.pageSize = pageSize;
    this.maxTokens = maxTokens;
    this.pagesPerSlot = Math.ceil(maxTokens / pageSize);
    const most = Math.floor(numPages / this.pagesPerSlot);
    /** @type {(string | null)[]} */
    this.slots = new Array(Math.min(most, slots ?? most)).fill(null);
    /** @type {Map<string, number>} */
    this.tokens = new Map();
    /** @type {PageEvent[]} */
    this.events = [];
  }

  /** @param {string} request @param {number} tokens @returns {boolean} */
  arrive(request, tokens) {
    const slot = this.slots.indexOf(null);
    if (tokens > this.maxTokens || slot < 0) return this.#refuse(request);
    this.slots[slot] = request;
    this.tokens.set(request, tokens);
    this.#note("take", request, slot);
    return true;
  }

  /** @param {string} request @param {number} tokens @returns {boolean} */
  append(request, tokens) {
    const total = (this.tokens.get(request) ?? 0) + tokens;
    if (total > this.maxTokens) return this.#refuse(request);
    this.tokens.set(request, total);
    return true;
  }

  /** @param {string} request */
  finish(request) {
    const slot = this.slots.indexOf(request);
    this.slots[slot] = null;
    this.tokens.delete(request);
    this.#note("free", request, slot);
  }

  get reservedPages() {
    return this.tokens.size * this.pagesPerSlot;
  }

  get usedPages() {
    return [...this.tokens.values()].reduce((sum, tokens) => sum + Math.ceil(tokens / this.pageSize), 0);
  }

  get wastedPages() {
    return this.reservedPages - this.usedPages;
  }

  get utilisation() {
    const tokens = [...this.tokens.values()].reduce((sum, count) => sum + count, 0);
    return tokens / Math.max(1, this.reservedPages * this.pageSize);
  }

  /** @param {string} request */
  #refuse(request) {
    this.events.push({ kind: "refuse", request, page: null, source: null });
    return false;
  }

  /** @param {"take" | "free"} kind @param {string} request @param {number} slot */
  #note(kind, request, slot) {
    for (let page = slot * this.pagesPerSlot; page < (slot + 1) * this.pagesPerSlot; page++) {
      this.events.push({ kind, request, page, source: null });
    }
  }
}
