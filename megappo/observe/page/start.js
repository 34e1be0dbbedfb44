// Header of the page, and start of all sections.

function showRun(run, isShown) {
  run.isShown = isShown;
  for (const card of run.cards ?? []) card.hidden = !isShown;
  drawAgain();
}

function startRuns() {
  for (const run of runs) {
    const box = make("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => showRun(run, box.checked));
    const head = make("label", {}, box, make("span", { class: "swatch", style: `background:${run.colour}` }), run.name);
    const lines = [run.result, run.status, run.directory].filter((text) => text);
    const notes = [...run.notes, ...(run.stepsPerPoint > 1 ? [`Each point of a curve is the mean of ${run.stepsPerPoint} steps (for maxima, the largest value).`] : [])];
    control("runs").append(
      make("li", {}, head, ...lines.map((text, at) => make("p", { class: at ? "quiet" : "" }, text)), ...notes.map((text) => make("p", { class: "note" }, text))),
    );
  }
}

function startContents() {
  for (const part of document.querySelectorAll("main > section")) {
    control("contents").append(make("a", { href: `#${part.id}` }, part.querySelector("h2").textContent));
  }
}

document.title = `${runs.map((run) => run.name).join(", ")} - megappo report`;
control("version").textContent = DATA.version;
for (const start of [startRuns, startContents, startCurves, startTimes, startMemory, startDistributions, startSamples, startEvents, startSettings, startProfiles]) start();
