/** An environment's own renderer in a sandboxed frame: no origin, no network but WebRTC, and only its episode. */
import { isExport } from "rlkit/api";
import { h } from "rlkit/dom";

const MAX_HEIGHT_PX = 4000;

/**
 * Return a frame that shows `view`: {html}, or {script} that draws into its document and finds the episode in the
 * global `episode`. A frame made from text would inherit the policy of this page, which forbids inline scripts, so
 * the server has frame.html with a policy of its own. An export allows them, and has the text of frame.html.
 */
export function drawFrame(view, episode) {
  const frame = h("iframe.renderer", { title: "Renderer of the environment" });
  frame.setAttribute("sandbox", "allow-scripts");
  const scheme = getComputedStyle(document.documentElement).colorScheme;
  const message = { ...view, episode: view.script ? episode : null, scheme };
  const listen = (event) => {
    if (event.source !== frame.contentWindow || !event.data) return;
    if (event.data.ready) frame.contentWindow.postMessage(message, "*");
    const { height } = event.data;
    if (!Number.isFinite(height)) return;
    frame.style.setProperty("height", `${Math.max(80, Math.min(MAX_HEIGHT_PX, height + 2))}px`);
  };
  addEventListener("message", listen);
  if (isExport) frame.srcdoc = globalThis.rlkitData.frame;
  else frame.src = "frame.html";
  return { node: frame, close: () => removeEventListener("message", listen) };
}
