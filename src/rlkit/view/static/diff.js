/** Differences between two texts by words, after Myers (1986). */

const MAX_EDITS = 3000;

/** Return two lists of [text, isDifferent] that spell the texts, or null if the texts differ too much to compare. */
export function diffWords(first, second) {
  const [a, b] = [splitWords(first), splitWords(second)];
  let start = 0;
  while (start < Math.min(a.length, b.length) && a[start] === b[start]) start++;
  let [aEnd, bEnd] = [a.length, b.length];
  while (aEnd > start && bEnd > start && a[aEnd - 1] === b[bEnd - 1]) [aEnd, bEnd] = [aEnd - 1, bEnd - 1];
  const common = matchWords(a.slice(start, aEnd), b.slice(start, bEnd));
  if (!common) return null;
  const [aSame, bSame] = [new Uint8Array(a.length).fill(1), new Uint8Array(b.length).fill(1)];
  aSame.fill(0, start, aEnd);
  bSame.fill(0, start, bEnd);
  for (const [x, y] of common) aSame[start + x] = bSame[start + y] = 1;
  return [joinRuns(a, aSame), joinRuns(b, bSame)];
}

function splitWords(text) {
  return text.match(/\p{L}+|\p{N}+|\s+|[^\p{L}\p{N}\s]/gu) ?? [];
}

function joinRuns(words, same) {
  const runs = [];
  words.forEach((word, index) => {
    const isDifferent = !same[index];
    if (runs.length && runs.at(-1)[1] === isDifferent) runs.at(-1)[0] += word;
    else runs.push([word, isDifferent]);
  });
  return runs;
}

/** Return the pairs of positions of a longest common subsequence, or null after too many edits. */
function matchWords(a, b) {
  const trace = [];
  let ends = new Map([[1, 0]]);
  for (let edits = 0; edits <= Math.min(MAX_EDITS, a.length + b.length); edits++) {
    const next = new Map();
    for (let k = -edits; k <= edits; k += 2) {
      const goesDown = k === -edits || (k !== edits && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1));
      let x = goesDown ? (ends.get(k + 1) ?? 0) : ends.get(k - 1) + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      next.set(k, x);
      if (x >= a.length && x - k >= b.length) return tracePairs([...trace, ends], a, b);
    }
    trace.push(ends);
    ends = next;
  }
  return null;
}

function tracePairs(trace, a, b) {
  const pairs = [];
  let [x, y] = [a.length, b.length];
  for (let edits = trace.length - 1; edits >= 0 && (x > 0 || y > 0); edits--) {
    const ends = trace[edits];
    const k = x - y;
    const goesDown = k === -edits || (k !== edits && (ends.get(k - 1) ?? -1) < (ends.get(k + 1) ?? -1));
    const from = goesDown ? k + 1 : k - 1;
    const fromX = edits === 0 ? 0 : ends.get(from);
    const fromY = edits === 0 ? 0 : fromX - from;
    while (x > fromX && y > fromY && a[x - 1] === b[y - 1]) pairs.push([--x, --y]);
    [x, y] = [fromX, fromY];
  }
  return pairs;
}
