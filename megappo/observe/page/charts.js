"use strict";
// Charts in the colours of the theme. A chart is drawn when it scrolls into view.

const DATA = JSON.parse(document.getElementById("data").textContent);
// Colours of medium brightness, visible on white and on black.
const COLOURS = ["#2f80ed", "#e8710a", "#1aa260", "#c54fb0", "#b8860b", "#12a4b8", "#e5484d", "#8a7bd8", "#7c8894", "#7aa116"];
const CONFIG = { displayModeBar: false, responsive: true, displaylogo: false };

const runs = DATA.runs.map((run, place) => ({
  ...run,
  metrics: new Map(run.metrics),
  colour: COLOURS[place % COLOURS.length],
  isShown: true,
}));
const shownRuns = () => runs.filter((run) => run.isShown);

// Return an element with text or child elements. Texts become text nodes and never markup.
function make(tag, attributes = {}, ...content) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...content);
  return element;
}

// Plotly interprets <b> and <a> in texts. This function escapes the texts.
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const formatted = (value) => (value === null || value === undefined ? "-" : String(Number(Number(value).toPrecision(5))));

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function layout(more = {}) {
  const axis = { gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true, exponentformat: "power" };
  const { xaxis = {}, yaxis = {}, ...rest } = more;
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: style("--font"), size: 12, color: style("--text") },
    margin: { l: 8, r: 8, t: 8, b: 8 },
    showlegend: false,
    hoverlabel: { bgcolor: style("--card"), font: { color: style("--text") } },
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...rest,
  };
}

// The legend is not clickable. All choices are controls that a keyboard can reach.
const LEGEND = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", itemclick: false, itemdoubleclick: false };

const drawings = new Map(); // content and state of each chart by element
const watcher = new IntersectionObserver(
  (entries) => {
    for (const entry of entries) {
      const drawing = drawings.get(entry.target);
      if (drawing) {
        drawing.isInView = entry.isIntersecting;
        draw(entry.target);
      }
    }
  },
  { rootMargin: "200px" },
);

function draw(place) {
  const drawing = drawings.get(place);
  if (!drawing.isInView || !drawing.isStale) return;
  drawing.isStale = false;
  const { traces, ...more } = drawing.content();
  drawing.drawn = Promise.all([drawing.drawn, Plotly.react(place, traces, layout(more), CONFIG)]);
}

// `content`: function that returns the traces and changes of the layout for each drawing.
function chart(name, content, ...classes) {
  const place = make("div", { class: ["chart", ...classes].join(" "), role: "img", "aria-label": name });
  drawings.set(place, { content, isStale: true, isInView: false });
  watcher.observe(place);
  return place;
}

function forget(place) {
  const { drawn } = drawings.get(place);
  watcher.unobserve(place);
  drawings.delete(place);
  drawn?.then(() => Plotly.purge(place)); // after the drawing, because plotly still uses the data
}

function drawAgain() {
  for (const [place, drawing] of drawings) {
    drawing.isStale = true;
    draw(place);
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
