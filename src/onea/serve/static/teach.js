// Teaching: collects photos of one class, several, a folder of class folders or a zip, and sends them as an update.
import { $, api, bdi, plural, acceptFiles, hasToken, isPhoto, create, state, photoCount, photoElement, printable, showText, authorizedApi } from "/static/common.js";

const MAX_THUMBNAILS = 40;
let onTaught = async () => {};

export function startTeaching(callback) {
  onTaught = callback;
  acceptFiles($("teach-drop"), [$("teach-files"), $("teach-folder")], addFiles);
  $("teach-class").addEventListener("input", showExisting);
  $("teach-background").addEventListener("change", updateMode);
  $("teach-more").addEventListener("click", addClass);
  $("teach-clear").addEventListener("click", () => {
    state.photos = [];
    showPhotos();
    $("teach-files").focus();
  });
  $("teach-form").addEventListener("submit", teach);
  $("refresh").addEventListener("click", trainOnCopies);
  new IntersectionObserver((seen) => {
    dockInView = seen.at(-1).isIntersecting;
    showDock();
  }).observe($("teach-dock"));
}

let dockInView = true;

// While there are photos to teach, the button stays in view: in its place, or else at the bottom of the window.
function showDock() {
  const photos = state.photos.length + state.queue.reduce((sum, entry) => sum + (entry.photos?.length ?? 0), 0);
  const zips = state.queue.filter((entry) => entry.zip).length;
  const waiting = [photos && photoCount(photos), zips && plural(zips, "zip", "zips")].filter(Boolean);
  const words = waiting.length ? `${waiting.join(" and ")} to teach` : "";
  if ($("teach-sum").textContent !== words) $("teach-sum").textContent = words;
  $("teach-dock").classList.toggle("afloat", waiting.length > 0 && !dockInView);
}

// Background photos have no class, and cannot be taught together with classes.
function updateMode() {
  const isBackground = $("teach-background").checked;
  for (const id of ["teach-class", "teach-more"]) $(id).disabled = isBackground;
  $("teach-background-hint").hidden = !isBackground;
  $("teach-photos-label").textContent = isBackground ? "Background photos" : "Photos of the class";
  showPhotos();
}

// The class of a photo is the name of its folder; photos without a folder are of the class in the form.
function addFiles(files) {
  const groups = new Map();
  for (const { file, path } of files) {
    const parts = path.split("/");
    if (/\.zip$/i.test(file.name)) state.queue.push({ zip: file });
    else if (!isPhoto({ file, path })) continue;
    else if (parts.length < 2 || $("teach-background").checked) state.photos.push(file);
    else groups.set(parts.at(-2), [...(groups.get(parts.at(-2)) ?? []), file]);
  }
  for (const label of [...groups.keys()].sort()) enqueue(label, groups.get(label));
  showPhotos();
  showQueue();
}

export function enqueue(label, photos) {
  const queued = state.queue.find((entry) => entry.label === label);
  if (queued) queued.photos.push(...photos);
  else state.queue.push({ label, photos: [...photos] });
  showQueue();
}

function addClass() {
  const label = $("teach-class").value.trim();
  showText("teach-error", "");
  if (!label || !state.photos.length) return showText("teach-error", "Enter the name of the class and choose its photos first.");
  enqueue(label, state.photos);
  state.photos = [];
  $("teach-class").value = "";
  showPhotos();
  showExisting();
  $("teach-class").focus();
}

function showThumbnails(place, photos, redraw) {
  place.replaceChildren(...photos.slice(0, MAX_THUMBNAILS).map((photo, n) => {
    const words = `Remove ${printable(photo.name)}`;
    const remove = create("button", { type: "button", title: words, ariaLabel: words }, "×");
    remove.addEventListener("click", () => {
      photos.splice(n, 1);
      redraw();
    });
    return create("li", {}, photoElement(photo), remove);
  }));
  const more = photos.length - MAX_THUMBNAILS;
  if (more > 0) place.append(create("li", { className: "more" }, `+${more}`));
}

