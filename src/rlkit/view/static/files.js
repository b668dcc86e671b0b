/** Files of an episode: the terminal session, the output of the verifier, artefacts. Each loads when it is opened. */
import { load } from "rlkit/api";
import { emptyNote, formatCount, h, replace, section, textBlock, textLine } from "rlkit/ui";

const GROUPS = [
  ["Terminal", /\.cast$|terminal|\.pane$|session|transcript|asciinema/i],
  ["Verifier", /verifier|test-?(std)?(out|err)|ctrf|reward\.(txt|json)|pytest/i],
  ["Artefacts", /./],
];

// Escape sequences of terminals: CSI, OSC with its end, and two-character ones.
const ESCAPES = /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[PX^_][^\u001b]*\u001b\\|[ -/]*[0-~])/g;

/** Draw the files of an episode; `path` is its path in the API. */
export function drawFiles(path, files) {
  const groups = new Map(GROUPS.map(([name]) => [name, []]));
  for (const file of files) groups.get(GROUPS.find(([, pattern]) => pattern.test(file.name))[0]).push(file);
  return h("div", null, [...groups].filter(([, members]) => members.length).map(([name, members]) =>
    section(name, null, members.map((file, index) => drawFile(path, file, index === 0 && name !== "Artefacts")))));
}

function drawFile(path, file, open) {
  const body = h("div", null);
  let isLoaded = false;
  const show = async () => {
    if (isLoaded) return;
    isLoaded = true;
    replace(body, h("p", { class: "muted" }, "Loading…"));
    try {
      const { text, truncated } = await load(`${path}/file?path=${encodeURIComponent(file.path)}`);
      replace(body, textBlock(terminalText(file.name, text), "code terminal"), truncated && emptyNote(`The file is longer; only its beginning is shown (${formatCount(file.bytes)}B in all).`));
    } catch (error) {
      replace(body, emptyNote(error.message));
    }
  };
  const details = h("details", { class: "fold file", open, ontoggle: () => details.open && show() }, h("summary", null, h("span", { class: "mono" }, textLine(file.name, 120)), " ", h("span", { class: "muted" }, `${formatCount(file.bytes)}B`)), body);
  if (open) show();
  return details;
}

/** Return the text of a terminal session without control sequences; asciinema recordings become their output. */
function terminalText(name, text) {
  return collapseReturns((name.endsWith(".cast") ? castOutput(text) : text).replace(ESCAPES, ""));
}

function castOutput(text) {
  return text.split("\n").map((line) => {
    try {
      const event = JSON.parse(line);
      return Array.isArray(event) && event[1] === "o" ? event[2] : "";
    } catch {
      return "";
    }
  }).join("");
}

function collapseReturns(text) {
  return text.replace(/\r+\n/g, "\n").split("\n").map((line) => line.slice(line.lastIndexOf("\r") + 1)).join("\n");
}
