// Teaching: photos of one class, of several, a folder of class folders or a zip; then one update.
import { $, api, bdi, count, droppable, isPhoto, make, page, photoCount, picture, printable, say, teacherApi } from "/static/page.js";

const MOST_THUMBS = 40;
let taught = async () => {};

export function startTeaching(done) {
  taught = done;
  droppable($("teach-drop"), [$("teach-files"), $("teach-folder")], take);
  $("teach-class").addEventListener("input", showKnown);
  $("teach-none").addEventListener("change", showNone);
  $("teach-more").addEventListener("click", another);
  $("teach-clear").addEventListener("click", () => {
    page.photos = [];
    showPhotos();
    $("teach-files").focus();
  });
  $("teach-form").addEventListener("submit", teach);
  new IntersectionObserver((seen) => {
    dockInView = seen.at(-1).isIntersecting;
    showDock();
  }).observe($("teach-dock"));
}

let dockInView = true;

// While there is something to teach, the button stays in view: at its place, or else at the foot of the window.
function showDock() {
  const photos = page.photos.length + page.lined.reduce((sum, one) => sum + (one.photos?.length ?? 0), 0);
  const zips = page.lined.filter((one) => one.zip).length;
  const waiting = [photos && photoCount(photos), zips && count(zips, "zip", "zips")].filter(Boolean);
  const words = waiting.length ? `${waiting.join(" and ")} to teach` : "";
  if ($("teach-sum").textContent !== words) $("teach-sum").textContent = words;
  $("teach-dock").classList.toggle("afloat", waiting.length > 0 && !dockInView);
}

// Photos of none of the classes have no name, and nothing is taught beside them.
function showNone() {
  const none = $("teach-none").checked;
  for (const id of ["teach-class", "teach-more"]) $(id).disabled = none;
  $("teach-none-hint").hidden = !none;
  $("teach-photos-label").textContent = none ? "Photos of other things" : "Photos of it";
  showPhotos();
}

// Photos lie in no folder, or in that of their class.
function take(found) {
  const groups = new Map();
  for (const { file, path } of found) {
    const parts = path.split("/");
    if (/\.zip$/i.test(file.name)) page.lined.push({ zip: file });
    else if (!isPhoto({ file, path })) continue;
    else if (parts.length < 2 || $("teach-none").checked) page.photos.push(file);
    else groups.set(parts.at(-2), [...(groups.get(parts.at(-2)) ?? []), file]);
  }
  for (const label of [...groups.keys()].sort()) lineUp(label, groups.get(label));
  showPhotos();
  showLined();
}

export function lineUp(label, photos) {
  const known = page.lined.find((one) => one.label === label);
  if (known) known.photos.push(...photos);
  else page.lined.push({ label, photos: [...photos] });
  showLined();
}

function another() {
  const label = $("teach-class").value.trim();
  say("teach-error", "");
  if (!label || !page.photos.length) return say("teach-error", "Give the class a name and its photos first; then add another.");
  lineUp(label, page.photos);
  page.photos = [];
  $("teach-class").value = "";
  showPhotos();
  showKnown();
  $("teach-class").focus();
}

function thumbs(place, photos, again) {
  place.replaceChildren(...photos.slice(0, MOST_THUMBS).map((photo, n) => {
    const words = `Remove ${printable(photo.name)}`;
    const remove = make("button", { type: "button", title: words, ariaLabel: words }, "×");
    remove.addEventListener("click", () => {
      photos.splice(n, 1);
      again();
    });
    return make("li", {}, picture(photo), remove);
  }));
  const more = photos.length - MOST_THUMBS;
  if (more > 0) place.append(make("li", { className: "more" }, `+${more}`));
}

function showPhotos() {
  thumbs($("teach-thumbs"), page.photos, showPhotos);
  $("teach-clear").hidden = !page.photos.length;
  $("teach-count").textContent = page.photos.length ? photoCount(page.photos.length)
    : $("teach-none").checked ? "One or more." : "Two or more; ten or more are better.";
  showDock();
}

function showLined() {
  page.lined = page.lined.filter((one) => one.zip || one.photos.length);
  $("lined").replaceChildren(...page.lined.map((one) => {
    const remove = make("button", { type: "button", className: "link" }, "Remove");
    remove.addEventListener("click", () => {
      page.lined = page.lined.filter((other) => other !== one);
      showLined();
    });
    const what = one.zip ? [make("b", {}, bdi(one.zip.name)), " (zip of class folders) "]
      : [make("b", {}, bdi(one.label)), ` · ${photoCount(one.photos.length)} `];
    const line = make("li", {}, make("p", {}, ...what, remove));
    if (!one.zip) {
      const place = make("ul", { className: "thumbs" });
      thumbs(place, one.photos, showLined);
      line.append(place);
    }
    return line;
  }));
  $("lined-title").hidden = !page.lined.length;
  showDock();
}

function showKnown() {
  const name = $("teach-class").value.trim();
  const known = page.classes.find((other) => other.name === name);
  $("teach-known").textContent = known ? `Known already from ${photoCount(known.images)}; these will be added.` : "";
}

