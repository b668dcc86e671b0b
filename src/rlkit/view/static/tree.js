/** The turns of an episode as a tree of segments: turns that continue each other, and branches. */
import { formatCount, h, isKnown, plural } from "rlkit/ui";
/** Return segments: {turns: [index], children: [segment]}. A turn without a parent starts a segment. */
function makeSegments(turns) {
  const children = turns.map(() => []);
  const roots = [];
  turns.forEach(({ parent }, index) => (isKnown(parent) ? children[parent] : roots).push(index));
  const grow = (first) => {
    const segment = { turns: [first], children: [] };
    while (children[segment.turns.at(-1)].length === 1) segment.turns.push(children[segment.turns.at(-1)][0]);
    segment.children = children[segment.turns.at(-1)].map(grow);
    return segment;
  };
  return roots.map(grow);
}

/** Draw the tree. hrefOf(turn) is the link of a turn; goTo(turn) shows it on this page. */
export function drawTree(episode, hrefOf, goTo) {
  const drawTurn = (index) => {
    const { completion, version, stop } = episode.turns[index];
    const facts = [`${formatCount(completion.length)} tok`, isKnown(version) && `v${version}`, stop === "length" && "cut"].filter(Boolean).join(" · ");
    const onclick = (event) => (event.preventDefault(), goTo(index));
    return h("a", { href: hrefOf(index), onclick }, h("b", null, `Turn ${index + 1}`), " ", h("span", { class: "muted" }, facts));
  };
  const draw = (segment) => h("li", null, segment.turns.map(drawTurn), segment.children.length > 0 && h("ul", null, segment.children.map(draw)));
  return h("nav", { class: "tree", "aria-label": "Turns" }, h("h2", null, plural(episode.turns.length, "turn")), h("ul", null, makeSegments(episode.turns).map(draw)));
}
