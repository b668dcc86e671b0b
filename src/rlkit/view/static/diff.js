/** Differences between two texts: a longest common subsequence of their words, or of their lines if they are long. */
import { joinRuns } from "rlkit/text";

const MAX_CELLS = 25_000_000;
const WORDS = /\p{L}+|\p{N}+|\s+|[^\p{L}\p{N}\s]/gu;
const LINE_ENDS = /(?<=\n)/;

/** Return two lists of [text, isDifferent] that spell the texts, or null if the texts are too long to compare. */
export const diffTexts = (first, second) => diffParts(first.match(WORDS) ?? [], second.match(WORDS) ?? [])
  ?? diffParts(first.split(LINE_ENDS), second.split(LINE_ENDS));

function diffParts(a, b) {
  let start = 0;
  while (start < Math.min(a.length, b.length) && a[start] === b[start]) start++;
  let [aEnd, bEnd] = [a.length, b.length];
  while (aEnd > start && bEnd > start && a[aEnd - 1] === b[bEnd - 1]) [aEnd, bEnd] = [aEnd - 1, bEnd - 1];
  const width = bEnd - start + 1;
  if ((aEnd - start + 1) * width > MAX_CELLS) return null;
  const lengths = new Uint16Array((aEnd - start + 1) * width); // of the subsequences of the rests
  for (let x = aEnd - start - 1; x >= 0; x--) {
    for (let y = width - 2; y >= 0; y--) {
      const cell = x * width + y;
      const without = Math.max(lengths[cell + width], lengths[cell + 1]);
      lengths[cell] = a[start + x] === b[start + y] ? lengths[cell + width + 1] + 1 : without;
    }
  }
  const [aSame, bSame] = [new Uint8Array(a.length), new Uint8Array(b.length)].map((same) => same.fill(1));
  aSame.fill(0, start, aEnd);
  bSame.fill(0, start, bEnd);
  for (let [x, y] = [0, 0]; x < aEnd - start && y < width - 1; ) {
    if (a[start + x] === b[start + y]) aSame[start + x++] = bSame[start + y++] = 1;
    else if (lengths[(x + 1) * width + y] >= lengths[x * width + y + 1]) x++;
    else y++;
  }
  return [[a, aSame], [b, bSame]].map(([parts, same]) => joinRuns(parts.map((part, index) => [part, !same[index]])));
}