// Some names, for a history that tells what was taught when.
function inWords(names) {
  const [last, ...others] = names.length > 3 ? [`${names.length - 2} more`, ...names.slice(0, 2)] : [names.at(-1), ...names.slice(0, -1)];
  return others.length ? `${others.join(", ")} and ${last}` : last;
}

// What the history calls an update: at most 200 characters, all of them printable.
const updateName = (words) => [...words.replace(/[\p{C}\p{Z}]+/gu, " ").trim()].slice(0, 200).join("").trim() || "update";

// What is to be sent, or one sentence about what is missing.
function requests() {
  const name = $("teach-class").value.trim();
  const groups = page.lined.filter((one) => !one.zip).map((one) => ({ ...one, photos: [...one.photos] }));
  const none = $("teach-none").checked ? page.photos : [];
  const own = none.length ? [] : page.photos;
  if (own.length && !name) throw new Error("Say what the photos show: give the class a name.");
  if (own.length) {
    const same = groups.find((one) => one.label === name);
    if (same) same.photos.push(...own);
    else groups.push({ label: name, photos: own });
  }
  const zips = page.lined.filter((one) => one.zip);
  if (!groups.length && !zips.length && !none.length) throw new Error("Choose at least two photos of it.");
  for (const { label, photos } of groups) {
    if (photos.length < 2 && !page.classes.some((known) => known.name === label)) {
      throw new Error(`Choose at least two photos of “${label}”, which is new.`);
    }
  }
  const all = groups.flatMap(({ label, photos }) => photos.map((photo) => [label, photo]));
  const most = page.health.learn_files;
  if (Math.max(all.length, none.length) > most) throw new Error(`Send at most ${most} photos at a time, or a zip of class folders.`);
  const forms = zips.map(({ zip }) => ({ path: "/learn", words: updateName(zip.name), fields: [["zip", zip], ["name", updateName(zip.name)]] }));
  if (all.length) {
    const words = updateName(inWords(groups.map(({ label }) => label)));
    const fields = all.flatMap(([label, photo]) => [["class", label], ["images", photo]]);
    forms.push({ path: "/learn", words, fields: [...fields, ["name", words]] });
  }
  if (none.length) {
    const words = "none of the classes";
    forms.push({ path: "/background", words, fields: [...none.map((photo) => ["images", photo]), ["name", words]] });
  }
  return forms;
}

async function teach(event) {
  event.preventDefault();
  for (const place of ["teach-error", "teach-done"]) say(place, "");
  $("teach-remarks").replaceChildren();
  $("teach-go").disabled = true;
  try {
    for (const form of requests()) await taughtOnce(form);
    page.photos = [];
    page.lined = [];
    $("teach-class").value = "";
    $("teach-none").checked = false;
    showNone();
    showLined();
    showKnown();
  } catch (error) {
    say("teach-error", error.message);
    if (error.status !== 401) $("teach-error").scrollIntoView({ block: "nearest" }); // or else the focus is on the token
  } finally {
    $("training").hidden = true;
    $("teach-go").disabled = false;
  }
}

async function taughtOnce({ path, words, fields }) {
  const form = new FormData();
  fields.forEach(([name, value]) => form.append(name, value));
  showTraining(`Sending “${words}”…`);
  const training = await teacherApi(`${path}?on_bad=skip`, form);
  const last = await followed(training.id);
  if (last.status !== "done") throw new Error(last.detail);
  page.fresh = new Set(last.classes);
  await taught();
  say("teach-done", `Learned “${words}” from ${photoCount(last.images)} in ${last.seconds} s. Version ${last.version} answers now.`);
  const unread = {};
  for (const line of last.skipped) { // "image: reason"; a reason that many images share stands once
    const [, image, reason] = line.match(/^(.*?): (.*)$/s);
    (unread[reason] ??= []).push(image);
  }
  const skipped = Object.entries(unread).map(([reason, images]) =>
    `Left out, as ${images.length > 1 ? "they" : "it"} cannot be read: ${images.join(", ")}: ${reason}`);
  $("teach-remarks").append(...[...skipped, ...last.remarks].map((remark) => make("li", {}, remark)));
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

const STAGES = { "reading the model": "Starting", prototypes: "Looking at every photo" };

function followed(id) {
  const words = (note) => STAGES[note] ?? note[0].toUpperCase() + note.slice(1);
  const show = (report) => showTraining(`${words(report.note)}…`, report.done, report.total);
  return new Promise((resolve, reject) => {
    const events = new EventSource(`/learn/${id}/events`);
    events.addEventListener("progress", (event) => show(JSON.parse(event.data)));
    events.addEventListener("end", (event) => {
      events.close();
      resolve(JSON.parse(event.data));
    });
    events.onerror = () => {
      if (events.readyState !== EventSource.CLOSED) return; // it connects again by itself
      api(`/learn/${id}`).then((report) => (["done", "failed"].includes(report.status) ? resolve(report)
        : reject(new Error("Lost sight of the training job; reload the page to see whether it is done."))), reject);
    };
  });
}
