/** An environment's own renderer in a sandboxed frame: no origin, no network but WebRTC, and only its episode. */
import { h, isExport } from "rlkit/ui";

const MAX_HEIGHT_PX = 4000;
let shown = {}; // the frame of the page, and the message that it gets

/**
 * Return a frame that shows `view`: {html}, or {script} that draws into its document and finds the episode in the
 * global `episode`. A frame made from text would inherit the policy of this page, which forbids inline scripts, so
 * the server has frame.html with a policy of its own. An export allows them, and has the text of frame.html.
 */
export function drawFrame(view, episode) {
  const frame = h("iframe.renderer", { title: "Renderer of the environment" });
  frame.setAttribute("sandbox", "allow-scripts");
  const scheme = getComputedStyle(document.documentElement).colorScheme;
  shown = { frame, message: { ...view, episode: view.script ? episode : null, scheme } };
  if (isExport) frame.srcdoc = globalThis.rlkitData.frame;
  else frame.src = "frame.html";
  return frame;
}

addEventListener("message", ({ source, data }) => {
  const { frame, message } = shown;
  if (!source || source !== frame?.contentWindow || !data) return;
  if (data.ready) source.postMessage(message, "*");
  if (!Number.isFinite(data.height)) return;
  frame.style.setProperty("height", `${Math.max(80, Math.min(MAX_HEIGHT_PX, data.height + 2))}px`);
});
