/** An environment's own renderer in a sandboxed frame: it has no origin, no network, and sees only its episode. */

import { isExport, load } from "rlkit/api";
import { h } from "rlkit/dom";

const MAX_HEIGHT_PX = 4000;

/**
 * Return a frame that shows `view`: {html}, or {script} that draws into its document and finds the episode in the
 * global `episode`. A frame made from text would inherit the policy of this page, which forbids inline scripts;
 * frame.html comes with its own. An export has no such policy and holds the text of frame.html.
 */
export function drawFrame(view, episode) {
  const frame = h("iframe", { class: "renderer", title: "Renderer of the environment" });
  frame.setAttribute("sandbox", "allow-scripts");
  const listen = (event) => {
    if (event.source !== frame.contentWindow || !event.data) return;
    if (event.data.ready) frame.contentWindow.postMessage({ ...view, episode: view.script ? episode : null, scheme: getComputedStyle(document.documentElement).colorScheme }, "*");
    const { height } = event.data;
    if (Number.isFinite(height)) frame.style.setProperty("height", `${Math.max(80, Math.min(MAX_HEIGHT_PX, height + 2))}px`);
  };
  addEventListener("message", listen);
  if (isExport) load("frame.html").then((text) => (frame.srcdoc = text));
  else frame.src = "frame.html";
  return { node: frame, close: () => removeEventListener("message", listen) };
}
