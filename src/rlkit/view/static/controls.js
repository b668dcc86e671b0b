/** Controls of a form that change a key of the query in the address. */
import { h, replace } from "rlkit/dom";
import { joinIds, setQuery } from "rlkit/route";

const TYPING_MS = 100;
let fields = 0;

export function field(label, control) {
  control.id = `field-${++fields}`;
  return h("div.field", h("label", { htmlFor: control.id }, label), control);
}

/** Return a field for text, or of another `type` such as number or range. */
export function textControl(label, key, query, props = {}) {
  let timer = 0;
  const oninput = ({ target }) => {
    clearTimeout(timer);
    timer = setTimeout(() => setQuery({ [key]: target.value }), TYPING_MS);
  };
  return field(label, h("input", { type: "search", ...props, value: query[key] ?? props.value ?? "", oninput }));
}

export function checkControl(label, key, query) {
  const onchange = (event) => setQuery({ [key]: event.target.checked });
  return checkField(label, h("input", { type: "checkbox", checked: Boolean(query[key]), onchange }));
}

export const checkField = (label, box) => h("label.field.check", box, h("span", label));

/** Return a box that puts an id into a set or takes it out; the set is at a key of the query, too. */
export function memberBox(ids, id, key, props = {}) {
  const onchange = ({ target }) => {
    ids[target.checked ? "add" : "delete"](id);
    setQuery({ [key]: joinIds(ids) });
  };
  return h("input", { type: "checkbox", checked: ids.has(id), onchange, ...props });
}

/** Return a choice between options [value, label]; the empty value is the default. */
export const choiceControl = (label, key, options, query) =>
  field(label, selectBox(options, query[key] ?? "", (value) => setQuery({ [key]: value })));

/** Return a choice between the environments of rows, if there are several. */
export function envControl(rows, query) {
  const envs = [...new Set(rows.map(({ env }) => env))].sort();
  return envs.length > 1 && choiceControl("Environment", "env", [["", "all"], ...envs.map((env) => [env, env])], query);
}

/** Return rows in the chosen order of `sorts`: [value, label, key of a row]; rows with small keys are first. */
export function sortRows(rows, sorts, value) {
  const [, , key] = sorts.find(([name]) => name === value) ?? sorts[0];
  const compare = (a, b) => typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b;
  return key ? rows.toSorted((a, b) => compare(key(a), key(b))) : rows;
}

/** Return a function that tells whether a text has all words of a search. */
export function wordMatcher(search = "") {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  return (text) => words.every((word) => text.toLowerCase().includes(word));
}

/** Return a choice between [value, label] options; `onchange` gets the value. */
export const selectBox = (options, value, onchange) =>
  replaceOptions(h("select", { onchange: (event) => onchange(event.target.value) }), options, value);

/** Replace the options of a choice, which keeps the focus, and return it. */
export function replaceOptions(select, options, value) {
  replace(select, options.map(([key, label]) => h("option", { value: key }, label)));
  select.value = value;
  return select;
}
