/** Files of an episode: the terminal session, the output of the verifier, artefacts. Each loads when it is opened. */
import { attempt, emptyNote, formatCount, h, load, replace, section, textBlock, textLine } from "rlkit/ui";

const GROUPS = [
  ["Terminal", /\.cast$|terminal|\.pane$|session|transcript|asciinema/i],
  ["Verifier", /verifier|test-?(std)?(out|err)|ctrf|reward\.(txt|json)|pytest/i], ["Artefacts", /./],
];

// Escape sequences of terminals: CSI, OSC with its end, and two-character ones.
const ESCAPES =
  /\u001b(?:\[[0-?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[PX^_][^\u001b]*\u001b\\|[ -/]*[0-~])/g;

/** Draw the files of an episode; `path` is its path in the API. */
export function drawFiles(path, files) {
  const groups = Map.groupBy(files, ({ name }) => GROUPS.find(([, pattern]) => pattern.test(name))[0]);
  return h("div", GROUPS.map(([name]) => groups.has(name) && section(name, null,
    groups.get(name).map((file, index) => drawFile(path, file, index === 0 && name !== "Artefacts")))));
}

function drawFile(path, file, open) {
  const body = h("div", h("p.muted", "Loading…"));
  const size = `${formatCount(file.bytes)}B`;
  const show = async () => {
    try {
      const { text, truncated } = await load(`${path}/file?path=${encodeURIComponent(file.path)}`);
      const note = truncated && emptyNote(`The file is longer; only its beginning is shown (${size} in all).`);
      replace(body, textBlock(terminalText(file.name, text), "code terminal"), note);
    } catch (error) {
      replace(body, emptyNote(error.message));
    }
  };
  const name = h("span.mono", textLine(file.name, 120));
  const details = h("details.fold.file", { open }, h("summary", name, " ", h("span.muted", size)), body);
  details.addEventListener("toggle", show, { once: true });
  return details;
}

/** Return the text of a terminal session without control sequences; asciinema recordings become their output. */
function terminalText(name, text) {
  const output = name.endsWith(".cast") ? text.split("\n").map(castOutput).join("") : text;
  const lines = output.replace(ESCAPES, "").replace(/\r+\n/g, "\n").split("\n");
  return lines.map((line) => line.slice(line.lastIndexOf("\r") + 1)).join("\n");
}

const castOutput = (line) => attempt(() => {
  const [, kind, text] = JSON.parse(line);
  return kind === "o" ? text : "";
}, "");
