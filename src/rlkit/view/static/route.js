/** The state of the page is the hash of its address: `#/path/of/names?key=value`. Each state has a link. */
import { attempt } from "rlkit/format";

/** Return {parts, query} of a hash; parts are decoded. */
export function parseHash(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const parts = path.split("/").filter(Boolean).map(decodePart);
  return { parts, query: Object.fromEntries(new URLSearchParams(query)) };
}

const decodePart = (text) => attempt(() => decodeURIComponent(text), text);

/** Return the hash for names and a query; empty values of the query are left out. */
export function makeHash(parts, query = {}) {
  const entries = Object.entries(query).filter(([, value]) => value || value === 0);
  const text = new URLSearchParams(entries.map(([key, value]) => [key, value === true ? "1" : value])).toString();
  return `#/${apiPath(...parts)}${text ? `?${text}` : ""}`;
}

export const runHash = (id, ...parts) => makeHash(["run", id, ...parts]);

export const apiPath = (...parts) => parts.map(encodeURIComponent).join("/");

/** Return ids as one text; an id may have commas itself. */
export const joinIds = (ids) => [...ids].map(encodeURIComponent).join(",");

export const splitIds = (text) => text.split(",").filter(Boolean).map(decodePart);

/** Change keys of the query without a new entry in the browser's history. */
export function setQuery(changes) {
  const { parts, query } = parseHash(location.hash);
  const hash = makeHash(parts, { ...query, ...changes });
  if (hash === location.hash) return;
  history.replaceState(null, "", hash);
  dispatchEvent(new HashChangeEvent("hashchange"));
}
