// Requests to the server: an answer, or an Error whose message is one line for people.

export async function ask(path, body, type = "application/json") {
  const options = body === undefined ? {} : {
    method: "POST",
    headers: { "content-type": type },
    body: type === "application/json" ? JSON.stringify(body) : body,
  };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer. Is it still running?");
  }
  const answer = await response.json().catch(() => ({ detail: `The server answered ${response.status}.` }));
  if (!response.ok) throw Object.assign(new Error(answer.detail), { status: response.status });
  return answer;
}

// Of the calls that come while one is under way, only the last is made.
export function latest(work) {
  let running = false;
  let next = null;
  return async function call(...values) {
    next = values;
    if (running) return;
    running = true;
    try {
      while (next) {
        const now = next;
        next = null;
        await work(...now);
      }
    } finally {
      running = false;
    }
  };
}

export function later(work, milliseconds) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...values), milliseconds);
  };
}

export function show(element, text) {
  element.textContent = text;
  element.hidden = !text;
}

export function create(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
