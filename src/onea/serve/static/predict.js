// Predictions: sends photos and shows the answers.
import { predictionText, renderPrediction, renderUnreadable } from "/static/answers.js";
import { $, api, isPhoto, state, printable, showText } from "/static/common.js";

export async function predict(files) {
  const photos = files.filter(isPhoto).map(({ file }) => file);
  showText("predict-error", "");
  if (!photos.length) return showText("predict-error", "These files are not images; choose photos.");
  const limit = state.health?.predict_images ?? 64;
  if (photos.length > limit) return showText("predict-error", `Choose at most ${limit} photos at a time.`);
  const form = new FormData();
  photos.forEach((photo) => form.append("images", photo));
  $("predict-status").textContent = "Predicting…";
  $("predict-drop").classList.add("waiting");
  try {
    const { answers, skipped } = await api("/predict?top=3&on_bad=skip", { method: "POST", body: form });
    state.predicted = photos;
    render(answers, skipped, photos);
  } catch (error) {
    state.predicted = [];
    render([], [], []);
    showText("predict-error", error.message);
  } finally {
    $("predict-drop").classList.remove("waiting");
  }
}

export const predictAgain = () => predict(state.predicted.map((file) => ({ file, path: file.name })));

function render(answers, skipped, photos) {
  const errors = new Map(skipped.map(({ index, detail }) => [index, detail]));
  const remaining = answers.values();
  const results = photos.map((photo, n) => (errors.has(n) ? { photo, detail: errors.get(n) } : { photo, answer: remaining.next().value }));
  $("answers").replaceChildren(...results.map(({ photo, answer, detail }) => (answer ? renderPrediction(answer, photo) : renderUnreadable(detail, photo))));
  $("predict-status").textContent = results.map(({ photo, answer }) =>
    `${printable(photo.name)}: ${answer ? predictionText(answer) : "cannot be read"}`).join(". ");
  markOutdated();
}

// Mark predictions of earlier versions.
export function markOutdated() {
  const now = state.history?.version;
  const outdated = [...$("answers").children].filter((line) => line.dataset.version && Number(line.dataset.version) !== now);
  for (const line of $("answers").children) line.classList.toggle("old", outdated.includes(line));
  $("predict-outdated").hidden = !outdated.length;
  if (outdated.length) $("predict-outdated-text").textContent = `These predictions are from version ${outdated[0].dataset.version}; the model is now at version ${now}.`;
}
