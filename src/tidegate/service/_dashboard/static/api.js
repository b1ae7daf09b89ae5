// HTTP requests to the service. The token is stored in this tab only and sent in the Authorization header.

/** The URL of the service: these files are in its folder "dashboard". A proxy may add a prefix to the path. */
const BASE = new URL("..", import.meta.url);
const STORAGE_KEY = "tidegate-token";

let tokenInMemory = ""; // used if the browser blocks sessionStorage

export function readToken() {
  try {
    return sessionStorage.getItem(STORAGE_KEY) ?? "";
  } catch {
    return tokenInMemory;
  }
}

/** Store the token; an empty string removes it. */
export function saveToken(value) {
  tokenInMemory = value;
  try {
    if (value) sessionStorage.setItem(STORAGE_KEY, value);
    else sessionStorage.removeItem(STORAGE_KEY);
  } catch {
    // The token then lasts until the page is reloaded.
  }
}

/** An error response of the service, or no response (status 0). */
export class RequestError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }

  get needsToken() {
    return this.status === 401 || this.status === 403;
  }
}

async function request(path, options) {
  const headers = { ...options.headers };
  if (readToken()) headers.Authorization = `Bearer ${readToken()}`;
  let response;
  try {
    response = await fetch(new URL(path, BASE), { ...options, headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(10_000) });
  } catch {
    throw new RequestError(0, "the service does not respond");
  }
  let body = {};
  try {
    body = await response.json();
  } catch {
    // The body is not JSON: the status alone is reported.
  }
  if (!response.ok) throw new RequestError(response.status, body.detail ?? body.title ?? `the service responded with status ${response.status}`);
  return body;
}

export const get = (path) => request(path, { method: "GET" });

export function post(verb, body) {
  return request(`v1/${verb}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}
