// Samples, and the tokens of a sample, coloured by the numbers of the update.

const COLUMN_LABELS = {
  logprob: "log-probability", value: "value", advantage: "advantage", kl: "KL", return: "return", reward: "reward",
  ratio: "ratio to the engine", version: "weight version",
};
const MOST_ROWS = 200;

// Return the limits of the colours of a column. Signed columns are symmetric around 0. Outliers do not determine the limits.
function limitsOf(name, numbers) {
  const sorted = numbers.filter((x) => x !== null).sort((a, b) => a - b);
  if (sorted.length === 0) return [0, 1];
  const [low, high] = [0.01, 0.99].map((share) => sorted[Math.round(share * (sorted.length - 1))]);
  if (name === "logprob") return [Math.min(low, -1e-6), 0];
  if (name === "ratio") return around(1, low, high);
  if (name === "version") return [sorted[0], Math.max(sorted.at(-1), sorted[0] + 1)];
  return around(0, low, high);
}

function around(middle, low, high) {
  const reach = Math.max(Math.abs(low - middle), Math.abs(high - middle), 1e-6);
  return [middle - reach, middle + reach];
}

// Return a colour: orange for low values, blue for high values, stronger towards the limits. Unlikely tokens are strong.
function colourOf(name, x, [low, high]) {
  const share = Math.max(0, Math.min(1, (x - low) / (high - low)));
  if (name === "logprob") return `rgba(var(--low), ${(0.7 * (1 - share)).toFixed(3)})`;
  const signed = 2 * share - 1;
  return `rgba(var(${signed < 0 ? "--low" : "--high"}), ${(0.7 * Math.abs(signed)).toFixed(3)})`;
}

function scaleOf(name, limits) {
  const [low, high] = limits;
  const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => colourOf(name, low + share * (high - low), limits));
  const bar = make("span", { class: "scale", style: `background:linear-gradient(to right, ${stops.join(", ")})` });
  return [formatted(low), " ", bar, " ", formatted(high)];
}

class TokenView {
  constructor() {
    this.choice = make("select");
    this.scale = make("span");
    this.tokens = make("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens of the response; arrow keys move between tokens" });
    this.description = make("p", { class: "told", "aria-live": "polite" });
    this.rows = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Numbers of all tokens" });
    this.details = make("details", {}, make("summary", {}, "All numbers of all tokens"), this.rows);
    this.plot = chart("Values, returns and advantages along the response", () => this.lines(), "short");
    const label = make("label", {}, "Colour ", this.choice);
    this.element = make("div", {}, make("div", { class: "controls" }, label, this.scale), this.tokens, this.description, this.plot, this.details);
    this.choice.addEventListener("input", () => this.paint());
    this.tokens.addEventListener("keydown", (event) => this.onKey(event));
    this.tokens.addEventListener("pointerover", (event) => this.onPointer(event));
    this.details.addEventListener("toggle", () => this.list());
  }

  show(sample) {
    this.sample = sample;
    this.columns = new Map(sample.columns);
    const before = this.choice.value;
    this.choice.replaceChildren(...[...this.columns.keys()].map((name) => make("option", { value: name }, COLUMN_LABELS[name])));
    this.choice.value = this.columns.has(before) ? before : this.columns.has("advantage") ? "advantage" : "logprob";
    this.spans = sample.tokens.map((text, at) => make("span", { class: sample.own[at] ? "" : "others" }, text.replaceAll("\n", "\u21b5\n")));
    this.tokens.replaceChildren(...this.spans);
    this.paint();
    this.at(0);
    this.list();
    const drawing = drawings.get(this.plot);
    drawing.isStale = true;
    draw(this.plot);
  }

  paint() {
    const name = this.choice.value;
    const numbers = this.columns.get(name);
    const limits = limitsOf(name, numbers);
    this.spans.forEach((span, at) => (span.style.backgroundColor = numbers[at] === null ? "" : colourOf(name, numbers[at], limits)));
    this.scale.replaceChildren(...scaleOf(name, limits));
  }

  at(place) {
    if (this.spans.length === 0) return this.description.replaceChildren("The response has no tokens.");
    this.spans[this.place]?.classList.remove("here");
    this.place = Math.max(0, Math.min(this.spans.length - 1, place));
    this.spans[this.place].classList.add("here");
    const numbers = [...this.columns].map(([name, column]) => `${COLUMN_LABELS[name]} ${formatted(column[this.place])}`);
    const origin = this.sample.own[this.place] ? "" : " of the environment";
    this.description.textContent = `Token ${this.place}${origin}, ${JSON.stringify(this.sample.tokens[this.place])}: ${numbers.join(", ")}`;
  }

  onKey(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity };
    if (!(event.key in steps)) return;
    event.preventDefault();
    this.at(this.place + steps[event.key]);
    this.spans[this.place]?.scrollIntoView({ block: "nearest" });
  }

  onPointer(event) {
    const place = this.spans.indexOf(event.target);
    if (place >= 0) this.at(place);
  }

  // Rows are created on demand, because a long response has thousands of tokens.
  list() {
    if (!this.details.open) return this.rows.replaceChildren();
    const names = [...this.columns.keys()];
    const rows = this.sample.tokens.map((text, at) => [String(at), JSON.stringify(text), this.sample.own[at] ? "1" : "0", ...names.map((name) => formatted(this.columns.get(name)[at]))]);
    this.rows.replaceChildren(table(["position", "token", "mask", ...names.map((name) => COLUMN_LABELS[name])], rows));
  }

  lines() {
    const names = ["value", "return", "advantage", "reward"].filter((name) => this.columns.has(name));
    const traces = names.map((name, place) => ({
      y: this.columns.get(name), name, mode: this.spans.length > 100 ? "lines" : "lines+markers", marker: { size: 4 }, line: { color: COLOURS[place], width: 1.5 },
    }));
    return { traces, hovermode: "x unified", showlegend: true, legend: LEGEND, xaxis: { title: { text: "position in the response" }, ...wholeTicks(this.spans.length) } };
  }
}

