// Sections with one part per run: times, memory, distributions, warnings, settings and profiles.

const STAGES = ["rollout", "reward", "forward", "advantages", "update_critic", "update_actor", "sync", "evaluate", "checkpoint", "export"];
const PHASES = ["gather", "load", "verify", "session", "wake", "probe"];
const QUANTITIES = {
  reward: ["Rewards", "reward of a sample"],
  length: ["Lengths", "response tokens"],
  ratio: ["Ratios", "old policy / engine"],
  value: ["Values", "value of a token"],
  advantage: ["Advantages", "advantage of a token"],
};

const bodyOf = (id) => document.querySelector(`#${id} > div`);
const runName = (run) => make("h3", {}, make("span", { class: "swatch", style: `background:${run.colour}` }), run.name);

// Return a card of a run. Hiding the run hides the card.
function runCard(run, ...content) {
  const card = make("article", { class: "card" }, runName(run), ...content);
  (run.cards ??= []).push(card);
  return card;
}

function section(id, parts, otherwise) {
  if (parts.length > 0) bodyOf(id).append(...parts);
  else bodyOf(id).append(make("p", { class: "quiet" }, otherwise));
}

// Return metrics of a run as stacked areas, with the total as a dotted line. Steps without the total are skipped.
function areas(run, parts, whole) {
  const sums = pointsOf(run, whole);
  const steps = new Set(sums.x.filter((_, at) => sums.y[at] !== null));
  const traces = parts
    .filter(([name]) => run.metrics.has(name))
    .map(([name, label], place) => {
      const points = pointsOf(run, name);
      const x = points.x.filter((step) => steps.has(step));
      const y = points.y.filter((_, at) => steps.has(points.x[at]));
      return {
        x, y, name: label, mode: steps.size < 3 ? "lines+markers" : "lines", stackgroup: "all",
        line: { width: 0.5, color: COLOURS[place % COLOURS.length] },
      };
    });
  const line = { color: style("--text"), dash: "dot", width: 1.5 };
  traces.push({ x: sums.x, y: sums.y, name: "total", mode: "lines+markers", marker: { size: 3 }, line });
  return { traces, hovermode: "x unified", showlegend: true, legend: LEGEND, xaxis: along(run), yaxis: { title: { text: "seconds" }, rangemode: "tozero" } };
}

function startTimes() {
  const stages = STAGES.map((stage) => [`time/${stage}`, stage.replace("_", " ")]);
  const phases = PHASES.map((phase) => [`sync/${phase}_seconds`, phase]);
  const withMetric = (name) => runs.filter((run) => run.metrics.has(name));
  const card = (run, what, parts, whole) => runCard(run, chart(`${what} of ${run.name}`, () => areas(run, parts, whole)));
  section("time", withMetric("time/step").map((run) => card(run, "Time by stage", stages, "time/step")), "No run has times in its metrics.");
  section("sync", withMetric("sync/seconds").map((run) => card(run, "Weight sync by phase", phases, "sync/seconds")), "No run has weight syncs in its metrics.");
}

// Return labels of the peaks of stages, and of the memory of the whole step.
function memoryLabels(run) {
  const stages = STAGES.map((stage) => [`memory/${stage}/peak_gigabytes`, stage.replace("_", " ")]);
  const whole = ["peak", "reserved", "free"].map((part) => [`memory/${part}_gigabytes`, part]);
  return [["Peaks of stages", stages], ["Whole step", whole]].map(([what, parts]) => [what, parts.filter(([name]) => run.metrics.has(name))]);
}

function memoryOf(run, parts) {
  const traces = parts.map(([name, label], place) => {
    const { x, y } = pointsOf(run, name);
    const line = { color: COLOURS[place % COLOURS.length], dash: ["solid", "dash", "dot"][place % 3] };
    return { x, y, name: label, mode: "lines+markers", marker: { size: 3 }, line };
  });
  return { traces, hovermode: "x unified", showlegend: true, legend: LEGEND, xaxis: along(run), yaxis: { title: { text: "GB" }, rangemode: "tozero" } };
}

function startMemory() {
  const parts = runs.flatMap((run) =>
    memoryLabels(run)
      .filter(([, parts]) => parts.length > 0)
      .map(([what, parts]) => runCard(run, make("h4", {}, what), chart(`${what}: memory of ${run.name}`, () => memoryOf(run, parts)))),
  );
  section("memory", parts, "No run has memory in its metrics.");
}

// Return a distribution over steps: one column per step, darker for larger shares. A single step has bars.
function distribution(run, { edges, shares }, steps, unit) {
  const widths = shares[0].map((_, bin) => edges[bin + 1] - edges[bin]);
  if (steps.length === 1) {
    const middles = widths.map((width, bin) => edges[bin] + width / 2);
    const bars = { type: "bar", x: middles, y: shares[0], width: widths, marker: { color: run.colour } };
    return { traces: [bars], bargap: 0, xaxis: { title: { text: unit } }, yaxis: { title: { text: "share" } } };
  }
  const bars = { type: "bar", x: [], base: [], y: [], marker: { color: [], line: { width: 0 }, cmin: 0 } };
  steps.forEach((step, at) => {
    shares[at].forEach((share, bin) => {
      if (share === 0) return;
      bars.x.push(String(step));
      bars.base.push(edges[bin]);
      bars.y.push(widths[bin]);
      bars.marker.color.push(share);
    });
  });
  Object.assign(bars.marker, {
    colorscale: [[0, style("--card")], [0.02, `${run.colour}30`], [1, run.colour]],
    cmax: Math.max(...bars.marker.color),
    showscale: true,
    colorbar: { thickness: 10, title: { text: "share", side: "right" }, tickformat: ".0%", outlinewidth: 0 },
  });
  bars.hovertemplate = "step %{x}: %{marker.color:.1%} from %{base:.4g}<extra></extra>";
  return { traces: [bars], bargap: 0, barmode: "overlay", xaxis: { type: "category", title: { text: "step" }, showgrid: false, nticks: 8 }, yaxis: { title: { text: unit }, showgrid: false, zeroline: false } };
}

