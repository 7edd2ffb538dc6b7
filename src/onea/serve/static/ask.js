// Asking: photos in, answers out.
import { shownAnswer, shownBad, inWords } from "/static/answers.js";
import { $, api, isPhoto, page, printable, say } from "/static/page.js";

export async function ask(found) {
  const photos = found.filter(isPhoto).map(({ file }) => file);
  say("ask-error", "");
  if (!photos.length) return say("ask-error", "Those are no images; choose photos.");
  const most = page.health?.predict_images ?? 64;
  if (photos.length > most) return say("ask-error", `Ask about ${most} photos at a time.`);
  const form = new FormData();
  photos.forEach((photo) => form.append("images", photo));
  $("ask-status").textContent = "Looking…";
  $("ask-drop").classList.add("waiting");
  try {
    const { answers, skipped } = await api("/predict?top=3&on_bad=skip", { method: "POST", body: form });
    page.asked = photos;
    show(answers, skipped, photos);
  } catch (error) {
    page.asked = [];
    show([], [], []);
    say("ask-error", error.message);
  } finally {
    $("ask-drop").classList.remove("waiting");
  }
}

export const askAgain = () => ask(page.asked.map((file) => ({ file, path: file.name })));

function show(answers, skipped, photos) {
  const bad = new Map(skipped.map((one) => [one.index, one.detail]));
  const good = answers.values();
  const found = photos.map((photo, n) => (bad.has(n) ? { photo, detail: bad.get(n) } : { photo, answer: good.next().value }));
  $("answers").replaceChildren(...found.map(({ photo, answer, detail }) => (answer ? shownAnswer(answer, photo) : shownBad(detail, photo))));
  $("ask-status").textContent = found.map(({ photo, answer }) =>
    `${printable(photo.name)}: ${answer ? inWords(answer) : "cannot be read"}`).join(". ");
  markOld();
}

// Answers of a version that no longer answers.
export function markOld() {
  const now = page.history?.version;
  const old = [...$("answers").children].filter((line) => line.dataset.version && Number(line.dataset.version) !== now);
  for (const line of $("answers").children) line.classList.toggle("old", old.includes(line));
  $("ask-old").hidden = !old.length;
  if (old.length) $("ask-old-text").textContent = `These answers are of version ${old[0].dataset.version}; version ${now} answers now.`;
}