class SampleList {
  constructor() {
    this.run = make("select", {}, ...runs.map((run, place) => make("option", { value: place }, run.name)));
    this.step = make("select");
    this.search = make("input", { type: "search", placeholder: "in prompt or response" });
    this.order = make("select", {}, ...["latest first", "highest reward", "lowest reward", "longest"].map((text) => make("option", {}, text)));
    this.count = make("span", { class: "quiet", "aria-live": "polite" });
    this.rows = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "List of samples" });
    this.detail = make("div", { class: "card" });
    this.view = new TokenView();
    const labels = [["Run ", this.run], ["Step ", this.step], ["Search ", this.search], ["Order ", this.order]];
    const controls = labels.map(([text, input]) => make("label", {}, text, input));
    controls[0].hidden = runs.length === 1;
    this.elements = [make("div", { class: "controls" }, ...controls, this.count), this.rows, this.detail];
    this.run.addEventListener("input", () => this.choose());
    for (const input of [this.step, this.search, this.order]) input.addEventListener("input", () => this.list());
  }

  get samples() {
    return runs[Number(this.run.value)].samples;
  }

  choose() {
    const steps = [...new Set(this.samples.map((sample) => sample.step))].sort((a, b) => b - a);
    this.step.replaceChildren(make("option", { value: "" }, "all"), ...steps.map((step) => make("option", { value: step }, String(step))));
    this.list();
  }

  matching() {
    const query = this.search.value;
    const isMatch = (sample) =>
      (this.step.value === "" || sample.step === Number(this.step.value)) &&
      (sample.prompt.includes(query) || sample.response.includes(query) || (sample.tokens ?? []).join("").includes(query));
    const orders = [(a, b) => b.step - a.step, (a, b) => b.reward - a.reward, (a, b) => a.reward - b.reward, (a, b) => b.length - a.length];
    return this.samples.filter(isMatch).sort(orders[this.order.selectedIndex]);
  }

  list() {
    const matches = this.matching();
    this.count.textContent = `${matches.length} of ${this.samples.length} samples of this page`;
    const rows = matches.slice(0, MOST_ROWS).map((sample) => {
      const button = make("button", { type: "button" }, sample.id === null ? "show" : String(sample.id));
      button.addEventListener("click", () => this.show(sample, button));
      const short = (text) => (text.length > 120 ? `${text.slice(0, 117)}...` : text);
      return [button, String(sample.step), formatted(sample.reward), formatted(sample.length), short(sample.prompt), short(sample.response), short(sample.answer ?? "")];
    });
    this.rows.replaceChildren(table(["sample", "step", "reward", "tokens", "prompt", "response", "right answer"], rows));
    this.detail.hidden = matches.length === 0;
    if (matches.length > 0) this.show(matches[0], rows[0][0]);
  }

  show(sample, button) {
    for (const row of this.rows.querySelectorAll(".chosen")) row.classList.remove("chosen");
    button.closest("tr").classList.add("chosen");
    const name = sample.id === null ? `Sample of step ${sample.step}` : `Sample ${sample.id} of step ${sample.step}`;
    const parts = [make("h3", {}, name), ...this.texts(sample)];
    this.detail.replaceChildren(...parts);
    if (sample.tokens) {
      this.detail.append(this.view.element);
      this.view.show(sample);
    }
  }

  texts(sample) {
    const named = [["Prompt", sample.prompt], ["Response", sample.tokens ? null : sample.response], ["Right answer", sample.answer], ["Failure of the reward", sample.failure]];
    const summary = `reward ${formatted(sample.reward)}, ${formatted(sample.length)} tokens${sample.end ? `, ${sample.end}` : ""}`;
    const texts = named.filter(([, text]) => text !== null && text !== undefined);
    return [make("p", { class: "quiet" }, summary), ...texts.flatMap(([name, text]) => [make("p", { class: "quiet" }, name), make("div", { class: "texts" }, text)])];
  }
}

function startSamples() {
  if (runs.every((run) => run.samples.length === 0)) return section("samples", [], "No run wrote samples.");
  const text = runs.some((run) => run.samples.some((sample) => sample.tokens))
    ? "Samples of each saved step, from the lowest to the highest reward. Text in italics is from an environment. megappo inspect lists all samples."
    : "The last samples of samples.jsonl. logging.save_experience adds the numbers of each token.";
  const list = new SampleList();
  list.run.value = runs.findIndex((run) => run.samples.length > 0);
  section("samples", [make("p", { class: "quiet" }, text), ...list.elements]);
  list.choose();
}
