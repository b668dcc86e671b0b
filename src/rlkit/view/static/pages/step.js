/** The groups of a step or of an evaluation: one row a task, with the rewards of its members. */
import { apiPath, checkControl, choiceControl, envControl, field, formatCount, formatReward, h, isExport, isKnown, load,
  loadPage, makeList, makeRow, makeRunView, meanReward, pageHead, plural, replace, replaceOptions, rewardChip,
  rewardRange, runHash, selectBox, sortRows, stepPlace, tellTaught, textControl, textLine,
  wordMatcher } from "rlkit/ui";

const HEADS = [["#", "num"], "Task", "Rewards", ["Mean", "num"], ["Tokens", "num"], "Taught"];
const STATUSES = [["", "any"], ["completed", "completed"], ["truncated", "truncated"], ["failed", "failed"]];
const LEGEND = { p2: "high", n2: "low", cut: "cut at a limit", masked: "not trained on", failed: "failed" };

const SORTS = [
  ["", "as played", ({ position }) => position],
  ["failures", "failures first", (group) => -countFailures(group)],
  ["mean", "lowest mean", ({ members }) => meanReward(members) ?? Infinity],
  ["-mean", "highest mean", ({ members }) => -(meanReward(members) ?? -Infinity)],
  ["spread", "largest spread", ({ members }) => rewardRange(members).reduce((low, high) => low - high)],
  ["tokens", "most tokens", (group) => -countTokens(group)],
];

export default async function showStep([, id, kind, step], query) {
  const path = apiPath("run", id, kind, step);
  const page = await loadPage(id, query, path);
  const at = (...parts) => runHash(id, kind, ...parts);
  const state = Object.assign(page, { kind, text: "", matches: null, at: (...parts) => at(step, ...parts) });
  const heads = kind === "step" ? HEADS : HEADS.slice(0, -1); // an evaluation teaches nothing
  const list = makeList(`Groups of ${kind} ${step}`, heads, (group) => drawGroup(state, group));
  const summary = h("p.lead", { role: "status" });
  const picker = selectBox([], step, (number) => (location.hash = at(number)));
  const draw = async () => {
    const { text = "" } = state.query;
    if (text !== state.text) {
      state.text = text;
      const { matches } = text && !isExport ? await load(`${path}/search?q=${encodeURIComponent(text)}`) : {};
      if (text === state.text) state.matches = matches && Map.groupBy(matches, ([position]) => position);
    }
    drawGroups(state, list, summary);
  };
  const redraw = (view) => {
    const steps = kind === "step" ? page.run.steps_recorded : page.run.evaluations;
    const options = steps.map((number) => [String(number), `${kind} ${number}`]);
    if (options.length !== picker.length) replaceOptions(picker, options, step);
    const hashOf = (number) => isKnown(number) && at(number);
    view.previous = hashOf(steps.findLast((number) => number < Number(step)));
    view.next = hashOf(steps.find((number) => number > Number(step)));
  };
  await draw();
  const place = stepPlace(kind, step);
  const head = pageHead(place[0], summary, field("Go to", picker));
  const legend = Object.entries(LEGEND).map(([name, label]) => h("span", { class: `chip ${name}` }, label));
  const content = [head, drawFilters(page.data[0].groups, query, kind), list.node, h("p.chips", legend)];
  return makeRunView(page, kind, [place], content, draw, { redraw });
}

function drawFilters(groups, query, kind) {
  const note = h("p.sub", "Search in replies needs the server.");
  const number = { type: "number", step: "any" };
  return h("form.toolbar.filters", { onsubmit: (event) => event.preventDefault(), "aria-label": "Filters" },
    textControl("Task", "task", query), isExport ? note : textControl("Text in replies", "text", query),
    envControl(groups, query), choiceControl("Status", "status", STATUSES, query),
    textControl("Reward from", "low", query, number), textControl("to", "high", query, number),
    choiceControl("Sort", "sort", SORTS, query), checkControl("Mixed", "mixed", query),
    checkControl("Cut at a limit", "cut", query),
    kind === "step" && checkControl("Taught", "taught", query));
}

/** Return the failed members, each worth a thousand failed attempts that were repeated. */
const countFailures = ({ members, failed_attempts: retries }) =>
  1000 * members.filter(({ status }) => status === "failed").length + retries.length;

const countTokens = ({ members }) => members.reduce((sum, { tokens }) => sum + tokens, 0);

function isMixed({ members }) {
  const [low, high] = rewardRange(members);
  return meanReward(members) !== null && high - low > 1e-9 * Math.max(1, Math.abs(high));
}

function memberMatcher({ status, low, high, cut }) {
  const [least, most] = [low ? Number(low) : -Infinity, high ? Number(high) : Infinity];
  const isWithin = (reward) => (!low && !high) || (reward !== null && reward >= least && reward <= most);
  return (member) => (!status || member.status === status) && isWithin(member.reward)
    && (!cut || member.cut || member.status === "truncated");
}

function filterGroups({ kind, data: [{ groups }], query, matches }) {
  const matchesMember = memberMatcher(query);
  const isMatch = wordMatcher(query.task);
  return groups.filter((group) => (!query.env || group.env === query.env) && (!query.mixed || isMixed(group))
    && (!query.taught || kind !== "step" || group.taught) && isMatch(`${group.env} ${group.task}`)
    && (!matches || matches.has(group.position)) && group.members.some(matchesMember));
}

function drawGroups(state, list, summary) {
  const [{ groups: all }] = state.data;
  const groups = sortRows(filterGroups(state), SORTS, state.query.sort);
  const total = groups.length === all.length ? "" : ` of ${all.length}`;
  const episodes = plural(groups.reduce((sum, { members }) => sum + members.length, 0), "episode");
  const taught = state.kind === "step" ? `, ${groups.filter((group) => group.taught).length} taught` : "";
  const mixed = groups.filter(isMixed).length;
  replace(summary, `${plural(groups.length, "group")}${total}, ${episodes} · ${mixed} mixed${taught}`);
  state.range = rewardRange(all.flatMap(({ members }) => members));
  list.show(groups, "No group matches.");
}

function drawGroup({ kind, at, query, matches, range }, group) {
  const { position, env, task, members, failed_attempts: retries } = group;
  const matchesMember = memberMatcher(query);
  const chips = members.map((member) => {
    const chip = rewardChip(member, range, at("episode", position, member.member, member.attempt));
    chip.classList.toggle("dim", !matchesMember(member));
    return chip;
  });
  const failure = [...members, ...retries].find((member) => member.error);
  const snippets = (matches?.get(position) ?? []).slice(0, 2).map(([, member, , snippet]) =>
    h("div.sub", `member ${member}: `, textLine(snippet, 160)));
  const retried = retries.length > 0 && ` · ${plural(retries.length, "failed attempt")}`;
  const taught = h("span", { class: group.taught ? null : "muted" }, textLine(tellTaught(group), 60));
  return makeRow([
    [String(position), "num muted"],
    h("div.task-cell", h("a.row-link", { href: at("group", position) }, textLine(task, 90)),
      h("div.sub", textLine(env), retried), snippets,
      failure && h("div.sub.bad", textLine(failure.error, 140))),
    h("div.chips", chips), [formatReward(meanReward(members)), "num"],
    [formatCount(countTokens(group)), "num"], ...(kind === "step" ? [taught] : []),
  ]);
}
