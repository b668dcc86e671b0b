/** Load data: from the server with a token, or from the records of a static export. */
const CACHE_ENTRIES = 12;

const token = new URLSearchParams(location.search).get("token");
const cache = new Map(); // path → {etag, data}; the newest entries are last

/** True in a static export, which has no server. */
export const isExport = Boolean(globalThis.rlkitData);

/** An answer of the server other than success. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Return the data of an API path. The same object is returned while the data does not change. */
export async function load(path) {
  return isExport ? loadExported(path) : loadServed(path);
}

async function loadServed(path) {
  const cached = cache.get(path);
  const headers = { Authorization: `Bearer ${token}` };
  if (cached?.etag) headers["If-None-Match"] = cached.etag;
  const response = await fetch(`api/${path}`, { headers, cache: "no-store" });
  if (response.status === 304 && cached) return remember(path, cached);
  if (!response.ok) throw new ApiError(response.status, await errorMessage(response));
  return remember(path, { etag: response.headers.get("ETag"), data: await response.json() });
}

async function errorMessage(response) {
  const { error } = await response.json().catch(() => ({}));
  return error ?? `The server answered ${response.status}.`;
}

function remember(path, entry) {
  cache.delete(path);
  cache.set(path, entry);
  if (cache.size > CACHE_ENTRIES) cache.delete(cache.keys().next().value);
  return entry.data;
}

const pendingRecords = new Map(); // path → resolve function of a record that a script loads
globalThis.rlkitStore = (path, text) => pendingRecords.get(path)?.(text);

async function loadExported(path) {
  const cached = cache.get(path);
  if (cached) return cached.data;
  const { inline, base } = globalThis.rlkitData;
  const text = inline?.[path] ?? (await loadScript(path, base));
  return remember(path, { data: await decodeRecord(text) });
}

function loadScript(path, base) {
  return new Promise((resolve, reject) => {
    const fail = () => reject(new ApiError(404, "This record is not in the export."));
    if (!base) return fail();
    const script = document.createElement("script");
    pendingRecords.set(path, resolve);
    script.src = `${base}${recordName(path)}.js`;
    script.onload = () => script.remove();
    script.onerror = fail;
    document.head.append(script);
  }).finally(() => pendingRecords.delete(path));
}

/** Return the name of the file of a record, as `_file_name` of the export makes it. */
function recordName(path) {
  const escapeByte = (byte) => `.${byte.toString(16).padStart(2, "0")}`;
  const escape = (char) => [...new TextEncoder().encode(char)].map(escapeByte).join("");
  return path.replace(/[^A-Za-z0-9_-]/gu, escape).replace(/.{200}(?=.)/g, "$&/");
}

async function decodeRecord(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}
