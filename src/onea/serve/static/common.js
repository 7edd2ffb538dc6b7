// Shared by all parts of the page: state, elements, texts and requests.
export const state = { health: null, classes: [], history: null, predicted: [], photos: [], queue: [], fresh: new Set() };

export const $ = (id) => document.getElementById(id);

export function create(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const plural = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
export const photoCount = (n) => plural(n, "photo", "photos");

const HIDDEN = /[\p{Cc}\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/gu;

// A name with control characters and changes of text direction escaped, as the command line prints them.
export const printable = (name) => name.replace(HIDDEN, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);

// A name whose text direction does not affect the text around it.
export const bdi = (name) => create("bdi", {}, printable(name));

export function showText(id, text) {
  $(id).textContent = text;
  $(id).hidden = !text;
}

// Hidden files, and files that operating systems and network storage create among photos.
const IGNORED = /(^|\/)(\.[^/]*|thumbs\.db|desktop\.ini|@eadir|__macosx)(\/|$)/i;

// Browsers report no type for HEIC photos.
export const isPhoto = ({ file, path }) => (!file.type || file.type.startsWith("image/")) && !IGNORED.test(path);

export async function api(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The service does not respond; check that it is running, then try again.");
  }
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw Object.assign(new Error(errorText(response.status, body)), { status: response.status });
  return body;
}

function errorText(status, body) {
  if (status === 401) return "The token is wrong; ask the operator of this service for it. Nothing was changed.";
  return body.detail || `The service refused (${status}).`;
}

// A request that needs the token.
export async function authorizedApi(path, body) {
  try {
    return await api(path, { method: "POST", body, headers: { Authorization: `Bearer ${$("token").value.trim()}` } });
  } catch (error) {
    if (error.status === 401) $("token").focus();
    throw error;
  }
}

// Whether a token was entered; otherwise shows a message in the element `messageId`.
export function hasToken(messageId) {
  if ($("token").value.trim()) return true;
  showText(messageId, "This needs the token; enter it in the teaching form first.");
  $("token").focus();
  return false;
}

// The first click shows a question on the button, the second confirms.
export function confirmed(button, question, label) {
  if (button.dataset.confirming) {
    delete button.dataset.confirming;
    return true;
  }
  button.dataset.confirming = "true";
  button.textContent = question;
  setTimeout(() => {
    if (!button.dataset.confirming) return;
    delete button.dataset.confirming;
    button.textContent = label;
  }, 6000);
  return false;
}

export function photoElement(photo, alt = printable(photo.name)) {
  const image = create("img", { src: URL.createObjectURL(photo), alt });
  image.addEventListener("load", () => URL.revokeObjectURL(image.src));
  image.addEventListener("error", () => { // such as HEIC, which few browsers can show
    URL.revokeObjectURL(image.src);
    image.replaceWith(create("span", { className: "no-picture", title: alt }, "no preview"));
  });
  return image;
}

export function acceptFiles(zone, inputs, onFiles) {
  for (const name of ["dragover", "dragleave", "drop"]) {
    zone.addEventListener(name, async (event) => {
      event.preventDefault();
      zone.classList.toggle("over", name === "dragover");
      if (name === "drop") onFiles(await droppedFiles(event.dataTransfer));
    });
  }
  for (const input of inputs) {
    input.addEventListener("change", () => {
      if (input.files.length) onFiles([...input.files].map((file) => ({ file, path: file.webkitRelativePath || file.name })));
      input.value = "";
    });
  }
}

// The dropped files and those in dropped folders, each with its path.
async function droppedFiles(data) {
  const entries = [...data.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...data.files].map((file) => ({ file, path: file.name }));
  return (await Promise.all(entries.map(filesIn))).flat();
}

async function filesIn(entry) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    return [{ file, path: entry.fullPath.replace(/^\//, "") }];
  }
  const reader = entry.createReader(), found = [];
  for (;;) { // which returns at most a hundred entries at a time
    const entries = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!entries.length) break;
    found.push(...entries);
  }
  return (await Promise.all(found.map(filesIn))).flat();
}
