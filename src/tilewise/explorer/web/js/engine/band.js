/**
 * Causal, window and length arithmetic; the mirror of tilewise/masks.py.
 *
 * Row m sees the keys m + offset - left .. m + offset + right that exist, offset = seqlenK - seqlenQ; null is unbounded.
 */

/** @typedef {"skip" | "partial" | "full"} TileKind */
/** @typedef {{blockM: number, blockN: number}} TileGrid */
/** @typedef {[number, number]} Span  start and stop, stop excluded */

/** Whole blocks that cover so many tokens. @param {number} length @param {number} block */
export function blocks(length, block) {
  return Math.ceil(length / block);
}

export class Band {
  /**
   * @param {number} seqlenQ @param {number} seqlenK
   * @param {number | null} left @param {number | null} right
   */
  constructor(seqlenQ, seqlenK, left = null, right = null) {
    this.seqlenQ = seqlenQ;
    this.seqlenK = seqlenK;
    this.left = left;
    this.right = right;
    this.offset = seqlenK - seqlenQ;
  }

  /** Whether query m attends to key n. @param {number} m @param {number} n */
  sees(m, n) {
    const distance = n - (m + this.offset);
    return (this.left === null || distance >= -this.left) && (this.right === null || distance <= this.right);
  }

  /** The keys that at least one of the queries sees. @param {number} mStart @param {number} mStop @returns {Span} */
  keysSeen(mStart, mStop) {
    mStop = Math.min(mStop, this.seqlenQ);
    if (mStart >= mStop) return [0, 0];
    const start = this.left === null ? 0 : Math.max(0, mStart + this.offset - this.left);
    const stop = this.right === null ? this.seqlenK : Math.min(this.seqlenK, mStop + this.offset + this.right);
    return [start, Math.max(start, stop)];
  }

  /** The keys that every one of the queries sees. @param {number} mStart @param {number} mStop @returns {Span} */
  keysCommon(mStart, mStop) {
    mStop = Math.min(mStop, this.seqlenQ);
    if (mStart >= mStop) return [0, 0];
    const start = this.left === null ? 0 : Math.max(0, mStop - 1 + this.offset - this.left);
    const stop = this.right === null ? this.seqlenK : Math.min(this.seqlenK, mStart + 1 + this.offset + this.right);
    return [start, Math.max(start, stop)];
  }

  /** @param {number} mBlock @param {number} nBlock @param {TileGrid} grid @returns {TileKind} */
  tileKind(mBlock, nBlock, { blockM, blockN }) {
    const nStart = nBlock * blockN;
    const nStop = nStart + blockN;
    const seen = this.keysSeen(mBlock * blockM, (mBlock + 1) * blockM);
    if (Math.max(nStart, seen[0]) >= Math.min(nStop, seen[1])) return "skip";
    const common = this.keysCommon(mBlock * blockM, (mBlock + 1) * blockM);
    return common[0] <= nStart && nStop <= common[1] ? "full" : "partial";
  }

  /** Tiles by kind, in time linear in the number of query blocks. @param {TileGrid} grid */
  countTiles({ blockM, blockN }) {
    let full = 0;
    let visited = 0;
    const mBlocks = blocks(this.seqlenQ, blockM);
    for (let m = 0; m < mBlocks; m++) {
      const seen = this.keysSeen(m * blockM, (m + 1) * blockM);
      if (seen[1] > seen[0]) visited += Math.ceil(seen[1] / blockN) - Math.floor(seen[0] / blockN);
      const common = this.keysCommon(m * blockM, (m + 1) * blockM);
      full += Math.max(0, Math.floor(common[1] / blockN) - Math.ceil(common[0] / blockN));
    }
    return { full, partial: visited - full, skipped: mBlocks * blocks(this.seqlenK, blockN) - visited, visited };
  }

  /** Visible (query, key) pairs, in closed form. */
  countPairs() {
    const upToRight = this.#pairsUpTo(this.right);
    return this.left === null ? upToRight : upToRight - this.#pairsUpTo(-this.left - 1);
  }

  /** Pairs with n - (m + offset) <= distance. @param {number | null} distance */
  #pairsUpTo(distance) {
    if (distance === null) return this.seqlenQ * this.seqlenK;
    const first = this.offset + distance + 1;
    const rampStart = Math.min(Math.max(0, -first), this.seqlenQ);
    const rampStop = Math.min(Math.max(rampStart, this.seqlenK - first), this.seqlenQ);
    const ramp = ((rampStop - rampStart) * (2 * first + rampStart + rampStop - 1)) / 2;
    return ramp + (this.seqlenQ - rampStop) * this.seqlenK;
  }
}

/** A mask pair by pair, such as one that was drawn; the mirror of Drawn in tilewise/simulator/events.py. */
export class Drawn {
  /** @param {string[]} rows  one text a query, "1" for a key that it sees */
  constructor(rows) {
    this.rows = rows;
  }

  /** Whether query m attends to key n. @param {number} m @param {number} n */
  sees(m, n) {
    return this.rows[m][n] === "1";
  }

  /** @param {number} mBlock @param {number} nBlock @param {TileGrid} grid @returns {TileKind} */
  tileKind(mBlock, nBlock, { blockM, blockN }) {
    const parts = this.rows
      .slice(mBlock * blockM, (mBlock + 1) * blockM)
      .map((row) => row.slice(nBlock * blockN, (nBlock + 1) * blockN));
    if (!parts.some((part) => part.includes("1"))) return "skip";
    return parts.every((part) => part === "1".repeat(blockN)) ? "full" : "partial";
  }

  /** Tiles by kind. @param {TileGrid} grid */
  countTiles(grid) {
    const counts = { full: 0, partial: 0, skip: 0 };
    for (let m = 0; m < blocks(this.rows.length, grid.blockM); m++)
      for (let n = 0; n < blocks(this.rows[0].length, grid.blockN); n++) counts[this.tileKind(m, n, grid)]++;
    const { full, partial, skip } = counts;
    return { full, partial, skipped: skip, visited: full + partial };
  }
}
