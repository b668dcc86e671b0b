/** An environment's own renderer in a sandboxed frame: no origin, no network but WebRTC, and only its episode. */
import { isExport } from "rlkit/api";
import { h } from "rlkit/dom";

const MAX_HEIGHT_PX = 4000;
const POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:";
const STYLE = "body { margin: 12px; font: 14px/1.5 system-ui, sans-serif; }";
const RUN = 'document.body.append(Object.assign(document.createElement("script"), { textContent: data.script }));';
const REPORT = "const report = () => parent.postMessage({ height: document.documentElement.offsetHeight }, '*');";

/**
 * Return a frame that shows `view`: {html}, or {script} that draws into its document and finds the episode in the
 * global `episode`. A frame made from text would inherit the policy of this page, which forbids inline scripts, so
 * the server has frame.html with a policy of its own. An export has no policy to inherit.
 */
export function drawFrame(view, episode) {
  const frame = h("iframe", { class: "renderer", title: "Renderer of the environment" });
  frame.setAttribute("sandbox", "allow-scripts");
  const scheme = getComputedStyle(document.body).getPropertyValue("--scheme").trim() || "light";
  const message = { ...view, episode: view.script ? episode : null, scheme };
  const listen = (event) => {
    if (event.source !== frame.contentWindow || !event.data) return;
    if (event.data.ready) frame.contentWindow.postMessage(message, "*");
    const { height } = event.data;
    if (!Number.isFinite(height)) return;
    frame.style.setProperty("height", `${Math.max(80, Math.min(MAX_HEIGHT_PX, height + 2))}px`);
  };
  addEventListener("message", listen);
  if (isExport) frame.srcdoc = composePage(message);
  else frame.src = "frame.html";
  return { node: frame, close: () => removeEventListener("message", listen) };
}

function composePage({ html, script, episode, scheme }) {
  const data = JSON.stringify({ episode, script: script ?? "" }).replaceAll("<", "\\u003c");
  const code = `const data = ${data}; window.episode = data.episode; ${script ? RUN : ""} ${REPORT}
    new ResizeObserver(report).observe(document.body);`;
  return `<!doctype html><meta http-equiv="Content-Security-Policy" content="${POLICY}">
    <style>:root { color-scheme: ${scheme}; } ${STYLE}</style><body>${html ?? ""}<script>{ ${code} }</` + "script>";
}