function distributionsOf(run) {
  const histograms = run.histograms;
  const parts = Object.entries(QUANTITIES).filter(([name]) => Object.hasOwn(histograms.of, name));
  const cards = parts.map(([name, [title, unit]]) =>
    make("div", {}, make("h3", {}, title), chart(`${title} of ${run.name} over steps`, () => distribution(run, histograms.of[name], histograms.steps, unit))),
  );
  return runCard(run, make("div", { class: "grid" }, ...cards));
}

function startDistributions() {
  const parts = runs.filter((run) => run.histograms !== null).map(distributionsOf);
  section("distributions", parts, "No run saved experience (logging.save_experience).");
  if (parts.length > 0) {
    const text = "Distributions of the saved samples of each step. The outermost bins also count the numbers beyond, at most 0.1% at each end.";
    bodyOf("distributions").prepend(make("p", { class: "quiet" }, text));
  }
}

const eventsOf = (run) => [...run.advice.map((event) => ["warning", ...event]), ...run.jumps.map((event) => ["jump", ...event])];

function timeline() {
  const traces = shownRuns().map((run) => {
    const events = eventsOf(run);
    return {
      x: events.map(([, step]) => step),
      y: events.map(([, , what]) => plain(runs.length > 1 ? `${what}, ${run.name}` : what)),
      text: events.map(([, , , why]) => plain(why).replace(/(.{60}\S*) /g, "$1<br>")),
      name: plain(run.name),
      mode: "markers",
      marker: { color: run.colour, size: 10, symbol: events.map(([kind]) => (kind === "jump" ? "diamond" : "circle")) },
      hovertemplate: "step %{x}<br>%{text}<extra>%{fullData.name}</extra>",
    };
  });
  const [from, to] = [Math.min(...runs.map((run) => run.steps[0])), Math.max(...runs.map((run) => run.steps.at(-1)))];
  const range = [from - 0.02 * (to - from) - 0.5, to + 0.02 * (to - from) + 0.5];
  return { traces, xaxis: { title: { text: "step" }, range, ...wholeTicks(longest(runs)) }, yaxis: { type: "category" } };
}

function startEvents() {
  const events = runs.flatMap((run) => eventsOf(run).map((event) => [run, ...event]));
  if (events.length === 0) return section("events", [], "No warnings, and no unusual updates.");
  const rows = events.map(([run, kind, step, what, why]) => [run.name, String(step), kind, what, why]);
  section("events", [
    chart("Warnings and jumps over steps", timeline),
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "List of warnings and jumps" }, table(["run", "step", "kind", "what", "why"], rows)),
  ]);
}

function table(heads, rows) {
  const head = make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text)));
  const body = rows.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", {}, cell))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
}

function startSettings() {
  const known = DATA.settings;
  if (known.length === 0) return section("settings", [], "No run has a readable configuration.");
  const differ = known.filter(([, values]) => values.some((value) => value !== values[0]));
  const search = make("input", { type: "search", placeholder: "actor.optimizer" });
  const all = make("input", { type: "checkbox" });
  const place = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Settings" });
  const list = () => {
    const query = search.value.trim().toLowerCase();
    const rows = (all.checked || runs.length === 1 ? known : differ).filter(([key]) => key.toLowerCase().includes(query));
    const shown = table(["setting", ...runs.map((run) => run.name)], rows.map(([key, values]) => [key, ...values.map((value) => value ?? "-")]));
    rows.forEach((row, at) => shown.tBodies[0].rows[at].classList.toggle("differs", runs.length > 1 && differ.includes(row)));
    place.replaceChildren(shown);
  };
  search.addEventListener("input", list);
  all.addEventListener("input", list);
  const text = runs.length > 1 ? `${differ.length} settings differ between these runs.` : "All settings of the run, including defaults.";
  const controls = make("div", { class: "controls" }, make("label", {}, "Search ", search));
  if (runs.length > 1) controls.append(make("label", {}, all, " Show all settings"));
  section("settings", [make("p", { class: "quiet" }, text), controls, place]);
  list();
}

// The page of a profile is Markdown of megappo: lines, and tables with `|`.
function markdown(text) {
  const parts = [];
  let rows = [];
  const endTable = () => {
    if (rows.length > 0) parts.push(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of the profile" }, table(rows[0], rows.slice(1))));
    rows = [];
  };
  for (const line of text.split("\n")) {
    if (/^\|[-|: ]+\|$/.test(line)) continue;
    if (line.startsWith("|")) rows.push(line.slice(1).replace(/\|\s*$/, "").split("|").map((cell) => cell.trim().replaceAll("`", "")));
    else {
      endTable();
      if (line.trim()) parts.push(make("p", {}, line.replace(/^#+ /, "")));
    }
  }
  endTable();
  return parts;
}

function startProfiles() {
  const parts = runs.flatMap((run) => run.profile.map((page) => runCard(run, ...markdown(page))));
  section("profile", parts, "No step was traced (logging.profile_steps).");
}