function showPhotos() {
  showThumbnails($("teach-thumbs"), state.photos, showPhotos);
  $("teach-clear").hidden = !state.photos.length;
  $("teach-count").textContent = state.photos.length ? photoCount(state.photos.length)
    : $("teach-background").checked ? "One or more." : "Two or more; ten or more are better.";
  showDock();
}

function showQueue() {
  state.queue = state.queue.filter((entry) => entry.zip || entry.photos.length);
  $("queue").replaceChildren(...state.queue.map((entry) => {
    const remove = create("button", { type: "button", className: "link" }, "Remove");
    remove.addEventListener("click", () => {
      state.queue = state.queue.filter((other) => other !== entry);
      showQueue();
    });
    const what = entry.zip ? [create("b", {}, bdi(entry.zip.name)), " (zip of class folders) "]
      : [create("b", {}, bdi(entry.label)), ` · ${photoCount(entry.photos.length)} `];
    const line = create("li", {}, create("p", {}, ...what, remove));
    if (!entry.zip) {
      const place = create("ul", { className: "thumbs" });
      showThumbnails(place, entry.photos, showQueue);
      line.append(place);
    }
    return line;
  }));
  $("queue-title").hidden = !state.queue.length;
  showDock();
}

function showExisting() {
  const name = $("teach-class").value.trim();
  const existing = state.classes.find((info) => info.name === name);
  $("teach-existing").textContent = existing ? `This class has ${photoCount(existing.images)}; the new ones will be added.` : "";
}

// Some of the names, for the history.
function joinNames(names) {
  const [last, ...others] = names.length > 3 ? [`${names.length - 2} more`, ...names.slice(0, 2)] : [names.at(-1), ...names.slice(0, -1)];
  return others.length ? `${others.join(", ")} and ${last}` : last;
}

// A valid name of an update: at most 200 printable characters.
const updateName = (text) => [...text.replace(/[\p{C}\p{Z}]+/gu, " ").trim()].slice(0, 200).join("").trim() || "update";

// The requests to send; throws if something is missing.
function buildRequests() {
  const name = $("teach-class").value.trim();
  const groups = state.queue.filter((entry) => !entry.zip).map((entry) => ({ ...entry, photos: [...entry.photos] }));
  const background = $("teach-background").checked ? state.photos : [];
  const own = background.length ? [] : state.photos;
  if (own.length && !name) throw new Error("Enter the name of the class.");
  if (own.length) {
    const same = groups.find((entry) => entry.label === name);
    if (same) same.photos.push(...own);
    else groups.push({ label: name, photos: own });
  }
  const zips = state.queue.filter((entry) => entry.zip);
  if (!groups.length && !zips.length && !background.length) throw new Error("Choose at least two photos.");
  for (const { label, photos } of groups) {
    if (photos.length < 2 && !state.classes.some((info) => info.name === label)) {
      throw new Error(`Choose at least two photos of the new class “${label}”.`);
    }
  }
  const all = groups.flatMap(({ label, photos }) => photos.map((photo) => [label, photo]));
  const limit = state.health.learn_files;
  if (Math.max(all.length, background.length) > limit) throw new Error(`Send at most ${limit} photos at a time, or a zip of class folders.`);
  const requests = zips.map(({ zip }) => ({ path: "/learn", name: updateName(zip.name), fields: [["zip", zip], ["name", updateName(zip.name)]] }));
  if (all.length) {
    const name = updateName(joinNames(groups.map(({ label }) => label)));
    const fields = all.flatMap(([label, photo]) => [["class", label], ["images", photo]]);
    requests.push({ path: "/learn", name, fields: [...fields, ["name", name]] });
  }
  if (background.length) {
    const name = "none of the classes";
    requests.push({ path: "/background", name, fields: [...background.map((photo) => ["images", photo]), ["name", name]] });
  }
  return requests;
}

