/** Keyboard: move through rows, go up or to neighbours, search, and a dialog that lists the keys. */
import { h } from "rlkit/dom";
import { navigate } from "rlkit/route";

const KEYS = [
  ["j / k", "next / previous row, reply or message"],
  ["Enter", "open the row"],
  ["x", "select the row, on the list of runs"],
  ["[ / ]", "previous / next step, group or episode"],
  ["u", "up: episode → group → step → run → runs"],
  ["/", "go to the search field"],
  ["← / →", "previous / next token, in the rendered episode"],
  ["t", "light, dark or automatic colours"],
  ["?", "this list"],
];

/** Listen to the keyboard. `currentView` returns the view on the screen; `switchTheme` changes the colours. */
export function listenToKeys(currentView, switchTheme) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || isEditing(event.target)) return;
    const { previous, next, up } = currentView() ?? {};
    const actions = {
      j: () => moveRow(1),
      k: () => moveRow(-1),
      x: () => document.activeElement?.closest("[data-row]")?.querySelector("input[type=checkbox]")?.click(),
      "[": () => previous && navigate(previous),
      "]": () => next && navigate(next),
      u: () => up && navigate(up),
      "/": () => document.querySelector("main input[type=search]")?.focus(),
      t: switchTheme,
      "?": showHelp,
    };
    if (!Object.hasOwn(actions, event.key) || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    actions[event.key]();
  });
}

function isEditing(target) {
  if (target.closest?.("textarea, select, [contenteditable]")) return true;
  return target.tagName === "INPUT" && !["checkbox", "radio", "range", "button"].includes(target.type);
}

function moveRow(distance) {
  const columns = [...document.querySelectorAll("main .column[data-row]")];
  const rows = columns.length ? columns : [...document.querySelectorAll("main [data-row]")];
  const current = rows.findIndex((row) => row.contains(document.activeElement));
  const row = current < 0 ? rows.at(distance > 0 ? 0 : -1) : (rows[current + distance] ?? rows[current]);
  const target = row?.matches("[tabindex]") ? row : row?.querySelector("a");
  (target ?? row)?.focus({ preventScroll: true });
  row?.scrollIntoView({ block: "nearest" });
}

/** Open the dialog that lists the keys. */
export function showHelp() {
  const dialog = h("dialog", { class: "help", "aria-labelledby": "help-title", onclose: () => dialog.remove() },
    h("h2", { id: "help-title" }, "Keys"),
    h("dl", null, KEYS.map(([key, text]) => h("div", null, h("dt", null, h("kbd", null, key)), h("dd", null, text)))),
    h("form", { method: "dialog" }, h("button", { type: "submit", class: "button" }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}
