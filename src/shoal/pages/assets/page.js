"use strict";
// Draws the curves of the page. All data is in the page; nothing is fetched. Texts reach the page as text nodes only.
(() => {
  const found = JSON.parse(document.getElementById("data").textContent);
  const places = [...document.querySelectorAll(".chart")];
  if (!places.length || typeof uPlot === "undefined") return;
  const isDense = found.runs.some((run) => Object.values(run.curves).some((curve) => curve[0].length > 800));
  const state = { axis: "step", log: false, smooth: isDense, range: null };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const NAMES = { step: "step", tokens: found.unit, seconds: "time" };
  let drawn = [];
  let isSyncing = false;

  const short = (value) => {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size >= 1e4) return new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 }).format(value);
    if (size !== 0 && size < 1e-3) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  };
  const clock = (seconds) => {
    if (seconds == null) return "–";
    if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
    if (seconds < 3600) return `${Number((seconds / 60).toPrecision(3))} min`;
    return `${Number((seconds / 3600).toPrecision(3))} h`;
  };
  const onAxis = (value) => (state.axis === "seconds" ? clock(value) : state.axis === "tokens" ? short(value) : Math.round(value).toLocaleString("en"));

  // The tokens or seconds at a step, between the two known steps around it.
  function place(run, step) {
    if (state.axis === "step") return step;
    const xs = run.axis.step, ys = run.axis[state.axis];
    if (!xs.length) return step;
    let low = 0, high = xs.length - 1;
    if (step <= xs[0]) return xs[0] ? (ys[0] * step) / xs[0] : ys[0];
    if (step >= xs[high]) return ys[high];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= step) low = middle; else high = middle;
    }
    return ys[low] + ((ys[high] - ys[low]) * (step - xs[low])) / (xs[high] - xs[low] || 1);
  }

  // An exponential mean over about a fiftieth of the points.
  function smoothed(values) {
    const keep = Math.max(0, 1 - 50 / Math.max(50, values.length));
    let mean = null;
    return values.map((value) => (value == null ? null : (mean = mean == null ? value : keep * mean + (1 - keep) * value)));
  }

  function tableOf(run, key, isSmooth) {
    const curve = run.curves[key];
    if (!curve) return null;
    const xs = curve[0].map((step) => place(run, step));
    const ys = isSmooth ? smoothed(curve[1]) : curve[1];
    // Where two steps share a place (a tokens column that stands still), the last one counts.
    const rows = new Map(xs.map((x, index) => [x, ys[index]]));
    return [[...rows.keys()].sort((a, b) => a - b), null, rows];
  }

  function seriesOf(key) {
    const series = [], tables = [];
    const add = (run, number, name, each, style) => {
      const table = tableOf(run, each, style.isSmooth);
      if (!table) return;
      tables.push([table[0], table[0].map((x) => table[2].get(x) ?? null)]);
      series.push({ label: name, stroke: color(`--c${number % 6}`), width: 1.5, value: (_, v) => short(v), ...style });
    };
    const many = found.runs.length > 1;
    found.runs.forEach((run, number) => {
      const hasRaw = state.smooth && key !== "lr" && key !== "memory_gib";
      if (hasRaw) add(run, number, "", key, { class: "raw", alpha: many ? 0.16 : 0.3, width: 1, points: { show: false } });
      add(run, number, many ? run.name : key === "loss" ? "training" : "value", key, { isSmooth: hasRaw, points: { show: false } });
      const style = { dash: [6, 4], width: 1.5, points: { show: true, size: 5 } };
      if (key === "loss") add(run, many ? number : number + 1, many ? `${run.name}, validation` : "validation", "eval_loss", style);
    });
    return { series, data: tables.length ? uPlot.join(tables) : [[]] };
  }

  // Vertical lines for saves (short), restarts, faults and stops (full height).
  function drawMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    for (const run of found.runs) for (const mark of run.marks) {
      const at = place(run, mark.step);
      if (at < plot.scales.x.min || at > plot.scales.x.max) continue;
      const x = Math.round(plot.valToPos(at, "x", true)) + 0.5;
      const isSave = mark.kind === "saved", isBad = mark.kind === "failed" || mark.kind === "not saved" || mark.kind === "skipped";
      ctx.strokeStyle = color(isBad ? "--bad" : isSave ? "--muted" : "--warn");
      ctx.globalAlpha = isSave ? 0.55 : 0.8;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash(isSave ? [] : [4, 3]);
      ctx.beginPath();
      ctx.moveTo(x, isSave ? bbox.top + bbox.height - 7 * devicePixelRatio : bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function zoomed(plot, scale) {
    if (scale !== "x" || isSyncing) return;
    isSyncing = true;
    const { min, max } = plot.scales.x;
    state.range = [min, max];
    for (const other of drawn) if (other !== plot) other.setScale("x", { min, max });
    isSyncing = false;
  }

  function options(chart, series, width, isWide) {
    const axis = { stroke: color("--muted"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const isLog = state.log && (chart.key === "loss" || chart.key === "grad_norm" || chart.key === "lr");
    return {
      width, height: isWide ? 270 : 170,
      cursor: { y: false, sync: { key: "page" }, drag: { x: true, y: false }, points: { size: 6 } },
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : {} },
      axes: [{ ...axis, values: (_, ticks) => ticks.map(onAxis), space: 76, size: 32 }, { ...axis, size: 58, values: (_, ticks) => ticks.map((t) => (t == null ? "" : short(t))) }],
      series: [{ label: NAMES[state.axis], value: (_, v) => (v == null ? "–" : onAxis(v)) }, ...series],
      hooks: { draw: [drawMarks], setScale: [zoomed] },
    };
  }

  function draw() {
    isSyncing = true;
    for (const plot of drawn) plot.destroy();
    drawn = [];
    for (const here of places) {
      const chart = found.charts.find((each) => each.key === here.dataset.key);
      const { series, data } = seriesOf(chart.key);
      if (!series.length) continue;
      const isWide = here.parentElement.classList.contains("wide-card");
      here.classList.add("drawn");
      drawn.push(new uPlot(options(chart, series, here.clientWidth, isWide), data, here));
    }
    if (state.range) for (const plot of drawn) plot.setScale("x", { min: state.range[0], max: state.range[1] });
    else showAll();
    isSyncing = false;
  }

  // All charts show the same stretch, also those whose curve starts later.
  function showAll() {
    const edges = drawn.map((plot) => plot.data[0]).filter((xs) => xs.length);
    if (!edges.length) return;
    const min = Math.min(...edges.map((xs) => xs[0])), max = Math.max(...edges.map((xs) => xs[xs.length - 1]));
    for (const plot of drawn) plot.setScale("x", { min, max: max > min ? max : min + 1 });
    state.range = null;
  }

  // `shoal watch` adds points to the data of the open page (live.js); zoom and cursor stay.
  function redraw() {
    isSyncing = true;
    const isSame = drawn.every((plot) => {
      const { series, data } = seriesOf(plot.root.parentElement.dataset.key);
      if (series.length !== plot.series.length - 1) return false;
      plot.setData(data, false);
      return true;
    });
    if (!isSame) draw();
    else if (state.range) for (const plot of drawn) plot.setScale("x", { min: state.range[0], max: state.range[1] });
    else showAll();
    isSyncing = false;
  }
  window.shoalPage = { found, redraw };

  function press(buttons, on) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(on(button)));
  }

  const controls = document.querySelector(".controls");
  controls.hidden = false;
  press([controls.querySelector("[data-smooth]")], () => state.smooth);
  const axes = [...controls.querySelectorAll("[data-axis]")];
  for (const button of axes) button.addEventListener("click", () => {
    state.axis = button.dataset.axis;
    state.range = null;
    press(axes, (each) => each === button);
    draw();
  });
  for (const name of ["log", "smooth"]) {
    const button = controls.querySelector(`[data-${name}]`);
    button.addEventListener("click", () => {
      state[name] = !state[name];
      press([button], () => state[name]);
      draw();
    });
  }
  const reset = () => { isSyncing = true; showAll(); isSyncing = false; };
  controls.querySelector("[data-reset]").addEventListener("click", reset);
  for (const here of places) here.addEventListener("dblclick", reset);

  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    for (const plot of drawn) plot.setSize({ width: plot.root.parentElement.clientWidth, height: plot.height });
  }).observe(document.body);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  const began = performance.now();
  draw();
  document.documentElement.dataset.drawn = String(Math.round(performance.now() - began));
})();
