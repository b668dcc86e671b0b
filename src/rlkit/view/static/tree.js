/** The turns of an episode as a tree of segments: turns that continue each other's tokens, and branches. */

import { h } from "rlkit/dom";
import { formatCount, formatReward, plural } from "rlkit/format";

/** Return segments: {turns: [index], children: [segment]}. A turn without a parent starts a new one. */
export function makeSegments(turns) {
  const children = turns.map(() => []);
  const roots = [];
  turns.forEach(({ parent }, index) => (parent === null || parent === undefined ? roots : children[parent]).push(index));
  const grow = (first) => {
    const segment = { turns: [first], children: [] };
    let last = first;
    while (children[last].length === 1) segment.turns.push((last = children[last][0]));
    segment.children = children[last].map(grow);
    return segment;
  };
  return roots.map(grow);
}

/** Draw the tree; `hrefOf` gives the link of a turn. */
export function drawTree(episode, hrefOf, current) {
  const draw = (segment) => h("li", null,
    h("div", { class: "segment" }, segment.turns.map((index) => drawTurn(episode.turns[index], index, hrefOf, current))),
    segment.children.length > 0 && h("ul", null, segment.children.map(draw)));
  const segments = makeSegments(episode.turns);
  return h("nav", { class: "tree", "aria-label": "Turns" }, h("h2", null, plural(episode.turns.length, "turn")), h("ul", null, segments.map(draw)));
}

function drawTurn(turn, index, hrefOf, current) {
  const facts = [`${formatCount(turn.completion.length)} tok`, turn.version !== null && turn.version !== undefined && `v${turn.version}`, turn.stop === "length" && "cut", turn.reward && `r ${formatReward(turn.reward)}`].filter(Boolean).join(" · ");
  return h("a", { href: hrefOf(index), "aria-current": index === current ? "true" : null }, h("b", null, `Turn ${index + 1}`), " ", h("span", { class: "muted" }, facts));
}
