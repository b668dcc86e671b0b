/** The turns of an episode as a tree of segments: turns that continue each other, and branches. */
import { formatCount, h, isKnown, joinFacts, plural } from "rlkit/ui";

/** Return segments: {turns: [index], children: [segment]}. A turn without a parent starts a segment. */
function makeSegments(turns) {
  const children = turns.map(() => []);
  const roots = [];
  turns.forEach(({ parent }, index) => (isKnown(parent) ? children[parent] : roots).push(index));
  const grow = (first) => {
    const path = [first];
    while (children[path.at(-1)].length === 1) path.push(children[path.at(-1)][0]);
    return { turns: path, children: children[path.at(-1)].map(grow) };
  };
  return roots.map(grow);
}

/** Draw the tree. hrefOf(turn) is the link of a turn; goTo(turn) shows it on this page. */
export function drawTree({ turns }, hrefOf, goTo) {
  const drawTurn = (index) => {
    const { completion, version, stop } = turns[index];
    const size = completion.length > 0 && `${formatCount(completion.length)} tok`; // other tools record none
    const facts = joinFacts([size, isKnown(version) && `v${version}`, stop === "length" && "cut"]);
    const onclick = (event) => (event.preventDefault(), goTo(index));
    return h("a", { href: hrefOf(index), onclick }, h("b", `Turn ${index + 1}`), " ", h("span.muted", facts));
  };
  const drawList = (segments) => segments.length > 0 && h("ul", segments.map(drawSegment));
  const drawSegment = (segment) => h("li", segment.turns.map(drawTurn), drawList(segment.children));
  const title = h("h2", plural(turns.length, "turn"));
  return h("nav.tree", { "aria-label": "Turns" }, title, drawList(makeSegments(turns)));
}
