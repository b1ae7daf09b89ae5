// Asking the service. The token is kept in this tab only, and sent as Authorization.

const PLACE = "tidegate-token";

export function token() {
  try {
    return sessionStorage.getItem(PLACE) ?? "";
  } catch {
    return kept;
  }
}

let kept = ""; // where storage is switched off

export function keep(value) {
  kept = value;
  try {
    if (value) sessionStorage.setItem(PLACE, value);
    else sessionStorage.removeItem(PLACE);
  } catch {
    // then it lasts as long as the page
  }
}

/** What went wrong, in the words of the service. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }

  get wantsToken() {
    return this.status === 401 || this.status === 403;
  }
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (token()) headers.Authorization = `Bearer ${token()}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(10_000) });
  } catch {
    throw new Problem(0, "the service does not answer");
  }
  let said = {};
  try {
    said = await answer.json();
  } catch {
    // an answer without words
  }
  if (!answer.ok) throw new Problem(answer.status, said.detail ?? said.title ?? `the service answered ${answer.status}`);
  return said;
}

export const get = (path) => ask(path, { method: "GET" });

export function post(verb, body) {
  return ask(`/v1/${verb}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}
