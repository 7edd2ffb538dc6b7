// What all parts of the page share: the state, elements, words, and how the service is asked.
export const page = { health: null, classes: [], history: null, asked: [], photos: [], lined: [], fresh: new Set() };

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
export const photoCount = (n) => count(n, "photo", "photos");

const HIDDEN = /[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/gu;

// A name with its control characters and changes of direction as escapes, as commands print them.
export const printable = (name) => name.replace(HIDDEN, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);

// A name whose direction does not turn the text around it.
export const bdi = (name) => make("bdi", {}, printable(name));

export function say(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

// What is hidden, and what file managers and disk stations leave among photos.
const PASSED_OVER = /(^|\/)(\.[^/]*|thumbs\.db|desktop\.ini|@eadir|__macosx)(\/|$)/i;

// Phones and computers give HEIC photos no type.
export const isPhoto = ({ file, path }) => (!file.type || file.type.startsWith("image/")) && !PASSED_OVER.test(path);

export async function api(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The service does not answer; check that it is running, then try again.");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(inPlainWords(response.status, body)), { status: response.status });
  return body;
}

function inPlainWords(status, body) {
  if (status === 401) return "That is not the right token. Whoever set up this page has it: ask them, and type it in again. Nothing was changed.";
  return body.detail || `The service refused (${status}).`;
}

// What only whoever has the token may do.
export async function teacherApi(path, body) {
  try {
    return await api(path, { method: "POST", body, headers: { Authorization: `Bearer ${$("token").value.trim()}` } });
  } catch (error) {
    if (error.status === 401) $("token").focus();
    throw error;
  }
}

// Whether a token was typed in; if not, where to.
export function hasToken(place) {
  if ($("token").value.trim()) return true;
  say(place, "This needs the token; type it into the teaching form first.");
  $("token").focus();
  return false;
}

// The first click asks whether it is meant, the second does it.
export function sure(button, question, rest) {
  if (button.dataset.sure) {
    delete button.dataset.sure;
    return true;
  }
  button.dataset.sure = "asked";
  button.textContent = question;
  setTimeout(() => {
    if (!button.dataset.sure) return;
    delete button.dataset.sure;
    button.textContent = rest;
  }, 6000);
  return false;
}

export function picture(photo, alt = printable(photo.name)) {
  const image = make("img", { src: URL.createObjectURL(photo), alt });
  image.addEventListener("load", () => URL.revokeObjectURL(image.src));
  image.addEventListener("error", () => { // not every browser can show every photo, such as HEIC
    URL.revokeObjectURL(image.src);
    image.replaceWith(make("span", { className: "no-picture", title: alt }, "no preview"));
  });
  return image;
}

export function droppable(zone, inputs, take) {
  for (const name of ["dragover", "dragleave", "drop"]) {
    zone.addEventListener(name, async (event) => {
      event.preventDefault();
      zone.classList.toggle("over", name === "dragover");
      if (name === "drop") take(await dropped(event.dataTransfer));
    });
  }
  for (const input of inputs) {
    input.addEventListener("change", () => {
      if (input.files.length) take([...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name })));
      input.value = "";
    });
  }
}

// Files and the files in folders, each with its path.
async function dropped(data) {
  const entries = [...data.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...data.files].map((file) => ({ file, path: file.name }));
  return (await Promise.all(entries.map(filesIn))).flat();
}

async function filesIn(entry) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    return [{ file, path: entry.fullPath.replace(/^\//, "") }];
  }
  const reader = entry.createReader(), inside = [];
  for (;;) { // it gives a hundred at a time
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break;
    inside.push(...some);
  }
  return (await Promise.all(inside.map(filesIn))).flat();
}
