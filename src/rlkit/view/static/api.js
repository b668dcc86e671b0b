/** Load data: from the server with a token, or from the records of a static export. */
const CACHE_ENTRIES = 12;

const token = new URLSearchParams(location.search).get("token");
const cache = new Map(); // path → {etag, data}; the newest entries are last

/** True in a static export, which has no server. */
export const isExport = Boolean(globalThis.rlkitData);

/**
 * Return the data of an API path. The same object is returned while the data does not change. The cause of an error is
 * its status in HTTP.
 */
export async function load(path) {
  const entry = await (isExport ? loadExported : loadServed)(path, cache.get(path));
  cache.delete(path);
  cache.set(path, entry);
  if (cache.size > CACHE_ENTRIES) cache.delete(cache.keys().next().value);
  return entry.data;
}

export const loadAll = (...paths) => Promise.all(paths.map(load));

async function loadServed(path, cached) {
  const headers = { Authorization: `Bearer ${token}` };
  if (cached) headers["If-None-Match"] = cached.etag;
  const response = await fetch(`api/${path}`, { headers, cache: "no-store" });
  if (response.status === 304) return cached;
  if (!response.ok) {
    const { error } = await response.json().catch(() => ({}));
    throw new Error(error ?? `The server answered ${response.status}.`, { cause: response.status });
  }
  return { etag: response.headers.get("ETag"), data: await response.json() };
}

async function loadExported(path, cached) {
  if (cached) return cached;
  const { inline, base } = globalThis.rlkitData;
  const text = inline[path] ?? (base && (await loadScript(path, `${base}${recordName(path)}.js`)));
  if (!text) throw new Error("This record is not in the export.", { cause: 404 });
  return { data: await decodeRecord(text) };
}

const resolvers = new Map(); // path → functions that take the text that a script stores
globalThis.rlkitStore = (path, text) => resolvers.get(path)?.forEach((resolve) => resolve(text));

/** Return the text that a script stores for a path, or null if there is no such script. */
function loadScript(path, src) {
  return new Promise((resolve) => {
    resolvers.set(path, [...(resolvers.get(path) ?? []), resolve]); // a page may load a path twice at once
    const end = () => (script.remove(), resolve(null));
    const script = Object.assign(document.createElement("script"), { src, onload: end, onerror: end });
    document.head.append(script);
  });
}

/** Return the name of the file of a record, as `_file_name` of the export makes it. */
const recordName = (path) =>
  path.replace(/[^\w-]/g, (char) => `.${char.charCodeAt().toString(16)}`).replace(/.{200}(?=.)/g, "$&/");

async function decodeRecord(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
