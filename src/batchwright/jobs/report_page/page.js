"use strict";
// Draws the plots in the colours of the page, and again when these change.
const specs = JSON.parse(document.getElementById("specs").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");

function look() {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`).trim();
  const font = getComputedStyle(document.body).fontFamily;
  const text = { labelColor: color("quiet"), titleColor: color("quiet"), labelFont: font, titleFont: font, titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 12 };
  return {
    background: "transparent",
    font,
    view: { stroke: null },
    axis: { ...text, gridColor: color("line"), domainColor: color("line"), tickColor: color("line"), tickCount: 5, labelOverlap: true, labelFlush: true },
    mark: { color: color("c0") },
    axisX: { grid: false },
    axisY: { domain: false, ticks: false, labelPadding: 6 },
    range: { category: Array.from({ length: 16 }, (_, number) => color(`c${number}`)) },
    params: [{ name: "ink", value: color("text") }, { name: "quiet", value: color("quiet") }],
  };
}

async function draw() {
  const config = look();
  for (const [number, spec] of specs.entries()) {
    await vegaEmbed(`#chart-${number}`, spec, { actions: false, renderer: "svg", config, tooltip: { disableDefaultStyle: true } });
  }
  document.documentElement.dataset.drawn = dark.matches ? "dark" : "light";
}

let drawing = draw();
dark.addEventListener("change", () => { drawing = drawing.then(draw); });
