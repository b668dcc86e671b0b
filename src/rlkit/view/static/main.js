/** Show the page that the address names, keep it live, and frame it with navigation. */
import { listenToKeys } from "rlkit/keys";
import { apiPath, attempt, h, isExport, load, makeHash, markInvisible, parseHash, replace, textBlock,
  textLine } from "rlkit/ui";

const POLL_MS = 2000;
const THEMES = ["auto", "light", "dark"];

// The addresses of the module of each page. Its default is a function (parts, query) → view. A view has `node` and
// `title`; it may have `crumbs`, `up`, `previous`, `next` (hashes), `watch` (a path of the API) with `refresh(data)`
// and `watched`, the data of it that the view shows, and `requery(query)` if it can follow a change of the query.
const PAGES = {
  runs: /^$/,
  compare: /^compare\/[^/]+$/,
  run: /^run\/[^/]+$/,
  tasks: /^run\/[^/]+\/tasks$/,
  task: /^run\/[^/]+\/task\/[^/]+\/[^/]+$/,
  evaluations: /^run\/[^/]+\/evaluations$/,
  discovery: /^run\/[^/]+\/discovery$/,
  step: /^run\/[^/]+\/(step|evaluation)\/\d+$/,
  group: /^run\/[^/]+\/(step|evaluation)\/\d+\/group\/\d+$/,
  episode: /^run\/[^/]+\/(step|evaluation)\/\d+\/episode\/\d+\/\d+\/\d+$/,
};

const [main, crumbs, neighbours, connection, announcement, themeButton] =
  ["main", "crumbs", "neighbours", "connection", "announcement", "theme"].map((id) => document.getElementById(id));
const scrolls = new Map(); // hash → vertical position, for the way back

let [view, viewPath, watchedData, navigation, followsLink] = [null, null, null, 0, false];

async function showPage(event) {
  const { parts, query } = parseHash(location.hash);
  const path = apiPath(...parts);
  const isOwn = followsLink || !event?.isTrusted; // the controls of a page know its own links and changes only
  if (view?.requery && path === viewPath && isOwn) return (followsLink = false, view.requery(query));
  const [isFirst, turn] = [!view, ++navigation];
  if (view) scrolls.set(viewPath, scrollY);
  main.setAttribute("aria-busy", "true");
  const nextView = await openView(path, parts, query);
  if (turn !== navigation) return;
  [view, viewPath] = [nextView, path];
  watchedData = view.watched ?? (view.watch ? await load(view.watch).catch(() => null) : null);
  replace(main, view.node);
  main.removeAttribute("aria-busy");
  drawFrame(view);
  drawNeighbours(view);
  if (!view.watch) setConnection("");
  if (!isFirst) main.focus({ preventScroll: true });
  scrollTo(0, followsLink ? 0 : (scrolls.get(path) ?? 0));
  view.opened?.();
  followsLink = false;
}

async function openView(path, parts, query) {
  const name = Object.keys(PAGES).find((page) => PAGES[page].test(path));
  try {
    if (!name) throw new Error(`There is no page ${path}.`, { cause: 404 });
    const { default: showPageOf } = await import(`rlkit/pages/${name}`);
    return await showPageOf(parts, query);
  } catch (error) {
    if (!error.cause) console.error(error);
    return makeFailure(error, parts);
  }
}

/** Return a view of an error. The page is opened again when its run appears or changes. */
function makeFailure({ cause, message }, parts) {
  const title = cause === 404 ? "Not found" : "The page failed";
  const texts = [h("h1", title), textBlock(message, "plain"), h("a", { href: "#/" }, "All runs")];
  const node = h("div.failure", { role: "alert" }, texts);
  const up = parts.length > 2 ? makeHash(parts.slice(0, 2)) : "#/";
  const watch = parts[0] === "run" && parts[1] ? apiPath("run", parts[1]) : "runs";
  return { title, node, crumbs: [["Runs", "#/"]], up, watch, refresh: showPage };
}

function drawFrame({ title, crumbs: links }) {
  announcement.textContent = markInvisible(title);
  document.title = `${announcement.textContent} · rlkit`;
  const drawLink = ([label, href]) => h("li", h("a", { href }, textLine(label, 80)));
  replace(crumbs, h("ol", links.map(drawLink)));
  crumbs.querySelector("li:last-child a").ariaCurrent = "page";
}

function drawNeighbours({ previous, next }) {
  const arrow = (href, title, text) => href && h("a.button", { href, title, "aria-label": title }, text);
  replace(neighbours, arrow(previous, "Previous ( [ )", "‹"), arrow(next, "Next ( ] )", "›"));
}

async function poll() {
  if (document.hidden || !view?.watch || main.hasAttribute("aria-busy")) return;
  const current = view;
  try {
    const data = await load(current.watch);
    const isNew = current === view && data !== watchedData;
    if (isNew) await current.refresh?.(data); // if it fails, the next poll repeats it
    setConnection(data.live ? "live" : "");
    if (!isNew || current !== view) return;
    watchedData = data;
    drawNeighbours(view);
    if (data.step !== undefined) announcement.textContent = `Updated: step ${data.step}`;
  } catch (error) {
    setConnection("lost", error.cause ? `error ${error.cause}` : "no connection");
  }
}

function setConnection(kind, text = kind) {
  if (connection.textContent !== text) connection.textContent = text;
  connection.className = `connection ${kind}`;
}

const pollForever = () => poll().finally(() => setTimeout(pollForever, POLL_MS));

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  themeButton.textContent = { light: "Light", dark: "Dark" }[theme] ?? "Auto";
  themeButton.setAttribute("aria-label", `Colours: ${theme}`);
}

function switchTheme() {
  const theme = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  findStorage()?.setItem("rlkit-theme", theme);
  applyTheme(theme);
  redrawCharts();
}

const redrawCharts = () =>
  document.querySelectorAll(".plot").forEach((plot) => plot.dispatchEvent(new Event("themechange")));

/** Return the storage of the browser; a page in a frame without origin has none, and keeps no theme. */
const findStorage = () => attempt(() => localStorage, null);

themeButton.addEventListener("click", switchTheme);
applyTheme(findStorage()?.getItem("rlkit-theme") ?? "auto");
listenToKeys(() => view, switchTheme);
document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), main.focus()));
addEventListener("click", (event) => event.target.closest?.("a[href^='#']") && (followsLink = true), true);
addEventListener("hashchange", showPage);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
if (!isExport) {
  pollForever();
  document.addEventListener("visibilitychange", poll);
}
// The first page is drawn; now load what the others need, so that they open at once.
showPage().then(() => Promise.allSettled(Object.keys(PAGES).map((name) => import(`rlkit/pages/${name}`))));
