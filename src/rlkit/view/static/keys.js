/** Keyboard: move through rows, go up or to neighbours, search; the dialog of index.html lists the keys. */
const EDITED = "textarea, select, [contenteditable], input:not([type=checkbox], [type=range])";

const go = (hash) => hash && (location.hash = hash);

/** Listen to the keyboard. `currentView` returns the view on the screen; `switchTheme` changes the colours. */
export function listenToKeys(currentView, switchTheme) {
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.target.closest?.("main input[type=search]")?.blur();
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.(EDITED)) return;
    const { previous, next, up } = currentView() ?? {};
    const actions = {
      j: () => moveRow(1),
      k: () => moveRow(-1),
      x: () => document.activeElement?.closest("[data-row]")?.querySelector("input[type=checkbox]")?.click(),
      "[": () => go(previous),
      "]": () => go(next),
      u: () => go(up),
      "/": () => document.querySelector("main input[type=search]")?.focus(),
      t: switchTheme,
      "?": () => document.getElementById("help").showModal(),
    };
    if (!Object.hasOwn(actions, event.key) || document.querySelector("dialog[open]")) return;
    event.preventDefault();
    actions[event.key]();
  });
}

function moveRow(distance) {
  const columns = [...document.querySelectorAll("main .column[data-row]")];
  const rows = (columns.length ? columns : [...document.querySelectorAll("main [data-row]")])
    .filter((row) => row.checkVisibility());
  const current = rows.findIndex((row) => row.contains(document.activeElement));
  const row = current < 0 ? rows.at(distance > 0 ? 0 : -1) : (rows[current + distance] ?? rows[current]);
  const target = row?.matches("[tabindex]") ? row : row?.querySelector("a");
  (target ?? row)?.focus({ preventScroll: true });
  row?.scrollIntoView({ block: "nearest" });
}