// Runs training jobs with the form disabled, and shows what went wrong.
async function whileDisabled(work) {
  for (const id of ["teach-error", "teach-done"]) showText(id, "");
  $("teach-remarks").replaceChildren();
  for (const id of ["teach-submit", "refresh"]) $(id).disabled = true;
  try {
    await work();
  } catch (error) {
    showText("teach-error", error.message);
    if (error.status !== 401) $("teach-error").scrollIntoView({ block: "nearest" }); // the focus is already on the token
  } finally {
    $("training").hidden = true;
    for (const id of ["teach-submit", "refresh"]) $(id).disabled = false;
  }
}

function teach(event) {
  event.preventDefault();
  return whileDisabled(async () => {
    for (const request of buildRequests()) await runJob(request);
    state.photos = [];
    state.queue = [];
    $("teach-class").value = "";
    $("teach-background").checked = false;
    updateMode();
    showQueue();
    showExisting();
  });
}

function trainOnCopies() {
  if (!hasToken("teach-error")) return;
  whileDisabled(async () => {
    showTraining("Starting…");
    const report = await finishJob(await authorizedApi("/refresh"));
    showText("teach-done", `The model is at version ${report.version}.`);
    showRemarks(report.remarks);
  });
}

async function runJob({ path, name, fields }) {
  const form = new FormData();
  fields.forEach(([field, value]) => form.append(field, value));
  showTraining(`Sending “${name}”…`);
  const report = await finishJob(await authorizedApi(`${path}?on_bad=skip`, form));
  showText("teach-done", `Learned “${name}” from ${photoCount(report.images)} in ${report.seconds} s. The model is now at version ${report.version}.`);
  const byReason = {};
  for (const line of report.skipped) { // "image: reason"; images with the same reason are listed together
    const [, image, reason] = line.match(/^(.*?): (.*)$/s);
    (byReason[reason] ??= []).push(image);
  }
  const skipped = Object.entries(byReason).map(([reason, images]) =>
    `Left out, unreadable: ${images.join(", ")}: ${reason}`);
  showRemarks([...skipped, ...report.remarks]);
}

// Waits for the end of a job and shows the new version.
async function finishJob(job) {
  const report = await followJob(job.id);
  if (report.status !== "done") throw new Error(report.detail);
  state.fresh = new Set(report.classes);
  await onTaught();
  return report;
}

function showRemarks(remarks) {
  $("teach-remarks").append(...remarks.map((remark) => create("li", {}, remark)));
}

function showTraining(note, done = 0, total = 0) {
  if ($("training").hidden) {
    $("training").hidden = false;
    $("training").scrollIntoView({ block: "nearest" });
  }
  if ($("training-note").textContent !== note) $("training-note").textContent = note;
  if (total) Object.assign($("training-bar"), { max: total, value: done });
  else $("training-bar").removeAttribute("value");
}

const STAGES = { "reading the model": "Starting", prototypes: "Processing all photos" };

function followJob(id) {
  const label = (note) => STAGES[note] ?? note[0].toUpperCase() + note.slice(1);
  const show = (report) => showTraining(`${label(report.note)}…`, report.done, report.total);
  return new Promise((resolve, reject) => {
    const events = new EventSource(`/learn/${id}/events`);
    events.addEventListener("progress", (event) => show(JSON.parse(event.data)));
    events.addEventListener("end", (event) => {
      events.close();
      resolve(JSON.parse(event.data));
    });
    events.onerror = () => {
      if (events.readyState !== EventSource.CLOSED) return; // it reconnects by itself
      api(`/learn/${id}`).then((report) => (["done", "failed"].includes(report.status) ? resolve(report)
        : reject(new Error("Lost the connection to the training job; reload the page to see whether it is done."))), reject);
    };
  });
}
