// Curves of metrics: selection, smoothing and horizontal axis.

const MOST_MARKS = 40;
const control = (id) => document.getElementById(id);
const docs = new Map(DATA.docs.map(([name, ...doc]) => [name, doc]));
const cards = new Map();

// Return positions and values of a metric in a run. A metric has one value per step, or two lists if few steps have it.
function pointsOf(run, name) {
  const series = run.metrics.get(name);
  if (series === undefined) return { x: [], y: [], isSparse: false };
  const isSparse = series.length === 2 && Array.isArray(series[0]);
  const [places, y] = isSparse ? series : [run.steps.keys(), series];
  const at = isOverHours() ? run.hours : run.steps;
  return { x: Array.from(places, (place) => at[place]), y, isSparse };
}

// Return the exponential moving average without bias of the first values towards zero.
function smoothed(values, weight) {
  let sum = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function curvesOf(name) {
  const weight = Number(control("smoothing").value);
  return shownRuns().flatMap((run) => {
    const { x, y, isSparse } = pointsOf(run, name);
    const isPoints = isSparse || y.length < 3;
    const line = { x, name: plain(run.name), mode: isPoints ? "lines+markers" : "lines", line: { color: run.colour, width: 2 } };
    if (weight === 0) return [{ ...line, y }];
    return [
      { ...line, y, opacity: 0.3, hoverinfo: "skip" },
      { ...line, y: smoothed(y, weight) },
    ];
  });
}

// Return positions of the first occurrence of each warning, and of unusual updates.
function marksOf(run) {
  const first = new Map(run.advice.toReversed().map(([step, what]) => [what, step]));
  const hoursAt = new Map(run.steps.map((step, place) => [step, run.hours[place]]));
  const steps = [...new Set([...first.values(), ...run.jumps.map(([step]) => step)])].slice(0, MOST_MARKS);
  return steps.map((step) => (isOverHours() ? hoursAt.get(step) : step)).filter((x) => x !== undefined && x !== null);
}

function marks() {
  if (!control("marks").checked) return [];
  return shownRuns().flatMap((run) =>
    marksOf(run).map((x) => ({
      type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, opacity: 0.6,
      line: { color: run.colour, width: 1, dash: "dot" },
    })),
  );
}

const isOverHours = () => control("over").value === "hours";
const longest = (of) => Math.max(...of.map((run) => run.steps.at(-1) - run.steps[0]));
const along = (...of) => ({ title: { text: isOverHours() ? "hours in steps" : "step" }, ...wholeTicks(isOverHours() ? Infinity : longest(of)) });

// A short range of integers has one tick per integer.
function wholeTicks(span) {
  return span <= 10 ? { dtick: 1 } : {};
}

function curveCard(name) {
  const [unit, meaning, healthy] = (docs.get(name) ?? ["", "", ""]).map((text) => text.replaceAll("`", ""));
  const content = () => ({
    traces: curvesOf(name),
    hovermode: "x unified",
    shapes: marks(),
    xaxis: along(...runs),
    yaxis: { type: control("logarithmic").checked ? "log" : "linear" },
  });
  const place = chart(`Curve of ${name}`, content);
  const card = make("article", { class: "card" }, make("h3", {}, name));
  if (meaning) card.append(make("p", { class: "quiet" }, unit === "1" ? meaning : `${meaning} Unit: ${unit}.`));
  card.append(place);
  if (healthy) card.append(make("p", { class: "quiet" }, `Healthy: ${healthy}`));
  return { card, place };
}

// Cards are in the order of the documents, independent of the order of selection.
function show(chosen) {
  for (const [name, { card, place }] of cards) {
    if (!chosen.has(name)) {
      forget(place);
      card.remove();
      cards.delete(name);
    }
  }
  const ranks = new Map([...DATA.first, ...DATA.names.filter((name) => !DATA.first.includes(name))].map((name, at) => [name, at]));
  for (const name of [...chosen].sort((a, b) => ranks.get(a) - ranks.get(b))) {
    if (!cards.has(name)) cards.set(name, curveCard(name));
    control("cards").append(cards.get(name).card);
  }
}

function startCurves() {
  const boxes = new Map();
  const chosen = () => new Set([...boxes].filter(([, box]) => box.checked).map(([name]) => name));
  const choose = (names) => {
    for (const [name, box] of boxes) box.checked = names.has(name);
    show(names);
  };
  for (const name of DATA.names) {
    const box = make("input", { type: "checkbox" });
    box.addEventListener("change", () => show(chosen()));
    boxes.set(name, box);
    control("metrics").append(make("li", {}, make("label", {}, box, ` ${name}`)));
  }
  const isFound = (name) => name.toLowerCase().includes(control("search").value.trim().toLowerCase());
  control("search").addEventListener("input", () => {
    for (const [name, box] of boxes) box.closest("li").hidden = !isFound(name);
  });
  control("found").addEventListener("click", () => choose(new Set(DATA.names.filter(isFound))));
  control("first").addEventListener("click", () => choose(new Set(DATA.first)));
  for (const id of ["smoothing", "over", "logarithmic", "marks"]) control(id).addEventListener("input", drawAgain);
  control("smoothing").addEventListener("input", () => (control("smoothing-value").textContent = control("smoothing").value));
  if (runs.every((run) => run.hours.every((hour) => hour === null))) control("over").closest("label").hidden = true;
  choose(new Set(DATA.first));
}
